"""Workers added and given back as lengths grow and shrink."""

from __future__ import annotations

from itertools import pairwise

from slipstream.schedule.allocation import Adjuster


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
