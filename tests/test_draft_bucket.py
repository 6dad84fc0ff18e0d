"""What steps of one way show of others: of a sequence alone, if they only make more drafts or fewer; where texts are
harder or easier than they were."""

from __future__ import annotations

import math
import random
import statistics
from collections import deque

import pytest

from slipstream.draft import bucket as module
from slipstream.draft.bucket import Bucket
from slipstream.draft.selector import Selector
from slipstream.engine.strategy import OFF, StepResult, Strategy

TWO, FOUR, EIGHT = Strategy(2.0, 1), Strategy(4.0, 1), Strategy(8.0, 1)


def right_of(num_drafts: int, odds: float, dice: random.Random) -> float:
    """How many are, before the first that is not."""
    return float(next((index for index in range(num_drafts) if dice.random() > odds), num_drafts))


def bucket_with(size: int, best: Strategy, odds: float, num_steps: int = 4000) -> Bucket:
    dice = random.Random(1)
    bucket = Bucket([OFF, TWO, FOUR, EIGHT, Strategy(4.0, 8, 4)], size, False, num_steps, best=best)
    bucket.right[best] = deque(right_of(int(best.drafts_each), odds, dice) for _ in range(num_steps))
    return bucket


@pytest.mark.parametrize("odds", [0.3, 0.9])
def test_fewer_drafts_and_more_are_foreseen_from_those_there_are(odds: float) -> None:
    bucket = bucket_with(1, FOUR, odds)
    assert bucket.foreseen(TWO) == 1 + statistics.fmean(min(one, 2.0) for one in bucket.right[FOUR])
    for way in (TWO, FOUR, EIGHT):
        wanted = sum(odds**index for index in range(int(way.drafts_each) + 1))
        assert bucket.foreseen(way) == pytest.approx(wanted, rel=0.03)


def test_steps_are_full_with_as_many_drafts_as_there_was_room_for() -> None:
    bucket, wanted = bucket_with(1, FOUR, 0.9), sum(0.9**index for index in range(9))
    bucket.right[FOUR] = deque(min(one, 3.0) for one in bucket.right[FOUR])  # sizes of steps are rounded down
    assert bucket.foreseen(EIGHT) == pytest.approx(wanted, rel=0.03)


def test_nothing_is_foreseen_of_others_from_none_or_of_many_at_once() -> None:
    assert bucket_with(1, FOUR, 0.9).foreseen(Strategy(4.0, 8, 4)) is None
    assert bucket_with(8, FOUR, 0.9).foreseen(EIGHT) is None, "a mean does not show how many had all right"
    assert Bucket([OFF, TWO], 1, False, 8).foreseen(TWO) is None


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_a_first_trial_in_bad_luck_does_not_bury_a_way(is_foreseen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_foreseen:
        monkeypatch.setattr(module, "FURTHER_ERROR", 1e6)
    dice, selector, unlucky = random.Random(2), Selector([OFF, FOUR, EIGHT]), 0
    for _ in range(1500):
        way = selector.choose(1)
        right = right_of(int(way.drafts_each), 0.93, dice)
        if way == EIGHT and unlucky < 25:
            right, unlucky = min(right, 2.0), unlucky + 1
        selector.observe(StepResult(1, way, 1 + right, 1.0 + 0.02 * way.drafts_each))
    assert (selector.best(1) == EIGHT) == is_foreseen


def bucket_of_two(error_of_best: float, error_of_other: float = 0.01) -> Bucket:
    """Four drafts give twice the tokens of none, eight a little more, and are the best way."""
    bucket = Bucket([OFF, FOUR, EIGHT], 16, False, 20, unit_s=1.0, best=EIGHT)
    bucket.costs = {OFF: 1.0, FOUR: 1.2, EIGHT: 1.4}
    bucket.beliefs.add(FOUR, OFF, 2.0, error_of_other**2)
    bucket.beliefs.add(EIGHT, OFF, 2.2, error_of_best**2)
    bucket.right = {OFF: deque([0.0] * 20), FOUR: deque([1.4] * 20), EIGHT: deque([2.08] * 20)}
    return bucket


def give(bucket: Bucket, way: Strategy, gain: float, other: Strategy = OFF) -> None:
    bucket.right[way] = deque([gain * bucket.rate(other) * bucket.costs[way] - 1.0] * 20)
    bucket.weigh(way, other)


def test_a_newcomer_that_disappoints_takes_others_down_less_than_a_known_way_does() -> None:
    newcomer, known = bucket_of_two(0.5), bucket_of_two(0.01)
    for bucket in (newcomer, known):
        for _ in range(3):
            give(bucket, EIGHT, 1.1)
        assert bucket.beliefs.gain(EIGHT) == pytest.approx(1.1, abs=0.2)
    assert newcomer.beliefs.gain(FOUR) > 1.7, "it was too little known to tell of texts"
    assert known.beliefs.gain(FOUR) == pytest.approx(1.0, abs=0.2)


def test_what_ways_are_to_each_other_outlasts_hard_texts() -> None:
    bucket = bucket_of_two(0.01)
    give(bucket, EIGHT, 0.9)
    bucket.give_up()
    for _ in range(3):
        give(bucket, FOUR, 2.0)
    assert bucket.beliefs.gain(EIGHT) > bucket.beliefs.gain(FOUR) > 1.7
    assert bucket.beliefs.variance(FOUR) < 0.25 * module.DOUBT**2


@pytest.mark.parametrize("error_of_best", [0.2, 0.01])
def test_what_a_trial_shows_is_due_to_who_was_less_known(error_of_best: float) -> None:
    """One who won by luck is found out by the way that was best before, which is known well."""
    bucket = bucket_of_two(error_of_best, error_of_other=0.21 - error_of_best)
    give(bucket, FOUR, 1.3, EIGHT)
    assert bucket.gain(FOUR) > 1.03
    changes = {EIGHT: abs(bucket.beliefs.gain(EIGHT) / 2.2 - 1), FOUR: abs(bucket.beliefs.gain(FOUR) / 2.0 - 1)}
    assert max(changes, key=lambda way: changes[way]) == (EIGHT if error_of_best > 0.1 else FOUR)
    assert min(changes.values()) < 0.01


def test_easy_texts_and_hard_ones_do_not_change_which_way_is_best() -> None:
    bucket, dice = bucket_of_two(0.05), random.Random(3)
    for _ in range(200):
        give(bucket, EIGHT, 2.2 * math.exp(dice.gauss(0.0, module.TEXTS)))
    assert bucket.gain(FOUR) == pytest.approx(2.0 / 2.2, abs=0.05)
