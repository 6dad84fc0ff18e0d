"""What an engine runs before its first sequence: every kind of step that it may launch later, and nothing changes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_draft_history import MAX_LENGTH, NUM_SLOTS, drafter_with, generate, groups, tiny
from test_draft_learned import rolled_out, sharp

from slipstream.draft.learned import ModelGuesser
from slipstream.draft.selector import DEFAULT_STRATEGIES, MIXED_STRATEGIES, MODEL_STRATEGIES, Selector
from slipstream.engine.engine import Engine
from slipstream.engine.first_runs import DRAFTED_ROWS, LEAST_PROMPTS, FirstRuns
from slipstream.engine.fitting import FREE, Fitting, coarsely, fitted, padded
from slipstream.engine.packing import Launch, padded_launches_of
from slipstream.engine.sequences import Samplers, StepPlan
from slipstream.engine.strategy import OFF, Always, Feeding, StepDrafts, Strategy

MAX_TOKENS = 2048
DRAFTING = {"texts": DEFAULT_STRATEGIES, "model": MODEL_STRATEGIES, "both": MIXED_STRATEGIES, "none": (OFF,)}


def plan_of(num_samplers: int, num_drafts: int, num_prefilled: int) -> StepPlan:
    num_tokens = num_samplers + num_drafts + num_prefilled
    samplers = Samplers(np.arange(num_samplers))
    num_rows = num_samplers + (num_prefilled > 0)
    return StepPlan(samplers=samplers, num_rows=num_rows, num_tokens=num_tokens, num_drafts=num_drafts)


def launches(plan: StepPlan, strategy: Strategy, feeding: Feeding, num_slots: int) -> list[Launch]:
    drafts = StepDrafts(len(plan.samplers), False, strategy, plan.num_drafts, feeding)
    return padded_launches_of(plan, drafts, coarsely, num_slots)


@pytest.mark.parametrize("num_slots", [1, 6, 64, 512, 3000])
@pytest.mark.parametrize("source", DRAFTING)
@pytest.mark.parametrize("with_cuts", [False, True])
def test_whatever_is_launched_later_has_run(source: str, num_slots: int, with_cuts: bool) -> None:
    ways, has_model = Selector(DRAFTING[source]).ways, source in ("model", "both")
    sizes = {"num_slots": num_slots, "max_tokens": MAX_TOKENS}
    ran = list(FirstRuns(ways=ways, has_model=has_model, with_cuts=with_cuts, **sizes).runs())
    assert all(one.step is None or one.step.num_tokens <= MAX_TOKENS for one in ran)
    kinds, num_tokens = {one.kind for one in ran}, {one.step.num_tokens for one in ran if one.step}
    num_samples = {one.step.num_samples for one in ran if one.step}
    dice = random.Random(num_slots)
    for _ in range(300):
        batch = dice.choice([dice.randint(1, min(num_slots, MAX_TOKENS)), dice.randint(1, min(num_slots, 32))])
        strategy = dice.choice(ways(batch))
        num_drafts = min(int(dice.random() * strategy.drafts_each * batch), MAX_TOKENS - batch)
        most = MAX_TOKENS - batch - num_drafts
        # Beside prompts a tree's drafter makes chains, so deep as nobody else's: of no new kernel, and seldom.
        num_prefilled = 0 if strategy.branches > 1 else dice.choice([0, 0, dice.randint(0, most), most])
        plan = replace(plan_of(batch, num_drafts, num_prefilled), with_cuts=with_cuts)
        feeding = Feeding.ALL if strategy.depth else dice.choice([*Feeding] if has_model else [Feeding.NOTHING])
        for launch in launches(plan, strategy, feeding, num_slots):
            assert launch.kind in kinds, launch
            if launch.step:
                assert launch.step.num_tokens in num_tokens and launch.step.num_samples in num_samples


def test_it_is_no_more_than_that() -> None:
    ways, sizes = Selector(MIXED_STRATEGIES).ways, {"max_tokens": MAX_TOKENS, "with_cuts": False}
    ran = list(FirstRuns(ways=ways, has_model=True, num_slots=512, **sizes).runs())
    assert len(ran) < 75 and len({(one.kind, one.room) for one in ran}) > 0.8 * len(ran)
    # Logits of more would take memory that nothing else does.
    for policy, num_slots, most in ((Always(OFF), 8, 8), (Selector(MIXED_STRATEGIES), 64, 768)):
        few = FirstRuns(ways=policy.ways, has_model=False, num_slots=num_slots, **sizes).runs()
        assert max(one.step.num_samples for one in few if one.step) == most


@pytest.mark.parametrize(
    "way", [OFF, Strategy(4.0, 1), Strategy(4.0, 0, 4), Strategy(4.0, 2, 3), Strategy(8.0, 0, 3, 2)], ids=str
)
def test_it_leaves_nothing_behind(way: Strategy) -> None:
    """Neither in pages, nor in what drafts are made from: which would show in their number alone."""
    plain, _ = generate(groups(3, 4))
    counts = []
    for loads in (False, True):
        drafter = drafter_with(list(plain.values())[::2])
        drafter.guesser = guesser = ModelGuesser(num_slots=NUM_SLOTS)
        engine = Engine(tiny(), drafter=drafter, policy=Always(way), max_sequences=NUM_SLOTS, max_length=MAX_LENGTH)
        guesser.write(sharp("eagle3", 3).state_dict().items())
        kept = drafter._shelves_3B, drafter._block, guesser.hidden_SD, guesser.normed_SD, guesser.kept_at_S
        before = [one.clone() for one in kept]
        if loads:
            engine.load_kernels()
            for one, was in zip(kept, before, strict=True):
                in_slots = slice(None) if one is kept[0] or one is kept[1] else slice(NUM_SLOTS)
                assert torch.equal(one[in_slots], was[in_slots])
            pages = [page for pair in engine._pages.layers.values() for page in pair]
            assert pages and all(not page[: engine._pages.trash_page].any() for page in pages)
            assert engine.facts().decode_tokens == engine.facts().num_forwards == 0
        assert rolled_out(engine) == plain
        counted = engine.take_draft_counts()
        counts.append((engine.facts().num_forwards, counted.num_drafted, counted.num_accepted))
    assert counts[0] == counts[1]


def test_an_engine_at_work_has_no_time_for_it() -> None:
    engine = Engine(tiny(), max_sequences=NUM_SLOTS, max_length=MAX_LENGTH)
    for requests in groups(1, 2):
        engine.submit(requests)
    with pytest.raises(AssertionError, match="before anything else"):
        engine.load_kernels()
    while engine.has_work:
        engine.step()
    with pytest.raises(AssertionError, match="before anything else"):
        engine.load_kernels()  # slots of who was taken out may not know it yet


def test_steps_with_prompts_come_in_few_sizes() -> None:
    """A rollout of 512 begins: whatever has begun to decode meanwhile, and whatever a model is told."""
    begun = [(24, 2024), (113, 1935), (213, 1835), (256, 1792)]
    sizes = {
        launch
        for num_samplers, num_prefilled in begun
        for feeding in (Feeding.KEYS, Feeding.ALL)
        for launch in launches(plan_of(num_samplers, 0, num_prefilled), OFF, feeding, 512)
    }
    (only,) = sizes
    assert only.step and only.step.num_samples == 256 and only.step.feeding == Feeding.ALL
    (launch,) = launches(plan_of(24, 0, 2024), OFF, Feeding.NOTHING, 512)
    assert launch.step and launch.step.feeding == Feeding.NOTHING
    few = padded_launches_of(plan_of(3, 0, 400), StepDrafts(3, False, OFF, 0), padded, 4)[0].step
    assert few and few.num_samples == 4 and few.num_tokens >= 403
    a_little = launches(plan_of(30, 0, 2), OFF, Feeding.KEYS, 512)
    assert a_little == launches(plan_of(32, 0, 0), OFF, Feeding.KEYS, 512), (
        "what has no room for prompts has no graph of its own"
    )


@pytest.mark.parametrize("num_slots", [1, 6, 64, 512])
@pytest.mark.parametrize("source", DRAFTING)
def test_graphs_are_there_before_steps_that_decode_and_before_drafts_for_few(
    source: str, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often they are met, if they only decode or what they run in is small: that takes no longer."""
    has_model = source in ("model", "both")
    feedings = (Feeding.NOTHING, Feeding.KEYS) if has_model else (Feeding.NOTHING,)
    fed_to_few = tuple(Feeding) if has_model else feedings
    ways, dice = Selector(DRAFTING[source]).ways, random.Random(num_slots)
    sizes = {"num_slots": num_slots, "max_tokens": MAX_TOKENS}
    first = FirstRuns(ways=ways, has_model=has_model, with_cuts=False, **sizes)
    graphs, fitting = first.graphs(), Fitting[Launch]()
    assert {one.kind for one in graphs} <= {one.kind for one in first.runs()}, "these ran before they are captured"
    for one in graphs:
        fitting.add(one)

    def check(plan: StepPlan, strategy: Strategy, feeding: Feeding) -> None:
        drafts = StepDrafts(len(plan.samplers), False, strategy, plan.num_drafts, feeding)
        pair = (padded_launches_of(plan, drafts, pad, num_slots) for pad in (padded, coarsely))
        for launch, coarser in zip(*pair, strict=True):
            chosen = fitting.choose(launch, coarser)
            assert chosen in graphs, launch
            if max(chosen.room) <= FREE or not (plan.num_prefilled or plan.num_drafts):
                with monkeypatch.context() as patch:
                    patch.setattr("slipstream.engine.fitting.PATIENCE", 0)
                    assert fitting.choose(launch, coarser) == chosen

    for batch in range(1, num_slots + 1):
        check(plan_of(batch, 0, 0), OFF, dice.choice(feedings))
        for way in ways(batch) if batch <= DRAFTED_ROWS else ():
            num_drafts = fitted(batch, math.ceil(way.drafts_each * batch)) if way != OFF else 0
            plan, feeding = plan_of(batch, num_drafts, 0), Feeding.ALL if way.depth else dice.choice(fed_to_few)
            check(plan, way, feeding)
            if batch.bit_count() == 1:
                assert set(launches(plan, way, feeding, num_slots)) <= set(graphs), "without slack"
    for num_tokens in range(LEAST_PROMPTS, MAX_TOKENS, 37):
        for begun in {0, *(dice.randint(0, min(num_slots, num_tokens - 1)) for _ in range(5))}:
            check(plan_of(begun, 0, num_tokens - begun), OFF, dice.choice(feedings))
