"""In which sizes steps run on a GPU, where each size needs a CUDA graph of its own. Pure.

A new graph takes the time of twenty to fifty steps, so a step runs in a somewhat larger size whose graph is there: if
that one is small too, for good, else until its own has been asked for so often that it would have paid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

PATIENCE = 200
"""Times that a size is asked for before it gets a graph although a larger one would do: in that many steps the padding
costs more than a graph does where it costs most."""
SMALL = 64
"""Tokens up to which a step takes hardly longer with twice as many, since reading the weights takes the time."""
FREE = 2 * SMALL
"""So up to this many, what is padding takes hardly any."""


class Size(Hashable, Protocol):
    @property
    def kind(self) -> Hashable:
        """Graphs of two kinds do different things."""

    @property
    def room(self) -> tuple[int, ...]:
        """For how many there is room, of each thing that there may be more room for than is needed."""


SizeT = TypeVar("SizeT", bound=Size)


class Fitting(Generic[SizeT]):
    def __init__(self) -> None:
        self._ready: set[SizeT] = set()
        self._num_asked: Counter[SizeT] = Counter()
        self._larger: dict[SizeT, SizeT] = {}
        """What a size runs in meanwhile."""

    def choose(self, size: SizeT, coarser: SizeT) -> SizeT:
        """The size to run in. `coarser`: one of few with room for this, to get a graph if nothing has room."""
        if size in self._ready:
            return size
        if size not in self._larger:
            fits = [one for one in self._ready if has_room(one, size)]
            self._larger[size] = min(fits, key=lambda one: one.room) if fits else coarser
        larger = self._larger[size]
        if _takes_longer(larger, size):
            self._num_asked[size] += 1
        return size if self._num_asked[size] > PATIENCE else larger

    def larger(self, size: SizeT, may_serve: Callable[[SizeT], bool]) -> SizeT | None:
        """What it can run in at all, if there is anything, however much is padding."""
        fits = [one for one in self._ready if one.kind == size.kind and _holds(one, size) and may_serve(one)]
        return min(fits, key=lambda one: one.room, default=None)

    def add(self, size: SizeT) -> None:
        """It has a graph now."""
        self._ready.add(size)
        self._larger.clear()

    def clear(self) -> None:
        """All graphs are gone; how often sizes were asked for still says which are worth one."""
        self._ready.clear()
        self._larger.clear()


def _holds(size: Size, needed: Size) -> bool:
    return all(room >= need for room, need in zip(size.room, needed.room, strict=True))


def _takes_longer(size: Size, needed: Size) -> bool:
    return any(room > max(need, FREE) for room, need in zip(size.room, needed.room, strict=True))


def has_room(size: Size, needed: Size) -> bool:
    """Whether a graph of this size can do it without much more work."""
    return size.kind == needed.kind and all(
        need <= room <= (max(8, 2 * need) if need <= SMALL else need + need // 2)
        for room, need in zip(size.room, needed.room, strict=True)
    )


def padded(count: int) -> int:
    """The size a step of `count` tokens is padded to: fine steps where they cost little, coarser ones above.

    Above 32 tokens, less than a quarter is added: four sizes between one power of two and the next.
    """
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = max(8, 1 << ((count - 1).bit_length() - 3))
    return -(-count // step) * step


def coarsely(count: int) -> int:
    """As `padded`, but for two sizes between one power of two and the next."""
    size = 1 << (count - 1).bit_length()
    less = size - size // 4
    return less if size > 16 and count <= less else size


def fitted(num_rows: int, num_drafts: int) -> int:
    """At most so many drafts that a step of these rows is a power of two, or half as much more: drafts fill whatever
    size they are given, so a few sizes will do. Where that leaves room for none, as many as would be padding."""
    most = num_rows + num_drafts
    size = 1 << (most.bit_length() - 1)
    if size >= 16 and size + size // 2 <= most:
        size += size // 2
    return (size if size > num_rows else padded(most)) - num_rows
