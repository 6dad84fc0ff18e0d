"""Samples into micro-batches by their token count, and a micro-batch into flat lists. Pure: no tensors.

`plan_micro_batches` is for samples that are all there; `StreamPacker` for those that come one by one.

Invariants of both: every sample is in exactly one micro-batch; a micro-batch holds at most `max_tokens`, or one single
longer sample; the result depends on the lengths and their order only. First-fit decreasing needs at most 11/9 of the
optimal number of bins plus 6/9 (Dosa 2007). A StreamPacker's micro-batch depends on nothing that came after it was
given, so samples in the same order give the same micro-batches whether they come together or apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

OPEN_MICRO_BATCHES = 8
"""At most so many wait for samples that fit: two at first, one more for every eight that are done. With one (next fit)
there are up to 22 % more micro-batches than by first-fit decreasing where the longest sample fills one, so up to 4 % in
a large step, and what is held back to its end is 1-3 % of its tokens (docs/log.md)."""
FULL_SHARE = 0.98
"""Of `max_tokens`: a micro-batch this full waits no longer."""


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Documents one after another. T: tokens of all documents; N: response tokens of all documents, in order."""

    token_ids_T: list[int]
    lengths: list[int]
    """Tokens of each document: prompt and response without its last token, which predicts nothing."""
    positions_N: list[int]
    """Where in T the hidden state lies that predicts each response token."""
    targets_N: list[int]
    response_lengths: list[int]


def document_tokens(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> int:
    """Tokens that a sample takes in a micro-batch."""
    return len(prompt_ids) + len(response_ids) - 1


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the samples of each micro-batch: first-fit decreasing, ties by order, members in the given order."""
    bins: list[list[int]] = []
    space: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        for number, free in enumerate(space):
            if lengths[index] <= free:
                bins[number].append(index)
                space[number] -= lengths[index]
                break
        else:
            bins.append([index])
            space.append(max_tokens - lengths[index])
    return [sorted(members) for members in bins]


@dataclass(slots=True)
class _OpenMicroBatch(Generic[T]):
    members: list[T] = field(default_factory=list)
    num_tokens: int = 0


class StreamPacker(Generic[T]):
    """Best fit with a bounded number of open micro-batches: the fullest goes when a sample fits into none."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._open: list[_OpenMicroBatch[T]] = []
        self._num_done = 0

    def add(self, item: T, num_tokens: int) -> list[T] | None:
        """The members of the micro-batch that need not wait any longer, if there is one, in the order they came."""
        fitting = [one for one in self._open if one.num_tokens + num_tokens <= self._max_tokens]
        done = None
        if not fitting:
            if num_tokens >= FULL_SHARE * self._max_tokens:
                self._num_done += 1
                return [item]
            if len(self._open) == min(OPEN_MICRO_BATCHES, 2 + self._num_done // 8):
                done = self._take_fullest(self._open)
            fitting = [_OpenMicroBatch()]
            self._open += fitting
        chosen = max(fitting, key=lambda one: one.num_tokens)
        chosen.members.append(item)
        chosen.num_tokens += num_tokens
        if chosen.num_tokens >= FULL_SHARE * self._max_tokens:
            assert done is None, "a sample that fits into none is not full on its own"
            return self._take_fullest([chosen])
        return done

    def rest(self) -> list[list[T]]:
        """What is left, the oldest micro-batch first; nothing is, afterwards."""
        rest, self._open = [one.members for one in self._open], []
        return rest

    def _take_fullest(self, among: Sequence[_OpenMicroBatch[T]]) -> list[T]:
        fullest = max(among, key=lambda one: one.num_tokens)
        self._open = [one for one in self._open if one is not fullest]
        self._num_done += 1
        return fullest.members


def in_rounds(waiting: list[T], items: Iterable[T], size: int, *, is_last: bool = False) -> Iterator[list[T]]:
    """Deal items out `size` at a time. What is short of a round stays in `waiting` for the next call, unless this is
    the last: then a shorter round ends it."""
    for item in items:
        waiting.append(item)
        if len(waiting) == size:
            yield waiting.copy()
            waiting.clear()
    if is_last and waiting:
        yield waiting.copy()
        waiting.clear()


def pack(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PackedTokens:
    """Lay (prompt_ids, response_ids) of one micro-batch one after another."""
    packed = PackedTokens([], [], [], [], [])
    for prompt_ids, response_ids in pairs:
        assert prompt_ids and response_ids, "a sample needs prompt tokens and response tokens"
        first = len(packed.token_ids_T) + len(prompt_ids) - 1
        packed.positions_N.extend(range(first, first + len(response_ids)))
        packed.targets_N.extend(response_ids)
        packed.token_ids_T.extend((*prompt_ids, *response_ids[:-1]))
        packed.lengths.append(document_tokens(prompt_ids, response_ids))
        packed.response_lengths.append(len(response_ids))
    return packed
