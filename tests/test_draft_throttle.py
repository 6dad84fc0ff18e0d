"""Updates beside decoding: the mean slow-down keeps its bound, and what costs nothing is not held back."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.draft.throttle import ALIKE, LEAST_QUIET, LONGEST_BUSY, TO_SPARE, Throttle

BOUND = 0.03


class Tail:
    """Steps of an engine, with updates beside them as the throttle lets them."""

    def __init__(self, throttle: Throttle, factor: Callable[[int], float], steps_each: int) -> None:
        self.throttle, self.factor, self.steps_each = throttle, factor, steps_each
        self.spent = self.wanted = 0.0
        self.left = self.num_updates = self.num_held_back = 0

    def step(self, quiet_s: float, kind: Hashable = ALIKE) -> None:
        busy = self.left > 0
        seconds = quiet_s * (self.factor(self.num_updates) if busy else 1.0)
        self.spent, self.wanted = self.spent + seconds, self.wanted + quiet_s
        self.throttle.step_took(seconds, beside_update=busy, kind=kind)
        self.left -= busy
        if not self.left:
            if self.throttle.may_start():
                self.throttle.started()
                self.left, self.num_updates = self.steps_each, self.num_updates + 1
            else:
                self.num_held_back += 1


@settings(max_examples=100)
@given(st.floats(1.0, 4.0), st.integers(1, 12), st.integers(50, 1500), st.floats(1e-3, 0.1))
def test_a_tail_slows_down_by_the_bound_and_one_update_at_most(
    factor: float, steps_each: int, num_steps: int, quiet_s: float
) -> None:
    """And not at all once it has seen a whole update."""
    throttle, num_whole = Throttle(BOUND), 0
    for _ in range(3):
        throttle.begin_tail()
        tail = Tail(throttle, lambda _: factor, steps_each)
        for _ in range(num_steps):
            tail.step(quiet_s)
            excess = tail.spent - (1 + BOUND) * tail.wanted
            assert excess <= (0.0 if num_whole else steps_each * (factor - 1) * quiet_s) + 1e-9
        assert throttle.slowdown == pytest.approx(tail.spent / tail.wanted - 1, abs=1e-6)
        num_whole += tail.num_updates - (tail.left > 0)


@settings(max_examples=50)
@given(st.lists(st.floats(1.0, 1.6), min_size=20, max_size=60), st.integers(1, 6))
def test_uneven_updates_and_steps_that_get_faster_keep_it_too(factors: list[float], steps_each: int) -> None:
    """As sequences end, steps take a third of what they took; an update costs now more, now less."""
    throttle = Throttle(BOUND)
    tail = Tail(throttle, lambda number: factors[number % len(factors)], steps_each)
    num_steps = 3000
    for number in range(num_steps):
        tail.step(0.009 - 0.006 * number / num_steps)
    worst = max(factors) - 1
    assert tail.spent / tail.wanted - 1 <= BOUND + 0.005 + worst * steps_each / num_steps
    mean = sum(factors) / len(factors) - 1
    if mean > 0.05:  # it is used, too
        assert tail.num_updates * steps_each >= 0.2 * BOUND / worst * num_steps


@pytest.mark.parametrize(("factor", "steps_each"), [(1.05, 10), (1.3, 10), (1.6, 4)])
def test_tails_of_uneven_steps_and_updates_keep_it_on_average(factor: float, steps_each: int) -> None:
    dice, throttle, slowdowns = random.Random(1), Throttle(BOUND), []
    for _ in range(60):
        throttle.begin_tail()
        costs = [(factor - 1) * dice.lognormvariate(0, 0.5) for _ in range(500)]
        tail = Tail(throttle, lambda number, costs=costs: 1 + costs[number], steps_each)  # type: ignore[misc]
        for _ in range(dice.randint(400, 1300)):
            tail.step(0.001 * dice.gauss(1, 0.05))
        slowdowns.append(tail.spent / tail.wanted - 1)
    assert 0.5 * BOUND < statistics.mean(slowdowns) < BOUND


@pytest.mark.parametrize("are_told_apart", [True, False])
@pytest.mark.parametrize(("factor", "steps_each"), [(1.05, 9), (1.3, 9)])
def test_where_ways_of_drafting_change_each_tail_keeps_it_if_they_are_told_apart(
    factor: float, steps_each: int, are_told_apart: bool
) -> None:
    """Steps of three ways take 1, 1.3 and 1.6 times as long as each other, and less with fewer sequences."""
    dice, throttle, slowdowns = random.Random(2), Throttle(BOUND), []
    for _ in range(60):
        throttle.begin_tail()
        tail, way = Tail(throttle, lambda _: factor, steps_each), 0
        for number in range(900):
            way = dice.randrange(3) if dice.random() < 1 / 25 else way
            size = number // 150
            kind = (way, size) if are_told_apart else ALIKE
            tail.step(0.001 * dice.gauss(1, 0.03) * (1 + 0.3 * way) * (1.4 - 0.08 * size), kind)
        slowdowns.append(tail.spent / tail.wanted - 1)
    keep_it = statistics.mean(slowdowns) < 0.9 * BOUND and max(slowdowns) < 1.2 * BOUND
    assert keep_it == are_told_apart, (statistics.mean(slowdowns), max(slowdowns))
    assert statistics.mean(slowdowns) > 0.5 * BOUND


@pytest.mark.parametrize("has_prompts", [False, True])
def test_a_step_that_took_any_time_is_nothing_to_compare_with(has_prompts: bool) -> None:
    """The first of a kind that hardly recurs, while its graph was made; or now and then one with prompts."""
    dice, throttle, slowdowns = random.Random(3), Throttle(BOUND), []
    for _ in range(60):
        throttle.begin_tail()
        tail, num_rare = Tail(throttle, lambda _: 1.3, 9), 0
        for _ in range(900):
            is_rare = dice.random() < 0.02
            num_rare += is_rare
            usual_s = 0.001 * dice.gauss(1, 0.03)
            rare_s = usual_s * (dice.uniform(1.2, 30) if has_prompts else 60 if num_rare == 1 else 1)
            tail.step(rare_s if is_rare else usual_s, (None if has_prompts else "rare") if is_rare else "usual")
        slowdowns.append(tail.spent / tail.wanted - 1)
    assert 0.5 * BOUND < statistics.mean(slowdowns) < BOUND and max(slowdowns) < 1.2 * BOUND


@given(st.floats(0.9, 1.0 + (1 - TO_SPARE) * BOUND), st.integers(1, 12))
def test_what_costs_nothing_waits_for_a_step_to_compare_with_alone(factor: float, steps_each: int) -> None:
    throttle = Throttle(BOUND)
    tail = Tail(throttle, lambda _: factor, steps_each)
    while tail.num_updates < 2:
        tail.step(0.01)
    tail.num_held_back = 0
    for _ in range(480):
        tail.step(0.01)
    most = 480 / max(LONGEST_BUSY, steps_each) + 1
    assert tail.num_held_back <= most and tail.num_updates >= 480 / (steps_each + 2) - 1


def test_nothing_starts_before_there_is_something_to_compare_with() -> None:
    throttle = Throttle(BOUND)
    for _ in range(LEAST_QUIET):
        assert not throttle.may_start() and throttle.cost is None
        throttle.step_took(0.01, beside_update=False)
    assert not throttle.may_start(), "unknown is taken to be expensive"
    for _ in range(40):
        throttle.step_took(0.01, beside_update=False)
    assert throttle.may_start() and throttle.slowdown == 0.0


def test_a_throttle_that_looks_away_is_caught() -> None:
    """The simulated tail notices updates that nobody holds back."""
    throttle = Throttle(BOUND)
    throttle.may_start = lambda: True  # type: ignore[method-assign]
    tail = Tail(throttle, lambda _: 1.5, 3)
    for _ in range(200):
        tail.step(0.01)
    assert tail.spent / tail.wanted - 1 > 0.3
