"""What is believed of ways: the same as all comparisons at once give, also of ways that were not compared."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from slipstream.draft.beliefs import Beliefs
from slipstream.engine.strategy import OFF, Strategy

WAYS = [Strategy(1.0, 2), Strategy(2.0, 1), Strategy(4.0, 1), Strategy(4.0, 8, 4)]


def weighed_at_once(seen: list[tuple[Strategy, Strategy, float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Means and covariances by least squares, all comparisons together."""
    rows = np.zeros((len(seen), len(WAYS)))
    for line, (way, other, _, _) in enumerate(seen):
        for one, sign in ((way, 1.0), (other, -1.0)):
            if one != OFF:
                rows[line, WAYS.index(one)] += sign
    weights = np.array([1 / variance for *_, variance in seen])
    covariances = np.linalg.inv(rows.T * weights @ rows)
    return covariances @ (rows.T * weights) @ np.log([gain for _, _, gain, _ in seen]), covariances


def compared(seed: int) -> tuple[Beliefs, list[tuple[Strategy, Strategy, float, float]]]:
    dice, beliefs = random.Random(seed), Beliefs()
    pairs = [(way, dice.choice([OFF, *WAYS[:index]])) for index, way in enumerate(WAYS)]
    pairs += [tuple(dice.sample([OFF, *WAYS], 2)) for _ in range(12)]  # type: ignore[misc]
    seen = [(*pair, math.exp(dice.gauss(0.0, 0.5)), dice.uniform(0.01, 0.1)) for pair in pairs]
    for way, other, gain, variance in seen:
        (beliefs.compare if way in beliefs else beliefs.add)(way, other, gain, variance)
    return beliefs, seen


@pytest.mark.parametrize("seed", range(20))
def test_one_comparison_after_another_gives_what_all_at_once_give(seed: int) -> None:
    beliefs, seen = compared(seed)
    means, covariances = weighed_at_once(seen)
    for at, way in enumerate(WAYS):
        assert math.log(beliefs.gain(way)) == pytest.approx(means[at], abs=1e-9)
        for other_at, other in enumerate(WAYS):
            variance = covariances[at, at] + covariances[other_at, other_at] - 2 * covariances[at, other_at]
            assert beliefs.variance(way, other) == pytest.approx(variance, abs=1e-9)
        wanted = means[at] + 2 * math.sqrt(covariances[at, at])
        assert beliefs.gain(way, errors=2.0) == pytest.approx(math.exp(wanted))


def test_those_that_a_way_was_measured_by_move_with_it() -> None:
    first, second, third, _ = WAYS
    beliefs = Beliefs()
    beliefs.add(first, OFF, 1.5, 0.04)
    beliefs.add(second, first, 1.2, 0.01)
    beliefs.add(third, OFF, 1.4, 0.04)
    for _ in range(50):
        beliefs.compare(first, OFF, 3.0, 0.02)
    assert beliefs.gain(first) == pytest.approx(3.0, rel=0.03)
    assert beliefs.gain(second, first) == pytest.approx(1.2) and beliefs.variance(second, first) == pytest.approx(0.01)
    assert beliefs.gain(third) == pytest.approx(1.4), "was not compared with it"


def test_doubt_of_all_leaves_them_known_against_each_other_and_doubt_of_one_does_not() -> None:
    beliefs, _ = compared(0)
    first, second = WAYS[:2]
    before = beliefs.variance(first, second), beliefs.variance(first)
    beliefs.doubt_all(0.09)
    assert (beliefs.variance(first, second), beliefs.variance(first)) == pytest.approx((before[0], before[1] + 0.09))
    beliefs.doubt_each(0.01, [first, Strategy(16.0)])
    assert beliefs.variance(first, second) == pytest.approx(before[0] + 0.01)
    beliefs.doubt_each(0.01)
    assert beliefs.variance(first, second) == pytest.approx(before[0] + 0.03)


def test_beliefs_survive_a_checkpoint_but_for_ways_that_are_gone() -> None:
    beliefs, _ = compared(1)
    state = json.loads(json.dumps(beliefs.state_dict()))
    same, fewer = Beliefs(), Beliefs()
    same.load_state_dict(state, WAYS)
    assert same.state_dict() == beliefs.state_dict()
    fewer.load_state_dict(state, WAYS[1:])
    assert list(fewer) == [OFF, *WAYS[1:]] and WAYS[0] not in fewer
    assert fewer.variance(*WAYS[1:3]) == beliefs.variance(*WAYS[1:3])
