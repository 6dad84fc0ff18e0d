"""How many workers sample while a run is going on: by what steps show. Pure.

Where a run starts is searched for by simulating it (`simulate/planning.py`). Then lengths change: generation and
training of neighbouring steps run side by side, so a step takes as long as the slower of the two, and GPUs on the
faster side wait.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.schedule.speeds import SpeedCurve

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
        self.means_s = 0.0, 0.0
        """Generation and training of the steps looked at last."""

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
        self.means_s = gen, train
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


JUDGED = 4
"""Steps with a worker that was added before it is judged: steps that overlap come in turns, a long and a short one."""
SETTLING = 2
"""Steps after a change that are of the old number of workers and the new: steps overlap."""
GAIN = 0.02
"""Of a token's time: less than this, and a worker that was added is given back."""
PATIENCE = 20
"""Steps before a number of workers that gained nothing is tried again."""


def times_as_long(
    curve: SpeedCurve, batch: float, num_workers: int, other: int, *, slots: int, num_rollouts: int
) -> float:
    """What sampling `num_rollouts` would take with `other` workers of so many slots, against what it takes.

    `batch`: sequences of a step on average, in which slots are free towards the end; so they will be with others too.
    """

    def most(workers: int) -> float:
        return min(slots, num_rollouts / workers)

    there = max(1, round(batch))
    then = max(1, round(batch * most(other) / most(num_workers)))
    return (num_workers * there * curve.token_s(then)) / (other * then * curve.token_s(there))


@dataclass(frozen=True, slots=True)
class StepSeen:
    """What a step showed."""

    step_s: float
    num_tokens: float
    """Sampled for it."""
    busy_s: float
    """Worker-seconds of sampling, all workers together."""
    train_s: float
    """In which the trainer was busy."""
    num_workers: int
    """That took part."""
    num_wanted: int
    """Another number while somebody is on the way in or out."""


@dataclass(frozen=True, slots=True)
class Wish:
    num_workers: int
    reason: str


class Allocator:
    """How many workers there shall be after each step, within bounds: what `Adjuster` reckons, and what came of it.

    Invariants, asserted by `tests/test_schedule_allocation.py`: never fewer than `least` nor more than `most`; one at a
    time, with WINDOW steps at least in between; a worker that saved less than GAIN of a token's
    time goes again, and that number is not tried for PATIENCE steps, nor one that could not start.
    """

    def __init__(self, least: int, most: int) -> None:
        assert 0 < least <= most
        self._least, self._most = least, most
        self._adjuster = Adjuster()
        self._token_s: deque[float] = deque(maxlen=JUDGED)
        """Of the last steps with as many workers as there are."""
        self._num_workers = self._settling = 0
        self._before_s: float | None = None
        """A token's time before the last worker was added, until that has been judged."""
        self._wanted: int | None = None
        self._no_more_than: int | None = None
        self._steps_left = 0

    def observe(self, seen: StepSeen, times_as_long: Callable[[int], float] | None = None) -> Wish | None:
        """`times_as_long`: as in `Adjuster`. None: it stays as it is."""
        self._steps_left = max(0, self._steps_left - 1)
        if seen.num_workers != seen.num_wanted:
            self._token_s.clear()
            return None
        if seen.num_workers != self._num_workers or self._wanted is not None:
            self._begin(seen.num_workers)
        if self._settling or seen.num_tokens <= 0 or seen.step_s <= 0:
            self._settling = max(0, self._settling - 1)
            return None
        self._token_s.append(seen.step_s / seen.num_tokens)
        if not self._least <= seen.num_workers <= self._most:
            return None  # somebody asked for so many
        if self._before_s is not None:
            return self._judge(seen.num_workers)
        most = self._most
        if self._steps_left and self._no_more_than is not None:
            most = min(most, self._no_more_than)
        gen_s, train_s = seen.busy_s / seen.num_workers, seen.train_s
        change = self._adjuster.observe(gen_s, train_s, seen.num_workers, most, times_as_long)
        if not change or not self._least <= seen.num_workers + change:
            return None
        words = "a worker samples {:.3g} s a step, training takes {:.3g} s".format(*self._adjuster.means_s)
        if change > 0:
            self._before_s = statistics.fmean(self._token_s)
            return self._wish(seen.num_workers + 1, f"{words}: one more is reckoned to be worth it")
        return self._wish(seen.num_workers - 1, f"{words}: one fewer would keep up")

    def _begin(self, num_workers: int) -> None:
        """With another number of workers."""
        if self._wanted != num_workers:  # nothing of ours is to be judged
            self._before_s = None
            if self._wanted is not None and self._wanted > num_workers:  # it could not start
                self._no_more_than, self._steps_left = num_workers, PATIENCE
        self._num_workers, self._wanted, self._settling = num_workers, None, SETTLING
        self._token_s.clear()
        self._adjuster = Adjuster()

    def _judge(self, num_workers: int) -> Wish | None:
        """Whether the worker that was added has saved anything, once that can be told."""
        if self._before_s is None or len(self._token_s) < JUDGED:
            return None
        saved = 1 - statistics.fmean(self._token_s) / self._before_s
        self._before_s = None
        if saved >= GAIN or num_workers <= self._least:
            return None
        self._no_more_than, self._steps_left = num_workers - 1, PATIENCE
        words = f"with {num_workers} a token took {1 - saved:.0%} of its time before: not worth it"
        return self._wish(num_workers - 1, words)

    def _wish(self, num_workers: int, reason: str) -> Wish:
        self._wanted = num_workers
        return Wish(num_workers, reason)
