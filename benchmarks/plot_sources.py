"""A picture of what sources and fixed ways of drafting save of a run's rollout seconds, step by step.

    python benchmarks/plot_sources.py benchmarks/results/draft_sources-{four_once_more,fixed_ways}-h200.json \\
        --out sources.html    # docs/sources.png

Reads results of `history_run.py`. A line is the sum of the seconds that were saved so far against the first source of
the same file, so it rises while drafts pay and falls while they cost. Dotted: ways that never change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import accumulate, cycle
from pathlib import Path

import plotly.graph_objects as go
from plots import plot_results, write

from slipstream.observe.figures import AQUA, BLUE, GREEN, GREY, ORANGE, PINK, VIOLET, YELLOW

FREE, FIXED = (BLUE, GREEN, VIOLET), (AQUA, ORANGE, PINK, YELLOW)
"""Colours of sources that the selector chooses from, and of fixed ways."""


def read_savings(files: Iterable[Path]) -> dict[str, list[float]]:
    """By source, the seconds saved up to each step."""
    savings = {}
    for file in files:
        steps = json.loads(file.read_text())["steps"]
        first, *others = steps
        seconds = {source: [row["timing_s/gen"] for row in rows] for source, rows in steps.items()}
        for source in others:
            pairs = zip(seconds[first], seconds[source], strict=True)
            name = source if source not in savings else f"{source} ({file.stem})"
            savings[name] = list(accumulate(without - spent for without, spent in pairs))
    return savings


def draw(savings: dict[str, list[float]], file: Path) -> None:
    figure = go.Figure()
    free, fixed = cycle(FREE), cycle(FIXED)
    for source, saved in savings.items():
        is_fixed = ": " in source
        line = {"color": next(fixed if is_fixed else free), "width": 1.5 if is_fixed else 3}
        name = source if is_fixed else f"{source}, chosen while it runs"
        line |= {"dash": "dot"} if is_fixed else {}
        figure.add_scatter(x=list(range(1, len(saved) + 1)), y=saved, name=name, mode="lines+markers", line=line)
    figure.add_hline(y=0.0, line={"color": GREY, "width": 1})
    write(
        figure,
        file,
        title="Rollout seconds saved so far, same tokens",
        xaxis={"title": "step of RL", "dtick": 1},
        yaxis={"title": "seconds"},
        legend={"x": 0.01, "y": 0.99},
        margin={"t": 60, "l": 60, "r": 20, "b": 50},
    )


if __name__ == "__main__":
    lacking = "these files have one source each: run history_run.py with --sources off,... or --way"
    plot_results(__doc__, read_savings, draw, lacking)
