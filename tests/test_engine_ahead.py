"""Graphs are made behind steps that are under way; what is sampled does not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_draft_history import MAX_LENGTH, NUM_SLOTS, drafter_with, generate, groups, tiny

from slipstream.engine import ahead as ahead_module
from slipstream.engine.ahead import FEWEST, MAKING_S, Ahead
from slipstream.engine.batcher import Batcher
from slipstream.engine.engine import Engine
from slipstream.engine.fitting import fitted
from slipstream.engine.graphs import GraphPool
from slipstream.engine.packing import Launch, padded_launches_of
from slipstream.engine.pages import PagePool
from slipstream.engine.state import Launched
from slipstream.engine.strategy import OFF, Always, StepResult, Strategy
from slipstream.types import Request, Rollout, SamplingParams

USUAL, GROUPS, MOST = 2, 10, 12
ENOUGH = 4 * NUM_SLOTS * MAX_LENGTH
COPIES, MORE = Strategy(2.0, 2), Strategy(4.0, 2)


def test_enough_steps_take_as_long_as_a_graph() -> None:
    ahead = Ahead(USUAL)
    assert ahead.enough == FEWEST
    for step_s, enough in ((MAKING_S / 20, 20), (MAKING_S / 1000, ahead_module.MOST), (MAKING_S, FEWEST)):
        for _ in range(60):
            ahead.observe(step_s)
        assert ahead.enough in (enough, enough + 1)


def test_a_new_way_waits_until_enough_steps_are_launched() -> None:
    ahead = Ahead(USUAL)
    ahead.observe(MAKING_S / (MOST - 0.5))
    assert ahead.enough == MOST
    ahead.begin_step(0, lambda: True)
    assert ahead.way(8, OFF, OFF) == OFF and ahead.num_steps == USUAL, "nothing to wait with"
    for num_unread in range(MOST):
        ahead.begin_step(num_unread, lambda: True)
        assert ahead.way(7, COPIES, OFF) == OFF and ahead.is_waiting and ahead.num_steps == MOST
    ahead.begin_step(MOST, lambda: True)
    assert ahead.way(7, COPIES, OFF) == COPIES and not ahead.is_waiting and ahead.num_steps == USUAL
    ahead.begin_step(USUAL, lambda: True)
    assert ahead.way(5, COPIES, OFF) == COPIES, "the same size of batch"
    assert ahead.way(9, COPIES, OFF) == COPIES and not ahead.is_waiting, "of this size nothing else has run"
    assert ahead.way(8, MORE, COPIES) == COPIES and ahead.is_waiting
    ahead.begin_step(USUAL, lambda: False)
    assert ahead.way(8, MORE, COPIES) == MORE, "without memory for what is launched nothing waits"
    ahead.note_prepared([(16, OFF), (16, MORE)])
    ahead.begin_step(USUAL, lambda: True)
    assert ahead.way(12, MORE, OFF) == MORE and not ahead.is_waiting, "its graphs are there"
    assert ahead.way(12, Strategy(8.0, 2), OFF) == OFF and ahead.is_waiting
    ahead.clear()
    ahead.begin_step(USUAL, lambda: True)
    assert ahead.way(8, COPIES, OFF) == COPIES, "all graphs are gone"


class Pool(GraphPool):
    """Its graphs run what they were captured of. Notes whenever one is made, or a step has none, how many steps were
    under way."""

    def __init__(self, unread: Sequence[Launched], budget: int) -> None:
        super().__init__(budget, is_busy=self._note)
        self._unread = unread
        self.num_unread: list[int] = []

    def _note(self) -> bool:
        self.num_unread.append(len(self._unread))
        return len(self._unread) > USUAL

    def _capture(self, size: Launch, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        self._graphs[size] = graph = SimpleNamespace(replay=body)  # type: ignore[assignment]
        self._fitting.add(size)
        self.num_bytes += 1
        return graph  # type: ignore[return-value]


class InTurn(Always):
    """A new way every so often, the one before being the best."""

    def __init__(self, ways: Sequence[Strategy], every: int) -> None:
        super().__init__(ways[0])
        self.ways, self.every = ways, every
        self.told: list[Strategy] = []
        self.prepared_s: list[float] = []

    def choose(self, batch: int, is_matching: bool = False) -> Strategy:
        return self.ways[min(len(self.told) // self.every, len(self.ways) - 1)]

    def best(self, batch: int, is_matching: bool = False) -> Strategy:
        return self.ways[max(0, min(len(self.told) // self.every, len(self.ways) - 1) - 1)]

    def observe(self, step: StepResult) -> None:
        self.told.append(step.strategy)

    def observe_preparing(self, batch: int, seconds: float, is_matching: bool = False) -> None:
        self.prepared_s.append(seconds)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: None)
    monkeypatch.setattr(ahead_module, "MAKING_S", 100.0)
    monkeypatch.setattr(ahead_module, "MOST", MOST)


def generate_by_graphs(
    requests: list[list[Request]],
    policy: InTurn | None,
    past: Sequence[Rollout],
    *,
    budget: int = 100,
    watch: Callable[[Engine], None] = lambda engine: None,
    **changes: Any,
) -> tuple[dict[str, Rollout], Pool, list[int]]:
    """As a GPU would, in padded sizes; also how many steps were under way after each."""
    engine = Engine(
        tiny(),
        max_sequences=NUM_SLOTS,
        max_length=MAX_LENGTH,
        drafter=None if policy is None else drafter_with(past),
        policy=policy,
        steps_ahead=USUAL,
        **changes,
    )
    pool = Pool(engine._unread, budget)
    engine._graphs, engine._batcher._fit_drafts = pool, fitted
    engine._launches = lambda plan, drafts, pad: padded_launches_of(  # type: ignore[method-assign]
        plan, drafts, pad, NUM_SLOTS
    )
    for group in requests:
        engine.submit(group)
    rollouts: dict[str, Rollout] = {}
    unread: list[int] = []
    while engine.has_work:
        rollouts |= {rollout.request.uid: rollout for rollout in engine.step()}
        unread.append(engine.facts().num_unread)
        watch(engine)
    return rollouts, pool, unread


def same(rollouts: dict[str, Rollout], others: dict[str, Rollout]) -> bool:
    """But for where tokens came from."""
    return {uid: (one.token_ids, one.logprobs) for uid, one in rollouts.items()} == {
        uid: (one.token_ids, one.logprobs) for uid, one in others.items()
    }


def test_ways_and_sizes_that_wait_for_their_graph_change_no_bit(no_gpu: None) -> None:
    plain, _ = generate(groups(2, 6))
    policy = InTurn([OFF, COPIES, MORE], every=4)
    drafted, pool, unread = generate_by_graphs(groups(2, 6), policy, list(plain.values()), kv_tokens=ENOUGH)
    assert same(drafted, plain) and set(policy.told) == {OFF, COPIES, MORE}
    assert max(unread) == MOST and unread.count(USUAL) > len(unread) / 4
    assert MOST in pool.num_unread and pool.stalled_s < pool.making_s
    assert sum(policy.prepared_s) < pool.stalled_s, "what is made behind other steps is no price of a way"


def test_a_batch_that_shrinks_waits_in_the_larger_graph(no_gpu: None) -> None:
    lengths = [4] * 8 + [70] * 4
    sampling = [SamplingParams(max_new_tokens=length) for length in lengths]
    requests = [[Request(str(number), "g", (5, 6), number, one) for number, one in enumerate(sampling)]]
    plain, _ = generate(requests)
    alone, pool, unread = generate_by_graphs(requests, None, (), kv_tokens=ENOUGH)
    assert alone == plain and max(unread) == MOST
    assert MOST in pool.num_unread


@pytest.mark.filterwarnings("ignore:1 CUDA graphs take")
def test_without_memory_for_graphs_nothing_waits_and_steps_run_in_larger_sizes(no_gpu: None) -> None:
    plain, _ = generate(groups(GROUPS))
    policy = InTurn([OFF], every=12)
    drafted, pool, unread = generate_by_graphs(groups(GROUPS), policy, (), budget=1, kv_tokens=ENOUGH)
    assert same(drafted, plain) and max(unread) <= USUAL
    assert len(pool) == 1 and len(pool.num_unread) < len(unread) / 4, "how often a step had no graph"


def test_pages_for_half_of_the_slots_change_no_bit(no_gpu: None) -> None:
    plain, _ = generate(groups(4))
    policy = InTurn([OFF, COPIES, MORE], every=12)
    drafted, _, _ = generate_by_graphs(groups(4), policy, list(plain.values()), kv_tokens=(NUM_SLOTS // 2) * 64)
    assert same(drafted, plain)


def test_a_wait_that_is_cut_short_is_over(no_gpu: None) -> None:
    """Answers end before enough steps are launched."""
    sampling = SamplingParams(max_new_tokens=8)
    requests = [[Request(f"{g}", str(g), (5, 6, 7), g, sampling)] for g in range(NUM_SLOTS)]
    ahead = Ahead(USUAL)
    ahead.observe(MAKING_S / (MOST - 0.5))
    for num_unread in (0, 1, 2):
        ahead.begin_step(num_unread, lambda: True)
        if num_unread:
            assert ahead.way(8, COPIES, OFF) == OFF and ahead.is_waiting
        else:
            ahead.way(8, OFF, OFF)
    ahead.begin_step(0, lambda: True)
    assert ahead.way(8, COPIES, OFF) == COPIES and not ahead.is_waiting
    policy = InTurn([OFF, COPIES], every=3)
    rollouts, _, _ = generate_by_graphs(requests, policy, (), kv_tokens=ENOUGH)
    assert len(rollouts) == NUM_SLOTS


def test_nobody_waits_while_sequences_wait_for_a_slot(no_gpu: None) -> None:
    policy = InTurn([OFF, COPIES, MORE], every=12)
    num_waiting: list[tuple[int, int]] = []

    def watch(engine: Engine) -> None:
        facts = engine.facts()
        num_waiting.append((facts.num_unread, facts.num_waiting))

    generate_by_graphs(groups(GROUPS), policy, (), kv_tokens=ENOUGH, watch=watch)
    assert any(waiting for _, waiting in num_waiting)
    assert all(unread <= USUAL for unread, waiting in num_waiting if waiting)


def test_a_policy_is_not_told_how_long_steps_take_that_wait(no_gpu: None) -> None:
    policy = InTurn([OFF, COPIES], every=12)
    waited: list[bool] = []

    def watch(engine: Engine) -> None:
        if engine._ahead.is_waiting and engine._unread:
            waited.append(engine._unread[-1].was_prepared)

    generate_by_graphs(groups(2), policy, (), kv_tokens=ENOUGH, watch=watch)
    assert waited and not any(waited)


def test_steps_are_launched_ahead_only_where_pages_last(no_gpu: None) -> None:
    batcher = Batcher(PagePool(6), num_slots=4, max_step_tokens=64, max_length=48, page_tokens=16)
    for number in range(2):
        batcher.submit([Request(str(number), str(number), (5,) * 10, number, SamplingParams(max_new_tokens=30))])
    batcher.seat()
    taken = batcher.pool.take(3)
    assert batcher.has_pages_for(7) and not batcher.has_pages_for(8), "of those too whose prompts are to be run"
    batcher.pool.give_back(taken)
    batcher.plan()
    assert batcher.pool.num_free == 4 and batcher.has_pages_for(6) and batcher.has_pages_for(22)
    assert batcher.has_pages_for(1000), "no more than they may have: 40 tokens each"
    batcher.pool.take(3)
    assert batcher.has_pages_for(6) and not batcher.has_pages_for(7)
