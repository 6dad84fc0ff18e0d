"""CUDA graphs of the step, one for each padded size, captured when a size is met for the second time.

The first time runs eagerly, which also compiles the kernels; prompts come in many sizes and most are met only once. All
graphs share one memory pool, so the largest decides what they take. Past the budget, new sizes go on eagerly, and a
warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch

PRIORITY = -1
"""Of the stream a step is captured on, which is that of its kernels wherever it is replayed: before the drafter's
updates beside it, which have 0. Torch has no lower one."""


class GraphPool:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self._spent = False
        self._met: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(priority=PRIORITY)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, size: Hashable, body: Callable[[], None]) -> None:
        """Do what `body` does, which must launch the same kernels on the same memory every time for this size."""
        graph = self._graphs.get(size)
        if graph is not None:
            graph.replay()
        elif size in self._met and self.num_bytes < self.budget_bytes:
            self._capture(size, body).replay()
        else:
            if size in self._met and not self._spent:
                self._spent = True
                warnings.warn(
                    f"{len(self)} CUDA graphs take {self.num_bytes / 1e9:.1f} GB, all they may: steps of other sizes "
                    "run without one, several times slower (fewer engine.max_sequences need fewer graphs)",
                    stacklevel=2,
                )
            self._met.add(size)
            body()

    def is_prepared(self, size: Hashable) -> bool:
        """Whether a step of this size takes as long as the next one of this size will."""
        return size in self._graphs or (size in self._met and self.num_bytes >= self.budget_bytes)

    def clear(self) -> None:
        """Forget every graph, because memory it reads or writes goes away."""
        self._graphs.clear()
        self._met.clear()  # the memory is allocated anew by an eager run, never inside a graph
        self.num_bytes = 0
        self._memory = torch.cuda.graph_pool_handle()

    def _capture(self, size: Hashable, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        reserved = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
            body()
        self.num_bytes += max(0, torch.cuda.memory_reserved() - reserved)
        self._graphs[size] = graph
        return graph


def padded(count: int) -> int:
    """The size a step of `count` tokens is padded to: fine steps where they cost little, coarser ones above.

    Above 32 tokens, less than a quarter is added: four sizes between one power of two and the next.
    """
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = max(8, 1 << ((count - 1).bit_length() - 3))
    return -(-count // step) * step


def fitted(num_rows: int, num_drafts: int) -> int:
    """At most so many drafts that a step of these rows is a power of two, or half as much more: drafts fill whatever
    size they are given, so a few sizes will do, and every size takes the time of thirty steps when it is first met.
    Where that leaves room for none, as many as would be padding."""
    most = num_rows + num_drafts
    size = 1 << (most.bit_length() - 1)
    if size >= 16 and size + size // 2 <= most:
        size += size // 2
    return (size if size > num_rows else padded(most)) - num_rows
