"""A picture of what each way of drafting gives at each size of batch, and what the selector makes of it.

    python benchmarks/plot_ways.py benchmarks/results/drafter_arms-{eight_tokens,small_sizes,large_sizes}-h200.json \\
        --out ways.html    # docs/ways.png

Reads results of `drafter_arms.py`. Every way is drawn as it was when it ran alone, the selector as it was in turns,
with the standard error that rounds show; a size of batch that several files have is drawn from the last of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plots import plot_results, write

from slipstream.observe.figures import AQUA, BLUE, GREEN, GREY, ORANGE, PINK, VIOLET, YELLOW

COLOURS = (ORANGE, YELLOW, VIOLET, PINK, AQUA, GREEN)
"""Of ways; again from the first where there are more."""


def read_rows(files: Iterable[Path]) -> list[dict[str, Any]]:
    """One for each size of batch in which the selector took turns, the smallest first."""
    by_batch = {}
    for file in files:
        for row in json.loads(file.read_text())["rows"]:
            share = row.get("in_turns", {}).get("shares", {}).get("selector_against_off", {})
            if "all_error" in share:  # older results have medians of rounds
                by_batch[row["batch"]] = row
    return [by_batch[batch] for batch in sorted(by_batch)]


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    figure = go.Figure()
    batches = [row["batch"] for row in rows]
    names = sorted({name for row in rows for name in row["arms"]}, key=_words_for)
    for name, colour in zip(names, cycle(COLOURS), strict=False):
        gains = [row["arms"][name]["gain"] if name in row["arms"] else None for row in rows]
        line = {"color": colour, "width": 1, "dash": "dot"}
        figure.add_scatter(x=batches, y=gains, name=_words_for(name), mode="lines+markers", line=line)
    shares = [row["in_turns"]["shares"]["selector_against_off"] for row in rows]
    figure.add_scatter(
        x=batches,
        y=[share["all"] for share in shares],
        error_y={"array": [share["all_error"] for share in shares]},
        name="the selector",
        mode="lines+markers",
        line={"color": BLUE, "width": 3},
    )
    figure.add_hline(y=1.0, line={"color": GREY, "width": 1})
    write(
        figure,
        file,
        title="Tokens a second against no drafts, same tokens",
        xaxis={"type": "log", "tickvals": batches, "title": "sequences in the batch"},
        yaxis={"title": "times no drafts", "rangemode": "tozero"},
        margin={"t": 60, "l": 60, "r": 20, "b": 50},
    )


def _words_for(name: str) -> str:
    """What `Strategy` calls "8 drafts, 8+ or model 6", for who has not read it."""
    drafts, _, after = name.partition(" drafts, ")
    if "model" not in after:
        return f"history, {drafts} {'draft' if drafts == '1' else 'drafts'}"
    depth, _, width = after.partition("model ")[2].partition(" x ")
    return f"{'history, else ' if ' or ' in after else ''}drafter {depth} deep{f', {width} wide' if width else ''}"


if __name__ == "__main__":
    lacking = "in none of these files the selector took turns: run drafter_arms.py with --turns ... selector"
    plot_results(__doc__, read_rows, draw, lacking)
