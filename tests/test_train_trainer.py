"""The trainer on a tiny Llama: it learns, resumes bit by bit, splits by group, and never steps on NaN."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.config import Algorithm, Training, load_config
from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.precision import WIDE, precision_of, resolve_precision
from slipstream.train.policy import NonFiniteLoss
from slipstream.train.trainer import Trainer, split_by_group
from slipstream.types import TrainSample

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 24


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def make_trainer(
    model: nn.Module, algorithm: Algorithm | None = None, reference: Any = None, **training: Any
) -> Trainer:
    settings: dict[str, Any] = {"steps": 20, "lr": 3e-3, "micro_batch_tokens": 24, "logprob_chunk_tokens": 7}
    trainer = Trainer(
        model, Training(**{**settings, **training}), algorithm or Algorithm(), temperature=1.0, max_new_tokens=6
    )
    trainer.reference = reference
    return trainer


def make_samples(step: int, prompts: int = 4, advantage: float = 1.0) -> list[TrainSample]:
    """Of each prompt one sample with even tokens, which is good, and one with odd tokens, which is bad."""
    samples = []
    for prompt in range(prompts):
        for sample in range(2):
            response = tuple((step + 2 * (prompt + t) + sample) % VOCABULARY for t in range(2 + (prompt + sample) % 4))
            response = tuple(token - token % 2 + sample for token in response)
            samples.append(
                TrainSample(
                    uid=f"{step}/{prompt}/{sample}",
                    prompt_ids=(prompt, prompt + 1, 3),
                    response_ids=response,
                    behaviour_logprobs=(-math.log(VOCABULARY),) * len(response),
                    advantage=advantage * (1 - 2 * sample),
                )
            )
    return samples


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_policy_moves_towards_the_good_samples() -> None:
    model = tiny_llama()
    trainer = make_trainer(model)
    samples = make_samples(0)
    before = trainer.logprobs_of(samples)
    progress: list[tuple[int, int]] = []
    for _ in range(5):
        metrics = trainer.step(samples, lambda done, total: progress.append((done, total)))
    after = trainer.logprobs_of(samples)
    gain = [(after[sample.uid] - before[sample.uid]).mean().item() for sample in samples]
    assert all(value > 0 for value in gain[0::2]) and sum(gain[1::2]) < 0
    total = sum(len(sample.response_ids) for sample in samples)
    assert progress[-1] == (total, total) and len(progress) > 5
    expected = {
        "actor/pg_loss", "actor/entropy", "actor/clipfrac", "actor/grad_norm", "actor/lr", "mismatch_kl",
        "mismatch/logprob_diff_max", "rollout/importance_weight",
    }  # fmt: skip
    assert set(metrics) == expected and all(math.isfinite(value) for value in metrics.values())


def test_on_policy_numbers_by_hand() -> None:
    # The engine is right, so all importance weights are 1; advantages 1 and -1 cancel in the mean over sequences.
    trainer = make_trainer(tiny_llama(), Algorithm(clip_high=0.0, clip_low=0.0))
    samples = make_samples(0)
    current = trainer.logprobs_of(samples)
    samples = [replace(sample, behaviour_logprobs=tuple(current[sample.uid].tolist())) for sample in samples]
    metrics = trainer.step(samples)
    assert metrics["actor/pg_loss"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["rollout/importance_weight"] == pytest.approx(1.0, abs=1e-5)
    assert 0 < metrics["actor/entropy"] <= math.log(VOCABULARY) + 1e-5
    assert metrics["actor/clipfrac"] == 0.0


def test_supervised_loss_falls_and_the_policy_stage_starts_with_fresh_moments() -> None:
    trainer = make_trainer(tiny_llama())
    pairs = [((1, 2, prompt), (prompt, 5, 7, 2)) for prompt in range(6)]
    losses = [trainer.supervised_step(pairs, 5e-3)["warmup/loss"] for _ in range(12)]
    assert losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.1) and losses[-1] < 0.5 * losses[0]
    assert trainer.steps_done == 0
    trainer.step(make_samples(0))
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {1.0}


@pytest.mark.parametrize("updates_per_step", [1, 2])
def test_resume_is_bit_equal(updates_per_step: int) -> None:
    algorithm = Algorithm(name="cispo", kl_coef=0.1)
    settings = {"updates_per_step": updates_per_step, "lr_schedule": "cosine", "weight_decay": 0.1}
    model = tiny_llama()
    trainer = make_trainer(model, algorithm, tiny_llama(5), **settings)
    for step in range(2):
        trainer.step(make_samples(step))
    file = io.BytesIO()
    torch.save({"trainer": trainer.state_dict(), "model": model.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = tiny_llama(9)
    twin.load_state_dict(saved["model"])
    resumed = make_trainer(twin, algorithm, tiny_llama(5), **settings)
    resumed.load_state_dict(saved["trainer"])
    for step in range(2, 4):
        assert trainer.step(make_samples(step)) == resumed.step(make_samples(step))
    assert torch.equal(weights(model), weights(twin))
    assert resumed.steps_done == 4


def test_a_changed_recipe_wins_over_the_saved_state() -> None:
    trainer = make_trainer(tiny_llama(), weight_decay=0.1)
    trainer.step(make_samples(0))
    changed = make_trainer(tiny_llama(), weight_decay=0.5)
    changed.load_state_dict(trainer.state_dict())
    assert [group["weight_decay"] for group in changed.optimizer.param_groups] == [0.5, 0.0]


def test_updates_split_by_whole_groups() -> None:
    samples = make_samples(0, prompts=5)
    parts = split_by_group(samples, 2)
    assert [sample for part in parts for sample in part] == samples
    assert [len(part) for part in parts] == [4, 6]
    assert [len(part) for part in split_by_group(samples[:2], 4)] == [2]


def test_second_update_sees_old_logprobs_of_before_the_step() -> None:
    # Advantages only in the first half: any ratio other than 1 in the second half comes from the first update.
    samples = make_samples(0)
    samples = [replace(s, prompt_ids=samples[0].prompt_ids, response_ids=samples[0].response_ids,
                       behaviour_logprobs=samples[0].behaviour_logprobs, advantage=1.0) for s in samples]  # fmt: skip
    algorithm = Algorithm(clip_high=0.001, importance_cap=0.0)
    assert make_trainer(tiny_llama(), algorithm).step(samples)["actor/clipfrac"] == 0.0
    two = make_trainer(tiny_llama(), algorithm, updates_per_step=2).step(samples)
    assert two["actor/clipfrac"] == pytest.approx(0.5), "all of the second update is beyond the clip"
    assert two["actor/pg_loss"] == pytest.approx(-(1.0 + 1.001) / 2, rel=1e-4)


def test_clip_higher_acts_from_the_second_update_on() -> None:
    """What the refusal of a clip with one update says, and the recipe `dapo` does."""
    after = {}
    for num_updates in (1, load_config("dapo").train.updates_per_step):
        for clip_high in (0.2, 0.28):
            model = tiny_llama()
            told = make_trainer(model, Algorithm(clip_high=clip_high), updates_per_step=num_updates, lr=3e-2).step(
                make_samples(0)
            )
            after[num_updates, clip_high] = weights(model), told["actor/clipfrac"]
    assert torch.equal(after[1, 0.2][0], after[1, 0.28][0]) and after[1, 0.28][1] == 0
    assert not torch.equal(after[4, 0.2][0], after[4, 0.28][0]) and after[4, 0.28][1] > 0


def test_non_finite_never_reaches_the_weights() -> None:
    model = tiny_llama()
    trainer = make_trainer(model, micro_batch_tokens=10_000)
    samples = make_samples(3)
    samples[5] = replace(samples[5], advantage=math.nan)
    before = weights(model)
    with pytest.raises(NonFiniteLoss, match=r"in step 1, samples 3/0/0.*train\.lr"):
        trainer.step(samples)
    assert torch.equal(weights(model), before) and trainer.steps_done == 0
    assert not trainer.optimizer.state

    hook = model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteLoss, match="the gradient") as caught:
        trainer.step(make_samples(3))
    assert torch.equal(weights(model), before) and len(caught.value.uids) == 8
    hook.remove()
    trainer.step(make_samples(3))
    assert not torch.equal(weights(model), before)


def test_a_poisoned_token_names_its_sample() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[20] = math.nan
    model.lm_head.weight = nn.Parameter(torch.randn(VOCABULARY, 32))
    samples = [replace(sample, response_ids=(1, 2, 3), behaviour_logprobs=(-1.0,) * 3) for sample in make_samples(1)]
    samples[3] = replace(samples[3], response_ids=(20, 2, 3))
    with pytest.raises(NonFiniteLoss) as caught:
        make_trainer(model, micro_batch_tokens=10_000).step(samples)
    assert caught.value.uids == ("1/1/1",)


def test_a_fault_of_the_warm_start_says_so() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(NonFiniteLoss, match=r"in a warm-start step, samples pair 0.*warmup\.lr"):
        make_trainer(model).supervised_step([((1, 2), (3, 4))], 1e-3)


def test_a_skipped_step_advances_the_schedule_only() -> None:
    model = tiny_llama()
    trainer = make_trainer(model, lr=1.0, lr_schedule="linear", steps=4)
    before = weights(model)
    trainer.skip_step()
    assert torch.equal(weights(model), before) and trainer.state_dict()["steps_done"] == 1
    assert trainer.step(make_samples(0))["actor/lr"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("name", "clip"),
    [("grpo", (0.2, 0.2)), ("reinforce++", (0.2, 0.2)), ("gspo", (3e-4, 4e-4)), ("cispo", (1.0, 4.0))],
)
def test_clips_are_the_algorithms_own_unless_set(name: str, clip: tuple[float, float]) -> None:
    own = make_trainer(tiny_llama(), Algorithm(name=name))
    assert (own.policy.clip_low, own.policy.clip_high) == clip
    told = make_trainer(tiny_llama(), Algorithm(name=name, clip_low=0.0, clip_high=0.28))
    assert (told.policy.clip_low, told.policy.clip_high) == (0.0, 0.28)


def test_tied_weights_once_and_decay_on_matrices_only() -> None:
    model = tiny_llama()
    trainer = make_trainer(model, weight_decay=0.1)
    decayed, plain = (group["params"] for group in trainer.optimizer.param_groups)
    assert all(parameter.ndim == 2 for parameter in decayed) and all(parameter.ndim == 1 for parameter in plain)
    assert sum(parameter is model.lm_head.weight for parameter in decayed) == 1
    assert len(decayed) + len(plain) == len(list(model.parameters()))


def test_refusals_name_the_setting() -> None:
    with pytest.raises(ValueError, match="float32"):
        make_trainer(tiny_llama().to(torch.bfloat16))
    with pytest.raises(ValueError, match=r"sampling\.temperature"):
        Trainer(tiny_llama(), Training(), Algorithm(), temperature=0.0, max_new_tokens=4)
    Trainer(tiny_llama(), Training(steps=0), Algorithm(), temperature=0.0, max_new_tokens=4)
    with pytest.raises(ValueError, match="at least one sample"):
        make_trainer(tiny_llama()).step([])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_computes_near_float32_with_float32_weights() -> None:
    samples = make_samples(0, prompts=1)
    model = tiny_llama()
    exact = make_trainer(model, precision="float32").logprobs_of(samples)
    trainer = make_trainer(model, precision="bfloat16")
    rounded = trainer.logprobs_of(samples)
    difference = max((exact[uid] - rounded[uid]).abs().max().item() for uid in exact)
    assert 0 < difference < 0.05
    assert math.isfinite(trainer.step(samples)["actor/grad_norm"])
    assert weights(model).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_gradient_points_as_float32_after_passes_without_gradient() -> None:
    samples, found = make_samples(0, prompts=2), {}
    for precision in ("float32", "bfloat16"):
        model = tiny_llama()
        trainer = make_trainer(model, Algorithm(kl_coef=0.1), tiny_llama(5), precision=precision)
        trainer.accumulate_gradients(samples, trainer.logprobs_of(samples))
        found[precision] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.cosine_similarity(found["float32"], found["bfloat16"], dim=0) > 0.999


def test_resolve_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_precision("float32", "cuda", 4096) == torch.float32
    assert resolve_precision("bfloat16", torch.device("cpu"), 8) == torch.bfloat16
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert resolve_precision("auto", "cpu", 4096) == torch.float32
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert resolve_precision("auto", "cpu", WIDE) == torch.bfloat16
    assert resolve_precision("auto", "cpu", WIDE - 1) == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert resolve_precision("auto", "cuda", 8) == torch.bfloat16, "on a GPU whatever the width"
    narrow = tiny_llama()
    assert narrow.config.hidden_size < WIDE and precision_of("auto", narrow) == torch.float32
    monkeypatch.setattr(narrow.config, "hidden_size", WIDE)
    assert precision_of("auto", narrow) == torch.bfloat16
