"""Continuous batching: which tokens go into the next forward, and what becomes of the sampled ones. Pure: no tensors.

A group is the requests that share a prompt. Its prompt is prefilled once, in the page of its first member; every
member's first token is sampled from that one row of logits; the others get a page as pages become free, either by a
copy of the prompt part of a sibling's page, or by taking over the page of a sibling that has finished.

Invariants, asserted by `tests/test_engine_batcher.py`: a plan never exceeds `max_step_tokens`; a running sequence has
exactly one page; its page holds keys for all of its tokens but the newest; every submitted request ends exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slipstream.engine.pages import PagePool
from slipstream.types import FinishReason, Request, Rollout


@dataclass(slots=True, eq=False)
class Running:
    """A sequence between submission and its end. Compared by identity: two may have the same tokens."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_version: int = -1
    page: int | None = None

    @property
    def position(self) -> int:
        """Absolute index of the next token to be sampled."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.token_ids and self.token_ids[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.sampling.max_new_tokens else None


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """A running sequence on its way to another engine, or to a checkpoint: tokens only, its keys are recomputed."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    first_version: int


@dataclass(slots=True, eq=False)
class Group:
    """Requests with one prompt, and how far its prefill is."""

    prefill_ids: Sequence[int]
    members: list[Running]
    num_prefilled: int = 0
    page: int | None = None

    @property
    def remaining(self) -> int:
        return len(self.prefill_ids) - self.num_prefilled


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one page in a packed forward, and the sequences that sample from the last one's logits."""

    page: int
    start: int
    token_ids: Sequence[int]
    samplers: tuple[Running, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    copies: tuple[tuple[int, int, int], ...]
    """(from page, to page, tokens) to do before the forward."""
    rows: tuple[Row, ...]
    num_decode_rows: int
    """The first rows decode, one token each; the others prefill."""

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


class Batcher:
    def __init__(self, pool: PagePool, max_step_tokens: int, page_tokens: int) -> None:
        self.pool = pool
        self.max_step_tokens = max_step_tokens
        self.page_tokens = page_tokens
        self._waiting: deque[Group] = deque()
        self._prefilling: deque[Group] = deque()
        self._pageless: deque[tuple[Group, Running]] = deque()
        self._running: dict[str, tuple[Group, Running]] = {}
        self._live: set[str] = set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        groups = (*self._waiting, *self._prefilling)
        return sum(len(group.members) for group in groups) + len(self._pageless)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefilling or self._pageless or self._running)

    def submit(self, requests: Sequence[Request]) -> None:
        """One group: requests with the same prompt."""
        prompt_ids = requests[0].prompt_ids
        assert all(request.prompt_ids == prompt_ids for request in requests), "a group shares its prompt"
        for request in requests:
            self._admit(request)
        self._waiting.append(Group(prompt_ids, [Running(request) for request in requests]))

    def submit_partial(self, partial: PartialRollout) -> None:
        """Go on with a sequence that another engine began."""
        self._admit(partial.request)
        sequence = Running(
            partial.request, list(partial.token_ids), list(partial.logprobs), first_version=partial.first_version
        )
        # The newest token has no key yet: it is the first input of the decode that follows the prefill.
        known = (*partial.request.prompt_ids, *partial.token_ids[:-1])
        self._waiting.append(Group(known, [sequence]))

    def withdraw(self, uid: str) -> PartialRollout:
        """Take a sequence out, wherever it stands; KeyError if it is not here."""
        self._live.remove(uid)
        sequence = self._take_out(uid)
        return PartialRollout(
            sequence.request, tuple(sequence.token_ids), tuple(sequence.logprobs), sequence.first_version
        )

    def plan(self) -> StepPlan:
        """Decode rows first, oldest served first; then prompts, in order of arrival, while tokens are left."""
        copies = self._house_pageless()
        budget = self.max_step_tokens
        rows: list[Row] = []
        for uid in list(self._running)[:budget]:
            sequence = self._running[uid][1]
            if len(self._running) > budget:  # then the served go to the back, so that everyone's turn comes
                self._running[uid] = self._running.pop(uid)
            assert sequence.page is not None
            rows.append(Row(sequence.page, sequence.position - 1, sequence.token_ids[-1:], (sequence,)))
        num_decode_rows = len(rows)
        rows += self._prefill_rows(budget - num_decode_rows)
        return StepPlan(tuple(copies), tuple(rows), num_decode_rows)

    def commit(self, plan: StepPlan, sampled: Sequence[tuple[int, float]], version: int) -> list[Rollout]:
        """Take in the sampled (token, logprob) pairs, in the order of the plan's samplers; give back what has ended."""
        draws = iter(sampled)
        finished: list[Rollout] = []
        for row in plan.rows:
            for sequence in row.samplers:
                token_id, logprob = next(draws)
                sequence.token_ids.append(token_id)
                sequence.logprobs.append(logprob)
                if sequence.first_version < 0:
                    sequence.first_version = version
        self._seat_prefilled()
        for uid, (group, sequence) in list(self._running.items()):
            reason = sequence.finish_reason
            if reason is not None:
                del self._running[uid]
                self._pass_on_page(group, sequence)
                finished.append(_rollout(sequence, reason, version))
        for entry in [entry for entry in self._pageless if entry[1].finish_reason is not None]:
            self._pageless.remove(entry)
            sequence = entry[1]
            assert sequence.finish_reason is not None
            finished.append(_rollout(sequence, sequence.finish_reason, version))
        self._live.difference_update(rollout.request.uid for rollout in finished)
        return finished

    def _admit(self, request: Request) -> None:
        assert request.uid not in self._live, f"request {request.uid} is already here"
        num_prompt, num_new = len(request.prompt_ids), request.sampling.max_new_tokens
        if num_prompt == 0:
            raise ValueError(f"request {request.uid}: the prompt is empty")
        if num_prompt + num_new > self.page_tokens:
            raise ValueError(
                f"request {request.uid}: prompt of {num_prompt} tokens + {num_new} new tokens exceed the engine's "
                f"{self.page_tokens} tokens a sequence; raise engine.max_prompt_tokens or shorten the prompt"
            )
        self._live.add(request.uid)

    def _prefill_rows(self, budget: int) -> Iterator[Row]:
        while self._waiting and self.pool.num_free > 0:
            group = self._waiting.popleft()
            group.page = self.pool.take()
            self._prefilling.append(group)
        for group in self._prefilling:
            if budget <= 0:
                return
            chunk = group.prefill_ids[group.num_prefilled : group.num_prefilled + budget]
            fresh = not group.members[0].token_ids
            samplers = tuple(group.members) if fresh and len(chunk) == group.remaining else ()
            assert group.page is not None
            yield Row(group.page, group.num_prefilled, chunk, samplers)
            group.num_prefilled += len(chunk)
            budget -= len(chunk)

    def _seat_prefilled(self) -> None:
        """Members of groups whose prefill is complete: the first keeps the page, the others wait for one."""
        while self._prefilling and self._prefilling[0].remaining == 0:
            group = self._prefilling.popleft()
            first, *others = group.members
            first.page, group.page = group.page, None
            self._running[first.request.uid] = (group, first)
            self._pageless.extend((group, member) for member in others)

    def _house_pageless(self) -> list[tuple[int, int, int]]:
        copies = []
        while self._pageless and self.pool.num_free > 0:
            group, sequence = self._pageless.popleft()
            donor = next(m.page for m in group.members if m.page is not None)
            sequence.page = self.pool.take()
            assert sequence.page is not None
            copies.append((donor, sequence.page, len(sequence.request.prompt_ids)))
            self._running[sequence.request.uid] = (group, sequence)
        return copies

    def _pass_on_page(self, group: Group, sequence: Running) -> None:
        """A finished sequence's page still holds the prompt: the next pageless sibling needs no copy."""
        page, sequence.page = sequence.page, None
        assert page is not None
        for entry in self._pageless:
            if entry[0] is group and entry[1].finish_reason is None:
                self._pageless.remove(entry)
                entry[1].page = page
                self._running[entry[1].request.uid] = entry
                return
        self.pool.give_back(page)

    def _take_out(self, uid: str) -> Running:
        if uid in self._running:
            group, sequence = self._running.pop(uid)
            self._pass_on_page(group, sequence)
            group.members.remove(sequence)
            return sequence
        for entry in self._pageless:
            if entry[1].request.uid == uid:
                self._pageless.remove(entry)
                entry[0].members.remove(entry[1])
                return entry[1]
        for queue in (self._waiting, self._prefilling):
            for group in queue:
                for member in group.members:
                    if member.request.uid == uid:
                        self._leave(queue, group, member)
                        return member
        raise AssertionError(f"{uid} is live but nowhere")

    def _leave(self, queue: deque[Group], group: Group, member: Running) -> None:
        """Out of a group whose prompt is not computed yet; the last one takes the group along."""
        group.members.remove(member)
        if not group.members:
            queue.remove(group)
            if group.page is not None:
                self.pool.give_back(group.page)


def _rollout(sequence: Running, reason: FinishReason, version: int) -> Rollout:
    return Rollout(
        request=sequence.request,
        token_ids=tuple(sequence.token_ids),
        logprobs=tuple(sequence.logprobs),
        finish_reason=reason,
        first_version=sequence.first_version,
        last_version=version,
    )
