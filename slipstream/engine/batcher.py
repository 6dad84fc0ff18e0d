"""Continuous batching: who sits in which slot, with which pages, and how many tokens each runs next. No tensors.

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

Axes: S slots, R sequences that run with a plan.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

import numpy as np

from slipstream.engine.pages import PagePool
from slipstream.engine.sequences import Group, Ints, PartialRollout, Report, Running, Seating, StepPlan, no_changes
from slipstream.engine.slots import MAX_STOP_TOKENS, Shares, SlotTable
from slipstream.engine.stopping import StopTexts
from slipstream.types import Request, Rollout

BEHIND_STEPS = 16
"""Steps after which it is looked again who is behind."""


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
        keeps_origins: bool = False,
        others_follow: bool = False,
        fit_drafts: Callable[[int, int], int] = lambda num_tokens, num_drafts: num_drafts,
    ) -> None:
        """`keeps_origins`: rollouts say of each token where it came from. `others_follow`: they wait
        elsewhere. `fit_drafts`: how many drafts a step should have, of its other tokens and the drafts it may have."""
        if pool.num_pages * page_tokens < max_length:
            raise ValueError(
                f"{pool.num_pages} pages of {page_tokens} tokens cannot hold one sequence of {max_length} tokens: "
                "raise engine.kv_tokens"
            )
        self.pool = pool
        self.max_step_tokens = max_step_tokens
        self.max_length = max_length
        self.page_tokens = page_tokens
        self._stop_texts, self._keeps_origins, self._others_follow = stop_texts, keeps_origins, others_follow
        self._fit_drafts = fit_drafts
        self.admits_fresh = True
        """Whether sequences that have sampled nothing yet may take a free slot."""
        self.num_preempted = 0
        self.num_sampled = 0
        self.tokens_behind: float | None = None
        """That sequences which are behind by now got in the step that was read last, on average; None: nobody is."""
        self._num_plans = 0
        """Of those that may draft."""
        self._seated: dict[str, Running] = {}
        self._at: dict[int, Running] = {}
        """The same, by slot."""
        self._table = SlotTable(num_slots, max_length)
        self._groups: deque[Group] = deque()
        self._live: set[str] = set()
        self._free_slots = list(range(num_slots))
        self._seating: Seating | None = None
        """Of those whom `seat` has seated; the next plan tells of them."""
        self._seat_numbers = count()
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
            list(partial.log_kept),
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
            sequence.request,
            tuple(sequence.token_ids),
            tuple(sequence.logprobs),
            sequence.first_version,
            tuple(sequence.log_kept),
        )

    def grown_since(self, known: Mapping[str, int]) -> list[PartialRollout]:
        """What sequences that are running have beyond the number of tokens that is known of each."""
        grown = (self._table.sampled_from(one, known.get(uid, 0)) for uid, one in self._seated.items())
        return [partial for partial in grown if partial.token_ids]

    @property
    def num_begun(self) -> int:
        """Sequences with tokens of their own, or that will have some after the steps launched so far."""
        waiting = sum(bool(member.token_ids) for group in self._groups for member in group.members)
        known = self._table["known"].tolist()
        return waiting + sum(known[one.slot] > len(one.request.prompt_ids) for one in self._seated.values())

    def restart_begun(self) -> None:
        """Sequences that have begun lose their tokens and wait to begin again, those of one prompt together."""
        self.send_back_running()
        fresh: dict[tuple[int, ...], Group] = {}
        for group in list(self._groups):
            for member in [member for member in group.members if member.token_ids]:
                group.members.remove(member)
                member.token_ids, member.logprobs, member.origins, member.log_kept = [], [], [], []
                member.first_version = -1
                fresh.setdefault(member.request.prompt_ids, Group(deque())).members.append(member)
            self._drop_if_empty(group)
        self._groups.extendleft(reversed(fresh.values()))

    def vacate_again(self, plan: StepPlan) -> None:
        """The device may not have heard of this plan: the next one names its vacated slots once more."""
        self._vacated[:0] = plan.vacated

    def send_back_unbegun(self) -> None:
        """Seated sequences without a token of their own go back to wait: their keys are no longer right."""
        self._send_back(sequence for sequence in self._seated.values() if not self._table.num_sampled(sequence))

    def send_back_running(self) -> None:
        """Running sequences give up slot and pages, and wait with the tokens they have, oldest first."""
        self._send_back(self._seated.values())

    def forget_prompts(self) -> None:
        """Keys of computed prompts are no longer right for sequences that have not begun."""
        for group in self._groups:
            self.pool.give_back(group.pages)
            group.pages, group.leader = [], None

    def seat(self) -> None:
        """Who fits takes a slot, so that it is known how many the next plan is for; else the plan does that itself."""
        self._seating = self._seating or self._seat_waiting()

    def plan(self, max_drafts: int = 0, drafts_each: int = 0) -> StepPlan:
        """Sequences that decode, oldest served first; then prompts, while tokens are left.

        Sequences that decode may run up to `drafts_each` drafts, `max_drafts` of all together.
        """
        seating, self._seating = self._seating or self._seat_waiting(), None
        copies, entries = seating.copies, seating.entries
        shares = self._table.share_out(self.max_step_tokens)
        num_due = shares.num_tokens
        max_drafts = min(self._fit_drafts(num_due, max_drafts) if max_drafts else 0, self.max_step_tokens - num_due)
        shares, drafts_R = self._grow_all(shares, min(drafts_each, max_drafts), entries)
        samplers, allotments = self._table.launch(shares, drafts_R)
        vacated, self._vacated = self._vacated, []
        num_drafts = min(max_drafts, int(samplers.drafts_R.sum())) if max_drafts else 0
        return StepPlan(
            vacated=tuple(vacated),
            copies=tuple(copies),
            seats=tuple(seat for seat in seating.seats if seat.sequence.slot == seat.slot),
            pages=tuple(entries),
            allotments=allotments,
            behind=self._look_who_is_behind() if drafts_each else no_changes(),
            samplers=samplers,
            num_rows=len(shares.slot_R),
            num_tokens=shares.num_tokens + num_drafts,
            num_drafts=num_drafts,
            with_cuts=bool(self._table["cuts_tail"][samplers.slot_R].any()),
        )

    def _look_who_is_behind(self) -> Ints:
        """Now and then, since each time the device has to be told. While others will have the slots, nobody is."""
        self._num_plans += 1
        if self._num_plans % BEHIND_STEPS:
            return no_changes()
        return self._table.note_behind(are_any=not self.others_follow)

    @property
    def others_follow(self) -> bool:
        """Whether a slot that gets free is taken by another."""
        return self._others_follow or (bool(self._groups) and self.admits_fresh)

    def has_pages_for(self, num_tokens: int) -> bool:
        """Whether all who are here could have so many more without anybody giving up pages."""
        slots, table = self._table.in_turn, self._table
        keys = np.minimum(table["known"][slots] - 1 + table["hoped"][slots] + num_tokens, table["max_keys"][slots])
        short = np.maximum(keys - table["paged"][slots], 0)
        return int((-(-short // self.page_tokens)).sum()) <= self.pool.num_free

    def commit(self, plan: StepPlan, report: Report, version: int) -> list[Rollout]:
        """Take in what slots sampled; give back what has ended."""
        taken_in = self._table.take_in(plan.samplers, report, version)
        self.num_sampled += taken_in.num_tokens
        self.tokens_behind = taken_in.tokens_behind / taken_in.num_behind if taken_in.num_behind else None
        finished: list[Rollout] = []
        for slot, num_new, is_stopped in taken_in.ended:
            sequence = self._at[slot]
            if sequence.request.sampling.stop:
                is_stopped |= self._met_stop_text(sequence, num_new)
            if is_stopped or self._table["left"][slot] <= 0:
                self._release(sequence)
                self._live.remove(sequence.request.uid)
                finished.append(sequence.ended("stop" if is_stopped else "length", version))
        return finished

    def uids_of(self, plan: StepPlan, slots: Sequence[int]) -> list[str]:
        """Of the sequences that sampled with this plan in these slots and are still there."""
        seats = dict(zip(plan.samplers.slot_R.tolist(), plan.samplers.seat_R.tolist(), strict=True)) if slots else {}
        here = [self._at[slot] for slot in slots if slot in self._at]
        return [sequence.request.uid for sequence in here if seats.get(sequence.slot) == sequence.seat]

    def _met_stop_text(self, sequence: Running, num_new: int) -> bool:
        """What was sampled beyond the end of a stop text is dropped; the device is told, which does not know of it."""
        stop_texts, stops = self._stop_texts, sequence.request.sampling.stop
        assert stop_texts is not None, "such a request was refused"
        num_old = self._table.num_sampled(sequence) - num_new
        first = max(0, num_old - stop_texts.reach(stops))
        tokens = self._table.sampled_from(sequence, first).token_ids
        end = stop_texts.end_of(tokens, num_old - first, stops)
        if end is None:
            return False
        self.num_sampled -= len(tokens) - end
        self._table["new"][sequence.slot] -= len(tokens) - end
        self._vacated.append(sequence.slot)
        return True

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

    def _seat_waiting(self) -> Seating:
        seating = Seating()
        if not self._free_slots or not self._groups:
            return seating
        # A page is left for everyone here who may need one, lest it be preempted at once.
        slots, paged, max_keys = self._table.in_turn, self._table["paged"], self._table["max_keys"]
        reserved = int((paged[slots] < max_keys[slots]).sum())
        for group in list(self._groups):
            self._collect_prompt(group)
            while group.members and self._free_slots and group.leader is None:
                if not (self.admits_fresh or group.members[0].token_ids):
                    break
                if not self._has_room_for(group, reserved):
                    return seating
                sequence = group.members.popleft()
                num_shared = self._take_seat(group, sequence, seating.copies)
                seating.entries += [(sequence.slot, index, page) for index, page in enumerate(sequence.pages)]
                seating.entries += self._grow(sequence, sequence.num_known)
                seating.add(sequence, num_shared)
                reserved += len(sequence.pages) * self.page_tokens < sequence.max_keys
                if not group.pages and group.members and len(sequence.request.prompt_ids) > 1:
                    group.leader = sequence
            self._drop_if_empty(group)
        return seating

    def _drop_if_empty(self, group: Group) -> None:
        if not group.members:
            self.pool.give_back(group.pages)
            self._groups.remove(group)

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

    def _take_seat(self, group: Group, sequence: Running, copies: list[tuple[int, int]]) -> int:
        """With what the group has computed of the prompt; the number of tokens it need not compute."""
        sequence.slot, sequence.seat = heapq.heappop(self._free_slots), next(self._seat_numbers)
        self._seated[sequence.request.uid] = self._at[sequence.slot] = sequence
        num_shared = self._share_prompt(group, sequence, copies)
        self._table.seat(sequence, num_computed=num_shared, num_paged=len(sequence.pages) * self.page_tokens)
        return num_shared

    def _collect_prompt(self, group: Group) -> None:
        """The leader has launched the whole prompt: the group takes hold of the pages its other members need."""
        if group.leader is None:
            return
        if self._table["launched"][group.leader.slot] < len(group.leader.request.prompt_ids):
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
        return num_shared

    def _grow_all(self, shares: Shares, drafts_each: int, entries: list[tuple[int, int, int]]) -> tuple[Shares, Ints]:
        """Pages for what each is to run, at the cost of the youngest if need be; the shares of those who are left, and
        how many drafts each may run, which are never at another's cost."""
        drafts_R, needed_R = self._table.reach(shares, drafts_each)
        paged_R = self._table["paged"][shares.slot_R]
        short = (needed_R > paged_R).nonzero()[0]
        rows = list(zip(short.tolist(), shares.slot_R[short].tolist(), needed_R[short].tolist(), strict=True))
        num_pages = sum(self._pages_for(needed) - len(self._at[slot].pages) for _, slot, needed in rows)
        if num_pages <= self.pool.num_free:
            for _, slot, needed in rows:
                entries += self._grow(self._at[slot], needed)
            return shares, drafts_R
        for row, slot, needed in rows:
            if slot not in self._at:
                continue  # preempted for another
            if needed > paged_R[row] + self.pool.num_free * self.page_tokens:
                needed, drafts_R[row] = needed - drafts_R[row], 0
            if needed > paged_R[row]:
                entries += self._grow(self._at[slot], int(needed))
        are_here_R = self._table["seat"][shares.slot_R] >= 0
        if len(are_here_R) and not are_here_R.any():  # then it is the turn of those who had no share
            return self._grow_all(self._table.share_out(self.max_step_tokens), drafts_each, entries)
        return shares.of(are_here_R), drafts_R[are_here_R]

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
        self._table["paged"][slot] = len(sequence.pages) * self.page_tokens
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

    def _release(self, sequence: Running) -> None:
        """Slot and pages are free again. A leader that ends has launched its prompt: its group takes pages first."""
        for group in self._groups:
            if group.leader is sequence:
                self._collect_prompt(group)
        del self._seated[sequence.request.uid], self._at[sequence.slot]
        self._table.vacate(sequence, keeps_origins=self._keeps_origins)
        self.pool.give_back(sequence.pages)
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
