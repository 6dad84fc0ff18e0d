"""When a step runs by a graph, and when without; what a graph does is shown on a GPU (`test_gpu.py`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.engine.graphs import GraphPool
from slipstream.engine.packing import DraftSizes, Launch, StepSizes
from slipstream.engine.strategy import Feeding


class Pool(GraphPool):
    """Captures by name only."""

    def _capture(self, size: Launch, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        self.captured.append(size)
        self._fitting.add(size)
        self.num_bytes += 1
        self._graphs[size] = graph = Replayed(self.replayed, size)  # type: ignore[assignment]
        return graph  # type: ignore[return-value]


class Replayed:
    def __init__(self, replayed: list[Launch], size: Launch) -> None:
        self.replay = lambda: replayed.append(size)


@pytest.fixture
def budget() -> int:
    return 5


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, budget: int) -> Pool:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: None)
    pool = Pool(budget_bytes=budget)
    pool.captured, pool.replayed = [], []  # type: ignore[attr-defined]
    return pool


def launch(num_tokens: int, num_samples: int | None = None, *, with_drafts: bool = False) -> Launch:
    sizes = StepSizes(num_tokens, num_tokens, num_samples or num_tokens, with_drafts, False)
    return Launch(DraftSizes(num_tokens) if with_drafts else None, sizes)


def run(pool: Pool, *sizes: Launch) -> list[Launch]:
    """Those that ran without a graph."""
    eager: list[Launch] = []
    for size in sizes:
        pool.run(size, lambda size=size: eager.append(size))  # type: ignore[misc]
    return eager


def test_only_the_first_of_a_kind_runs_without_a_graph(pool: Pool) -> None:
    assert run(pool, launch(8), launch(16), launch(16), launch(8)) == [launch(8)]
    assert pool.captured == [launch(8), launch(16)] and pool.replayed == [launch(16), launch(16), launch(8)]
    assert run(pool, launch(8, with_drafts=True)) == [launch(8, with_drafts=True)], "another kind"
    assert not pool.is_prepared(launch(24)) and pool.is_prepared(launch(16))


def test_none_of_a_kind_that_has_run_before_does(pool: Pool) -> None:
    pool.note_runs([launch(8)])
    assert run(pool, launch(16), launch(16, with_drafts=True)) == [launch(16, with_drafts=True)]
    pool.clear()
    assert run(pool, launch(16)) == [launch(16)], "memory it was to find is gone"


def test_a_graph_can_be_made_before_its_first_step_once_such_a_step_has_run(pool: Pool) -> None:
    sizes = [launch(num) for num in (8, 16, 24, 32, 40, 48)]
    with pytest.raises(AssertionError, match="allocated once"):
        pool.make(sizes[0], lambda: None)
    pool.note_runs([launch(64, 8)])
    for size in sizes:
        pool.make(size, lambda: None)
    assert pool.captured == sizes[:5], "what they may take is spent"
    assert run(pool, *sizes[:5]) == [] and pool.replayed == sizes[:5] and pool.making_s == 0


def test_prompts_get_a_graph_when_they_come_again(pool: Pool) -> None:
    run(pool, launch(8))
    assert run(pool, launch(64, 8), launch(64, 8)) == [launch(64, 8)] and pool.captured[1:] == [launch(64, 8)]


def test_once_all_graphs_are_gone_memory_is_allocated_outside_of_one(pool: Pool) -> None:
    run(pool, launch(8), launch(16))
    pool.clear()
    assert run(pool, launch(16), launch(8)) == [launch(16)]


@pytest.mark.parametrize("budget", [3])
def test_past_the_budget_new_sizes_run_without_and_somebody_is_told_once(pool: Pool) -> None:
    run(pool, launch(8), launch(16), launch(24))
    with pytest.warns(UserWarning, match="all they may") as told:
        assert run(pool, launch(40), launch(48), launch(40)) == [launch(40), launch(48), launch(40)]
    assert len(told) == 1 and pool.is_prepared(launch(40)), "it will not get any faster"


def test_meanwhile_a_larger_size_of_the_same_kind_serves_but_not_for_prompts(pool: Pool) -> None:
    run(pool, launch(32), launch(16), launch(64, 8), launch(64, 8))
    assert pool.meanwhile([launch(4)]) == [launch(16)] and pool.meanwhile([launch(20)]) == [launch(32)]
    assert pool.meanwhile([launch(16)]) is None, "it has its own"
    assert pool.meanwhile([launch(40)]) is None and pool.meanwhile([launch(4, with_drafts=True)]) is None
    assert pool.meanwhile([launch(48, 8)]) is None, "a prompt takes as long as it is padded to"
    assert pool.meanwhile([launch(48, 48)]) is None
    run(pool, launch(128, 64), launch(128, 64))
    assert pool.meanwhile([launch(48, 48)]) is None, "nor does it serve anybody"


def test_meanwhile_a_drafter_may_be_told_more_than_it_need_be(pool: Pool) -> None:
    keys, nothing = (
        Launch(None, StepSizes(16, 16, 16, with_drafts=False, with_cuts=False, feeding=feeding))
        for feeding in (Feeding.KEYS, Feeding.NOTHING)
    )
    run(pool, keys)
    assert pool.meanwhile([nothing]) == [keys]
    run(pool, nothing)
    assert pool.meanwhile([nothing]) is None


def test_what_is_made_while_the_device_has_work_stalls_nothing(pool: Pool) -> None:
    is_busy = False
    pool._is_busy = lambda: is_busy
    run(pool, launch(8))
    stalled_s = pool.stalled_s
    assert stalled_s == pool.making_s > 0
    is_busy = True
    run(pool, launch(16))
    assert pool.stalled_s == stalled_s < pool.making_s
