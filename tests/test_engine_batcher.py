"""The batcher against an oracle that knows what each request must become, and a device that remembers what was written.

The words of the module's head: a plan never exceeds `max_step_tokens`; a seated sequence has one slot, and pages for
every token that was launched; every submitted request ends exactly once; free + held = all pages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        self.batcher = make_batcher(num_pages, max_step_tokens, num_slots)
        self.lag = lag
        self.pages: list[list[int]] = [[-1] * PAGE_TOKENS for _ in range(num_pages)]
        self.slots: dict[int, DeviceSlot] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.allotted: dict[int, int] = {}
        self.unread: deque[tuple[StepPlan, dict[int, list[int]], int]] = deque()
        self.alive: dict[str, Request] = {}
        self.away: list[PartialRollout] = []
        self.done: dict[str, Rollout] = {}
        self.computed = 0
        self.version = 0

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

    def step(self) -> StepPlan:
        plan = self.batcher.plan(*self.drafts)
        assert plan.num_drafts <= self.drafts[0]
        assert plan.num_tokens <= self.batcher.max_step_tokens
        self.check_books()
        self.version += 1
        self.take_in(plan)
        if plan.num_tokens:
            self.unread.append((plan, self.run(plan), self.version))
        else:
            assert self.unread or not self.batcher.has_work, "work is left, but the plan is empty"
        while len(self.unread) > (self.lag if plan.num_tokens else 0):
            self.read()
        return plan

    def take_in(self, plan: StepPlan) -> None:
        for slot in plan.vacated:
            self.slots[slot].live = False
        contents = [list(self.pages[source]) for source, _ in plan.copies]
        for (_, target), content in zip(plan.copies, contents, strict=True):
            self.pages[target] = content
        for seat in plan.seats:
            assert seat.slot not in self.slots or not self.slots[seat.slot].live, "a slot is taken twice"
            self.slots[seat.slot] = DeviceSlot(seat.sequence, list(seat.token_ids), seat.num_computed)
            self.allotted[seat.slot] = 0
        assert len({(slot, index) for slot, index, _ in plan.pages}) == len(plan.pages), "an order no device keeps"
        for slot, index, page in plan.pages:
            self.tables.setdefault(slot, {})[index] = page
        self.allotted |= dict(plan.allotments)

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
        tokens = [report.get(slot, []) for slot in range(200)]
        logprobs = [[float(token) for token in line] for line in tokens]
        for rollout in self.batcher.commit(plan, tokens, logprobs, version):
            assert rollout.request.uid not in self.done, "every request ends once"
            self.done[rollout.request.uid] = rollout
            del self.alive[rollout.request.uid]
        self.check_books()

    def check_books(self) -> None:
        batcher = self.batcher
        assert batcher.pool.num_free + batcher.pool.num_held == batcher.pool.num_pages
        held: set[int] = set()
        for sequence in batcher._seated.values():
            most = min(sequence.num_launched + sequence.num_hoped, sequence.max_keys)
            assert len(sequence.pages) * PAGE_TOKENS >= most
            held.update(sequence.pages)
        for group in batcher._groups:
            held.update(group.pages)
        assert len(held) == batcher.pool.num_held, "a held page has a holder"
        slots = [sequence.slot for sequence in batcher._seated.values()]
        assert len(set(slots)) == len(slots) and not set(slots) & set(batcher._free_slots)
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


def served(budgets: Budgets, sizes: list[tuple[int, int, int]]) -> tuple[Bench, list[list[Request]]]:
    """A bench that has finished groups of these sizes, and the groups."""
    bench = Bench(*budgets)
    groups = [make_group(f"g{number}", *size) for number, size in enumerate(sizes)]
    for requests in groups:
        bench.submit(requests)
    bench.finish()
    return bench, groups


SIZES = st.tuples(st.integers(1, 6), st.integers(1, 20), st.integers(1, 20))
DRAFTS = st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 20), st.integers(1, 5)))
BUDGETS = st.tuples(st.integers(10, 40), st.integers(1, 24), st.integers(1, 9), st.integers(0, 2), DRAFTS)
AMPLE = st.tuples(st.just(400), st.integers(1, 24), st.integers(1, 30), st.integers(0, 2), DRAFTS)


@settings(max_examples=150, deadline=None)
@given(BUDGETS, st.lists(SIZES, min_size=1, max_size=6))
def test_every_request_ends_once_however_few_pages_there_are(
    budgets: Budgets, sizes: list[tuple[int, int, int]]
) -> None:
    bench, groups = served(budgets, sizes)
    assert set(bench.done) == {request.uid for requests in groups for request in requests}


@settings(max_examples=100, deadline=None)
@given(AMPLE, st.lists(SIZES, min_size=1, max_size=6))
def test_with_pages_for_all_every_prompt_is_computed_once_but_for_its_last_token(
    budgets: Budgets, sizes: list[tuple[int, int, int]]
) -> None:
    bench, groups = served(budgets, sizes)
    assert bench.batcher.num_preempted == 0
    prompts = sum(len(requests[0].prompt_ids) + len(requests) - 1 for requests in groups)
    decoded = sum(len(rollout.token_ids) - 1 for rollout in bench.done.values())
    assert bench.computed == prompts + decoded - bench.gained


ACTS = st.one_of(
    SIZES.map(lambda size: ("submit", size)),
    st.just(("step", None)),
    st.integers(0, 99).map(lambda which: ("withdraw", which)),
    st.just(("bring back", None)),
    st.just(("forget prompts", None)),
    st.just(("send all back", None)),
    st.just(("send unbegun back", None)),
    st.just(("restart", None)),
)


@settings(max_examples=300, deadline=None)
@given(BUDGETS, st.lists(ACTS, max_size=40))
def test_sequences_may_leave_and_come_back_at_any_time(budgets: Budgets, acts: list[tuple[str, object]]) -> None:
    bench, submitted = Bench(*budgets), set()
    for number, (act, detail) in enumerate(acts):
        if act == "submit":
            requests = make_group(f"g{number}", *detail)  # type: ignore[misc]
            bench.submit(requests)
            submitted |= {request.uid for request in requests}
        elif act == "withdraw" and bench.alive:
            bench.withdraw(sorted(bench.alive)[detail % len(bench.alive)])  # type: ignore[operator]
        elif act == "bring back" and bench.away:
            bench.bring_back()
        elif act == "forget prompts":
            bench.batcher.forget_prompts()
        elif act == "send all back":
            bench.batcher.send_back_running()
        elif act == "send unbegun back":
            bench.batcher.send_back_unbegun()
        elif act == "restart":
            bench.batcher.restart_begun()
        elif act == "step":
            bench.step()
        bench.check_books()
    bench.finish()
    assert set(bench.done) == submitted


def test_under_pressure_the_youngest_give_way_and_the_oldest_never_does() -> None:
    bench = Bench(num_pages=12, max_step_tokens=64)
    sampling = SamplingParams(max_new_tokens=30)
    requests = [Request(f"r{n}", f"g{n}", (5000 + n,) * 8, 0, sampling) for n in range(4)]
    for request in requests:
        bench.submit([request])
    while len(bench.done) < 1:
        bench.step()
    assert set(bench.done) == {"r0"} and bench.batcher.num_preempted > 0


def test_new_weights_may_restart_what_is_running() -> None:
    bench = Bench(num_pages=40, max_step_tokens=64)
    requests = [Request(f"r{n}", "g", (7, 8), 0, SamplingParams(max_new_tokens=30)) for n in range(3)]
    bench.submit(requests)
    for _ in range(5):
        bench.step()
    bench.batcher.restart_begun()
    assert bench.batcher.num_running == 0 and bench.batcher.num_waiting == 3
    version = bench.version
    bench.finish()
    assert all(rollout.first_version > version for rollout in bench.done.values())


def test_only_what_has_begun_is_seated_while_nothing_fresh_is_admitted() -> None:
    bench = Bench(num_pages=40, max_step_tokens=64)
    bench.submit(make_group("g", 2, 3, 4))
    bench.batcher.admits_fresh = False
    assert bench.batcher.plan().num_tokens == 0
    bench.batcher.admits_fresh = True
    for _ in range(3):
        bench.step()
    bench.submit(make_group("h", 2, 3, 4))
    bench.batcher.send_back_running()
    bench.batcher.admits_fresh = False
    while bench.batcher.num_begun:
        bench.step()
    assert {uid[0] for uid in bench.done} == {"g"}, "what has begun ends, and nothing else begins"
    bench.batcher.admits_fresh = True
    bench.finish()


def test_drafts_give_several_tokens_a_step_and_never_cost_another_its_pages() -> None:
    requests = [Request(f"r{n}", f"g{n}", (5000 + n,) * 4, 0, SamplingParams(max_new_tokens=36)) for n in range(3)]
    steps = {}
    for drafts in ((0, 0), (12, 4)):
        bench = Bench(num_pages=30, max_step_tokens=64, drafts=drafts)
        for request in requests:
            bench.submit([request])
        while bench.batcher.has_work:
            bench.step()
        steps[drafts] = bench.version
        assert bench.batcher.num_preempted == 0 and (bench.gained > 0) == (drafts != (0, 0))
    assert steps[12, 4] < 0.7 * steps[0, 0]


def test_drafts_give_way_to_prompts_so_that_a_step_stays_as_large() -> None:
    batcher = make_batcher(40, 64, 99, fit_drafts=lambda num_tokens, num_drafts: min(num_drafts, 12 - num_tokens))
    for number, prompt_tokens in enumerate((1, 5)):
        batcher.submit(make_group(f"g{number}", 1, prompt_tokens, 30))
        plan = batcher.plan(11, 11)
        batcher.commit(plan, [[7]] * 99, [[0.0]] * 99, 0)
        assert plan.num_tokens == 12 and plan.num_drafts == (11 if number == 0 else 6)


def test_slots_that_the_device_has_not_heard_of_are_vacated_by_the_next_plan() -> None:
    bench = Bench(num_pages=40, max_step_tokens=64)
    bench.submit([Request(f"r{n}", "g", (7, 8), 0, SamplingParams(max_new_tokens=30)) for n in range(3)])
    for _ in range(3):
        bench.step()
    slot = bench.batcher._seated["r2"].slot
    bench.withdraw("r2")
    lost = bench.batcher.plan()
    bench.batcher.vacate_again(lost)
    assert lost.vacated == (slot,) and bench.batcher.plan().vacated == (slot,)


def test_everyones_turn_comes_when_there_are_more_sequences_than_tokens() -> None:
    bench = Bench(num_pages=200, max_step_tokens=3)
    requests = [
        Request(f"r{n}", "g", (7, 8), 0, SamplingParams(max_new_tokens=30)) for n in range(10)
    ]  # no stop token: all run on
    bench.submit(requests)
    for _ in range(45):
        bench.step()
    lengths = [len(sequence.token_ids) for sequence in bench.batcher._seated.values()]
    assert len(lengths) == 10 and max(lengths) - min(lengths) <= 2 and max(lengths) > 10


def test_prompts_are_computed_in_order_of_arrival_and_in_chunks() -> None:
    bench = Bench(num_pages=20, max_step_tokens=5)
    bench.submit(make_group("a", 1, 7, 4))
    bench.submit(make_group("b", 1, 6, 4))
    first, second = bench.step(), bench.step()
    assert (first.allotments, first.samplers) == (((0, 5),), ())
    assert second.allotments == ((0, 2), (1, 3)) and [sampler.sequence.request.uid for sampler in second.samplers] == [
        "a.0"
    ]


@pytest.mark.parametrize(
    ("prompt", "words"), [((), "prompt is empty"), ((1,) * 30, "prompt of 30 tokens \\+ 11 new tokens")]
)
def test_a_request_that_cannot_fit_is_refused_by_name(prompt: tuple[int, ...], words: str) -> None:
    batcher = make_batcher(10, 8)
    with pytest.raises(ValueError, match=f"request r: .*{words}"):
        batcher.submit([Request("r", "g", prompt, 0, SamplingParams(max_new_tokens=11))])
    assert not batcher.has_work


def test_a_partial_rollout_that_cannot_fit_is_refused_by_name() -> None:
    batcher = make_batcher(10, 8)
    request = Request("r", "g", (1,) * 30, 0, SamplingParams(max_new_tokens=11))
    with pytest.raises(ValueError, match=r"request r: prompt of 30 tokens \+ 11 new tokens"):
        batcher.submit_partial(PartialRollout(request, (5, 6), (0.0, 0.0), 0))
    assert not batcher.has_work


def test_pages_that_cannot_hold_one_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="9 pages of 4 tokens cannot hold one sequence of 40 tokens"):
        make_batcher(9, 8)


def test_a_refused_group_leaves_nothing_behind() -> None:
    batcher = make_batcher(10, 8)
    good = Request("good", "g", (1, 2), 0, SamplingParams(max_new_tokens=4))
    with pytest.raises(ValueError, match="request bad"):
        batcher.submit([good, Request("bad", "g", (1, 2), 0, SamplingParams(max_new_tokens=99))])
    batcher.submit([good])
    assert batcher.num_waiting == 1


def test_a_rollout_that_has_ended_cannot_go_on() -> None:
    request = Request("r", "g", (1, 2), 0, SamplingParams(max_new_tokens=2))
    with pytest.raises(ValueError, match="request r: this rollout has already ended"):
        make_batcher(10, 8).submit_partial(PartialRollout(request, (5, 6), (0.0, 0.0), 0))


def test_a_script_of_another_length_is_refused() -> None:
    request = Request("r", "g", (1, 2), 0, SamplingParams(max_new_tokens=4), script_ids=(5, 6))
    with pytest.raises(ValueError, match="request r: a script of 2 tokens"):
        make_batcher(10, 8).submit([request])


def test_a_group_with_a_prompt_of_one_token_is_seated_at_once() -> None:
    bench = Bench(num_pages=40, max_step_tokens=64)
    bench.submit(make_group("g", 5, 1, 4))
    assert len(bench.step().seats) == 5


def test_withdrawing_what_is_not_here_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nobody"):
        make_batcher(10, 8).withdraw("nobody")
