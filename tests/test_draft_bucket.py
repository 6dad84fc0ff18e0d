"""What a sequence alone shows of ways that only make more drafts, or fewer."""

from __future__ import annotations

import random
import statistics
from collections import deque

import pytest

from slipstream.draft import bucket as module
from slipstream.draft.bucket import Bucket
from slipstream.draft.selector import Selector
from slipstream.engine.strategy import OFF, Strategy

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
        if way == EIGHT and unlucky < 70:
            right, unlucky = min(right, 2.0), unlucky + 1
        selector.observe(1, way, 1 + right, 1.0 + 0.02 * way.drafts_each)
    assert (selector.best(1) == EIGHT) == is_foreseen
