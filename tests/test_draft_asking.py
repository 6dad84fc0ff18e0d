"""When the selector asks a model that drafts, and what that is fed meanwhile: one that is never right costs hardly
anything, and one that has learned is soon found."""

from __future__ import annotations

import json
import random

import pytest

from slipstream.draft.asking import STEADY_STEPS
from slipstream.draft.selector import MIXED_STRATEGIES, MODEL_STRATEGIES, Selector
from slipstream.engine.strategy import OFF, Feeding, StepResult, Strategy


def drive_asked(selector: Selector, odds: float, steps: int, batch: int = 8) -> dict[Strategy, int]:
    """Where a model is right with these odds at each place, and texts never help; which ways how many steps had."""
    dice, counts = random.Random(5), dict.fromkeys(selector.strategies, 0)
    for _ in range(steps):
        way = selector.choose(batch)
        counts[way] += 1
        right = [next((at for at in range(way.depth) if dice.random() > odds), way.depth) for _ in range(batch)]
        each, seconds = sum(right) / batch, 1.0 + 0.02 * way.drafts_each + 0.12 * way.depth
        selector.observe(StepResult(batch, way, 1.0 + each, seconds, False, each if way.depth else None))
    return counts


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_model_that_is_never_right_is_hardly_asked_and_once_it_has_learned_is_taken(batch: int) -> None:
    selector = Selector(MIXED_STRATEGIES)
    drive_asked(selector, 0.0, 1000, batch)
    counts = drive_asked(selector, 0.0, 6000, batch)
    asked = sum(count for way, count in counts.items() if way.depth)
    assert 0 < asked < 0.008 * 6000 * (5 if batch == 1 else 1), "of a sequence alone trials take longer"
    drive_asked(selector, 0.9, 2 * STEADY_STEPS, batch)
    assert selector.best(batch).depth >= 4


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_model_of_no_use_is_fed_nothing_until_it_is_about_to_be_asked_again(batch: int) -> None:
    selector = Selector(MIXED_STRATEGIES)
    assert selector.feed(batch) == Feeding.KEYS and Selector().feed(batch) == Feeding.NOTHING
    fed: list[Feeding] = []
    fed_before: list[set[Feeding]] = []
    was_asked = False
    for _ in range(7000):
        is_asked = selector.choose(batch).depth > 0
        if is_asked and not was_asked:
            fed_before.append(set(fed[-12:]))
        if not is_asked:
            fed.append(selector.feed(batch))
        was_asked = is_asked
        drive_asked(selector, 0.0, 1, batch)
    assert len(fed_before) >= 4 and all(last <= {Feeding.KEYS} for last in fed_before)
    late = fed[1500:]
    assert late.count(Feeding.NOTHING) > 0.92 * len(late) and Feeding.ALL not in fed
    drive_asked(selector, 0.9, 2 * STEADY_STEPS, batch)
    assert selector.feed(batch) == Feeding.KEYS


def test_a_model_of_no_use_is_of_no_use_after_a_checkpoint() -> None:
    selector, resumed = Selector(MIXED_STRATEGIES), Selector(MIXED_STRATEGIES)
    drive_asked(selector, 0.0, 1500, 1)
    resumed.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    counts = drive_asked(resumed, 0.0, 500, 1)
    assert resumed.feed(1) == Feeding.NOTHING and not any(count for way, count in counts.items() if way.depth)


def test_what_was_saved_before_there_was_a_model_does_not_silence_it() -> None:
    before, after = (Selector(MODEL_STRATEGIES, has_model=False) for _ in range(2))
    after.note_new_model()
    after.load_state_dict(before.state_dict())
    assert after.feed(8) == Feeding.KEYS
    after.load_state_dict({"asking": {"of": 1, "another": 2, "version": 3}})
    assert after.feed(8) == Feeding.KEYS


