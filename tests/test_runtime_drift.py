"""Old rollouts that teach too little are told of: once, and only if they are old."""

from __future__ import annotations

from slipstream.runtime.drift import MUCH, STEPS, Drift


def told(staleness: float, *mismatches: float) -> list[int]:
    """The steps after which something is said, from 1 on."""
    drift = Drift()
    rows = [{"rollout/staleness": staleness, "mismatch_kl": one} for one in mismatches]
    return [step for step, row in enumerate(rows, 1) if drift.after_step(row) is not None]


def test_a_policy_that_runs_away_from_its_rollouts_is_told_of_once() -> None:
    assert told(1.0, *[2 * MUCH] * 20) == [STEPS]
    assert told(1.0, 0.0, 0.0, 0.0, *[2 * MUCH] * 20) == [STEPS + 1], "most of the last ones"


def test_nothing_is_said_of_fresh_rollouts_small_steps_or_a_single_large_one() -> None:
    assert told(0.0, *[2 * MUCH] * 20) == []
    assert told(1.0, *[MUCH / 3] * 20) == []
    assert told(1.0, *[10 * MUCH, MUCH / 3, MUCH / 3] * 10) == []
    assert Drift().after_step({"rollout/staleness": 1.0}) is None, "no sample taught anything"


def test_it_says_what_to_do() -> None:
    drift = Drift()
    (words,) = filter(None, (drift.after_step({"rollout/staleness": 1.0, "mismatch_kl": 0.01}) for _ in range(STEPS)))
    assert "train.lr" in words and "mode=sync" in words and "0.010" in words
