"""A bench for the batcher: an oracle that knows what each request must become, and a device that remembers what was
written."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from reports import report_of

from slipstream.engine.batcher import Batcher
from slipstream.engine.pages import PagePool
from slipstream.engine.sequences import PartialRollout, Running, StepPlan
from slipstream.rng import derive_seed
from slipstream.types import Request, Rollout, SamplingParams

STOP = 0
PAGE_TOKENS = 4
MAX_LENGTH = 40


def drawn(request: Request, index: int) -> int:
    """The fake model: token `index` of a request, one in six a stop token."""
    return derive_seed(request.uid, index) % 6 and 1000 + derive_seed(request.uid, "token", index) % 1000


def expected(request: Request) -> tuple[int, ...]:
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_new_tokens and not (
        tokens and tokens[-1] in request.sampling.stop_token_ids
    ):
        tokens.append(drawn(request, len(tokens)))
    return tuple(tokens)


def make_group(name: str, num_members: int, prompt_tokens: int, max_new_tokens: int) -> list[Request]:
    prompt = tuple(derive_seed(name, place) % 1000 + 5000 for place in range(prompt_tokens))
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(STOP,))
    return [Request(f"{name}.{member}", name, prompt, 0, sampling) for member in range(num_members)]


@dataclass
class DeviceSlot:
    """What the device knows of a slot; it ends a sequence by itself, before the host hears of it."""

    sequence: Running
    tokens: list[int]
    computed: int
    live: bool = True
    pages: dict[int, int] = field(default_factory=dict)


class Bench:
    """A batcher with a fake device, whose pages hold tokens instead of keys; asserts the invariants at every step.

    `lag`: how many steps are launched before the results of one are committed. `drafts`: of one step at most, and of
    one sequence.
    """

    def __init__(
        self,
        num_pages: int,
        max_step_tokens: int,
        num_slots: int = 99,
        lag: int = 0,
        drafts: tuple[int, int] = (0, 0),
    ) -> None:
        self.drafts = drafts
        self.gained = 0
        self.keeps_origins = drafts != (0, 0)
        self.batcher = make_batcher(num_pages, max_step_tokens, num_slots, keeps_origins=self.keeps_origins)
        self.lag = lag
        self.pages: list[list[int]] = [[-1] * PAGE_TOKENS for _ in range(num_pages)]
        self.slots: dict[int, DeviceSlot] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.allotted: dict[int, int] = {}
        self.behind: dict[int, int] = {}
        self.unread: deque[tuple[StepPlan, dict[int, list[int]], int]] = deque()
        self.alive: dict[str, Request] = {}
        self.away: list[PartialRollout] = []
        self.done: dict[str, Rollout] = {}
        self.computed = 0
        self.version = 0
        self.is_seated = False
        """Since the last plan: if all have left who then had a slot, the plan is empty."""

    def submit(self, requests: list[Request]) -> None:
        self.batcher.submit(requests)
        self.alive |= {request.uid: request for request in requests}

    def withdraw(self, uid: str) -> PartialRollout:
        partial = self.batcher.withdraw(uid)
        request = self.alive.pop(uid)
        assert partial.request == request
        assert partial.token_ids == expected(request)[: len(partial.token_ids)]
        self.away.append(partial)
        return partial

    def bring_back(self) -> None:
        partial = self.away.pop()
        self.batcher.submit_partial(partial)
        self.alive[partial.request.uid] = partial.request

    def seat(self) -> None:
        self.batcher.seat()
        self.is_seated = True

    def step(self) -> StepPlan:
        may_be_empty = self.is_seated and not self.batcher.num_running
        self.is_seated = False
        plan = self.batcher.plan(*self.drafts)
        assert plan.num_drafts <= self.drafts[0]
        assert plan.num_tokens <= self.batcher.max_step_tokens
        self.check_books()
        self.version += 1
        self.take_in(plan)
        if plan.num_tokens:
            self.unread.append((plan, self.run(plan), self.version))
        else:
            assert self.unread or may_be_empty or not self.batcher.has_work, "work is left, but the plan is empty"
        while len(self.unread) > (self.lag if plan.num_tokens else 0):
            self.read()
        return plan

    def take_in(self, plan: StepPlan) -> None:
        for slot in plan.vacated:
            if slot in self.slots:  # not if it was taken and given up in one plan, of which the device never heard
                self.slots[slot].live = False
        contents = [list(self.pages[source]) for source, _ in plan.copies]
        for (_, target), content in zip(plan.copies, contents, strict=True):
            self.pages[target] = content
        for seat in plan.seats:
            assert seat.slot not in self.slots or not self.slots[seat.slot].live, "a slot is taken twice"
            self.slots[seat.slot] = DeviceSlot(seat.sequence, list(seat.token_ids), seat.num_computed)
            self.allotted.pop(seat.slot, None)
        assert len({(slot, index) for slot, index, _ in plan.pages}) == len(plan.pages), "an order no device keeps"
        for slot, index, page in plan.pages:
            self.tables.setdefault(slot, {})[index] = page
        self.behind.update(plan.behind.tolist())
        known = dict(enumerate(self.batcher._table["is_behind"].tolist()))
        assert all(value in (-1, self.behind.get(slot, 0)) for slot, value in known.items()), "the device knows better"
        self.allotted |= dict(plan.allotments.tolist())

    def run(self, plan: StepPlan) -> dict[int, list[int]]:
        """Every live slot runs its allotted tokens, some with drafts, right and wrong; what was sampled, by slot."""
        report: dict[int, list[int]] = {}
        num_tokens = num_rows = num_drafts = 0
        for number, slot in self.slots.items():
            due = len(slot.tokens) - slot.computed
            count = min(self.allotted[number], due) if slot.live else 0
            num_tokens, num_rows = num_tokens + count, num_rows + (count > 0)
            samples = count > 0 and count == due
            drafts: list[int] = []
            if samples and due == 1:
                drafts = self.guess(slot, min(self.allotted[number] - 1, plan.num_drafts - num_drafts))
                num_drafts += len(drafts)
            ran = (slot.tokens + drafts)[slot.computed : slot.computed + count + len(drafts)]
            for at, token in enumerate(ran, slot.computed):
                self.pages[self.tables[number][at // PAGE_TOKENS]][at % PAGE_TOKENS] = token
            slot.computed += count
            if samples:
                report[number] = self.sample(number, slot, drafts)
        self.computed += num_tokens
        assert num_tokens + num_drafts <= plan.num_tokens and num_rows <= plan.num_rows, (
            "the host's sizes are too small"
        )
        return report

    def guess(self, slot: DeviceSlot, most: int) -> list[int]:
        """What comes next, as far as a die says, and sometimes wrong."""
        request, known = slot.sequence.request, len(slot.tokens)
        most = min(most, len(request.prompt_ids) + request.sampling.max_new_tokens - known - 1)
        dice = derive_seed(request.uid, known, self.version)
        right = [drawn(request, known - len(request.prompt_ids) + ahead) for ahead in range(dice % (most + 1))]
        return [token if derive_seed(token, self.version) % 4 else -7 for token in right]

    def sample(self, number: int, slot: DeviceSlot, drafts: list[int]) -> list[int]:
        """One token after those known, and one more after each draft that was right."""
        request, new = slot.sequence.request, list[int]()
        for draft in (*drafts, None):
            known = len(slot.tokens)
            seen = [self.pages[self.tables[number][at // PAGE_TOKENS]][at % PAGE_TOKENS] for at in range(known)]
            assert seen == slot.tokens, "a sequence samples from its own tokens, all of them"
            token = drawn(request, known - len(request.prompt_ids))
            slot.tokens.append(token)
            new.append(token)
            over = (
                token in request.sampling.stop_token_ids
                or known + 1 == len(request.prompt_ids) + request.sampling.max_new_tokens
            )
            slot.live = not over
            if over or token != draft:
                break
        slot.computed = len(slot.tokens) - 1
        self.gained += len(new) - 1
        return new

    def read(self) -> None:
        plan, report, version = self.unread.popleft()
        lines = {
            slot: (tokens, [float(token) for token in tokens], [token % 5 for token in tokens], 0)
            for slot, tokens in report.items()
        }
        for rollout in self.batcher.commit(plan, report_of(lines), version):
            assert rollout.request.uid not in self.done, "every request ends once"
            self.done[rollout.request.uid] = rollout
            del self.alive[rollout.request.uid]
        self.check_books()

    def check_books(self) -> None:
        batcher = self.batcher
        assert batcher.pool.num_free + batcher.pool.num_held == batcher.pool.num_pages
        held: set[int] = set()
        for sequence in batcher._seated.values():
            table, slot = batcher._table, sequence.slot
            most = min(table["launched"][slot] + table["hoped"][slot], sequence.max_keys)
            assert len(sequence.pages) * PAGE_TOKENS == table["paged"][slot] >= most
            assert batcher._at[slot] is sequence and table["seat"][slot] == sequence.seat
            held.update(sequence.pages)
        for group in batcher._groups:
            held.update(group.pages)
        assert len(held) == batcher.pool.num_held, "a held page has a holder"
        slots = [sequence.slot for sequence in batcher._seated.values()]
        assert len(set(slots)) == len(slots) and not set(slots) & set(batcher._free_slots)
        assert sorted(slots) == sorted(batcher._table.in_turn.tolist()) == sorted(batcher._at)
        assert batcher.num_running + batcher.num_waiting == len(self.alive)

    def finish(self) -> None:
        while self.away:
            self.bring_back()
        for _ in range(9000):
            if not self.batcher.has_work:
                break
            self.step()
        assert not self.alive and self.batcher.pool.num_free == self.batcher.pool.num_pages
        for rollout in self.done.values():
            assert rollout.token_ids == expected(rollout.request)
            assert rollout.logprobs == tuple(float(token) for token in rollout.token_ids)
            assert len(rollout.origins) == (len(rollout.token_ids) if self.keeps_origins else 0)
            pairs = zip(rollout.origins, rollout.token_ids, strict=False)
            assert all(origin in (0, token % 5) for origin, token in pairs), "0 of what was brought along"
            stopped = rollout.token_ids[-1] in rollout.request.sampling.stop_token_ids
            assert rollout.finish_reason == ("stop" if stopped else "length")
            assert 1 <= rollout.first_version <= rollout.last_version <= self.version


def make_batcher(num_pages: int, max_step_tokens: int, num_slots: int = 99, **changes: Any) -> Batcher:
    return Batcher(
        PagePool(num_pages),
        num_slots=num_slots,
        max_step_tokens=max_step_tokens,
        max_length=MAX_LENGTH,
        page_tokens=PAGE_TOKENS,
        **changes,
    )


Budgets = tuple[int, int, int, int, tuple[int, int]]
