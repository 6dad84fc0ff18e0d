"""Old rollouts that teach too little are told of, and a drafter that is taught in vain: once, and only then."""

from __future__ import annotations

import pytest

from slipstream.runtime.advice import DEAR, LESSONS, LITTLE, MUCH, STEPS, Drift, Lessons


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


def step(teaching: float, share: float) -> dict[str, float]:
    """With as much of its time for teaching, and of its tokens from the drafter."""
    times = {"timing_s/update_drafter": teaching, "timing_s/gen": 0.7 - teaching, "timing_s/update_actor": 0.3}
    return times | {"rollout/tokens": 1000.0, "rollout/spec_share_drafter": share}


def told_of_lessons(source: str, *rows: dict[str, float]) -> list[int]:
    lessons = Lessons(source)
    return [number for number, row in enumerate(rows, 1) if lessons.after_step(row) is not None]


def test_a_drafter_that_is_taught_in_vain_is_told_of_once() -> None:
    in_vain, of_use = step(2 * DEAR, LITTLE / 2), step(2 * DEAR, 10 * LITTLE)
    assert told_of_lessons("both", *[in_vain] * 3 * LESSONS) == [LESSONS]
    late = told_of_lessons("drafter", *[of_use] * LESSONS, *[in_vain] * LESSONS)
    assert late == [2 * LESSONS - 1], "nineteen of twenty gave half of what is little, one gave ten times as much"


def test_nothing_is_said_of_lessons_that_pay_or_cost_little_or_are_no_part_of_a_step() -> None:
    assert told_of_lessons("both", *[step(2 * DEAR, 2 * LITTLE)] * 3 * LESSONS) == []
    assert told_of_lessons("both", *[step(DEAR / 2, 0.0)] * 3 * LESSONS) == []
    elsewhere = {name: value for name, value in step(0.0, 0.0).items() if name != "timing_s/update_drafter"}
    assert told_of_lessons("both", *[elsewhere] * 3 * LESSONS) == []
    assert told_of_lessons("history", *[step(2 * DEAR, 0.0)] * 3 * LESSONS) == []


@pytest.mark.parametrize(("source", "instead"), [("both", "history"), ("drafter", "off")])
def test_it_says_what_to_write_instead_of_a_drafter_taught_in_vain(source: str, instead: str) -> None:
    lessons = Lessons(source)
    (words,) = filter(None, (lessons.after_step(step(0.11, 0.003)) for _ in range(LESSONS)))
    assert f"draft.source={instead} " in words and "11%" in words and "0.3%" in words and "drafter.updates" in words
