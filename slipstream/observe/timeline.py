"""The run as a timeline: `trace.json` for Perfetto (ui.perfetto.dev) or chrome://tracing, made from the event log.

A span begins with the action that starts a phase and ends with the fact that concludes it; a phase that a kill cut
off has no end and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
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
                found.append(
                    {
                        "name": f"{phase} {step}",
                        "cat": phase,
                        "ph": "X",
                        "ts": round((start_s - first_s) * 1e6),
                        "dur": round((event.at_s - start_s) * 1e6),
                        "pid": 1,
                        "tid": row,
                        "args": {"step": step},
                    }
                )
            if event.name == begin:
                began.setdefault((phase, step), event.at_s)
    return found


def write_trace(run_dir: Path) -> Path:
    """`trace.json` of a run."""
    with RunStore(run_dir, read_only=True) as store:
        events = spans(store.events())
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": phase}}
        for row, phase in enumerate(PHASES)
    ]
    path = run_dir / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}))
    return path
