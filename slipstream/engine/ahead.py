"""How many steps are launched before one is read. Pure.

Usually a few. Before a CUDA graph is made, which takes the host as long as some twenty steps, many: so that the GPU has
work meanwhile. Until they are launched, a way of drafting that was never tried with so many sequences is put off for
one that was, and a size without a graph runs in a larger one's (`graphs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from slipstream.engine.strategy import Strategy, size_of

MAKING_S = 0.04
"""So much work the GPU should have when a graph, or two, are made."""
FEWEST, MOST = 4, 64
"""Steps launched before that."""


class Ahead:
    def __init__(self, usual: int) -> None:
        self._usual = usual
        self._met: set[tuple[int, Strategy]] = set()
        """Sizes of batch and ways that have run, or can at once."""
        self._num_unread, self._has_room = 0, _has_none
        self._step_s: float | None = None
        self._was_cut_short = False
        self.is_waiting = False
        """Whether this step runs otherwise than it will."""

    @property
    def num_steps(self) -> int:
        """That may be launched and not read, after this one."""
        return self.enough if self.is_waiting else self._usual

    @property
    def enough(self) -> int:
        """Steps to be launched before a graph is made."""
        return FEWEST if self._step_s is None else min(MOST, max(FEWEST, math.ceil(MAKING_S / self._step_s)))

    def observe(self, step_s: float) -> None:
        """How long a step took that only decoded."""
        self._step_s = step_s if self._step_s is None else 0.8 * self._step_s + 0.2 * step_s

    def begin_step(self, num_unread: int, has_room: Callable[[], bool]) -> None:
        """`has_room`: whether there is any for what so many steps may sample."""
        # Where there is less to launch than that, it would be waited for ever.
        self._was_cut_short = self.is_waiting and num_unread <= self._num_unread
        self._num_unread, self._has_room, self.is_waiting = num_unread, has_room, False

    @property
    def can_wait(self) -> bool:
        """Whether more steps should be launched before a graph is made."""
        return self._num_unread < self.enough and not self._was_cut_short and self._has_room()

    def wait(self) -> None:
        self.is_waiting = True

    def way(self, batch: int, chosen: Strategy, best: Strategy) -> Strategy:
        """`chosen`, or while it has to wait what was best before."""
        size = size_of(batch)
        if (size, chosen) not in self._met and (size, best) in self._met and self.can_wait:
            self.wait()
            return best
        self._met.add((size, chosen))
        return chosen

    def note_prepared(self, ways: Iterable[tuple[int, Strategy]]) -> None:
        """Sizes of batch and ways whose graphs are there."""
        self._met.update((size_of(batch), way) for batch, way in ways)

    def clear(self) -> None:
        """All graphs are gone."""
        self._met.clear()


def _has_none() -> bool:
    return False
