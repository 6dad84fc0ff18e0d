"""The picture at the end of a run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.observe.curve import LEAST_COLUMNS, MOST_COLUMNS, ROWS, draw_run

RISING = {
    "reward/mean": {step: step / 60 for step in range(1, 61)},
    "eval/held/avg@1": {0: 0.0, 30: 0.5, 60: 1.0},
    "actor/lr": {1: 7.0},
}


def test_a_rising_reward_rises_from_corner_to_corner() -> None:
    lines = draw_run(RISING, 80, ascii_only=True)
    plot = [line.split("|", 1)[1] for line in lines[:ROWS]]
    places = [line.index("*") for line in plot if "*" in line]
    assert places == sorted(places, reverse=True), "each line up begins further to the right"
    assert plot[0].endswith("o") and plot[-1].startswith("o"), "the evaluations before and after"
    assert lines[0].split()[0] == "1" and lines[ROWS - 1].split()[0] == "0"
    assert "step 0" in lines[ROWS + 1] and lines[ROWS + 1].endswith("60")
    assert "reward 0.017 -> 1.000" in lines[-1] and "held/avg@1 0.000 -> 1.000" in lines[-1]


def test_braille_has_the_same_shape() -> None:
    plot = [line.split("│", 1)[1] for line in draw_run(RISING, 80)[:ROWS]]
    places = [next(x for x, mark in enumerate(line) if mark > "⠀") for line in plot]
    assert places == sorted(places, reverse=True) and len(set(places)) == ROWS
    assert sum(line.count("●") for line in plot) == 3


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"reward/mean": {1: 0.1, 2: 0.2}},
        {"reward/mean": dict.fromkeys(range(9), 0.5)},
        {"reward/mean": {1: 0.1, 2: math.nan, 3: math.inf}},
    ],
    ids=["nothing", "two steps", "flat", "no numbers"],
)
def test_nothing_is_drawn_of_too_little(metrics: dict[str, dict[int, float]]) -> None:
    assert draw_run(metrics, 80) == []


NUMBERS = st.floats(-1e6, 1e6) | st.just(math.nan)
SERIES = st.dictionaries(st.integers(0, 3000), NUMBERS, max_size=120)


@settings(max_examples=150, deadline=None)
@given(SERIES, st.dictionaries(st.text("ab/", min_size=1, max_size=90), SERIES, max_size=6), st.integers(1, 300))
def test_it_fits_whatever_it_shows(
    reward: dict[int, float], evaluations: dict[str, dict[int, float]], width: int
) -> None:
    metrics = {"reward/mean": reward} | {f"eval/{name}/avg@4": series for name, series in evaluations.items()}
    for ascii_only in (False, True):
        lines = draw_run(metrics, width, ascii_only=ascii_only)
        assert lines == [] or width >= LEAST_COLUMNS
        assert all(len(line) <= min(width, MOST_COLUMNS) for line in lines)
        assert not ascii_only or all(line.isascii() for line in lines)
