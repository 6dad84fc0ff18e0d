"""An engine that drafts from history samples what it samples without: tokens and log-probabilities, to the bit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from slipstream.draft.history import HistoryDrafter
from slipstream.draft.shelves import Text
from slipstream.draft.widths import Rule
from slipstream.engine import batcher
from slipstream.engine.engine import Engine
from slipstream.engine.strategy import OFF, Always, StepResult, Strategy
from slipstream.models.loading import load_model
from slipstream.rng import derive_seed
from slipstream.types import Request, Rollout, SamplingParams

NUM_SLOTS, MAX_LENGTH = 12, 96


@cache
def tiny() -> PreTrainedModel:
    torch.manual_seed(3)
    model = load_model("tiny", dtype=torch.float32, device=torch.device("cpu"))
    for parameter in model.parameters():  # sharper than a fresh model, so that texts recur
        parameter.data.mul_(1.6)
    return model


def groups(num_groups: int = 4, members: int = 5, temperature: float = 1.0) -> list[list[Request]]:
    sampling = SamplingParams(max_new_tokens=70, temperature=temperature, stop_token_ids=(2,))
    return [
        [
            Request(f"{group}/{member}", str(group), (5, 6, 7, 8 + group), derive_seed(group, member), sampling)
            for member in range(members)
        ]
        for group in range(num_groups)
    ]


def drafter_with(past: Sequence[Rollout], *, rule: Rule = "aimd", **changes: int) -> HistoryDrafter:
    texts: dict[tuple[int, ...], list[Text]] = {}
    for rollout in past:
        texts.setdefault(rollout.request.prompt_ids, []).append(Text(rollout.token_ids, 1))
    settings = {"max_drafts": 8, "library_tokens": 20_000, "min_match": 2} | changes
    return HistoryDrafter(
        num_slots=NUM_SLOTS, device=torch.device("cpu"), past=lambda ids: texts.get(ids, []), rule=rule, **settings
    )


def generate(
    requests: list[list[Request]],
    drafter: HistoryDrafter | None = None,
    drafts_each: float = 8.0,
    **engine_changes: int,
) -> tuple[dict[str, Rollout], Engine]:
    policy = None if drafter is None else Always(Strategy(drafts_each))
    engine = Engine(
        tiny(), max_sequences=NUM_SLOTS, max_length=MAX_LENGTH, drafter=drafter, policy=policy, **engine_changes
    )
    for group in requests:
        engine.submit(group)
    rollouts: dict[str, Rollout] = {}
    while engine.has_work:
        rollouts |= {rollout.request.uid: rollout for rollout in engine.step()}
    return rollouts, engine


@pytest.mark.parametrize("rule", ["aimd", "odds"])
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.slow), 1.0])
def test_drafts_change_no_bit_and_some_are_right(rule: Rule, temperature: float) -> None:
    plain, _ = generate(groups(temperature=temperature))
    for past in ([], list(plain.values())):
        drafted, engine = generate(groups(temperature=temperature), drafter_with(past, rule=rule))
        assert drafted == plain
        counts, facts = engine.take_draft_counts(), engine.facts()
        assert counts.num_accepted > 0 or not past
        if past:
            assert facts.decode_tokens > 1.3 * facts.num_forwards
        assert counts.num_tokens == facts.decode_tokens
        assert sum(origin > 0 for rollout in drafted.values() for origin in rollout.origins) == counts.num_accepted


@pytest.mark.parametrize("changes", [{"kv_tokens": 256}, {"steps_ahead": 2, "kv_tokens": 320}])
@pytest.mark.parametrize("drafts_each", [pytest.param(0.3, marks=pytest.mark.slow), 4.0])
def test_drafts_change_no_bit_under_preemption_and_late_reading(changes: dict[str, int], drafts_each: float) -> None:
    plain, _ = generate(groups())
    drafted, engine = generate(groups(), drafter_with(list(plain.values())), drafts_each, **changes)
    assert drafted == plain and engine.take_draft_counts().num_accepted > 0
    assert engine.facts().num_preempted > 0 or drafts_each > 1 or "kv_tokens" not in changes


class Told(Always):
    """Notes what it is told."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.steps: list[StepResult] = []

    def observe(self, step: StepResult) -> None:
        assert step.seconds > 0
        self.steps.append(step)


@pytest.mark.parametrize("steps_ahead", [0, 2])
def test_a_sequence_that_had_ended_when_its_step_ran_is_not_counted(steps_ahead: int) -> None:
    policy = Told(OFF)
    settings = {"max_sequences": NUM_SLOTS, "max_length": MAX_LENGTH, "steps_ahead": steps_ahead}
    engine = Engine(tiny(), drafter=drafter_with([]), policy=policy, **settings)
    for group in groups():
        engine.submit(group)
    while engine.has_work:
        engine.step()
    assert {step.tokens_each for step in policy.steps} == {1.0}
    assert max(step.batch for step in policy.steps) == NUM_SLOTS


