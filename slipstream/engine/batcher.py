"""Continuous batching: which sequences sit in which slot, with which pages, and how many tokens each runs next. Pure.

A plan may be made before the results of the plans before it are known (`commit` comes late on a GPU): a sequence counts
tokens that were launched, known or not. A sequence taken out while a result is on its way loses nothing: sampling is
keyed, so the token comes out the same when it is computed again.

With drafts a step may give a sequence several tokens, and how many is known only when its result is read: until then
the sequence is counted as having the fewest, and has pages for the most.

A group is the requests that share a prompt. Its first member computes the prompt; the others are seated afterwards on
the same pages, with a copy of the last, partly filled one, and compute only the prompt's last token for themselves.

Invariants, asserted by `tests/test_engine_batcher.py`: a plan never exceeds `max_step_tokens`; a seated sequence has
one slot, and pages for every token that was launched; every submitted request ends exactly once; free + held = all
pages.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

from slipstream.engine.pages import PagePool
from slipstream.engine.sequences import Group, PartialRollout, Running, Sampled, Sampler, Seat, StepPlan
from slipstream.engine.stopping import StopTexts
from slipstream.types import Request, Rollout

MAX_STOP_TOKENS = 8
"""Of one request: the device compares every sampled token with all of them."""
NOTHING: Sampled = ([], [], [], 0)
"""Of a slot that had ended in a step before."""


class Batcher:
    def __init__(
        self,
        pool: PagePool,
        *,
        num_slots: int,
        max_step_tokens: int,
        max_length: int,
        page_tokens: int,
        stop_texts: StopTexts | None = None,
        fit_drafts: Callable[[int, int], int] = lambda num_tokens, num_drafts: num_drafts,
    ) -> None:
        """`fit_drafts`: how many drafts a step should have, of its other tokens and the drafts it may have."""
        if pool.num_pages * page_tokens < max_length:
            raise ValueError(
                f"{pool.num_pages} pages of {page_tokens} tokens cannot hold one sequence of {max_length} tokens: "
                "raise engine.kv_tokens"
            )
        self.pool = pool
        self.max_step_tokens = max_step_tokens
        self.max_length = max_length
        self.page_tokens = page_tokens
        self._stop_texts = stop_texts
        self._fit_drafts = fit_drafts
        self.admits_fresh = True
        """Whether sequences that have sampled nothing yet may take a free slot."""
        self.num_preempted = 0
        self.num_sampled = 0
        self._seated: dict[str, Running] = {}
        self._groups: deque[Group] = deque()
        self._live: set[str] = set()
        self._free_slots = list(range(num_slots))
        self._seat_numbers = count()
        self._allotted: dict[int, int] = {}
        """By slot: tokens it may run, as the device knows."""
        self._vacated: list[int] = []

    @property
    def num_running(self) -> int:
        return len(self._seated)

    @property
    def num_waiting(self) -> int:
        return sum(len(group.members) for group in self._groups)

    @property
    def has_work(self) -> bool:
        return bool(self._seated or self._groups)

    def submit(self, requests: Sequence[Request]) -> None:
        """One group: requests with the same prompt."""
        prompt_ids = requests[0].prompt_ids
        assert all(request.prompt_ids == prompt_ids for request in requests), "a group shares its prompt"
        for request in requests:
            self._check(request)
        self._live.update(request.uid for request in requests)
        self._groups.append(Group(deque(Running(request) for request in requests)))

    def submit_partial(self, partial: PartialRollout) -> None:
        """Go on with a sequence that another engine began."""
        self._check(partial.request)
        sequence = Running(
            partial.request,
            list(partial.token_ids),
            list(partial.logprobs),
            [0] * len(partial.token_ids),
            partial.first_version,
        )
        if sequence.finish_reason is not None:
            raise ValueError(
                f"request {partial.request.uid}: this rollout has already ended ({sequence.finish_reason})"
            )
        self._live.add(partial.request.uid)
        self._groups.append(Group(deque([sequence])))

    def withdraw(self, uid: str) -> PartialRollout:
        """Take a sequence out, wherever it stands; KeyError if it is not here."""
        self._live.remove(uid)
        sequence = self._seated.get(uid)
        if sequence is not None:
            self._unseat(sequence)
        else:
            sequence = self._leave_group(uid)
        return PartialRollout(
            sequence.request, tuple(sequence.token_ids), tuple(sequence.logprobs), sequence.first_version
        )

    def seated(self) -> list[Running]:
        return list(self._seated.values())

    @property
    def num_begun(self) -> int:
        """Sequences with tokens of their own, seated or preempted."""
        waiting = (member for group in self._groups for member in group.members)
        return sum(sequence.has_begun for sequence in (*self._seated.values(), *waiting))

    def restart_begun(self) -> None:
        """Sequences that have begun lose their tokens and wait to begin again, those of one prompt together."""
        self.send_back_running()
        fresh: dict[tuple[int, ...], Group] = {}
        for group in list(self._groups):
            for member in [member for member in group.members if member.has_begun]:
                group.members.remove(member)
                member.token_ids, member.logprobs, member.origins, member.first_version = [], [], [], -1
                member.met_stop_text = False
                fresh.setdefault(member.request.prompt_ids, Group(deque())).members.append(member)
            self._drop_if_empty(group)
        self._groups.extendleft(reversed(fresh.values()))

    def vacate_again(self, plan: StepPlan) -> None:
        """The device may not have heard of this plan: the next one names its vacated slots once more."""
        self._vacated[:0] = plan.vacated

    def send_back_unbegun(self) -> None:
        """Seated sequences without a token of their own go back to wait: their keys are no longer right."""
        self._send_back(sequence for sequence in self._seated.values() if not sequence.token_ids)

    def send_back_running(self) -> None:
        """Running sequences give up slot and pages, and wait with the tokens they have, oldest first."""
        self._send_back(self._seated.values())

    def forget_prompts(self) -> None:
        """Keys of computed prompts are no longer right for sequences that have not begun."""
        for group in self._groups:
            self.pool.give_back(group.pages)
            group.pages, group.leader = [], None

    def plan(self, max_drafts: int = 0, drafts_each: int = 0) -> StepPlan:
        """Seat who fits; then sequences that decode, oldest served first; then prompts, while tokens are left.

        Sequences that decode may run up to `drafts_each` drafts, `max_drafts` of all together.
        """
        copies: list[tuple[int, int]] = []
        entries: list[tuple[int, int, int]] = []
        seats = self._seat_waiting(copies, entries)
        shares = self._share_out()
        num_due = sum(shares.values())
        max_drafts = min(self._fit_drafts(num_due, max_drafts) if max_drafts else 0, self.max_step_tokens - num_due)
        drafts_each = min(drafts_each, max_drafts)
        drafts: dict[Running, int] = {}
        while shares and not (drafts := self._grow_all(shares, drafts_each, entries)):
            shares = self._share_out()  # all who had a share were preempted: it is the others' turn
        shares = {sequence: shares[sequence] for sequence in drafts}
        samplers: list[Sampler] = []
        allotted: dict[int, int] = {}
        with_cuts, most_drafts = False, 0
        for sequence, tokens in shares.items():
            num_drafts = drafts[sequence]
            sequence.num_launched += tokens
            allotted[sequence.slot] = tokens + num_drafts
            if sequence.num_launched == sequence.num_known:
                sequence.num_unread += 1
                sequence.num_hoped += num_drafts
                most_drafts += num_drafts
                samplers.append((sequence, sequence.seat, num_drafts))
                with_cuts |= sequence.cuts_tail
        changed = [(slot, tokens) for slot, tokens in allotted.items() if tokens != self._allotted.get(slot)]
        changed += [(slot, 0) for slot in self._allotted if slot not in allotted]
        self._allotted = allotted
        vacated, self._vacated = self._vacated, []
        num_drafts = min(max_drafts, most_drafts)
        return StepPlan(
            vacated=tuple(vacated),
            copies=tuple(copies),
            seats=tuple(seat for seat in seats if seat.sequence.slot == seat.slot),
            pages=tuple(entries),
            allotments=tuple(changed),
            samplers=tuple(samplers),
            num_rows=len(shares),
            num_tokens=sum(shares.values()) + num_drafts,
            num_drafts=num_drafts,
            with_cuts=with_cuts,
        )

    def commit(
        self, plan: StepPlan, report: Mapping[int, Sampled], version: int, *, keeps_origins: bool = False
    ) -> list[Rollout]:
        """Take in what slots sampled, and where from if drafts are in use; give back what has ended."""
        finished: list[Rollout] = []
        stop_texts = self._stop_texts
        for sequence, seat, num_drafts in plan.samplers:
            if sequence.seat != seat:
                continue  # taken out meanwhile: the tokens will be computed again
            new, logprobs, origins, _ = report.get(sequence.slot, NOTHING)
            sequence.num_unread -= 1
            sequence.num_hoped -= num_drafts
            sequence.token_ids += new
            sequence.logprobs += logprobs
            if keeps_origins:
                sequence.origins += origins
            sequence.num_launched += len(new) - 1
            self.num_sampled += len(new)
            if sequence.first_version < 0:
                sequence.first_version = version
            if stop_texts is not None and sequence.request.sampling.stop:
                self._look_for_stop_text(stop_texts, sequence, len(new))
            reason = sequence.finish_reason
            if reason is not None:
                self._release(sequence)
                self._live.remove(sequence.request.uid)
                finished.append(sequence.ended(reason, version))
        return finished

    def _look_for_stop_text(self, stop_texts: StopTexts, sequence: Running, num_new: int) -> None:
        """What was sampled beyond the end of a stop text is dropped; the device is told, which does not know of it."""
        stops = sequence.request.sampling.stop
        end = stop_texts.end_of(sequence.token_ids, len(sequence.token_ids) - num_new, stops)
        if end is not None:
            self.num_sampled -= len(sequence.token_ids) - end
            del sequence.token_ids[end:], sequence.logprobs[end:], sequence.origins[end:]
            sequence.met_stop_text = True
            self._vacated.append(sequence.slot)

    def _check(self, request: Request) -> None:
        assert request.uid not in self._live, f"request {request.uid} is already here"
        num_prompt, num_new = len(request.prompt_ids), request.sampling.max_new_tokens
        if num_prompt == 0:
            raise ValueError(f"request {request.uid}: the prompt is empty")
        if num_prompt + num_new > self.max_length:
            raise ValueError(
                f"request {request.uid}: prompt of {num_prompt} tokens + {num_new} new tokens exceed the engine's "
                f"{self.max_length} tokens a sequence; raise engine.max_prompt_tokens or shorten the prompt"
            )
        if len(request.sampling.stop_token_ids) > MAX_STOP_TOKENS:
            raise ValueError(f"request {request.uid}: at most {MAX_STOP_TOKENS} stop tokens, not more")
        if request.sampling.stop and self._stop_texts is None:
            raise ValueError(f"request {request.uid}: sampling.stop needs an engine that can decode")
        if request.script_ids and len(request.script_ids) != num_new:
            raise ValueError(
                f"request {request.uid}: a script of {len(request.script_ids)} tokens needs as many max_new_tokens, "
                f"not {num_new}"
            )

    def _share_out(self) -> dict[Running, int]:
        """How many tokens each sequence runs in this step."""
        budget = self.max_step_tokens
        decoding: list[Running] = []
        in_prompt: dict[Running, int] = {}
        for sequence in self._seated.values():
            due = sequence.num_due
            if due == 1:
                decoding.append(sequence)
            elif due > 1:
                in_prompt[sequence] = due
        shares = dict.fromkeys(decoding[:budget], 1)
        if len(decoding) > budget:  # then the served go to the back, so that everyone's turn comes
            for sequence in shares:
                uid = sequence.request.uid
                self._seated[uid] = self._seated.pop(uid)
        budget -= len(shares)
        for sequence, due in in_prompt.items():
            if budget > 0:
                shares[sequence] = min(due, budget)
                budget -= shares[sequence]
        return shares

    def _seat_waiting(self, copies: list[tuple[int, int]], entries: list[tuple[int, int, int]]) -> list[Seat]:
        seats: list[Seat] = []
        if not self._free_slots or not self._groups:
            return seats
        # A page is left for everyone here who may need one, lest it be preempted at once.
        reserved = sum(self._may_grow(sequence) for sequence in self._seated.values())
        for group in list(self._groups):
            self._collect_prompt(group)
            while group.members and self._free_slots and group.leader is None:
                if not (self.admits_fresh or group.members[0].has_begun):
                    break
                if not self._has_room_for(group, reserved):
                    return seats
                sequence = group.members.popleft()
                self._take_seat(sequence)
                num_shared = self._share_prompt(group, sequence, copies)
                entries += [(sequence.slot, index, page) for index, page in enumerate(sequence.pages)]
                entries += self._grow(sequence, sequence.num_known)
                ids = (*sequence.request.prompt_ids, *sequence.token_ids)
                seats.append(Seat(sequence.slot, sequence, ids, num_shared))
                reserved += self._may_grow(sequence)
                if not group.pages and group.members and len(sequence.request.prompt_ids) > 1:
                    group.leader = sequence
            self._drop_if_empty(group)
        return seats

    def _drop_if_empty(self, group: Group) -> None:
        if not group.members:
            self.pool.give_back(group.pages)
            self._groups.remove(group)

    def _may_grow(self, sequence: Running) -> bool:
        return len(sequence.pages) < self._pages_for(sequence.max_keys)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def _has_room_for(self, group: Group, num_reserved: int) -> bool:
        if not self._seated and self._num_pages_to_seat(group) > self.pool.num_free:
            self.forget_prompts()
        return self._num_pages_to_seat(group) + num_reserved <= self.pool.num_free

    def _num_pages_to_seat(self, group: Group) -> int:
        sequence = group.members[0]
        num_shared = (len(sequence.request.prompt_ids) - 1) // self.page_tokens if group.pages else 0
        return self._pages_for(sequence.num_known) - num_shared

    def _take_seat(self, sequence: Running) -> None:
        sequence.slot, sequence.seat = heapq.heappop(self._free_slots), next(self._seat_numbers)
        self._seated[sequence.request.uid] = sequence

    def _collect_prompt(self, group: Group) -> None:
        """The leader has launched the whole prompt: the group takes hold of the pages its other members need."""
        if group.leader is None or group.leader.num_launched < len(group.leader.request.prompt_ids):
            return
        # The last prompt token is left to each member: its logits are where the member's own first token comes from.
        group.pages = group.leader.pages[: self._pages_for(len(group.leader.request.prompt_ids) - 1)]
        self.pool.share(group.pages)
        group.leader = None

    def _share_prompt(self, group: Group, sequence: Running, copies: list[tuple[int, int]]) -> int:
        """Give a member the group's prompt; the number of tokens it need not compute."""
        if not group.pages:
            return 0
        num_shared = len(sequence.request.prompt_ids) - 1
        whole = num_shared // self.page_tokens
        sequence.pages = group.pages[:whole]
        self.pool.share(sequence.pages)
        for page in group.pages[whole:]:
            own = self.pool.take(1)
            copies.append((page, own[0]))
            sequence.pages = sequence.pages + own
        sequence.num_launched = num_shared
        return num_shared

    def _grow_all(
        self, shares: dict[Running, int], drafts_each: int, entries: list[tuple[int, int, int]]
    ) -> dict[Running, int]:
        """Pages for what each is to run; those who were not preempted for others, and the drafts each may run."""
        drafts = {}
        page_tokens = self.page_tokens
        num_preempted = self.num_preempted
        for sequence, tokens in shares.items():
            if sequence.seat < 0:
                continue
            hoped = sequence.num_launched + sequence.num_hoped + tokens
            room = len(sequence.pages) * page_tokens
            num_drafts = 0
            if drafts_each and tokens == 1 and sequence.num_due == 1:
                # Only for one who decodes, not beyond the last token it may sample, and never at another's cost.
                num_drafts = sequence.max_keys - hoped
                if num_drafts > drafts_each:
                    num_drafts = drafts_each
                if num_drafts < 0 or hoped + num_drafts > room + self.pool.num_free * page_tokens:
                    num_drafts = 0
            drafts[sequence] = num_drafts
            hoped += num_drafts
            if hoped > room:
                entries += self._grow(sequence, min(hoped, sequence.max_keys))
        if self.num_preempted == num_preempted:
            return drafts
        return {sequence: count for sequence, count in drafts.items() if sequence.seat >= 0}

    def _grow(self, sequence: Running, num_tokens: int) -> list[tuple[int, int, int]]:
        """Pages for the first `num_tokens` tokens, from younger sequences if need be; the new table entries.

        Empty and the sequence unseated if it is itself the youngest and nothing is left for it.
        """
        needed = self._pages_for(num_tokens) - len(sequence.pages)
        while needed > self.pool.num_free:
            youngest = max(self._seated.values(), key=lambda other: other.seat)
            if youngest is sequence and len(self._seated) == 1:
                self.forget_prompts()
                assert needed <= self.pool.num_free, "one sequence fits into all pages"
                break
            self.num_preempted += 1
            self._send_back([youngest])
            if youngest is sequence:
                return []
        if needed <= 0:
            return []
        first, slot, pages = len(sequence.pages), sequence.slot, self.pool.take(needed)
        sequence.pages += pages
        return [(slot, index, page) for index, page in enumerate(pages, first)]

    def _send_back(self, sequences: Iterable[Running]) -> None:
        """Out of their slots, first in the queue, the oldest at its head: keys are computed again, tokens stay."""
        for sequence in sorted(sequences, key=lambda sequence: -sequence.seat):
            self._unseat(sequence)
            self._groups.appendleft(Group(deque([sequence])))

    def _unseat(self, sequence: Running) -> None:
        for group in self._groups:
            if group.leader is sequence:
                group.leader = None  # another member computes the prompt
        self._vacated.append(sequence.slot)
        self._release(sequence)
        sequence.num_launched = sequence.num_unread = sequence.num_hoped = 0

    def _release(self, sequence: Running) -> None:
        """Slot and pages are free again. A leader that ends has launched its prompt: its group takes pages first."""
        for group in self._groups:
            if group.leader is sequence:
                self._collect_prompt(group)
        del self._seated[sequence.request.uid]
        self.pool.give_back(sequence.pages)
        self._allotted.pop(sequence.slot, None)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.pages, sequence.slot, sequence.seat = [], -1, -1

    def _leave_group(self, uid: str) -> Running:
        for group in self._groups:
            for member in group.members:
                if member.request.uid == uid:
                    group.members.remove(member)
                    self._drop_if_empty(group)
                    return member
        raise AssertionError(f"{uid} is live but nowhere")
