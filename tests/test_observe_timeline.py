from __future__ import annotations

import json
from pathlib import Path

from slipstream.observe.report import write_report
from slipstream.observe.store import RunStore
from slipstream.observe.timeline import happenings, spans, stays, write_trace


def test_spans_go_from_action_to_fact(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        for at_s, name, step in [
            (10.0, "RunBegan", 0),
            (10.0, "PushWeights", 0),
            (10.5, "WeightsLive", 0),
            (10.5, "Generate", 1),
            (10.5, "Generate", 1),
            (12.5, "GroupScored", 1),
            (13.0, "GroupScored", 1),
            (13.0, "Train", 1),
            (16.0, "StepTrained", 1),
        ]:
            store.add_event(step, at_s, name, {"step": step})
        found = [(span["name"], span["ts"], span["dur"]) for span in spans(store.events())]
    assert found == [
        ("weight update 0", 0, 500_000),
        ("rollout 1", 500_000, 2_500_000),
        ("training 1", 3_000_000, 3_000_000),
    ]
    trace = json.loads(write_trace(tmp_path).read_text())
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}


def test_a_phase_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        store.add_event(1, 1.0, "Generate", {"step": 2})
        store.add_event(1, 5.0, "RunBegan", {"step": 1})
        store.add_event(1, 6.0, "Train", {"step": 2})
        assert spans(store.events()) == []


def test_workers_have_rows_from_when_to_when_they_were_there(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        for at_s, name, worker in [
            (1.0, "WorkerJoined", "rollout-1"),
            (1.5, "WorkerJoined", "rollout-0"),
            (3.0, "WorkerLeft", "rollout-1"),
            (4.0, "WorkerJoined", "rollout-1"),
            (9.0, "WorkerLeft", "rollout-0"),
        ]:
            store.add_event(1, at_s, name, {"worker": worker})
        found = stays(store.events())
    assert found == {"rollout-1": [(1.0, 3.0), (4.0, 9.0)], "rollout-0": [(1.5, 9.0)]}
    events = json.loads(write_trace(tmp_path).read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    placed = [(rows[event["tid"]], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert placed == [
        ("rollout-0", 500_000, 7_500_000),
        ("rollout-1", 0, 2_000_000),
        ("rollout-1", 3_000_000, 5_000_000),
    ]


def test_a_worker_of_a_process_that_was_killed_was_there_until_the_run_went_on(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        store.add_event(1, 1.0, "WorkerJoined", {"worker": "rollout-0"})
        store.add_event(1, 5.0, "RunBegan", {"step": 1})
        assert stays(store.events()) == {"rollout-0": [(1.0, 5.0)]}


def test_what_happened_to_workers_is_told_in_words_and_marked(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        for at_s, name, payload in [
            (1.0, "RunBegan", {"step": 0}),
            (2.0, "WorkerJoined", {"worker": "rollout-0"}),
            (3.0, "WorkersWanted", {"count": 2, "reason": "as was asked for"}),
            (4.2, "TakeBack", {"worker": "rollout-0", "rollout": "1/0/0"}),
            (4.3, "TakeBack", {"worker": "rollout-0", "rollout": "1/0/1"}),
            (5.0, "WorkerLeft", {"worker": "rollout-0", "tokens": [["1/0/0", 3]], "reason": "it said nothing for 5 s"}),
        ]:
            store.add_event(1, at_s, name, payload)
        told = happenings(store.events())
    assert [what for _, _, what in told] == [
        "rollout-0 joined",
        "2 workers wanted: as was asked for",
        "2 rollouts taken from rollout-0 for one without work",
        "rollout-0 left: it said nothing for 5 s; others go on with its 1 rollouts",
    ]
    marks = [one for one in json.loads(write_trace(tmp_path).read_text())["traceEvents"] if one["ph"] == "i"]
    assert [(one["name"], one["ts"]) for one in marks][:2] == [(told[0][2], 1_000_000), (told[1][2], 2_000_000)]
    report = write_report(tmp_path).read_text()
    assert all(what in report for _, _, what in told)
