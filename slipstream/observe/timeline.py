"""The run as a timeline: `trace.json` for Perfetto (ui.perfetto.dev) or chrome://tracing, made from the event log.

A span begins with the action that starts a phase and ends with the fact that concludes it; a phase that a kill cut
off has no end and is left out. Rollout workers have a row each: from when to when they were there. What happened to
them (joined, left or lost and why, another number wanted, rollouts moved) are marks above all rows.
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
PRESENCE = ("RunBegan", "WorkerJoined", "WorkerLeft")
HAPPENINGS = ("WorkerJoined", "WorkerLeft", "WorkersWanted", "TakeBack")
TRACED_EVENTS = 50_000
"""Of the event log; Perfetto opens what becomes of them in a second or two."""
TRACED_STAYS = 2_000
"""Events by which workers came and went that are read beside those: who came earlier may still be there."""


def spans(events: Iterable[StoredEvent], first_s: float | None = None) -> list[dict[str, Any]]:
    """Complete ("X") events of the Chrome trace format, one row a phase, times in microseconds from `first_s`, by
    default the first event."""
    began: dict[tuple[str, int], float] = {}
    found: list[dict[str, Any]] = []
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


def stays(events: Sequence[StoredEvent], end_s: float | None = None) -> dict[str, list[tuple[float, float]]]:
    """{worker: [(from, to)]}; a worker that never left stays until `end_s`, by default that of the events."""
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
        found.setdefault(worker, []).append((from_s, events[-1].at_s if end_s is None else end_s))
    return found


def happenings(events: Sequence[StoredEvent]) -> list[tuple[float, int, str]]:
    """(when, step, what) of the workers, in words. Rollouts that moved are counted by worker and second."""
    found: list[tuple[float, int, str]] = []
    moved: dict[tuple[int, str, int], int] = {}
    for event in events:
        payload = event.payload
        if event.name == "WorkerJoined":
            found.append((event.at_s, event.step, f"{payload['worker']} joined"))
        elif event.name == "WorkerLeft":
            reason = f": {payload['reason']}" if payload.get("reason") else ""
            handed = len(payload.get("tokens", ()))
            others = f"; others go on with its {handed} rollouts" if handed else ""
            found.append((event.at_s, event.step, f"{payload['worker']} left{reason}{others}"))
        elif event.name == "WorkersWanted":
            found.append((event.at_s, event.step, f"{payload['count']} workers wanted: {payload['reason']}"))
        elif event.name == "TakeBack":
            key = int(event.at_s), payload["worker"], event.step
            moved[key] = moved.get(key, 0) + 1
    for (second, worker, step), count in moved.items():
        found.append((float(second), step, f"{count} rollouts taken from {worker} for one without work"))
    return sorted(found)


def write_trace(run_dir: Path) -> Path:
    """`trace.json` of a run, or of its newest steps."""
    with RunStore(run_dir, read_only=True) as store:
        first, num_events = store.first_event(), store.num_events()
        recorded = store.newest_events(TRACED_EVENTS)
        presence = store.newest_events(TRACED_STAYS, PRESENCE)
    first_s = first.at_s if first is not None else 0.0
    begin_s, end_s = (recorded[0].at_s, recorded[-1].at_s) if recorded else (0.0, 0.0)
    workers = {
        name: kept
        for name, found in stays(presence, end_s).items()
        if (kept := [(max(from_s, begin_s), to_s) for from_s, to_s in found if to_s >= begin_s])
    }
    events = spans(recorded, first_s)
    for row, worker in enumerate(sorted(workers), len(PHASES)):
        events += [_span(worker, "worker", row, from_s, to_s, first_s, {}) for from_s, to_s in workers[worker]]
    for at_s, step, what in happenings(recorded):
        at = max(0, round((at_s - first_s) * 1e6))
        mark = {"name": what, "cat": "worker", "ph": "i", "s": "g", "ts": at, "pid": 1, "tid": 0}
        events.append(mark | {"args": {"step": step}})
    steps = sorted({event.step for event in recorded})
    covers = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
    if num_events > len(recorded):
        covers += f": the newest {len(recorded):,} of {num_events:,} events, the others are in run.db only"
    names = [{"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": covers}}]
    names += [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}
        for row, name in enumerate([*PHASES, *sorted(workers)])
    ]
    path = run_dir / "trace.json"
    trace = {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": {"covers": covers}}
    path.write_text(json.dumps(trace))
    return path
