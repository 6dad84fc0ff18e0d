"""Where the texts that a group may draft from lie in the device's library. Pure.

A shelf is a stretch of the library for one group of requests: its prompt, past rollouts of that prompt, and a place for
each member to write its own text into while it goes on. Texts begin with the end of the prompt, so that a match can
reach back into it, and end with NO_TEXT, which matches nothing and where every draft ends.

    NO_TEXT  prompt  NO_TEXT  tail rollout  NO_TEXT  ...  NO_TEXT  tail (room for a member)  NO_TEXT  ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

NO_TEXT = -1
MAX_MATCH = 16
"""Tokens of a suffix that are compared at most, and so many of the prompt stand before every text."""

ALIGNMENT = 16
SIBLING, HISTORY, OWN_TEXT = 1, 2, 3
"""Sources of drafts: another sample of the same group, an earlier rollout, the prompt and the sequence's own text."""


@dataclass(frozen=True, slots=True)
class Text:
    """A past rollout and what its vote counts."""

    token_ids: Sequence[int]
    """An array, from the history: what can be copied without looking at each."""
    weight: int


@dataclass(frozen=True, slots=True)
class Shelf:
    """The content of a stretch, and where in it each member writes."""

    content: np.ndarray
    """int32, a column a place: its token, the weight of its text and the source."""
    segments: tuple[int, ...]
    """By member: the place in the stretch where position 0 of its sequence would lie."""


def lay_out(
    prompt_ids: Sequence[int], past: Sequence[Text], num_members: int, max_new_tokens: int, sibling_weight: int
) -> Shelf:
    prompt = np.array(prompt_ids, np.int32)
    tail = prompt[-MAX_MATCH:]
    lengths = [len(prompt), *(len(tail) + len(text.token_ids) for text in past)]
    starts = list(accumulate((length + 1 for length in lengths), initial=1))
    room = len(tail) + max_new_tokens + 1
    content = np.empty((3, starts[-1] + num_members * room), np.int32)
    content[0], content[1:, 0] = NO_TEXT, 0
    content[0, 1 : starts[1] - 1] = prompt
    content[1, 1 : starts[1]], content[2, 1 : starts[1]] = 1, OWN_TEXT
    for text, (start, end) in zip(past, pairwise(starts[1:]), strict=True):
        content[0, start : start + len(tail)] = tail
        content[0, start + len(tail) : end - 1] = text.token_ids
        content[1, start:end], content[2, start:end] = text.weight, HISTORY
    members = content[:, starts[-1] :].reshape(3, num_members, room)
    members[0, :, : len(tail)] = tail
    members[1], members[2] = sibling_weight, SIBLING
    return Shelf(content, tuple(starts[-1] + len(tail) - len(prompt_ids) + room * one for one in range(num_members)))


def shelf_tokens(num_prompt: int, num_texts: int, text_tokens: int) -> int:
    """Places that a shelf takes at most: its prompt, and past rollouts and members of at most `text_tokens` each."""
    return aligned(num_prompt + 2 + num_texts * (MAX_MATCH + text_tokens + 1))


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Shelving:
    """Stretches of a library of fixed size: the first free one that is large enough.

    Each begins at a multiple of ALIGNMENT, so that a GPU can read several places at once.
    """

    def __init__(self, size: int) -> None:
        self._free = [(0, size - size % ALIGNMENT)]
        self._taken: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, size: int) -> int | None:
        """The first place of a stretch of at least `size`, None if there is none."""
        size = aligned(size)
        for index, (start, free) in enumerate(self._free):
            if free >= size > 0:
                self._free[index : index + 1] = [(start + size, free - size)] if free > size else []
                self._taken[start] = size
                return start
        return None

    def give_back(self, start: int) -> None:
        free = sorted([*self._free, (start, self._taken.pop(start))])
        merged: list[tuple[int, int]] = []
        for begin, size in free:
            if merged and merged[-1][0] + merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((begin, size))
        self._free = merged
