"""How many GPUs sample and how many train: at the start by search, later by what steps show. Pure.

Generation and training of neighbouring steps run side by side, so a step takes as long as the slower of the two, and
GPUs on the faster side wait. Both are told as functions from a number of GPUs to seconds a step, which are fitted from
benchmarks or simulated; they need not be smooth, but more GPUs never take longer.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SecondsBy = Callable[[int], float]
WINDOW = 3
"""Steps of which the mean is looked at before a worker is added or given back."""
AS_GOOD = 1.005
"""Times the best: fewer GPUs that are this near are preferred."""


@dataclass(frozen=True, slots=True)
class Split:
    gen_gpus: int
    train_gpus: int
    gen_s: float
    train_s: float

    @property
    def step_s(self) -> float:
        return max(self.gen_s, self.train_s)

    @property
    def num_gpus(self) -> int:
        return self.gen_gpus + self.train_gpus


def best_split(num_gpus: int, gen_s: SecondsBy, train_s: SecondsBy, *, gen_unit: int = 1, train_unit: int = 1) -> Split:
    """Of all splits within `num_gpus`, in whole units, the fastest; of those as good, the one with the fewest GPUs."""
    splits = [
        Split(gen, train, gen_s(gen), train_s(train))
        for gen in range(gen_unit, num_gpus - train_unit + 1, gen_unit)
        for train in range(train_unit, num_gpus - gen + 1, train_unit)
    ]
    if not splits:
        raise ValueError(
            f"{num_gpus} GPUs cannot hold a worker of {gen_unit} and a trainer of {train_unit}: give at least "
            f"{gen_unit + train_unit}"
        )
    fastest = min(split.step_s for split in splits)
    return min((split for split in splits if split.step_s <= AS_GOOD * fastest), key=lambda split: split.num_gpus)


def split_across(
    gen_budget: int, train_budget: int, gen_s: SecondsBy, train_s: SecondsBy, *, gen_unit: int = 1, train_unit: int = 1
) -> Split:
    """Two datacenters, each with GPUs for one side only: the slower side takes all it has, the other no more than it
    needs to keep up."""
    gen, train = gen_budget - gen_budget % gen_unit, train_budget - train_budget % train_unit
    if not gen or not train:
        raise ValueError(
            f"{gen_budget} GPUs to sample in workers of {gen_unit}, {train_budget} to train in units of {train_unit}: "
            "each side needs one at least"
        )
    slower_s = AS_GOOD * max(gen_s(gen), train_s(train))
    gen = next(gpus for gpus in range(gen_unit, gen + 1, gen_unit) if gen_s(gpus) <= slower_s)
    train = next(gpus for gpus in range(train_unit, train + 1, train_unit) if train_s(gpus) <= slower_s)
    return Split(gen, train, gen_s(gen), train_s(train))


class Adjuster:
    """Adds a worker when generation lags by at least what it would save, gives one back when it would still keep up.

    The times are those of the workers there are, so it looks at a few steps after every change before the next.
    """

    def __init__(self) -> None:
        self._gen_s: deque[float] = deque(maxlen=WINDOW)
        self._train_s: deque[float] = deque(maxlen=WINDOW)

    def observe(self, gen_s: float, train_s: float, num_workers: int, max_workers: int) -> int:
        """After a step: 1, -1 or 0 workers more."""
        self._gen_s.append(gen_s)
        self._train_s.append(train_s)
        if len(self._gen_s) < WINDOW:
            return 0
        gen, train = statistics.fmean(self._gen_s), statistics.fmean(self._train_s)
        change = 0
        if num_workers < max_workers and gen * num_workers / (num_workers + 1) >= train:
            change = 1
        elif num_workers > 1 and gen * num_workers / (num_workers - 1) <= train:
            change = -1
        if change:
            self._gen_s.clear()
            self._train_s.clear()
        return change
