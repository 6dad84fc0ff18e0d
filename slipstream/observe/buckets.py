"""A metric over the steps of a run, in a bounded number of points.

A run of many steps is shown in buckets, of as many steps as it takes to stay within the points wanted; step 0, which is
before training, has one of its own. Totals and the newest value are exact all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_POINTS = 400
"""Of a curve on a page that is 1,200 pixels wide."""
Series = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Buckets:
    """How steps are put together."""

    width: int
    ends: Mapping[int, int]
    """Bucket: its last recorded step, under which it is drawn."""
    num_steps: Mapping[int, int]
    """Bucket: how many steps of it are recorded."""


def width_for(num_steps: int, most_points: int = MOST_POINTS) -> int:
    """Steps of a bucket."""
    return max(1, math.ceil(num_steps / most_points))


@dataclass(frozen=True, slots=True)
class Part:
    """What one bucket holds of a metric."""

    bucket: int
    last_step: int
    last: float
    mean: float
    """Of the values that are numbers."""
    total: float
    count: int
    num_bad: int
    """Values that are NaN."""


class Curve(dict[int, float]):
    """{step: value}; where a bucket has several steps, the mean of its values under the last step that has one."""

    def __init__(self, parts: Sequence[Part], buckets: Buckets, each: Series | None = None) -> None:
        """`each`: all values, of a metric that has few."""
        is_whole = each is not None or buckets.width == 1
        super().__init__(each or {part.last_step: part.last if is_whole else part.mean for part in parts})
        self.width = 1 if is_whole else buckets.width
        self.total = math.fsum(part.total for part in parts)
        self.count = sum(part.count for part in parts)
        self.last = parts[-1].last if parts else math.nan
        self.bad = set() if is_whole else {part.last_step for part in parts if part.num_bad}
        self.by_step = {buckets.ends[part.bucket]: part.total / buckets.num_steps[part.bucket] for part in parts}
        """{step: value a step}, steps without one counted as zero: metrics over the same steps can be stacked."""


def width_of(series: Series) -> int:
    """How many steps a point stands for."""
    return series.width if isinstance(series, Curve) else 1


def stacked(series: Series) -> Series:
    return series.by_step if isinstance(series, Curve) else series


def total(series: Series) -> float:
    """Of all values, also of those that are not drawn one by one."""
    return series.total if isinstance(series, Curve) else sum(series.values())


def count(series: Series) -> int:
    return series.count if isinstance(series, Curve) else len(series)


def last(series: Series) -> float:
    """The newest value."""
    return series.last if isinstance(series, Curve) else series[max(series)]


def bad_steps(series: Series) -> set[int]:
    """Points that hold a value which is not finite."""
    found = {step for step, value in series.items() if not math.isfinite(value)}
    return found | series.bad if isinstance(series, Curve) else found
