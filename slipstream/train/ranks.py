"""The processes that train one model together, and the few things they must agree on.

Owns the process group (gloo on CPUs, NCCL on GPUs) from joining to leaving. Every method is called by all ranks at the
same time. One rank alone has no process group, and its calls cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Of this rank."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_say(self, yes: bool) -> bool:
        """Whether every rank says so."""
        if self.size == 1:
            return yes
        num_no = torch.tensor(0 if yes else 1, device=self.device)
        dist.all_reduce(num_no)
        return int(num_no) == 0

    def gather(self, mine: T) -> list[T]:
        """What each rank gave, by rank. Small things only: they are pickled."""
        if self.size == 1:
            return [mine]
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found  # type: ignore[return-value]

    def share_of(self, round_of: list[T]) -> T | None:
        """Of a list with at most one item for each rank, this rank's; None if it is too short."""
        return round_of[self.rank] if self.rank < len(round_of) else None


@contextmanager
def joined_ranks(rank: int, size: int, rendezvous: str, device: torch.device, wait_s: float) -> Iterator[Ranks]:
    """Meet the other ranks at `rendezvous` (file:///path/of/a/new/file or tcp://host:port), and leave at the end.
    `wait_s`: for the slowest rank in a collective, before the others give up."""
    if size == 1:
        yield Ranks(device=device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=rendezvous, rank=rank, world_size=size, timeout=timedelta(seconds=wait_s)
    )
    try:
        yield Ranks(rank, size, device)
    finally:
        dist.destroy_process_group()
