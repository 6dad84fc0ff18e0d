"""Runs of many steps: what is read one by one, and what is written, stops growing; what is shown stays right."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe import report, timeline
from slipstream.observe.buckets import MOST_POINTS, bad_steps, total, width_for
from slipstream.observe.figures import draft_shares, health_curve, ledger_stack, reward_curve, time_stack
from slipstream.observe.ledger import Entry
from slipstream.observe.report import wall_time_s, write_report
from slipstream.observe.store import RunStore
from slipstream.observe.timeline import write_trace
from slipstream.types import Request, Rollout, SamplingParams, Scored

PLOTLY = re.compile(r"<script>\s*/\*\*.*?</script>", re.DOTALL)


def fill(folder: Path, num_steps: int, samples: int = 4) -> Path:
    """A run with drafts and a ledger; each transaction is one of many rows, for speed."""
    with RunStore(folder) as store:
        for step in range(num_steps + 1):
            row: dict[str, float] = {}
            if step:
                row |= {
                    "timing_s/step": 3.0,
                    "timing_s/gen": 2.0,
                    "timing_s/update_actor": 0.75,
                    "reward/mean": step / 9,
                }
                row |= {"reward/mean": step / 9, "rollout/tokens": 10.0}
                row |= {"rollout/spec_accept_length": 1.5, "rollout/spec_share_history": 0.25}
                row |= {"perf/throughput": 100.0, "actor/grad_norm": math.nan if step == 7 else 0.5}
            if step % 50 == 0:
                row |= {"eval/held/avg@1": step / 1e4, "timing_s/eval": 5.0}
            store.add_metrics(step, row)
            store.add_ledger([Entry(step, "local", "decode", 2.0), Entry(step, "local", "training", 1.0)])
            if step:
                results = [scored(f"{step}/0/{sample}", step, sample) for sample in range(samples)]
                store.add_rollouts(step, "train", "train", {f"{step}/0": ("key", "question")}, results)
            for name in ("Generate", "GroupScored", "Train", "StepTrained"):
                store.add_event(step, 10.0 * step, name, {"step": step})
            store.add_event(step, 10.0 * step, "DraftChosen", {"batch": 4, "strategy": f"way {step}", "reason": "best"})
            store.add_event(step, 10.0 * step, "WorkerJoined", {"worker": f"rollout-{step}"})
            store.add_event(step, 10.0 * step + 9, "WorkerLeft", {"worker": f"rollout-{step}", "reason": ""})
    return folder


def scored(uid: str, step: int, sample: int) -> Scored:
    request = Request(uid, uid.rpartition("/")[0], (1,), 7, SamplingParams())
    length = 5 + sample
    rollout = Rollout(request, (3,) * length, (-1.0,) * length, "stop", 1, 1, (2,) * length)
    return Scored(rollout, f"response {uid}", float(sample), {"task": 1.0})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {steps: fill(tmp_path_factory.mktemp("runs") / str(steps), steps) for steps in (400, 1200)}


def rows_read(monkeypatch: pytest.MonkeyPatch, module: Any, work: Any, folder: Path) -> int:
    stores = list[RunStore]()

    def opened(*given: Any, **settings: Any) -> RunStore:
        stores.append(RunStore(*given, **settings))
        return stores[-1]

    with monkeypatch.context() as patched:
        patched.setattr(module, "RunStore", opened)
        work(folder)
    return sum(store.rows_read for store in stores)


def test_three_times_the_steps_are_no_more_rows_and_no_larger_a_page(
    runs: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "READ_CHOICES", 100)
    monkeypatch.setattr(report, "READ_HAPPENINGS", 100)
    short, long = (rows_read(monkeypatch, report, write_report, runs[steps]) for steps in (400, 1200))
    assert long <= 1.1 * short < 15_000
    pages = [PLOTLY.sub("", (runs[steps] / "report.html").read_text()) for steps in (400, 1200)]
    assert len(pages[1]) <= 1.1 * len(pages[0])
    for page in pages:
        data = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
        points = [len(trace["x"]) for figure in data for trace in figure["data"]]
        assert len(data) >= 8 and max(points) <= MOST_POINTS + 2


def test_what_is_said_of_a_long_run_is_of_all_its_steps(runs: dict[int, Path]) -> None:
    with RunStore(runs[1200], read_only=True) as store:
        buckets = store.buckets()
        curves = store.curves(buckets)
        each = store.metrics_by_name()
        assert buckets.width == width_for(1200) == 3
        assert wall_time_s(store) == 1200 * 3.0 + 5.0, "the evaluation before training belongs to no step"
        for name in ("rollout/tokens", "timing_s/gen", "timing_s/eval"):
            assert total(curves[name]) == pytest.approx(sum(each[name].values()))
        assert curves["eval/held/avg@1"] == each["eval/held/avg@1"], "few values are all shown"
        reward = curves["reward/mean"]
        assert next(iter(reward)) == 3 and reward[3] == pytest.approx(2 / 9), "the mean of steps 1 to 3"
        assert list(reward)[-1] == 1200 and reward.last == pytest.approx(1200 / 9)
        assert bad_steps(curves["actor/grad_norm"]) == {9}
        assert curves["actor/grad_norm"][9] == 0.5, "the mean of those that are numbers"
        figure = health_curve(curves, "actor/grad_norm")
        assert figure is not None and figure["data"][1]["x"] == [9]
        stack, drafts = time_stack(curves), draft_shares(curves)
        ledger = ledger_stack(store.ledger_by_step(buckets))
        assert stack is not None and drafts is not None and ledger is not None
        bars = {trace["name"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in stack["data"]}
        assert bars["evaluation"][0] == 5.0 and bars["evaluation"][51] == pytest.approx(5 / 3), "of steps 49 to 51"
        assert bars["rollout"][3] == 2.0 and bars["other"][3] == pytest.approx(0.25)
        assert bars["rollout"].keys() == bars["training"].keys() == bars["other"].keys()
        assert set(drafts["data"][0]["y"]) == {0.25} and set(ledger["data"][0]["y"]) == {2.0}
        assert {name.device: name.seconds for name in store.ledger_by_device() if name.account == "decode"} == {
            "local": 1201 * 2.0
        }
        curve = reward_curve(curves)
        assert curve is not None and curve["data"][0]["name"] == "mean of 3 steps"
    page = (runs[1200] / "report.html").read_text() if (runs[1200] / "report.html").exists() else ""
    page = page or write_report(runs[1200]).read_text()
    for words in ("stands for 3 steps", "Step 1<", "Step 601<", "Step 1200<", "way 1200", "1h00m", "12.0 k"):
        assert words in page, words
    assert "mean reward 133.333" in page and "earlier ones are in run.db only" in page


def test_a_short_run_is_shown_step_by_step(tmp_path: Path) -> None:
    fill(tmp_path, 12)
    with RunStore(tmp_path, read_only=True) as store:
        each, curves = store.metrics_by_name(), store.curves(store.buckets())
    assert curves.keys() == each.keys()
    for name, series in each.items():
        assert list(curves[name]) == list(series)
        assert str(list(curves[name].values())) == str(list(series.values())), "also where it is NaN"
    assert "stands for" not in write_report(tmp_path).read_text()


def test_the_trace_holds_the_newest_events_and_says_so(runs: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "TRACED_EVENTS", 700)
    monkeypatch.setattr(timeline, "TRACED_STAYS", 300)
    read = [rows_read(monkeypatch, timeline, write_trace, folder) for folder in runs.values()]
    assert read[0] == read[1] <= 700 + 2 * 300 + 10
    trace = json.loads((runs[1200] / "trace.json").read_text())
    covers = "steps 1101 to 1200: the newest 700 of 8,407 events, the others are in run.db only"
    assert trace["otherData"]["covers"] == covers
    assert trace["traceEvents"][0] == {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": covers}}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["step"] for event in spans if event["cat"] == "training"} == set(range(1101, 1201))
    assert min(event["ts"] for event in spans) == 11_010 * 10**6, "times count from the beginning of the run"
    whole = json.loads(write_trace(fill(runs[400].parent / "few", 20)).read_text())
    assert whole["otherData"]["covers"] == "steps 0 to 20"


def test_a_worker_that_came_before_the_traced_events_is_in_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "TRACED_EVENTS", 10)
    with RunStore(tmp_path) as store:
        store.add_event(0, 1.0, "WorkerJoined", {"worker": "early"})
        store.add_event(0, 1.0, "WorkerJoined", {"worker": "gone"})
        store.add_event(0, 2.0, "WorkerLeft", {"worker": "gone"})
        for number in range(20):
            store.add_event(1, 10.0 + number, "Generate", {"step": 1})
    trace = json.loads(write_trace(tmp_path).read_text())["traceEvents"]
    assert [(one["name"], one["ts"], one["dur"]) for one in trace if one["ph"] == "X"] == [
        ("early", 19 * 10**6, 9 * 10**6)
    ]


def test_samples_of_a_large_step_come_from_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 1, samples=900)
    read = rows_read(monkeypatch, report, write_report, tmp_path)
    assert read < 900 + 900 + 256 + 1000, "lengths of all, rewards of 256"
    assert "picked from 256 of its 900 rollouts" in (tmp_path / "report.html").read_text()


def test_a_run_from_before_the_index_is_read(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    connection = sqlite3.connect(tmp_path / "run.db")
    connection.executescript("DROP INDEX events_by_name; DROP TABLE ledger; DROP TABLE drafts;")
    connection.close()
    assert "way 3" in write_report(tmp_path).read_text()
    write_trace(tmp_path)
    RunStore(tmp_path).close()
    with sqlite3.connect(tmp_path / "run.db") as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    assert {"events_by_name", "ledger", "drafts"} <= names, "a run that goes on has them again"


def test_some_steps_are_spread_from_the_first_to_the_last(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        assert store.some_steps(3) == [] == store.newest_steps(3)
        for step in (2, 3, 9, 30):
            store.add_rollouts(step, "train", "train", {f"{step}/0": ("key", "q")}, [scored(f"{step}/0/0", step, 0)])
        assert store.some_steps(3) == [2, 9, 30] and store.some_steps(100) == [2, 3, 9, 30]
        assert store.newest_steps(3) == [3, 9, 30] and store.newest_steps(9) == [2, 3, 9, 30]
        assert [(one.step, one.uid, one.length) for one in store.rollout_facts(first_step=9)] == [
            (9, "9/0/0", 5),
            (30, "30/0/0", 5),
        ]
