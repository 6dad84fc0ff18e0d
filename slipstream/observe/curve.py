"""The curves of a run as a small picture of characters: the mean reward of each step, and the evaluations.

Owns the drawing; pure text, no control codes. A cell of braille holds 2 x 4 dots; the ASCII twin has one mark a cell.
Invariants: no line is longer than the width; a value is drawn at its own height to within half a dot; nothing is drawn
of fewer than three steps, of values that are all equal, or on less than 30 columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Series = Mapping[int, float]

ROWS = 8
MOST_COLUMNS = 72
LEAST_COLUMNS = 30
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character, by column and row."""
_MARKS, _ASCII_MARKS = "●◆▲■", "oxO#"


@dataclass(frozen=True, slots=True)
class _Grid:
    """Dots: `across` x `down` of them a cell."""

    columns: int
    across: int
    down: int
    low: float
    high: float
    first: int
    last: int

    def x(self, step: int) -> int:
        return round((step - self.first) / max(1, self.last - self.first) * (self.columns * self.across - 1))

    def y(self, value: float) -> int:
        """From the top."""
        return round((self.high - value) / (self.high - self.low) * (ROWS * self.down - 1))


def draw_run(metrics: Mapping[str, Series], width: int, *, ascii_only: bool = False) -> list[str]:
    """Lines of the picture; none if there is too little to draw. `metrics`: {name: {step: value}}."""
    reward = _finite(metrics.get("reward/mean", {}))
    names = [name for name in metrics if re.fullmatch(r"eval/.+/avg@\d+", name)]
    evaluations = {name.removeprefix("eval/"): _finite(metrics[name]) for name in sorted(names)}
    evaluations = {name: series for name, series in evaluations.items() if series}
    every = [reward, *evaluations.values()]
    values = [value for series in every for value in series.values()]
    if len(reward) < 3 or width < LEAST_COLUMNS or max(values) - min(values) < 1e-9:
        return []
    low, high = min(values), max(values)
    middle = high - (high - low) * (ROWS // 2) / (ROWS - 1)
    labels = {row: f"{value:.3g}" for row, value in ((0, high), (ROWS // 2, middle), (ROWS - 1, low))}
    margin = max(map(len, labels.values()))
    columns = min(width, MOST_COLUMNS) - margin - 2
    across, down = (1, 1) if ascii_only else (2, 4)
    first, last = min(min(s) for s in every), max(max(s) for s in every)
    grid = _Grid(columns, across, down, low, high, first, last)
    cells = _line(reward, grid, ascii_only)
    marks = _ASCII_MARKS if ascii_only else _MARKS
    for mark, series in zip(marks, evaluations.values(), strict=False):
        for step, value in series.items():
            cells[grid.y(value) // down][grid.x(step) // across] = mark
    side, corner, bar = "|+-" if ascii_only else "│└─"
    lines = [f"{labels.get(row, ''):>{margin}} {side}{''.join(cells[row])}".rstrip() for row in range(ROWS)]
    lines.append(f"{'':{margin + 1}}{corner}{bar * columns}")
    begin = f"step {first}"
    lines.append(f"{'':{margin + 2}}{begin}{last:>{columns - len(begin)}}")
    to = "->" if ascii_only else "→"
    line_mark = "*" if ascii_only else "⠒⠒"
    legend = [f"{line_mark} reward {_ends(reward, to)}"]
    legend += [f"{mark} {name} {_ends(s, to)}" for mark, (name, s) in zip(marks, evaluations.items(), strict=False)]
    legend += [f"and {len(evaluations) - len(marks)} more sets"] if len(evaluations) > len(marks) else []
    return lines + _wrapped(legend, " " * (margin + 2), min(width, MOST_COLUMNS))


def _line(series: Series, grid: _Grid, ascii_only: bool) -> list[list[str]]:
    """Cells with a line through the values; of several that share a place, through their mean."""
    by_x: dict[int, list[float]] = {}
    for step, value in series.items():
        by_x.setdefault(grid.x(step), []).append(value)
    points = [(x, grid.y(sum(values) / len(values))) for x, values in sorted(by_x.items())]
    dots = set(points)
    for (x0, y0), (x1, y1) in pairwise(points):
        steps = x1 - x0 if ascii_only else max(x1 - x0, abs(y1 - y0))
        for part in range(1, steps):
            dots.add((x0 + round((x1 - x0) * part / steps), y0 + round((y1 - y0) * part / steps)))
    if ascii_only:
        return [["*" if (x, y) in dots else " " for x in range(grid.columns)] for y in range(ROWS)]
    bits = [[0] * grid.columns for _ in range(ROWS)]
    for x, y in dots:
        bits[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    return [[chr(0x2800 + cell) if cell else " " for cell in row] for row in bits]


def _ends(series: Series, to: str) -> str:
    values = list(series.values())
    return f"{values[0]:.3f} {to} {values[-1]:.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def _wrapped(words: Sequence[str], margin: str, width: int) -> list[str]:
    """Words side by side, as many on a line as fit; one that is too long is cut."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 3 + len(word) <= width:
            lines[-1] += f"   {word}"
        else:
            lines.append(f"{margin}{word}"[:width])
    return lines


def _finite(series: Series) -> dict[int, float]:
    return {step: series[step] for step in sorted(series) if math.isfinite(series[step])}
