"""Hints: each fault of learning is told of, once, with what to change; healthy and merely noisy runs are left alone."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import build_config
from slipstream.observe.advice import CONDITIONS, Advice, Drift, Hint, Lessons, example_lines
from slipstream.observe.store import StoredRollout

HEALTHY: dict[str, list[dict[str, float]]] = json.loads(
    (Path(__file__).parent / "data" / "healthy_runs.json").read_text()
)
RECIPE: dict[str, Any] = {
    "model": "tiny",
    "run": {"dir": "runs/x"},
    "tasks": {"train": [{"source": "sorting", "size": 4}]},
    "sampling": {"max_new_tokens": 96},
    "warmup": {},
}


def advice_for(**changes: Any) -> Advice:
    return Advice(build_config(RECIPE | changes))


def hints_of(rows: Iterable[dict[str, float]], **changes: Any) -> list[Hint]:
    advice = advice_for(**changes)
    return [hint for step, row in enumerate(rows, 1) for hint in advice.after_step(step, row)]


def step_row(reward: float = 0.5, **changes: float) -> dict[str, float]:
    """Of a step with some groups that have a signal."""
    row = {
        "reward/unscored": 0.0,
        "reward/mean": reward,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/stderr": 0.03,
        "reward/zero_spread_groups": 0.4,
        "response_length/mean": 40.0,
        "response_length/clip_ratio": 0.05,
        "actor/entropy": 0.4,
        "mismatch_kl": 1e-5,
        "actor/kl": 0.01,
    }
    return row | {name.replace("__", "/"): value for name, value in changes.items()}


def silent(value: float, **changes: float) -> dict[str, float]:
    """A row of a step in which every sample has this reward."""
    return step_row(value, reward__min=value, reward__max=value, reward__zero_spread_groups=1.0, **changes)


# Runs that learn.


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_left_alone(name: str) -> None:
    rows = HEALTHY[name]
    assert len(rows) >= 25
    advice = advice_for()
    assert [hint for row in rows for hint in advice.after_step(int(row["step"]), row)] == []
    assert advice.verdict() == []


def test_the_entropy_of_a_healthy_run_may_fall_to_a_fortieth() -> None:
    rows = HEALTHY["SmolLM2-135M on reasoning-gym sums, products, gcd and lcm, GRPO"]
    # Recorded are the ends, 2.47 and 0.07.
    falling = [row | {"actor/entropy": 2.47 * (0.07 / 2.47) ** (place / 29)} for place, row in enumerate(rows)]
    assert hints_of(falling) == []


NOISE: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda chance: chance.gauss(0.5, 0.05),
    "rare": lambda chance: sum(chance.random() < 0.02 for _ in range(64)) / 64,
    "coarse": lambda chance: sum(chance.random() < 0.6 for _ in range(16)) / 16,
    "negative": lambda chance: chance.gauss(-3.0, 1.0),
}


@pytest.mark.parametrize("kind", NOISE)
def test_flat_noise_is_left_alone(kind: str) -> None:
    for seed in range(4):
        chance = random.Random(f"{kind} {seed}")
        rows = [
            step_row(
                NOISE[kind](chance),
                reward__stderr=0.06,
                response_length__mean=chance.uniform(30, 60),
                response_length__clip_ratio=chance.uniform(0.2, 0.4),
                reward__zero_spread_groups=chance.uniform(0.3, 0.95),
                actor__entropy=chance.uniform(0.2, 0.6),
                mismatch_kl=chance.uniform(0, 0.004),
                actor__kl=chance.uniform(0, 0.1),
            )
            for _ in range(600)
        ]
        start = [step_row(0.5, reward__stderr=0.06)] if kind != "negative" else []
        assert hints_of([*start, *rows] if kind == "normal" else rows, warmup=None) == []


def test_noise_about_the_warm_start_is_left_alone() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        rows = [step_row(chance.gauss(0.5, 0.06), reward__stderr=0.06) for _ in range(CONDITIONS.undone_steps)]
        assert hints_of(rows) == []


# No signal.

CAUSES = {
    "zero": (silent(0.0), {}, ["every sample got reward 0", "warmup"]),
    "full": (silent(1.0), {}, ["got the full reward", "harder problems"]),
    "cut": (silent(0.0, response_length__clip_ratio=1.0), {}, ["sampling.max_new_tokens=96", "cut"]),
    "constant": (silent(0.1), {}, ["every sample got the reward 0.1"]),
    "by prompt": (step_row(0.5, reward__zero_spread_groups=1.0), {}, ["always solved or never", "dynamic_sampling"]),
    "unscored": ({"reward/unscored": 8.0}, {}, ["no sample could be scored"]),
    "full of two": (silent(2.0), {"reward": {"functions": [{"function": "task"}] * 2}}, ["got the full reward"]),
    "half of two": (silent(1.0), {"reward": {"functions": [{"function": "task"}] * 2}}, ["the reward 1,"]),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_steps_without_a_signal_are_told_of_with_their_reason(cause: str) -> None:
    row, changes, words = CAUSES[cause]
    advice = advice_for(**changes)
    given = {step: advice.after_step(step, row) for step in range(1, 31)}
    assert [step for step, hints in given.items() if hints] == [3, 9, 27], "with back-off"
    (hint,) = given[3]
    assert (hint.kind, hint.needs_example) == ("no signal", True)
    assert all(word in hint.text for word in ("last 3 steps", *words))
    (verdict,) = advice.verdict()
    assert verdict.startswith("nothing was learned") and all(word in verdict for word in words)


def test_a_signal_begins_the_count_anew_and_what_was_told_is_not_told_again() -> None:
    rows = [*[silent(0.0)] * 2, step_row(), *[silent(0.0)] * 3, step_row(), *[silent(0.0)] * 5]
    assert [(hint.kind, hint.step) for hint in hints_of(rows, warmup=None)] == [("no signal", 6)]


def test_a_signal_that_is_lost_is_not_called_a_task_too_hard() -> None:
    (hint,) = hints_of([step_row(0.2), *[silent(0.0)] * 3], warmup=None)
    assert "the mean was 0.200 before" in hint.text and "train.lr" in hint.text and "too hard" not in hint.text
    (hint,) = hints_of([*[silent(0.0)] * 2, step_row(0.01), *[silent(0.0)] * 3], warmup=None)
    assert "too hard" in hint.text, "rewards were rare from the start"


def test_the_last_words_depend_on_how_many_steps_had_a_signal() -> None:
    for num_silent, words in ((10, "nothing was learned"), (6, "in 6 of 10 steps"), (4, None)):
        advice = advice_for()
        for step, row in enumerate([step_row()] * (10 - num_silent) + [silent(0.0)] * num_silent, 1):
            advice.after_step(step, row)
        said = advice.verdict()
        assert (said == []) if words is None else (len(said) == 1 and said[0].startswith(words))


def test_an_algorithm_that_compares_whole_steps_learns_from_groups_that_differ() -> None:
    rows = [step_row(0.5, reward__zero_spread_groups=1.0)] * 10
    assert hints_of(rows, algorithm={"name": "reinforce++"}) == []
    assert [hint.kind for hint in hints_of([silent(0.0)] * 3, algorithm={"name": "reinforce++"})] == ["no signal"]


def test_an_example_shows_prompt_completion_and_why_it_ended() -> None:
    fields: dict[str, Any] = dict.fromkeys(StoredRollout.__slots__)
    rollout = StoredRollout(**fields | {"prompt_text": "sort\n3 1", "text": "x" * 500, "reward": 0.0, "fault": None,
                                        "length": 32, "finish_reason": "length"})  # fmt: skip
    prompt, completion = example_lines([rollout])
    assert r"sort\n3 1" in prompt and "32 tokens, length, reward 0" in completion
    assert "300 more characters" in completion and len(completion) < 400
    assert example_lines([]) == []


# What goes wrong later.


def wobbly(*levels: tuple[int, float], spread: float = 0.02) -> list[float]:
    chance = random.Random(1)
    return [level + chance.uniform(-spread, spread) for count, level in levels for _ in range(count)]


def test_a_reward_that_falls_is_told_of_once_and_in_the_last_words() -> None:
    rows = [step_row(reward) for reward in wobbly((15, 0.3), (20, 0.7), (60, 0.4))]
    (hint,) = hints_of(rows, warmup=None)
    assert hint.kind == "falling reward" and 36 < hint.step <= 46 and "train.lr" in hint.text
    advice = advice_for(warmup=None)
    for step, row in enumerate(rows, 1):
        advice.after_step(step, row)
    (verdict,) = advice.verdict()
    assert "fallen" in verdict and "86-95" in verdict
    for step, reward in enumerate(wobbly((15, 0.72)), 96):
        advice.after_step(step, step_row(reward))
    assert advice.verdict() == [], "it has come back"


def test_a_slow_decline_is_found_in_a_noisy_reward_and_a_dip_is_not() -> None:
    chance = random.Random(3)
    slow = [step_row(0.6 - 0.001 * step + chance.gauss(0, 0.08)) for step in range(400)]
    assert [hint.kind for hint in hints_of(slow, warmup=None)] == ["falling reward"]
    dip = [step_row(reward) for reward in wobbly((10, 0.1), (20, 0.8), (12, 0.72), (20, 0.8))]
    assert hints_of(dip, warmup=None) == [], "it lost an eighth of what it had gained"


def evaluated(value: float, stderr: float = 0.03) -> dict[str, float]:
    return {"eval/held/avg@1": value, "eval/held/stderr": stderr}


def test_updates_that_undo_the_warm_start_are_told_of() -> None:
    fall = [step_row(reward) for reward in (0.7, 0.68, 0.6, 0.5, 0.4, 0.35, 0.3)]
    (hint,) = hints_of(fall, train={"lr": 4e-4})
    assert hint.kind == "undone warm start" and hint.step == 5 and "reward was 0.700" in hint.text
    assert "train.lr (now 0.0004" in hint.text and "algorithm.kl_coef" in hint.text
    assert hints_of(fall, warmup=None) == [], "there was no warm start"
    advice = advice_for()
    assert advice.after_step(0, evaluated(0.7)) == []
    rows = [step_row(), step_row() | evaluated(0.68), step_row(), step_row() | evaluated(0.45)]
    (hint,) = [hint for step, row in enumerate(rows, 1) for hint in advice.after_step(step, row)]
    assert (hint.kind, hint.step) == ("undone warm start", 4) and "eval/held was 0.700" in hint.text


def test_what_falls_late_or_within_its_error_is_not_the_first_updates_doing() -> None:
    late = [step_row(0.7)] * CONDITIONS.undone_steps + [step_row(0.3)] * 5
    assert all(hint.kind != "undone warm start" for hint in hints_of(late))
    assert hints_of([step_row(0.7, reward__stderr=0.1), *[step_row(0.5, reward__stderr=0.1)] * 10]) == []


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("actor/kl", [0.01 * 1.3**step for step in range(30)], "algorithm.kl_coef"),
        ("mismatch_kl", [1e-4 * 1.4**step for step in range(30)], "engine.dtype=float32"),
    ],
)
def test_a_divergence_that_runs_away_is_told_of_once(name: str, values: list[float], words: str) -> None:
    (hint,) = hints_of([step_row() | {name: value} for value in values], warmup=None)
    assert hint.kind == name and words in hint.text
    level = CONDITIONS.reference_kl if name == "actor/kl" else CONDITIONS.mismatch
    assert hints_of([step_row() | {name: 1.5 * level}] * 40, warmup=None) == [], "it was so from the start"


def test_lengths_that_run_into_the_limit_or_grow_for_nothing_are_told_of() -> None:
    cut = [step_row(response_length__clip_ratio=min(0.9, 0.03 * step)) for step in range(40)]
    (hint,) = hints_of(cut, warmup=None)
    assert hint.kind == "length" and "sampling.max_new_tokens=96" in hint.text
    long = [step_row(response_length__mean=20.0 + 2 * step) for step in range(60)]
    (hint,) = hints_of(long, warmup=None)
    assert hint.kind == "length" and "for no more reward" in hint.text
    useful = [row | {"reward/mean": 0.2 + 0.01 * step} for step, row in enumerate(long)]
    assert hints_of(useful, warmup=None) == [], "long answers that are better are what it is for"


def test_an_entropy_that_collapses_is_told_of_unless_the_task_is_learned() -> None:
    def rows(reward: float) -> list[dict[str, float]]:
        return [
            step_row(
                reward, actor__entropy=max(0.01, 0.5 * 0.8**step), reward__zero_spread_groups=min(0.97, 0.05 * step)
            )
            for step in range(40)
        ]

    (hint,) = hints_of(rows(0.5), warmup=None)
    assert hint.kind == "entropy" and "collapsed" in hint.text
    assert hints_of(rows(0.95), warmup=None) == []


# All of them.

NAMES = [*step_row(), "eval/held/avg@1", "eval/held/stderr", "rollout/staleness"]
ROWS = st.lists(
    st.dictionaries(st.sampled_from(NAMES), st.floats(allow_nan=True, allow_infinity=True, width=32)), max_size=60
)


@settings(max_examples=150, deadline=None)
@given(ROWS)
def test_whatever_a_run_records_hints_come_once_or_with_back_off_and_a_replay_gives_the_same(
    rows: list[dict[str, float]],
) -> None:
    advice = advice_for()
    told = [hint for step, row in enumerate(rows) for hint in advice.after_step(step, row)]
    counts = Counter(hint.kind for hint in told)
    assert all(count == 1 for kind, count in counts.items() if kind != "no signal")
    assert counts["no signal"] <= 3, "after 3, 9 and 27 of at most 60 steps"
    again = advice_for()
    recorded: dict[str, dict[int, float]] = {}
    for step, row in enumerate(rows):
        for name, value in row.items():
            recorded.setdefault(name, {})[step] = value
    assert again.replay(recorded) == told and again.verdict() == advice.verdict()


def test_a_run_that_goes_on_is_not_told_twice() -> None:
    recorded = {name: dict.fromkeys(range(1, 5), value) for name, value in silent(0.0).items()}
    advice = advice_for()
    assert len(advice.replay(recorded)) == 1
    assert [step for step in range(5, 20) if advice.after_step(step, silent(0.0))] == [9]


# Rollouts that are a step old, and drafters.


def told(staleness: float, *mismatches: float) -> list[int]:
    """The steps after which something is said, from 1 on."""
    drift = Drift()
    rows = [{"rollout/staleness": staleness, "mismatch_kl": one} for one in mismatches]
    return [step for step, row in enumerate(rows, 1) if drift.after_step(step, row) is not None]


def test_a_policy_that_runs_away_from_its_rollouts_is_told_of_once() -> None:
    much, steps = 2 * CONDITIONS.drift_kl, CONDITIONS.recent_steps
    assert told(1.0, *[much] * 20) == [steps]
    assert told(1.0, 0.0, 0.0, 0.0, *[much] * 20) == [steps + 1], "most of the last ones"


def test_nothing_is_said_of_fresh_rollouts_small_steps_or_a_single_large_one() -> None:
    much = CONDITIONS.drift_kl
    assert told(0.0, *[2 * much] * 20) == []
    assert told(1.0, *[much / 3] * 20) == []
    assert told(1.0, *[10 * much, much / 3, much / 3] * 10) == []
    assert Drift().after_step(1, {"rollout/staleness": 1.0}) is None, "no sample taught anything"


def test_it_says_what_to_do() -> None:
    drift, row = Drift(), {"rollout/staleness": 1.0, "mismatch_kl": 0.01}
    (hint,) = filter(None, (drift.after_step(step, row) for step in range(CONDITIONS.recent_steps)))
    assert "train.lr" in hint.text and "mode=sync" in hint.text and "0.010" in hint.text


def step(teaching: float, share: float) -> dict[str, float]:
    """With as much of its time for teaching, and of its tokens from the drafter."""
    times = {"timing_s/update_drafter": teaching, "timing_s/gen": 0.7 - teaching, "timing_s/update_actor": 0.3}
    return times | {"rollout/tokens": 1000.0, "rollout/spec_share_drafter": share}


def told_of_lessons(source: str, *rows: dict[str, float]) -> list[int]:
    lessons = Lessons(source)
    return [number for number, row in enumerate(rows, 1) if lessons.after_step(number, row) is not None]


DEAR, LITTLE, LESSONS = CONDITIONS.drafter_share, CONDITIONS.drafter_tokens, CONDITIONS.drafter_steps


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
    (hint,) = filter(None, (lessons.after_step(number, step(0.11, 0.003)) for number in range(LESSONS)))
    words = hint.text
    assert f"draft.source={instead} " in words and "11%" in words and "0.3%" in words and "drafter.updates" in words