class OffAlone(Told):
    """Drafts with two sequences, not with one."""

    def choose(self, batch: int, is_matching: bool = False) -> Strategy:
        return self.strategy if batch == 2 else OFF


@pytest.mark.parametrize("steps_ahead", [0, 2])
def test_who_takes_a_slot_counts_for_the_way_of_its_first_step(steps_ahead: int) -> None:
    """Else two are judged by what is best for one whenever another has ended."""
    policy = OffAlone(Strategy(4.0, 1))
    sampling = SamplingParams(max_new_tokens=12)
    requests = [Request(f"r{number}", "r", (3, 5, 6), number, sampling) for number in range(8)]
    settings = {"max_sequences": 2, "max_length": MAX_LENGTH, "steps_ahead": steps_ahead}
    engine, kinds = Engine(tiny(), drafter=drafter_with([]), policy=policy, **settings), list[Hashable]()
    engine.submit(requests)
    while engine.has_work:
        engine.step()
        kinds += [engine.last_kind] * (len(policy.steps) - len(kinds))
    ways = [step.strategy for step in policy.steps]
    assert len(set(zip(ways, kinds, strict=True))) == len(set(ways)) == len(set(kinds)) == 2, "as many kinds as ways"
    of_two = [step for step in policy.steps if step.batch == 2]
    assert len(of_two) > 12 and {step.strategy for step in of_two} == {policy.strategy}


@pytest.mark.parametrize("others_follow", [False, True])
def test_a_policy_and_the_device_are_told_who_is_behind(others_follow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven sequences repeat a known text, the eighth does not: they wait for it, unless others take their slots."""
    monkeypatch.setattr(batcher, "BEHIND_STEPS", 2)
    sampling = SamplingParams(max_new_tokens=60)
    requests = [Request(f"r{number}", f"r{number}", (number + 3, 5, 6), number, sampling) for number in range(8)]
    texts = generate([[request] for request in requests[1:]])[0]
    policy, settings = Told(Strategy(8.0)), {"max_sequences": NUM_SLOTS, "max_length": MAX_LENGTH}
    drafter = drafter_with(list(texts.values()))
    engine = Engine(tiny(), drafter=drafter, policy=policy, others_follow=others_follow, **settings)
    for request in requests:
        engine.submit([request])
    on_device, behind_S = [], engine._state["behind"]
    while engine.has_work:
        engine.step()
        on_device.append(behind_S.nonzero().flatten().tolist())
    ends = [step for step in policy.steps if step.batch == 8][-3:]
    assert all(step.others_follow == others_follow for step in policy.steps)
    assert all((step.tokens_behind is None) == others_follow for step in ends)
    if others_follow:
        assert not any(on_device)
    else:
        assert on_device[4:9] == [[0]] * 5, "it has the first slot"
        assert all(step.tokens_behind < step.tokens_each for step in ends)  # type: ignore[operator]


def test_adversarial_history_changes_no_bit() -> None:
    plain, _ = generate(groups())
    wrong = [
        Rollout(r.request, tuple(3 + derive_seed(r.request.uid, at) % 20 for at in range(40)), (), "length", 0, 0)
        for r in plain.values()
    ]
    assert generate(groups(), drafter_with(wrong, min_match=1))[0] == plain


def test_a_script_is_walked_with_drafts_too() -> None:
    """Replay: what is walked does not depend on drafts, and right drafts shorten it."""
    scripted = [
        [
            Request(r.uid, r.group, r.prompt_ids, r.seed, SamplingParams(max_new_tokens=30), tuple(range(40, 70)))
            for r in group
        ]
        for group in groups(2, 2)
    ]
    past = [Rollout(group[0], tuple(range(40, 70)), (), "length", 0, 0) for group in scripted]
    rollouts, engine = generate(scripted, drafter_with(past))
    assert all(rollout.token_ids == tuple(range(40, 70)) for rollout in rollouts.values())
    assert engine.facts().num_forwards < 14


def test_a_library_that_is_full_leaves_groups_without_drafts() -> None:
    plain, _ = generate(groups())
    drafter = drafter_with(list(plain.values()), library_tokens=704)
    drafted, _ = generate(groups(), drafter)
    assert drafted == plain and drafter.num_unserved > 0
    assert drafter._shelving.num_free == 704, "all shelves were given back"


def test_sequences_may_leave_and_come_back() -> None:
    plain, _ = generate(groups(1, 3))
    drafter = drafter_with(list(plain.values()))
    engine = Engine(
        tiny(), max_sequences=NUM_SLOTS, max_length=MAX_LENGTH, drafter=drafter, policy=Always(Strategy(8.0))
    )
    engine.submit(groups(1, 3)[0])
    for _ in range(4):
        engine.step()
    engine.import_sequence(engine.export_sequence("0/1"))
    rollouts = {}
    while engine.has_work:
        rollouts |= {rollout.request.uid: rollout for rollout in engine.step()}
    assert rollouts == plain
