"""How fast a worker decodes, by how many sequences it has: straight lines between measured points. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MAX_STEP_MS = 1e9


@dataclass(frozen=True, slots=True)
class SpeedCurve:
    points: tuple[tuple[int, float], ...]
    """(sequences, seconds of a step), growing in both. Beyond the last point the last line goes on."""
    tokens_a_step: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """(sequences, tokens that each gets): more than one with drafts. Beyond the last point it stays."""
    _known: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        batches, seconds = zip(*self.points, strict=True) if self.points else ((), ())
        if not batches or batches[0] < 1 or min(seconds) <= 0:
            raise ValueError("a speed curve needs points (sequences from 1 on, seconds above 0)")
        if list(batches) != sorted(set(batches)) or list(seconds) != sorted(seconds):
            raise ValueError(f"a step of more sequences takes no less time: {self.points} does not grow")

    def token_s(self, batch: int) -> float:
        """Seconds in which each of `batch` sequences gets one more token."""
        seconds = self._known.get(batch)
        if seconds is None:
            assert batch > 0
            seconds = _line(self.points, batch, goes_on=True) / _line(self.tokens_a_step, batch, goes_on=False)
            self._known[batch] = seconds
        return seconds

    def extra_s(self, batch: int) -> float:
        """By how much a token of each takes longer once another joins `batch` sequences."""
        return self.token_s(batch + 1) - (self.token_s(batch) if batch else 0.0)


def _line(points: tuple[tuple[int, float], ...], x: int, goes_on: bool) -> float:
    right = bisect_right(points, x, key=lambda point: point[0])
    if right == 0 or len(points) == 1:
        return points[0][1]
    if right == len(points):
        if not goes_on:
            return points[-1][1]
        right -= 1
    (x0, y0), (x1, y1) = points[right - 1 : right + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


Paces = tuple[tuple[int, int, float], ...]
"""(steps, their sequences summed up, their seconds), of steps with 1 sequence, 2 or 3, 4 to 7 and so on; prompts that
they computed beside are in the seconds."""


def sum_paces(several: Iterable[Paces]) -> Paces:
    found: dict[int, tuple[int, int, float]] = {}
    for steps, sequences, seconds in (one for paces in several for one in paces):
        size = (sequences // steps).bit_length()
        before = found.get(size, (0, 0, 0.0))
        found[size] = before[0] + steps, before[1] + sequences, before[2] + seconds
    return tuple(found[size] for size in sorted(found))


def curve_of_paces(paces: Paces) -> SpeedCurve:
    """From steps of one size at least. Where larger steps were no slower, by chance, both have the time of all of them:
    a curve must grow."""
    merged: list[tuple[int, int, float]] = []
    for one in sorted(paces, key=lambda pace: pace[1] / pace[0]):
        merged.append(one)
        while len(merged) > 1 and (
            merged[-1][2] / merged[-1][0] <= merged[-2][2] / merged[-2][0]
            or round(merged[-1][1] / merged[-1][0]) == round(merged[-2][1] / merged[-2][0])
        ):
            last, before = merged.pop(), merged.pop()
            merged.append((last[0] + before[0], last[1] + before[1], last[2] + before[2]))
    return SpeedCurve(tuple((round(sequences / steps), seconds / steps) for steps, sequences, seconds in merged))


def _is_timed(row: Mapping[str, object]) -> bool:
    batch, step_ms = row.get("batch"), row.get("step_ms")
    is_timed = isinstance(batch, int) and batch >= 1 and isinstance(step_ms, int | float) and 0 < step_ms < MAX_STEP_MS
    return is_timed and isinstance(row.get("shape"), str)


def curve_of_bench(record: object, shape: str) -> SpeedCurve:
    """From the record of `slipstream bench engine`; ValueError names what it has instead."""
    rows = record.get("rows") if isinstance(record, Mapping) else None
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) and _is_timed(row) for row in rows):
        raise ValueError("this is no record of `slipstream bench engine`: write one with --json FILE")
    found = sorted((row["batch"], row["step_ms"] / 1e3) for row in rows if row["shape"] == shape)
    if not found:
        shapes = ", ".join(sorted({str(row["shape"]) for row in rows}))
        raise ValueError(f"the record has no shape '{shape}', only {shapes}")
    slowest = 0.0
    points = []
    for batch, seconds in found:
        slowest = max(slowest, seconds)  # a larger batch that measured faster is noise
        points.append((batch, slowest))
    return SpeedCurve(tuple(points))
