"""Pictures of results: what all of them look like, and the command line of those that are drawn from result files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import plotly.graph_objects as go

Results = TypeVar("Results")


def write(figure: go.Figure, file: Path, **layout: Any) -> None:
    """As a page of its own, as wide as a page of docs/ shows it."""
    figure.update_layout(template="simple_white", width=880, height=420, **layout)
    figure.write_html(file, include_plotlyjs=True, config={"displayModeBar": False})


def plot_results(
    about: str | None, read: Callable[[Iterable[Path]], Results], draw: Callable[[Results, Path], None], lacking: str
) -> None:
    """`lacking`: what to say of files in which there is nothing to draw."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="an HTML file")
    arguments = parser.parse_args()
    found = read(arguments.results)
    if not found:
        parser.error(lacking)
    draw(found, arguments.out)
