"""CUDA graphs of the step, one for each size: of those to be expected before the first step (`first_runs.py`), of the
others when a step is first to run in it.

Steps with prompts come in many sizes, most of which are met once: these run eagerly the first time, which takes as long
as a capture. So does the first step of each kind, before its capture, unless one has run before all others: what is
allocated once must not be allocated by a graph.
Which sizes steps run in is decided in `fitting.py`. All graphs share one memory pool, which grows in place, so the
largest decides what they take. Past the budget, new sizes go on eagerly, and a warning says so.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

import torch

from slipstream.engine.fitting import Fitting
from slipstream.engine.packing import Launch

PRIORITY = -1
"""Of the stream a step is captured on, which is that of its kernels wherever it is replayed: before the drafter's
updates beside it, which have 0. Torch has no lower one."""


class GraphPool:
    def __init__(self, budget_bytes: int, is_busy: Callable[[], bool] = lambda: False) -> None:
        """`is_busy`: whether the device still has work from before."""
        self.budget_bytes = budget_bytes
        self._is_busy = is_busy
        self.num_bytes = 0
        self.making_s = 0.0
        """Spent in mid-run on capturing, and on eager runs of sizes that have no graph yet."""
        self.stalled_s = 0.0
        """Of these, by when the device had nothing left to do."""
        self._has_warned = False
        self._kinds_run: set[Hashable] = set()
        """Without a graph."""
        self._met: set[Launch] = set()
        self._graphs: dict[Launch, torch.cuda.CUDAGraph] = {}
        self._fitting = Fitting[Launch]()
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(priority=PRIORITY)

    def __len__(self) -> int:
        return len(self._graphs)

    def fit(self, launches: list[Launch], coarser: Callable[[], list[Launch]]) -> list[Launch]:
        """The sizes to run in, which have room for these. `coarser`: of few sizes, for what no graph has room for."""
        if all(launch in self._graphs for launch in launches):
            return launches
        return [self._fitting.choose(*pair) for pair in zip(launches, coarser(), strict=True)]

    def meanwhile(self, launches: list[Launch]) -> list[Launch] | None:
        """While there is no graph for some of these: larger sizes that have one. None if there are none, or if all
        of these have theirs; if prompts are among them, of which all sizes cost what they run."""
        if all(launch in self._graphs for launch in launches) or any(launch.has_prompts for launch in launches):
            return None
        larger = (
            self._fitting.larger(launch, _only_samples) or self._fitting.larger(launch.feeding_more, _only_samples)
            for launch in launches
        )
        found = [launch for launch in larger if launch is not None]
        return found if len(found) == len(launches) else None

    @property
    def is_spent(self) -> bool:
        """Whether there will be no further graph."""
        return self.num_bytes >= self.budget_bytes

    def run(self, size: Launch, body: Callable[[], None]) -> None:
        """Do what `body` does, which must launch the same kernels on the same memory every time for this size."""
        graph = self._graphs.get(size)
        if graph is not None:
            graph.replay()
            return
        started = time.perf_counter()
        is_worth_it = size in self._met or not size.has_prompts
        must_run_first = size.kind not in self._kinds_run
        if must_run_first or not is_worth_it or self.is_spent:
            body()
            self._kinds_run.add(size.kind)
        self._met.add(size)
        if is_worth_it and not self.is_spent:
            graph = self._capture(size, body)
            if not must_run_first:
                graph.replay()
        elif is_worth_it and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{len(self)} CUDA graphs take {self.num_bytes / 1e9:.1f} GB, all they may: steps of other sizes "
                "run without one, several times slower (fewer engine.max_sequences need fewer graphs)",
                stacklevel=2,
            )
        took_s = time.perf_counter() - started
        self.making_s += took_s
        self.stalled_s += 0.0 if self._is_busy() else took_s

    def make(self, size: Launch, body: Callable[[], None]) -> None:
        """Its graph, before a step is to run in it."""
        assert size.kind in self._kinds_run, "what is allocated once must not be allocated by a graph"
        if not self.is_spent:
            self._capture(size, body)

    def note_runs(self, launches: Iterable[Launch]) -> None:
        """Launches of their kinds have run without a graph."""
        self._kinds_run.update(launch.kind for launch in launches)

    def is_prepared(self, size: Launch) -> bool:
        """Whether a step in this size takes as long as the next one in this size will."""
        return size in self._graphs or (size in self._met and self.is_spent)

    def clear(self) -> None:
        """Forget every graph, because memory it reads or writes goes away."""
        self._graphs.clear()
        self._kinds_run.clear()  # the memory is allocated anew by an eager run, never inside a graph
        self._met.clear()
        self._fitting.clear()
        self.num_bytes = 0
        self._memory = torch.cuda.graph_pool_handle()

    def _capture(self, size: Launch, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Not by `torch.cuda.graph`, which waits for the device and gives back all memory that is not in use at the
        moment: that takes longer than the capture, and the next eager step longer too. Relaxed, since kernels that
        this size is the first to need are compiled and loaded on the way."""
        reserved = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), growing_in_place():
            graph.capture_begin(pool=self._memory, capture_error_mode="relaxed")
            try:
                body()
            finally:
                graph.capture_end()
        self.num_bytes += max(0, torch.cuda.memory_reserved() - reserved)
        self._graphs[size] = graph
        self._fitting.add(size)
        return graph


@contextmanager
def growing_in_place() -> Iterator[None]:
    """Memory that is allocated here is added to the end of what there is. Otherwise a graph that is larger than those
    before would take all its memory anew, since what they leave it is too small in each place. For all other memory
    whoever runs this decides: who has written it in the environment, for this too."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments" in settings:
        yield
        return
    others = f"{settings}," if settings else ""  # which would be as if nobody had said anything
    torch._C._accelerator_setAllocatorSettings(f"{others}expandable_segments:True")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(f"{others}expandable_segments:False")


def _only_samples(launch: Launch) -> bool:
    return not launch.has_prompts
