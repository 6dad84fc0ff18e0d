from __future__ import annotations

import json
from pathlib import Path

from slipstream.observe.store import RunStore
from slipstream.observe.timeline import spans, write_trace


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
