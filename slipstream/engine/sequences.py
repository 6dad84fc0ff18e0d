"""The batcher's records: a sequence on its way, a group that shares a prompt, the plan of a step and its report. Pure.

`Running`, `Group` and `Seating` belong to the batcher, which alone changes them; the others are facts for whoever asks.

Axes: R sequences that sample with a plan.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.types import FinishReason, Request, Rollout

Ints = NDArray[np.int64]


def _none() -> Ints:
    return np.zeros(0, np.int64)


def no_changes() -> Ints:
    """Rows of (slot, what the device is to know of it)."""
    return np.zeros((0, 2), np.int64)


@dataclass(slots=True, eq=False)
class Running:
    """A sequence between submission and its end. Compared by identity: two may have the same tokens."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    """While it is seated, those it had when it took its seat, as `logprobs` and so on: the slot has what came since."""
    logprobs: list[float] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    log_kept: list[float] = field(default_factory=list)
    """Empty unless its distribution is cut."""
    first_version: int = -1
    slot: int = -1
    seat: int = -1
    """A number given at seating, so that results for an earlier seat can be told apart; -1 while not seated."""
    pages: list[int] = field(default_factory=list)

    @property
    def num_known(self) -> int:
        """Tokens it has while it waits, prompt included."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def max_keys(self) -> int:
        """Keys it can come to hold: the last token it may sample is never run."""
        return len(self.request.prompt_ids) + self.request.sampling.max_new_tokens - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of one that waits."""
        if self.token_ids and self.token_ids[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if self.num_known > self.max_keys else None

    def ended(self, reason: FinishReason, version: int) -> Rollout:
        return Rollout(
            request=self.request,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            first_version=self.first_version,
            last_version=version,
            origins=tuple(self.origins) if len(self.origins) == len(self.token_ids) else (),
            log_kept=tuple(self.log_kept),
        )


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """A running sequence on its way to another engine, or to a checkpoint: tokens only, its keys are recomputed."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    first_version: int
    log_kept: tuple[float, ...] = ()
    """As in `Rollout`."""


@dataclass(slots=True, eq=False)
class Group:
    """Members without a slot that share a prompt. Once a seated member has computed it, the group holds its pages."""

    members: deque[Running]
    leader: Running | None = None
    """The member that is computing the prompt for the others."""
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Seat:
    """A sequence that takes a slot with this plan."""

    slot: int
    sequence: Running
    token_ids: tuple[int, ...]
    num_computed: int


@dataclass(slots=True)
class Seating:
    """Who took slots, and what the device has to do for that.

    Who leaves before the plan tells of it does no harm: nobody else takes his slot before, and whoever is given his
    pages in the same plan writes into them after the copies are done.
    """

    seats: list[Seat] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    entries: list[tuple[int, int, int]] = field(default_factory=list)
    """As in the plan: copies of pages, and what is new in page tables."""

    def add(self, sequence: Running, num_computed: int) -> None:
        ids = (*sequence.request.prompt_ids, *sequence.token_ids)
        self.seats.append(Seat(sequence.slot, sequence, ids, num_computed))


@dataclass(frozen=True, slots=True, eq=False)
class Samplers:
    """Sequences that sample with a plan: each gets one token, and one more for each draft that is accepted."""

    slot_R: Ints = field(default_factory=_none)
    seat_R: Ints = field(default_factory=_none)
    drafts_R: Ints = field(default_factory=_none)
    """How many drafts each may have."""

    def __len__(self) -> int:
        return len(self.slot_R)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What the device needs to be told, and what it will run."""

    vacated: tuple[int, ...] = ()
    """Slots whose sequence was taken out before its end."""
    copies: tuple[tuple[int, int], ...] = ()
    """(from page, to page), to be done first, all reads before all writes."""
    seats: tuple[Seat, ...] = ()
    pages: tuple[tuple[int, int, int], ...] = ()
    """(slot, index, page): new entries of the page table."""
    allotments: Ints = field(default_factory=no_changes)
    """Rows of (slot, tokens it may run), where the device knows otherwise."""
    behind: Ints = field(default_factory=no_changes)
    """Rows of (slot, 0 or 1): whether others may have to wait for it, where the device knows otherwise."""
    samplers: Samplers = field(default_factory=Samplers)
    num_rows: int = 0
    num_tokens: int = 0
    """With all drafts that the step may run."""
    num_drafts: int = 0
    """Tokens that may be drafted, of all sequences together."""
    with_cuts: bool = False
    """Whether any of the samplers cuts the tail of the distribution."""

    @property
    def num_prefilled(self) -> int:
        """Tokens that are computed only for their keys."""
        return self.num_tokens - self.num_drafts - len(self.samplers)


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """What slots sampled in a step."""

    lines: NDArray[np.int32]
    """A line a slot: see `StepState`."""
    num_rows: int
    """Slots that sampled."""
    num_from: list[int]
    """Tokens by origin."""
    by_drafted: list[int]
    """Slots that sampled by how many drafts were verified."""
    by_right: list[int]
    """And by how many of these were right."""
    broken: list[int]
    """Slots whose logits were not numbers."""

    @property
    def num_drafted(self) -> int:
        return sum(drafts * rows for drafts, rows in enumerate(self.by_drafted))
