"""Steps that are fed group by group: the same bits as the whole step, whatever the step contains."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.config import Algorithm, Training
from slipstream.models.attention import ATTENTION_NAME
from slipstream.train.packing import FULL_SHARE, OPEN_MICRO_BATCHES, StreamPacker, plan_micro_batches
from slipstream.train.policy import MicroBatch, NonFiniteLoss
from slipstream.train.trainer import Trainer
from slipstream.types import TrainSample

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, MAX_NEW_TOKENS = 24, 12
Group = list[TrainSample]
ROUNDING = 2e-6
"""Relative distance of two gradients that differ by the order of their sums; measured: 1e-7 to 2.2e-7."""


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def make_trainer(algorithm: Algorithm | None = None, **training: Any) -> Trainer:
    chosen = {"steps": 20, "lr": 3e-3, "micro_batch_tokens": 40, "logprob_chunk_tokens": 7, "precision": "float32"}
    algorithm = algorithm or Algorithm()
    trainer = Trainer(
        tiny_llama(), Training(**{**chosen, **training}), algorithm, temperature=1.0, max_new_tokens=MAX_NEW_TOKENS
    )
    trainer.reference = tiny_llama(5) if algorithm.kl_coef else None
    return trainer


def make_groups(step: int = 0, num_groups: int = 6, idle: Sequence[int] = (2,)) -> list[Group]:
    """Groups of three samples, of lengths and rewards as they come; those called idle have no advantage."""
    draw = random.Random(step)
    groups = []
    for prompt in range(num_groups):
        prompt_ids = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 6)))
        group = []
        for sample in range(3):
            response = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, MAX_NEW_TOKENS)))
            behaviour = tuple(draw.uniform(-4, -2) for _ in response)
            advantage = 0.0 if prompt in idle else draw.uniform(-2, 2)
            group.append(TrainSample(f"{step}/{prompt}/{sample}", prompt_ids, response, behaviour, advantage))
        groups.append(group)
    return groups


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.parameters])


def moments(trainer: Trainer) -> Tensor:
    return torch.cat([state["exp_avg"].flatten() for state in trainer.optimizer.state.values()])


def flat(groups: Sequence[Group]) -> list[TrainSample]:
    return [sample for group in groups for sample in group]


def stream(trainer: Trainer, groups: Sequence[Group]) -> dict[str, float]:
    trainer.begin_step()
    for group in groups:
        trainer.feed(group)
    return trainer.finish_step()


EVERY_KIND = [
    ({"name": "grpo"}, {}),
    ({"name": "grpo", "aggregation": "token_mean", "kl_coef": 0.2}, {}),
    ({"name": "dr_grpo"}, {}),
    ({"name": "gspo"}, {"updates_per_step": 2}),
    ({"name": "cispo", "kl_coef": 0.2}, {"updates_per_step": 4}),
    ({"name": "rloo"}, {"deterministic": True, "micro_batch_tokens": 10_000}),
]


@pytest.mark.parametrize(("algorithm", "training"), EVERY_KIND)
def test_fed_one_by_one_is_bit_equal_to_fed_at_once(algorithm: dict[str, Any], training: dict[str, Any]) -> None:
    whole, streamed, pairs = (make_trainer(Algorithm(**algorithm), **training) for _ in range(3))
    for step in range(2):
        groups = make_groups(step)
        expected = whole.step(flat(groups))
        assert stream(streamed, groups) == expected
        assert stream(pairs, [flat(groups[:1]), flat(groups[1:5]), flat(groups[5:])]) == expected
    assert torch.equal(weights(whole), weights(streamed)) and torch.equal(weights(whole), weights(pairs))
    assert torch.equal(moments(whole), moments(streamed))


@pytest.mark.parametrize(("algorithm", "training"), [kind for kind in EVERY_KIND if "updates_per_step" not in kind[1]])
def test_another_order_gives_the_same_gradient(algorithm: dict[str, Any], training: dict[str, Any]) -> None:
    # After the first step the first moment is (1 - beta1) x the clipped gradient; no clip here.
    trainers = [make_trainer(Algorithm(**algorithm), max_grad_norm=1e9, **training) for _ in range(2)]
    groups = make_groups()
    expected = trainers[0].step(flat(groups))
    got = stream(trainers[1], [groups[index] for index in (3, 0, 5, 2, 1, 4)])
    first, second = (moments(trainer) for trainer in trainers)
    assert (first - second).norm() < ROUNDING * first.norm()
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    # One sample fewer in the total, though it has no gradient of its own, is far more than rounding.
    fewer = make_trainer(Algorithm(**algorithm), max_grad_norm=1e9, **training)
    fewer.step(flat(groups)[:6] + flat(groups)[7:])
    assert (moments(fewer) - first).norm() > 1e3 * ROUNDING * first.norm()


def test_gradients_are_computed_as_micro_batches_fill() -> None:
    trainer = make_trainer()
    seen: list[int] = []
    trainer.on_hidden = lambda batch, hidden_TD: seen.append(len(batch.lengths))
    groups, progress = make_groups(), list[tuple[int, int]]()
    num_tokens = [sum(len(sample.response_ids) for sample in group) for group in groups]
    trainer.begin_step()
    for number, group in enumerate(groups, 1):
        before = len(progress)
        trainer.feed(group, lambda done, total: progress.append((done, total)))
        assert all(total == sum(num_tokens[:number]) for _, total in progress[before:])
    in_time = sum(seen)
    trainer.finish_step(lambda done, total: progress.append((done, total)))
    assert 6 <= in_time < sum(seen) == 15, "of five groups that teach, most are done before the end"
    assert progress[-1] == (sum(num_tokens), sum(num_tokens))
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


@pytest.mark.parametrize("updates_per_step", [1, 3])
def test_hidden_states_are_shown_once_and_idle_samples_spared(updates_per_step: int) -> None:
    trainer = make_trainer(updates_per_step=updates_per_step)
    shown: list[tuple[int, ...]] = []

    def show(batch: MicroBatch, hidden_TD: Tensor) -> None:
        shown.extend(tuple(ids.tolist()) for ids in batch.token_ids_T.split(batch.lengths))

    trainer.on_hidden = show
    groups = make_groups()
    stream(trainer, groups)
    taught = [(*s.prompt_ids, *s.response_ids[:-1]) for s in flat(groups) if s.advantage]
    assert sorted(shown) == sorted(taught)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_hidden_states_that_are_asked_for_are_those_of_the_gradients_forward(precision: str) -> None:
    trainer = make_trainer(precision=precision)
    before, compared = weights(trainer).clone(), list[bool]()

    def show(batch: MicroBatch, hidden_TD: Tensor) -> None:
        asked_TD = trainer.policy.hidden(batch.token_ids_T, batch.lengths)
        compared.append(torch.equal(asked_TD, hidden_TD) and not asked_TD.requires_grad)
        compared.append(bool(asked_TD.abs().sum() > 0))

    trainer.on_hidden = show
    trainer.begin_step()
    trainer.feed(flat(make_groups()))
    assert len(compared) > 4 and all(compared) and torch.equal(weights(trainer), before)
    trainer.abandon_step()


@pytest.mark.parametrize("updates_per_step", [1, 2, 3])
def test_a_step_without_any_advantage_moves_by_momentum_alone(updates_per_step: int) -> None:
    trainer = make_trainer(updates_per_step=updates_per_step, weight_decay=0.0)
    stream(trainer, make_groups(0))
    before, momentum = weights(trainer), moments(trainer)
    metrics = stream(trainer, make_groups(1, idle=range(6)))
    assert metrics["actor/grad_norm"] == 0.0 and metrics["actor/pg_loss"] == 0.0
    assert not torch.equal(weights(trainer), before)
    torch.testing.assert_close(moments(trainer), momentum * 0.9**updates_per_step)


@pytest.mark.parametrize("updates_per_step", [1, 2])
def test_an_abandoned_step_leaves_no_trace(updates_per_step: int) -> None:
    plain, disturbed = (make_trainer(updates_per_step=updates_per_step) for _ in range(2))
    for trainer in (plain, disturbed):
        trainer.supervised_step([((1, 2, 3), (4, 5))], 1e-3)
    before, momentum = weights(disturbed), moments(disturbed)
    disturbed.begin_step()
    disturbed.feed(flat(make_groups(7)))
    disturbed.abandon_step()
    assert torch.equal(weights(disturbed), before) and torch.equal(moments(disturbed), momentum)
    assert (disturbed.stage, disturbed.steps_done) == ("supervised", 0)
    assert all(parameter.grad is None for parameter in disturbed.parameters), "their memory is given back"
    assert stream(plain, make_groups(0)) == stream(disturbed, make_groups(0))
    assert torch.equal(weights(plain), weights(disturbed))


def test_a_fault_while_feeding_names_the_culprit_and_abandons_the_step() -> None:
    trainer = make_trainer(micro_batch_tokens=12)
    groups, before = make_groups(), weights(trainer)
    groups[1][2] = replace(groups[1][2], advantage=math.nan)
    trainer.begin_step()
    trainer.feed(groups[0])
    with pytest.raises(NonFiniteLoss, match=r"in step 1, .*train\.lr") as caught:
        trainer.feed(groups[1])
        trainer.feed(groups[3])
    assert "0/1/2" in caught.value.uids
    assert torch.equal(weights(trainer), before) and not trainer.optimizer.state
    twin = make_trainer(micro_batch_tokens=12)
    assert stream(trainer, make_groups(1)) == stream(twin, make_groups(1)), "nothing of the failed step is left"


def test_calls_in_the_wrong_order_are_seen() -> None:
    trainer = make_trainer()
    with pytest.raises(AssertionError, match="begin_step comes first"):
        trainer.feed(make_groups()[0])
    with pytest.raises(AssertionError, match="begin_step comes first"):
        trainer.finish_step()
    trainer.begin_step()
    with pytest.raises(AssertionError, match="is under way"):
        trainer.begin_step()
    with pytest.raises(AssertionError, match="is under way"):
        trainer.supervised_step([((1,), (2,))], 1e-3)
    trainer.feed(make_groups()[0])
    trainer.feed(make_groups()[0])
    before = weights(trainer)
    with pytest.raises(AssertionError, match="fed twice"):
        trainer.finish_step()
    assert torch.equal(weights(trainer), before)
    trainer.begin_step()
    with pytest.raises(ValueError, match="at least one sample"):
        trainer.finish_step()
    trainer.begin_step()


def packed(lengths: Sequence[int], max_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """What comes while samples are added, and what is left."""
    packer: StreamPacker[int] = StreamPacker(max_tokens)
    given = [packer.add(index, length) for index, length in enumerate(lengths)]
    rest = packer.rest()
    assert packer.rest() == []
    return [members for members in given if members is not None], rest


LENGTHS = st.lists(st.integers(1, 60), max_size=60)


@given(LENGTHS, LENGTHS, st.integers(1, 80))
def test_packing_does_not_depend_on_what_comes_later(lengths: list[int], more: list[int], max_tokens: int) -> None:
    done, rest = packed(lengths, max_tokens)
    longer, _ = packed(lengths + more, max_tokens)
    assert longer[: len(done)] == done
    everything = done + rest
    assert sorted(index for members in everything for index in members) == list(range(len(lengths)))
    for members in everything:
        assert sum(lengths[index] for index in members) <= max_tokens or len(members) == 1
        assert members == sorted(members)
    assert len(rest) <= OPEN_MICRO_BATCHES
    assert all(sum(lengths[index] for index in members) < FULL_SHARE * max_tokens for members in rest)


def test_packing_needs_few_more_micro_batches_than_if_all_were_known() -> None:
    draw = random.Random(0)
    for limit, bound in ((2_000, 1.06), (8_000, 1.02)):
        lengths = [100 + min(1_900, int(math.exp(draw.gauss(6.2, 0.8)))) for _ in range(1_000)]
        done, rest = packed(lengths, limit)
        assert len(done) + len(rest) <= bound * len(plan_micro_batches(lengths, limit))
        assert sum(lengths[index] for members in rest for index in members) < 0.05 * sum(lengths), "held back"
