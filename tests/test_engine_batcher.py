"""The batcher against an oracle that knows what every request must become, and pages that remember what was written.

The words of the module's head: a plan never exceeds max_step_tokens; a running sequence has exactly one page; its page
holds keys for all of its tokens but the newest; every submitted request ends exactly once.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.batcher import Batcher, PartialRollout, StepPlan
from slipstream.engine.pages import PagePool
from slipstream.rng import derive_seed
from slipstream.types import Request, Rollout, SamplingParams

STOP = 0
PAGE_TOKENS = 40


def drawn(request: Request, index: int) -> int:
    """The fake model: token `index` of a request, one in six a stop token."""
    return derive_seed(request.uid, index) % 6 and 1000 + derive_seed(request.uid, "token", index) % 1000


def expected(request: Request) -> tuple[int, ...]:
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_new_tokens and (not tokens or tokens[-1] != STOP):
        tokens.append(drawn(request, len(tokens)))
    return tuple(tokens)


def make_group(name: str, num_members: int, prompt_tokens: int, max_new_tokens: int) -> list[Request]:
    prompt = tuple(derive_seed(name, place) % 1000 + 5000 for place in range(prompt_tokens))
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(STOP,))
    return [Request(f"{name}.{member}", name, prompt, 0, sampling) for member in range(num_members)]


class Bench:
    """A batcher with the fake model and with pages of tokens instead of keys; asserts the invariants at every step."""

    def __init__(self, num_pages: int, max_step_tokens: int) -> None:
        self.batcher = Batcher(PagePool(num_pages), max_step_tokens, PAGE_TOKENS)
        self.pages: list[list[int]] = [[-1] * PAGE_TOKENS for _ in range(num_pages)]
        self.alive: dict[str, Request] = {}
        self.away: list[PartialRollout] = []
        self.done: dict[str, Rollout] = {}
        self.prefilled = 0
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
        plan = self.batcher.plan()
        assert plan.num_tokens <= self.batcher.max_step_tokens
        assert plan.num_tokens > 0 or not self.batcher.has_work, "work is left, but the plan is empty"
        for source, target, num_tokens in plan.copies:
            self.pages[target][:num_tokens] = self.pages[source][:num_tokens]
        draws = []
        for number, row in enumerate(plan.rows):
            self.pages[row.page][row.start : row.start + len(row.token_ids)] = row.token_ids
            if number < plan.num_decode_rows:
                assert len(row.token_ids) == len(row.samplers) == 1
            else:
                self.prefilled += len(row.token_ids)
            for sequence in row.samplers:
                known = [*sequence.request.prompt_ids, *sequence.token_ids]
                assert self.pages[row.page][: len(known)] == known, (
                    "a sequence samples from its own tokens, all of them"
                )
                assert row.start + len(row.token_ids) == len(known)
                draws.append((drawn(sequence.request, len(sequence.token_ids)), float(sequence.position)))
        self.version += 1
        for rollout in self.batcher.commit(plan, draws, self.version):
            assert rollout.request.uid not in self.done, "every request ends once"
            self.done[rollout.request.uid] = rollout
            del self.alive[rollout.request.uid]
        self.check_pages()
        return plan

    def check_pages(self) -> None:
        batcher = self.batcher
        held = [sequence.page for _, sequence in batcher._running.values()]
        held += [group.page for group in batcher._prefilling]
        assert None not in held and len(set(held)) == len(held) == batcher.pool.num_held
        for _, sequence in batcher._running.values():
            known = [*sequence.request.prompt_ids, *sequence.token_ids[:-1]]
            assert self.pages[sequence.page][: len(known)] == known, "a page holds all tokens but the newest"
        assert batcher.num_running + batcher.num_waiting == len(self.alive)

    def finish(self) -> None:
        while self.away:
            self.bring_back()
        for _ in range(5000):
            if not self.batcher.has_work:
                break
            self.step()
        assert not self.alive and self.batcher.pool.num_free == self.batcher.pool.num_pages
        for rollout in self.done.values():
            assert rollout.token_ids == expected(rollout.request)
            prompt_tokens = len(rollout.request.prompt_ids)
            assert rollout.logprobs == tuple(float(prompt_tokens + i) for i in range(len(rollout.token_ids)))
            assert rollout.finish_reason == ("stop" if rollout.token_ids[-1] == STOP else "length")
            assert 1 <= rollout.first_version <= rollout.last_version <= self.version


SIZES = st.tuples(st.integers(1, 6), st.integers(1, 20), st.integers(1, 20))
BUDGETS = st.tuples(st.integers(1, 5), st.integers(1, 24))


@settings(max_examples=150, deadline=None)
@given(BUDGETS, st.lists(SIZES, min_size=1, max_size=6))
def test_every_prompt_is_prefilled_once_and_every_request_ends_once(
    budgets: tuple[int, int], sizes: list[tuple[int, int, int]]
) -> None:
    bench = Bench(*budgets)
    groups = [make_group(f"g{number}", *size) for number, size in enumerate(sizes)]
    for requests in groups:
        bench.submit(requests)
    bench.finish()
    assert set(bench.done) == {request.uid for requests in groups for request in requests}
    assert bench.prefilled == sum(len(requests[0].prompt_ids) for requests in groups)


ACTS = st.one_of(
    SIZES.map(lambda size: ("submit", size)),
    st.just(("step", None)),
    st.integers(0, 99).map(lambda which: ("withdraw", which)),
    st.just(("bring back", None)),
)


@settings(max_examples=250, deadline=None)
@given(BUDGETS, st.lists(ACTS, max_size=40))
def test_sequences_may_leave_and_come_back_at_any_time(
    budgets: tuple[int, int], acts: list[tuple[str, object]]
) -> None:
    bench, submitted = Bench(*budgets), set()
    for number, (act, detail) in enumerate(acts):
        if act == "submit":
            requests = make_group(f"g{number}", *detail)  # type: ignore[misc]
            bench.submit(requests)
            submitted |= {request.uid for request in requests}
        elif act == "withdraw" and bench.alive:
            bench.withdraw(sorted(bench.alive)[detail % len(bench.alive)])  # type: ignore[operator]
            bench.check_pages()
        elif act == "bring back" and bench.away:
            bench.bring_back()
        elif act == "step":
            bench.step()
    bench.finish()
    assert set(bench.done) == submitted


def test_members_of_a_group_take_over_the_pages_of_finished_siblings() -> None:
    bench = Bench(num_pages=1, max_step_tokens=8)
    bench.submit(make_group("g", 5, 3, 4))
    while bench.batcher.has_work:
        assert bench.step().copies == ()
    bench.finish()
    assert bench.prefilled == 3 and len(bench.done) == 5


def test_everyones_turn_comes_when_there_are_more_sequences_than_tokens() -> None:
    bench = Bench(num_pages=10, max_step_tokens=3)
    requests = [
        Request(f"r{n}", "g", (7, 8), 0, SamplingParams(max_new_tokens=30)) for n in range(10)
    ]  # no stop token: all run on
    bench.submit(requests)
    for _ in range(41):
        bench.step()
    lengths = [len(sequence.token_ids) for _, sequence in bench.batcher._running.values()]
    assert len(lengths) == 10 and max(lengths) - min(lengths) <= 1 and max(lengths) > 10


def test_prompts_are_prefilled_in_order_of_arrival_and_in_chunks() -> None:
    bench = Bench(num_pages=4, max_step_tokens=5)
    bench.submit(make_group("a", 1, 7, 4))
    bench.submit(make_group("b", 1, 6, 4))
    first, second = bench.step(), bench.step()
    assert [(row.start, len(row.token_ids)) for row in first.rows] == [(0, 5)]
    assert [(row.start, len(row.token_ids)) for row in second.rows] == [(5, 2), (0, 3)]
    assert [len(row.samplers) for row in second.rows] == [1, 0]


@pytest.mark.parametrize(
    ("prompt", "words"), [((), "prompt is empty"), ((1,) * 30, "prompt of 30 tokens \\+ 11 new tokens")]
)
def test_a_request_that_cannot_fit_is_refused_by_name(prompt: tuple[int, ...], words: str) -> None:
    batcher = Batcher(PagePool(1), 8, PAGE_TOKENS)
    with pytest.raises(ValueError, match=f"request r: .*{words}"):
        batcher.submit([Request("r", "g", prompt, 0, SamplingParams(max_new_tokens=11))])
    assert not batcher.has_work


def test_a_partial_rollout_that_cannot_fit_is_refused_by_name() -> None:
    batcher = Batcher(PagePool(1), 8, PAGE_TOKENS)
    request = Request("r", "g", (1,) * 30, 0, SamplingParams(max_new_tokens=11))
    with pytest.raises(ValueError, match=r"request r: prompt of 30 tokens \+ 11 new tokens"):
        batcher.submit_partial(PartialRollout(request, (5, 6), (0.0, 0.0), 0))
    assert not batcher.has_work


def test_withdrawing_what_is_not_here_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nobody"):
        Batcher(PagePool(1), 8, PAGE_TOKENS).withdraw("nobody")