@pytest.mark.parametrize(
    ("known", "late", "copies_bring"),
    [
        # Trees of 16 drafts wait until 8 copies are the best way.
        ((Strategy(4.0, 4, 4), 2.0), (Strategy(16.0, 4, 5, 4), 3.0), ((1.0, 300), (3.0, 600))),
        # Copies that pay leave no chance to eight drafts, and stop paying while nothing is tried.
        ((Strategy(2.0, 4, 2), 1.4), (Strategy(8.0, 4, 6), 2.5), ((2.0, 500), (1.0, 200))),
    ],
)
def test_before_a_way_that_may_be_tried_only_now_its_model_is_fed(
    known: tuple[Strategy, float], late: tuple[Strategy, float], copies_bring: tuple[tuple[float, int], ...]
) -> None:
    """Ways with what their steps cost; by then the model had long been told nothing."""
    copies, (way_late, _) = Strategy(8.0, 1), late
    seconds = {OFF: 1.0, copies: 1.2} | dict((known, late))
    selector, fed = Selector(list(seconds)), list[Feeding]()
    for tokens_of_copies, num_steps in copies_bring:
        assert way_late not in selector.rates(8)
        for _ in range(num_steps):
            way = selector.choose(8)
            if way == way_late and way_late not in selector.rates(8):
                assert set(fed[-12:]) == {Feeding.KEYS}
            if not way.depth:
                fed.append(selector.feed(8))
            tokens = tokens_of_copies if way == copies else 1.05 if way.depth else 1.0
            selector.observe(StepResult(8, way, tokens, seconds[way], False, 0.05 if way.depth else None))
    assert Feeding.NOTHING in fed and way_late in selector.rates(8)


@pytest.mark.parametrize(("right", "fed"), [(0.5, Feeding.KEYS), (0.02, Feeding.NOTHING)])
def test_a_model_that_is_too_dear_for_many_is_fed_for_the_few_that_they_become(right: float, fed: Feeding) -> None:
    way = Strategy(1.0, 0, 1)
    selector = Selector([OFF, way])
    drive_by(selector, 300, {OFF: 1.0, way: 1.0 + right}, {OFF: 1.0, way: 2.0}, right)
    assert selector.best(8) == OFF and selector.feed(8) == fed


@pytest.mark.parametrize("batch", [8, 64])
def test_a_model_is_not_judged_by_what_another_drafted(batch: int) -> None:
    """One draft each, of which three in ten are right by now, where none was."""
    way, right, num_steps = Strategy(1.0, 0, 1), 0.0, 0
    selector = Selector([OFF, way])
    while selector.best(batch) == OFF and num_steps < 4000:
        if num_steps == 3000:
            selector.note_new_model()
            right = 0.3
        chosen = selector.choose(batch)
        result = (1.0, 1.0, False, None) if chosen == OFF else (1.0 + right, 1.12, False, right)
        selector.observe(StepResult(batch, chosen, *result))
        num_steps += 1
    assert 3000 < num_steps < 3400


@pytest.mark.parametrize("batch", [8, 64])
def test_a_model_with_other_weights_is_asked_sooner(batch: int) -> None:
    selector = Selector(MIXED_STRATEGIES)
    drive_asked(selector, 0.0, 1500, batch)
    while not selector.choose(batch).depth:
        drive_asked(selector, 0.0, 1, batch)
    drive_asked(selector, 0.0, 10, batch)
    counts = drive_asked(selector, 0.9, 500, batch)
    assert not any(count for way, count in counts.items() if way.depth), "it was not told that anything has changed"
    selector.note_new_model()
    drive_asked(selector, 0.9, 500, batch)
    assert selector.best(batch).depth >= 4


