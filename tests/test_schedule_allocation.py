"""Splits of GPUs: against every split, across two places, and adjusted as lengths grow and shrink."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.schedule.allocation import AS_GOOD, Adjuster, best_split, split_across

work = st.floats(1.0, 1000.0)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 40), work, work, st.integers(1, 4), st.integers(1, 4))
def test_no_split_is_faster(num_gpus: int, gen: float, train: float, gen_unit: int, train_unit: int) -> None:
    if num_gpus < gen_unit + train_unit:
        with pytest.raises(ValueError, match="give at least"):
            best_split(num_gpus, lambda g: gen / g, lambda g: train / g, gen_unit=gen_unit, train_unit=train_unit)
        return
    split = best_split(num_gpus, lambda g: gen / g, lambda g: train / g, gen_unit=gen_unit, train_unit=train_unit)
    assert split.gen_gpus % gen_unit == split.train_gpus % train_unit == 0 and split.num_gpus <= num_gpus
    fastest = min(
        max(gen / g, train / t)
        for g in range(gen_unit, num_gpus, gen_unit)
        for t in range(train_unit, num_gpus - g + 1, train_unit)
    )
    assert split.step_s <= AS_GOOD * fastest


def test_gpus_that_would_only_wait_are_left_out() -> None:
    # Sampling has a floor: beyond 6 GPUs the longest rollout decides.
    split = best_split(32, lambda g: max(10.0, 60.0 / g), lambda g: 40.0 / g)
    assert (split.gen_gpus, split.train_gpus, split.step_s) == (6, 4, 10.0)


def test_across_two_places_the_faster_keeps_up_and_no_more() -> None:
    split = split_across(40, 16, lambda g: 400.0 / g, lambda g: 320.0 / g, gen_unit=4)
    assert (split.gen_gpus, split.train_gpus) == (20, 16), "training is slower: 20 s"
    split = split_across(8, 16, lambda g: 400.0 / g, lambda g: 320.0 / g)
    assert (split.gen_gpus, split.train_gpus) == (8, 7)
    with pytest.raises(ValueError, match="each side needs one at least"):
        split_across(3, 16, lambda g: 1.0, lambda g: 1.0, gen_unit=4)


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
