"""How many workers sample while a run is going on: by what steps show. Pure.

Where a run starts is searched for by simulating it (`simulate/planning.py`). Then lengths change: generation and
training of neighbouring steps run side by side, so a step takes as long as the slower of the two, and GPUs on the
faster side wait.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

WINDOW = 3
"""Steps of which the mean is looked at before a worker is added or given back."""
WORTH = 0.5
"""Of its share of generation: what another worker must be reckoned to save. Where sequences are few it saves less:
they are hardly faster with fewer beside them."""


class Adjuster:
    """Adds a worker when generation lags by at least what it would save, gives one back when it would still keep up.

    The times are those of the workers there are, so it looks at a few steps after every change before the next.
    """

    def __init__(self) -> None:
        self._gen_s: deque[float] = deque(maxlen=WINDOW)
        self._train_s: deque[float] = deque(maxlen=WINDOW)

    def observe(
        self,
        gen_s: float,
        train_s: float,
        num_workers: int,
        max_workers: int,
        times_as_long: Callable[[int], float] | None = None,
    ) -> int:
        """After a step: 1, -1 or 0 workers more.

        `times_as_long`: what generation would take with so many workers, against what it takes; without it, as much
        less as there are more of them.
        """
        self._gen_s.append(gen_s)
        self._train_s.append(train_s)
        if len(self._gen_s) < WINDOW:
            return 0
        gen, train = statistics.fmean(self._gen_s), statistics.fmean(self._train_s)
        with_more, with_fewer = num_workers / (num_workers + 1), num_workers / max(1, num_workers - 1)
        if times_as_long is not None:
            with_more, with_fewer = times_as_long(num_workers + 1), times_as_long(max(1, num_workers - 1))
        change = 0
        if num_workers < max_workers and gen * with_more >= train and 1 - with_more >= WORTH / (num_workers + 1):
            change = 1
        elif num_workers > 1 and gen * with_fewer <= train:
            change = -1
        if change:
            self._gen_s.clear()
            self._train_s.clear()
        return change
