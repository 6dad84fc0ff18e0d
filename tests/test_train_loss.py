"""The packed, chunked, micro-batched loss against a plain one: one sequence at a time, full logits, no packing."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.config import Algorithm, Training
from slipstream.models.attention import ATTENTION_NAME
from slipstream.train.algorithms import ALGORITHMS
from slipstream.train.loss import logprobs_and_entropy, mean_metrics, merge_metrics, policy_loss, summed_metrics
from slipstream.train.trainer import Trainer
from slipstream.types import TrainSample

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPERATURE, MAX_NEW_TOKENS, VOCABULARY = 0.7, 12, 40
ALL = ["grpo", "dr_grpo", "rloo", "reinforce++", "gspo", "cispo"]
# What each algorithm is, written out once more, on purpose not read from the table under test.
OWN_CLIP = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
OWN_AGGREGATION = {
    "grpo": "sequence_mean", "dr_grpo": "constant", "rloo": "token_mean", "reinforce++": "token_mean",
    "gspo": "sequence_mean", "cispo": "token_mean",
}  # fmt: skip


def tiny_llama(seed: int, attention: str) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(attention)
    return model


def make_samples() -> list[TrainSample]:
    draw = random.Random(7)
    samples = []
    for prompt in range(3):
        prompt_ids = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 6)))
        for sample in range(3):
            response = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, MAX_NEW_TOKENS)))
            behaviour = tuple(draw.uniform(-6, -1) for _ in response)
            advantage, log_kept = draw.uniform(-2, 2), ()
            if sample > 0:  # drawn from a cut distribution
                log_kept = tuple(-0.1 * (place % 5) for place in range(len(response)))
            name = f"0/{prompt}/{sample}"
            samples.append(TrainSample(name, prompt_ids, response, behaviour, advantage, log_kept))
    return samples


def plain_logprobs(model: LlamaForCausalLM, sample: TrainSample) -> Tensor:
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    logprobs = (model(input_ids=ids).logits[0].float() / TEMPERATURE).log_softmax(-1)
    first = len(sample.prompt_ids)
    return torch.stack([logprobs[first + t - 1, token] for t, token in enumerate(sample.response_ids)])


def plain_loss(
    name: str,
    algorithm: Algorithm,
    model: LlamaForCausalLM,
    reference: LlamaForCausalLM,
    samples: list[TrainSample],
    old: dict[str, Tensor],
) -> Tensor:
    aggregation = OWN_AGGREGATION[name] if algorithm.aggregation == "auto" else algorithm.aggregation
    own_low, own_high = OWN_CLIP.get(name, (0.2, 0.2))
    low = 1 - (own_low if algorithm.clip_low is None else algorithm.clip_low)
    high = 1 + (own_high if algorithm.clip_high is None else algorithm.clip_high)
    advantage_of = {s.uid: s.advantage for s in samples}
    per_sample = []
    for sample in samples:
        logprobs, advantage, losses = plain_logprobs(model, sample), advantage_of[sample.uid], []
        with torch.no_grad():
            reference_logprobs = plain_logprobs(reference, sample)
        mean_log_ratio = (logprobs - old[sample.uid]).sum() / len(logprobs)
        for t in range(len(logprobs)):
            ratio = torch.exp(mean_log_ratio if name == "gspo" else logprobs[t] - old[sample.uid][t])
            if name == "cispo":
                loss = -min(max(ratio.item(), low), high) * advantage * logprobs[t]
            elif advantage > 0:
                loss = -advantage * torch.clamp(ratio, max=high)
            else:
                loss = -advantage * torch.clamp(ratio, min=low)
            if algorithm.importance_cap > 0:
                weight = math.exp(old[sample.uid][t].item() - sample.behaviour_logprobs[t])
                weight *= math.exp(sample.log_kept[t]) if sample.log_kept else 1.0
                loss = loss * min(weight, algorithm.importance_cap)
            if algorithm.kl_coef > 0:
                difference = reference_logprobs[t] - logprobs[t]
                loss = loss + algorithm.kl_coef * (torch.exp(difference) - difference - 1)
            losses.append(loss)
        per_sample.append(torch.stack(losses))
    if aggregation == "token_mean":
        return torch.cat(per_sample).mean()
    if aggregation == "sequence_mean":
        return torch.stack([losses.mean() for losses in per_sample]).mean()
    return torch.stack([losses.sum() for losses in per_sample]).sum() / (len(samples) * MAX_NEW_TOKENS)


def gradients(model: LlamaForCausalLM) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def compare(
    algorithm: Algorithm, *, on_policy: bool = False, planted: str = "", micro_batch_tokens: int = 30
) -> tuple[float, float]:
    """Relative distance of the gradients, and of the losses, of the two implementations."""
    samples = make_samples()
    plain, reference = tiny_llama(0, "eager"), tiny_llama(1, "eager")
    packed, packed_reference = tiny_llama(0, ATTENTION_NAME), tiny_llama(1, ATTENTION_NAME)
    noise = torch.Generator().manual_seed(3)
    old = {}
    for sample in samples:
        with torch.no_grad():
            current = plain_logprobs(plain, sample)
        scale = 0.0 if on_policy else 0.4
        old[sample.uid] = current + scale * torch.randn(len(current), generator=noise)
    expected = plain_loss(algorithm.name, algorithm, plain, reference, samples, old)
    expected.backward()

    training = Training(micro_batch_tokens=micro_batch_tokens, logprob_chunk_tokens=5, precision="float32")
    trainer = Trainer(
        packed, training, algorithm, temperature=TEMPERATURE, max_new_tokens=MAX_NEW_TOKENS
    )  # fmt: skip
    trainer.reference = packed_reference if algorithm.kl_coef else None
    if planted == "ratio":
        trainer.policy.recipe = replace(trainer.policy.recipe, ratio_level="token")
    elif planted == "aggregation":
        trainer.policy.aggregation = "token_mean"
    elif planted == "behaviour":
        samples[4] = replace(samples[4], behaviour_logprobs=tuple(v + 0.01 for v in samples[4].behaviour_logprobs))
    elif planted == "advantage":
        samples[0] = replace(samples[0], advantage=samples[0].advantage * 1.01)
    parts: list[int] = []
    metrics = trainer.accumulate_gradients(samples, None if on_policy else old, parts.append)
    assert len(parts) > 1 or micro_batch_tokens > 100
    got, wanted = gradients(packed), gradients(plain)
    loss = metrics["actor/pg_loss"][0].item()
    if algorithm.kl_coef:
        return ((got - wanted).norm() / wanted.norm()).item(), 0.0
    return ((got - wanted).norm() / wanted.norm()).item(), abs(loss - expected.item()) / abs(expected.item())


TOLERANCE = 6e-6  # measured: 8e-7 to 1.6e-6


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "settings",
    [
        {"importance_cap": 0.0},
        {"kl_coef": 0.3},
        {"clip_low": 0.2, "clip_high": 0.2},
        {"kl_coef": 0.05, "aggregation": "constant", "clip_high": 0.28},
    ],
    ids=["plain", "kl_tis", "tis_one_clip_for_all", "kl_tis_constant_clip_higher"],
)
def test_gradient_equals_the_plain_one(name: str, settings: dict[str, float]) -> None:
    gradient, loss = compare(Algorithm(name=name, **settings))
    assert gradient < TOLERANCE and loss < TOLERANCE


@pytest.mark.parametrize("name", ALL)
def test_on_policy_needs_no_old_logprobs(name: str) -> None:
    gradient, _ = compare(Algorithm(name=name, aggregation="sequence_mean"), on_policy=True, micro_batch_tokens=10_000)
    assert gradient < TOLERANCE


@pytest.mark.parametrize(
    ("name", "planted"),
    [("gspo", "ratio"), ("grpo", "aggregation"), ("rloo", "behaviour"), ("cispo", "advantage")],
)
def test_a_planted_error_is_seen(name: str, planted: str) -> None:
    gradient, _ = compare(Algorithm(name=name), planted=planted)
    assert gradient > 5 * TOLERANCE


def test_logprobs_and_entropy_do_not_depend_on_the_chunks_and_never_hold_all_logits() -> None:
    model = tiny_llama(0, ATTENTION_NAME)
    hidden, targets = torch.randn(17, 32, requires_grad=True), torch.randint(0, VOCABULARY, (17,))
    rows_seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, out: rows_seen.append(len(out)))
    logits = model.lm_head(hidden).float() / TEMPERATURE
    wanted = torch.distributions.Categorical(logits=logits)
    whole_gradient = torch.autograd.grad(wanted.log_prob(targets).sum(), hidden)[0]
    rows_seen.clear()
    for chunk_tokens in (1, 4, 17, 100):
        logprobs, entropy = logprobs_and_entropy(model, hidden, targets, TEMPERATURE, chunk_tokens)
        torch.testing.assert_close(logprobs, wanted.log_prob(targets))
        torch.testing.assert_close(entropy, wanted.entropy())
        assert not entropy.requires_grad
        torch.testing.assert_close(torch.autograd.grad(logprobs.sum(), hidden)[0], whole_gradient)
        assert max(rows_seen) <= chunk_tokens
        assert sum(rows_seen) == 2 * 17, "each row once forward and once more in the backward"
        rows_seen.clear()


def test_metrics_by_hand_and_merged() -> None:
    trainer_recipe = ALGORITHMS["grpo"]
    old, logprobs = torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -2.0])
    behaviour = torch.tensor([-1.5, -1.0])
    merged: dict[str, tuple[Tensor, float]] = {}
    for t in range(2):
        _, metrics = policy_loss(
            logprobs[t : t + 1], old_logprobs_N=old[t : t + 1], behaviour_logprobs_N=behaviour[t : t + 1],
            advantages_N=torch.ones(1), weights_N=torch.full((1,), 0.5), lengths=[1], recipe=trainer_recipe,
            clip_low=0.2, clip_high=0.2, importance_cap=1.5, ref_logprobs_N=behaviour[t : t + 1], kl_coef=0.1,
        )  # fmt: skip
        merge_metrics(merged, metrics)
    merge_metrics(merged, {"actor/pg_loss": (torch.zeros(()), 1.0)})
    values = mean_metrics([summed_metrics(merged)])
    assert values["actor/clipfrac"] == 0.5
    assert values["mismatch/logprob_diff_max"] == pytest.approx(1.0)
    assert values["rollout/importance_weight"] == pytest.approx((1.5 + math.exp(-1)) / 2)
    assert values["mismatch_kl"] == pytest.approx(((math.exp(0.5) - 1.5) + math.exp(-1)) / 2)
    assert values["actor/kl"] == pytest.approx((math.exp(-1) + (math.exp(1) - 2)) / 2)
    assert values["actor/pg_loss"] == pytest.approx(-(1.2 * 1.5 + 1.0 * math.exp(-1)) / 2)


def test_with_the_kept_mass_the_mean_gradient_is_that_of_the_uncut_policy_on_what_can_be_drawn() -> None:
    """In expectation over a cut distribution, computed exactly: every token that is kept, with its chance as weight."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    advantages, kept = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64), slice(0, 3)
    with torch.no_grad():
        behaviour = logits.log_softmax(-1)[kept]
        mass = behaviour.exp().sum()
    facts = {
        "old_logprobs_N": behaviour,
        "behaviour_logprobs_N": behaviour,
        "advantages_N": advantages,
        "weights_N": behaviour.exp() / mass,
        "lengths": [1, 1, 1],
        "recipe": ALGORITHMS["grpo"],
        "clip_low": 0.2,
        "clip_high": 0.2,
    }

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits)[0]

    logprobs = logits.log_softmax(-1)[kept]
    wanted = gradient(-(logprobs.exp() * advantages).sum())
    log_kept = mass.log().expand(3)
    loss, metrics = policy_loss(logits.log_softmax(-1)[kept], **facts, importance_cap=2.0, log_kept_N=log_kept)  # type: ignore[arg-type]
    torch.testing.assert_close(gradient(loss), wanted)
    values = mean_metrics([summed_metrics({name: pair for name, pair in metrics.items() if pair[1]})])
    assert values["rollout/kept_mass"] == values["rollout/importance_weight"] == pytest.approx(float(mass))
    assert values["mismatch_kl"] == 0, "a cut is no mismatch of the engine's numerics"
    for cap, masses in ((0.0, log_kept), (2.0, None)):
        loss, _ = policy_loss(logits.log_softmax(-1)[kept], **facts, importance_cap=cap, log_kept_N=masses)  # type: ignore[arg-type]
        torch.testing.assert_close(gradient(loss), wanted / mass)


def test_extreme_ratios_keep_finite_gradients() -> None:
    for name in ALL:
        recipe = ALGORITHMS[name]
        logprobs = torch.tensor([-0.1, -300.0], requires_grad=True)
        loss, metrics = policy_loss(
            logprobs, old_logprobs_N=torch.tensor([-300.0, -0.1]), behaviour_logprobs_N=torch.tensor([-0.1, -300.0]),
            advantages_N=torch.tensor([1.0, -1.0]), weights_N=torch.full((2,), 0.5), lengths=[2], recipe=recipe,
            clip_low=0.2, clip_high=0.2, importance_cap=2.0, ref_logprobs_N=torch.tensor([-300.0, -0.1]), kl_coef=0.1,
        )  # fmt: skip
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()
        assert mean_metrics([summed_metrics({k: v for k, v in metrics.items() if v[1]})])["mismatch_kl"] >= 0
