"""The run as a timeline: `trace.json` for Perfetto (ui.perfetto.dev) or chrome://tracing, made from the event log.

A span begins with the action that starts a phase and ends with the fact that concludes it; a phase that a kill cut
off has no end and is left out. Rollout workers have a row each: from when to when they were there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slipstream.observe.store import RunStore, StoredEvent

# phase: (the record that begins it, the record that ends it)
PHASES = {
    "rollout": ("Generate", "Train"),
    "training": ("Train", "StepTrained"),
    "weight update": ("PushWeights", "WeightsLive"),
    "evaluation": ("Evaluate", "Evaluated"),
    "checkpoint": ("Save", "Saved"),
}


def spans(events: Iterable[StoredEvent]) -> list[dict[str, Any]]:
    """Complete ("X") events of the Chrome trace format, one row a phase, times in microseconds from the first event."""
    began: dict[tuple[str, int], float] = {}
    found: list[dict[str, Any]] = []
    first_s: float | None = None
    for event in events:
        first_s = event.at_s if first_s is None else first_s
        if event.name == "RunBegan":
            began.clear()
        step = event.payload.get("step", 0)
        for row, (phase, (begin, end)) in enumerate(PHASES.items()):
            if event.name == end and (phase, step) in began:
                start_s = began.pop((phase, step))
                found.append(_span(f"{phase} {step}", phase, row, start_s, event.at_s, first_s, {"step": step}))
            if event.name == begin:
                began.setdefault((phase, step), event.at_s)
    return found


def _span(
    name: str, kind: str, row: int, from_s: float, to_s: float, first_s: float, details: dict[str, Any]
) -> dict[str, Any]:
    at, duration = round((from_s - first_s) * 1e6), round((to_s - from_s) * 1e6)
    return {"name": name, "cat": kind, "ph": "X", "ts": at, "dur": duration, "pid": 1, "tid": row, "args": details}


def stays(events: Sequence[StoredEvent]) -> dict[str, list[tuple[float, float]]]:
    """{worker: [(from, to)]}; whoever never left is there to the end."""
    found: dict[str, list[tuple[float, float]]] = {}
    since: dict[str, float] = {}
    for event in events:
        ended: list[str] = []
        if event.name == "WorkerJoined":
            since[event.payload["worker"]] = event.at_s
        elif event.name == "WorkerLeft":
            ended = [event.payload["worker"]]
        elif event.name == "RunBegan":  # all others were of a process that is gone
            ended = list(since)
        for worker in ended:
            if worker in since:
                found.setdefault(worker, []).append((since.pop(worker), event.at_s))
    for worker, from_s in since.items():
        found.setdefault(worker, []).append((from_s, events[-1].at_s))
    return found


def write_trace(run_dir: Path) -> Path:
    """`trace.json` of a run."""
    with RunStore(run_dir, read_only=True) as store:
        recorded = store.events()
    workers = stays(recorded)
    events = spans(recorded)
    for row, worker in enumerate(sorted(workers), len(PHASES)):
        events += [_span(worker, "worker", row, from_s, to_s, recorded[0].at_s, {}) for from_s, to_s in workers[worker]]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}
        for row, name in enumerate([*PHASES, *sorted(workers)])
    ]
    path = run_dir / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}))
    return path
