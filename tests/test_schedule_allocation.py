"""Workers added and given back as lengths grow and shrink."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from slipstream.schedule.allocation import PATIENCE, WINDOW, Adjuster, Allocator, StepSeen, Wish, times_as_long
from slipstream.schedule.speeds import SpeedCurve


def run(adjuster: Adjuster, lengths: list[float], num_workers: int, train_s: float = 100.0) -> list[int]:
    """Workers at each step: sampling takes the length over their number, training does not change."""
    history = []
    for length in lengths:
        history.append(num_workers)
        num_workers += adjuster.observe(length / num_workers, train_s, num_workers, max_workers=64)
    return history


def test_lengths_that_grow_get_more_workers_a_few_steps_apart() -> None:
    history = run(Adjuster(), [400 + 20 * step for step in range(30)], num_workers=4)
    assert history[0] == 4 and history[-1] >= 8 and history == sorted(history)
    changes = [step for step, (before, after) in enumerate(pairwise(history)) if after != before]
    assert all(later - earlier >= 3 for earlier, later in pairwise(changes))


def test_lengths_that_shrink_give_workers_back_and_steady_ones_change_nothing() -> None:
    assert run(Adjuster(), [400.0] * 40, num_workers=8)[-1] == 4
    steady = run(Adjuster(), [430.0] * 40, num_workers=5)
    assert set(steady) == {5}, "four would lag, and six are not worth it"


def test_there_are_never_more_workers_than_there_can_be_nor_none() -> None:
    for gen_s, train_s, num_workers in ((1000.0, 1.0, 3), (0.1, 100.0, 1)):
        adjuster = Adjuster()
        assert {adjuster.observe(gen_s, train_s, num_workers, max_workers=3) for _ in range(9)} == {0}


def drive(
    allocator: Allocator, num_steps: int, sampling_s: Callable[[int], float], num_workers: int, train_s: float = 10.0
) -> tuple[list[int], list[Wish]]:
    """Workers at each step. A step takes as long as the slower of sampling and training; `sampling_s`: of so many."""
    history, wishes = [], []
    for _ in range(num_steps):
        history.append(num_workers)
        gen_s = sampling_s(num_workers)
        seen = StepSeen(max(gen_s, train_s), 1000.0, gen_s * num_workers, train_s, num_workers, num_workers)
        wish = allocator.observe(seen)
        if wish is not None:
            wishes.append(wish)
            num_workers = wish.num_workers
    return history, wishes


def test_workers_are_added_until_training_is_the_limit_and_each_decision_says_why() -> None:
    history, wishes = drive(Allocator(1, 8), 80, lambda workers: 40.0 / workers, num_workers=1)
    assert history == sorted(history) and history[-1] == 4
    assert "a worker samples 40 s a step, training takes 10 s: one more" in wishes[0].reason
    history, wishes = drive(Allocator(1, 8), 80, lambda workers: 40.0 / workers, num_workers=7)
    assert history == sorted(history, reverse=True) and history[-1] == 4 and "would keep up" in wishes[0].reason
    changes = [step for step, (before, after) in enumerate(pairwise(history)) if after != before]
    assert all(later - earlier >= WINDOW for earlier, later in pairwise(changes))


def test_a_worker_that_saves_nothing_goes_again_and_is_not_tried_at_once() -> None:
    """As where all share the same cores."""
    history, wishes = drive(Allocator(1, 4), 60, lambda workers: 40.0, num_workers=1)
    assert set(history) == {1, 2}
    assert "with 2 a token took 100% of its time before: not worth it" in wishes[1].reason
    tried = [step for step, (before, after) in enumerate(pairwise(history)) if after > before]
    assert len(tried) >= 2 and all(later - earlier >= PATIENCE for earlier, later in pairwise(tried))


@given(st.integers(1, 4), st.integers(0, 4), st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), max_size=60))
def test_the_bounds_hold_and_changes_are_one_at_a_time(least: int, more: int, steps: list[tuple[float, float]]) -> None:
    allocator, num_workers, since = Allocator(least, least + more), least, 0
    for gen_s, train_s in steps:
        since += 1
        seen = StepSeen(max(gen_s, train_s), 1000.0, gen_s * num_workers, train_s, num_workers, num_workers)
        wish = allocator.observe(seen)
        if wish is not None:
            assert abs(wish.num_workers - num_workers) == 1 and least <= wish.num_workers <= least + more
            assert since >= WINDOW
            num_workers, since = wish.num_workers, 0


def test_a_worker_that_cannot_start_is_not_asked_for_again_at_once() -> None:
    allocator, asked = Allocator(1, 4), []
    for step in range(40):
        is_starting = bool(asked) and step == asked[-1] + 1
        seen = StepSeen(40.0, 1000.0, 40.0, 10.0, num_workers=1, num_wanted=2 if is_starting else 1)
        if allocator.observe(seen) is not None:
            asked.append(step)
    assert len(asked) == 2 and asked[1] - asked[0] > PATIENCE


def test_whoever_asks_for_more_than_the_bounds_gets_them() -> None:
    allocator = Allocator(1, 2)
    assert not any(allocator.observe(StepSeen(40.0, 1000.0, 200.0, 10.0, 5, 5)) for _ in range(20))


def test_more_workers_save_more_where_rollouts_wait_for_slots() -> None:
    curve = SpeedCurve(((1, 1.0), (8, 1.7)))
    waiting = times_as_long(curve, 8.0, 1, 2, slots=8, num_rollouts=64)
    assert waiting == 0.5, "both have full batches"
    seated = times_as_long(curve, 8.0, 1, 2, slots=64, num_rollouts=8)
    assert seated == curve.token_s(4) / curve.token_s(8), "half of them each, which are hardly faster"
    assert times_as_long(curve, 3.0, 2, 2, slots=8, num_rollouts=8) == 1.0
