"""Drafts are timed against none in turns, on a model so small that it takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.runtime import bench_history as bench
from slipstream.runtime.bench_history import LEAST_WALKS, MOST_WALKS, TIMED_S, Walk, have_walked_enough


def walk(seconds: float) -> Walk:
    return Walk(100, seconds, 100, seconds)


def test_walks_are_timed_for_a_while_but_for_a_few_times_at_least_and_at_most() -> None:
    long, short = walk(TIMED_S), walk(TIMED_S / 100)
    assert not have_walked_enough([[], []]) and not have_walked_enough([[long], [long]])
    assert have_walked_enough([[long] * LEAST_WALKS] * 2)
    assert not have_walked_enough([[long] * LEAST_WALKS, [short] * LEAST_WALKS]), "each for as long"
    assert not have_walked_enough([[short] * (MOST_WALKS - 1)] * 2) and have_walked_enough([[short] * MOST_WALKS] * 2)


def test_engines_with_and_without_drafts_walk_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[bool] = []
    prepared: list[bool] = []
    whole_walk, prepare = bench.Replay.walk, bench.Replay.prepare

    def noted_walk(self: bench.Replay, groups: list[bench.ReplayGroup]) -> Walk:
        timed.append(self._engine.drafter is not None)
        return whole_walk(self, groups)

    def noted_prepare(self: bench.Replay, groups: list[bench.ReplayGroup]) -> None:
        prepare(self, groups)
        prepared.append(self._engine.drafter is not None)
        timed.clear()

    monkeypatch.setattr(bench.Replay, "walk", noted_walk)
    monkeypatch.setattr(bench.Replay, "prepare", noted_prepare)
    monkeypatch.setattr(bench, "MOST_WARM_UPS", 1)
    monkeypatch.setattr(bench, "TIMED_S", 0.0)
    written = tmp_path / "bench.json"
    record = bench.bench_history("tiny", [2], [0.9], new_tokens=12, json_file=written)
    assert prepared == [False, True, False, True] and timed == [False, True, True, False]
    rows = json.loads(written.read_text())["rows"]
    assert rows == record["rows"] and [row["workload"] for row in rows] == ["90% alike", "adversarial"]
    for row in rows:
        assert len(row["off"]["walks"]) == len(row["history"]["walks"]) == LEAST_WALKS
        assert row["gain"] == row["history"]["tokens_per_s"] / row["off"]["tokens_per_s"] > 0
