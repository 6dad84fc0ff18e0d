"""The batcher's records: a sequence on its way, a group that shares a prompt, and the plan of one step. Pure.

`Running` and `Group` belong to the batcher, which alone changes them; the others are facts for whoever asks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from slipstream.types import FinishReason, Request, Rollout

Sampled = tuple[list[int], list[float], list[int], int]
"""What a slot sampled in a step: tokens, their log-probabilities and origins, and how many drafts were verified. There
are hundreds a step, and a plain tuple takes the host the least."""


@dataclass(slots=True, eq=False)
class Running:
    """A sequence between submission and its end. Compared by identity: two may have the same tokens."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    first_version: int = -1
    slot: int = -1
    seat: int = -1
    """A number given at seating, so that results for an earlier seat can be told apart; -1 while not seated."""
    met_stop_text: bool = False
    pages: list[int] = field(default_factory=list)
    num_launched: int = 0
    """Tokens whose keys are computed, or will be by the steps launched so far; with drafts at least so many."""
    num_unread: int = 0
    """Steps that sample for it and were launched but not yet committed: each gives at least one token."""
    num_hoped: int = 0
    """Tokens beyond one each that these steps may give, if their drafts are accepted."""
    # Of the request, since every step asks for them.
    num_prompt: int = field(init=False)
    max_keys: int = field(init=False)
    """Keys it can come to hold: the last token it may sample is never run."""
    max_new_tokens: int = field(init=False)
    stop_token_ids: tuple[int, ...] = field(init=False)
    cuts_tail: bool = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.num_prompt = len(self.request.prompt_ids)
        self.max_keys = self.num_prompt + sampling.max_new_tokens - 1
        self.max_new_tokens, self.stop_token_ids = sampling.max_new_tokens, sampling.stop_token_ids
        self.cuts_tail = sampling.cuts_tail

    @property
    def num_known(self) -> int:
        """Tokens it has, or will have after the steps launched so far; with drafts at least so many."""
        return self.num_prompt + len(self.token_ids) + self.num_unread

    @property
    def num_due(self) -> int:
        """Tokens to run before the next one can be sampled; 0 if it has sampled all it may."""
        known = self.num_prompt + len(self.token_ids) + self.num_unread
        return known - self.num_launched if known <= self.max_keys else 0

    @property
    def has_begun(self) -> bool:
        return bool(self.token_ids) or self.num_unread > 0

    @property
    def finish_reason(self) -> FinishReason | None:
        token_ids = self.token_ids
        if self.met_stop_text or (token_ids and token_ids[-1] in self.stop_token_ids):
            return "stop"
        return "length" if len(token_ids) >= self.max_new_tokens else None

    def ended(self, reason: FinishReason, version: int) -> Rollout:
        return Rollout(
            request=self.request,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            first_version=self.first_version,
            last_version=version,
            origins=tuple(self.origins) if len(self.origins) == len(self.token_ids) else (),
        )


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """A running sequence on its way to another engine, or to a checkpoint: tokens only, its keys are recomputed."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    first_version: int


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


Sampler = tuple[Running, int, int]
"""A sequence that samples with this plan, its seat, and how many drafts it may have: it gets one token, and one more
for each of them that is accepted."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the device needs to be told, and what it will run."""

    vacated: tuple[int, ...]
    """Slots whose sequence was taken out before its end."""
    copies: tuple[tuple[int, int], ...]
    """(from page, to page), to be done first, all reads before all writes."""
    seats: tuple[Seat, ...]
    pages: tuple[tuple[int, int, int], ...]
    """(slot, index, page): new entries of the page table."""
    allotments: tuple[tuple[int, int], ...]
    """(slot, tokens it may run), where this differs from the plan before."""
    samplers: tuple[Sampler, ...]
    num_rows: int
    num_tokens: int
    """With all drafts that the step may run."""
    num_drafts: int
    """Tokens that may be drafted, of all sequences together."""
    with_cuts: bool
    """Whether any of the samplers cuts the tail of the distribution."""

    @property
    def num_prefilled(self) -> int:
        """Tokens that are computed only for their keys."""
        return self.num_tokens - self.num_drafts - len(self.samplers)
