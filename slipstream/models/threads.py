"""How many threads compute on a CPU: those of torch, and those of the engine's own kernels, set together.

They may share a library. Then numba sets torch's number as it starts its own, and what torch multiplies with may keep
the one before, so that torch tells another number than its products have. Hence the order here: numba's are started
first, then torch is told, though it be what it says already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numba
import torch


def use_threads(num_threads: int | None = None) -> int:
    """In this process, whoever computes; None: as many as torch has now. How many that are, from here on."""
    if num_threads is None:
        num_threads = torch.get_num_threads()
        numba.get_num_threads()
    else:
        numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    torch.set_num_threads(num_threads)
    return num_threads


@contextmanager
def threads(num_threads: int | None) -> Iterator[None]:
    """As many until the block ends; None: as many as torch has now."""
    before = use_threads()
    numba_before = numba.get_num_threads()
    use_threads(num_threads)
    try:
        yield
    finally:
        numba.set_num_threads(numba_before)
        torch.set_num_threads(before)