def drive_by(
    selector: Selector,
    steps: int,
    tokens: dict[Strategy, float],
    seconds: dict[Strategy, float],
    of_model: float = 0.0,
    is_matching: bool = False,
) -> set[Strategy]:
    """Eight sequences, where every step of a way is like any other; which ways were used."""
    ways = set()
    for _ in range(steps):
        way = selector.choose(8, is_matching)
        ways.add(way)
        asked = of_model if way.depth else None
        selector.observe(StepResult(8, way, tokens[way], seconds[way], is_matching, asked))
    return ways


def test_in_stretches_a_model_that_is_never_right_elsewhere_is_not_even_tried() -> None:
    copy, mixed = Strategy(4.0, 1), Strategy(4.0, 4, 4)
    selector, seconds = Selector([OFF, copy, mixed]), {OFF: 1.0, copy: 1.1, mixed: 1.5}
    for is_matching, tokens in ((False, {OFF: 1.0, copy: 1.0, mixed: 1.0}), (True, {OFF: 1.0, copy: 3.0, mixed: 5.0})):
        ways = drive_by(selector, 400, tokens, seconds, is_matching=is_matching)
        assert (mixed in ways) != is_matching
    assert selector.best(8, True) == copy


def test_however_lucky_a_trial_was_a_model_that_is_never_right_is_not_taken() -> None:
    copy, mixed = Strategy(4.0, 1), Strategy(4.0, 4, 4)
    selector, seconds = Selector([OFF, copy, mixed]), {OFF: 1.0, copy: 1.1, mixed: 1.5}
    tokens, num_asked = {OFF: 1.0, copy: 1.3, mixed: 6.0}, 0
    for step in range(3000):
        num_asked += mixed in drive_by(selector, 1, tokens, seconds) and step > 300
    assert num_asked > 5 and not any(choice.strategy == mixed for choice in selector.take_choices())


def test_where_texts_are_repeated_a_model_that_is_no_longer_right_elsewhere_is_left() -> None:
    """In a stretch few drafts are a model's: whether it is right shows outside, also for ways never tried in one."""
    copy, mixed, deep = Strategy(4.0, 1), Strategy(4.0, 4, 4), Strategy(8.0, 4, 6)
    seconds = {OFF: 1.0, copy: 1.1, mixed: 1.5, deep: 1.9}
    selector = Selector([OFF, copy, mixed, deep])

    drive_by(selector, 400, {OFF: 1.0, copy: 1.0, mixed: 3.0, deep: 3.1}, seconds, 2.0)
    drive_by(selector, 300, {OFF: 1.0, copy: 3.0, mixed: 6.0, deep: 3.0}, seconds, 0.1, is_matching=True)
    assert selector.best(8, True) == mixed
    drive_by(selector, 400, {OFF: 1.0, copy: 1.0, mixed: 1.0, deep: 1.0}, seconds)
    saved, lucky = selector.state_dict(), {OFF: 1.0, copy: 3.0, mixed: 6.0, deep: 6.0}
    used = drive_by(selector, 400, lucky, seconds, is_matching=True)
    assert selector.best(8, True) == copy and mixed in used
    assert not any(way.depth for way in drive_by(selector, 400, lucky, seconds, is_matching=True))
    resumed = Selector([OFF, copy, mixed, deep])
    resumed.load_state_dict(saved)
    assert resumed._bucket(8, True).costs_outside is resumed._bucket(8).costs


def test_before_there_is_a_model_nothing_is_told_and_nobody_asked() -> None:
    selector = Selector(MODEL_STRATEGIES, has_model=False)
    for batch in (*[64] * 300, *[8] * 300, *[64] * 300, *[8] * 3000):  # rollouts, and one that never ends
        assert selector.choose(batch) == OFF and selector.feed(batch) == Feeding.NOTHING
        selector.observe(StepResult(batch, OFF, 1.0, 1.0))
    selector.note_new_model()
    assert selector.feed(8) == Feeding.KEYS
    counts = drive_asked(selector, 0.9, 400)
    assert selector.best(8).depth and sum(counts[way] for way in MODEL_STRATEGIES[1:5]) > 200
