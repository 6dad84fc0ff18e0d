"""The memory of a process that runs for hours: garbage is looked for when it does not hold up a step, and what is freed
is given back."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

MMAP_THRESHOLD, MAPPED_BYTES = -3, 1 << 20
"""The number of this setting of glibc, and what it is set to."""
KEPT_KERNELS = 64
"""Several times what a micro-batch needs."""


@contextmanager
def still_heap() -> Iterator[None]:
    """What is loaded by now is not looked through for garbage meanwhile, which would hold up a step for 0.3 s; and new
    garbage, little of which is in cycles, is looked for less often."""
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def give_back() -> None:
    """Garbage, and the holes that it leaves between what is still used: without this a process that was large for a
    moment stays so. Other libraries than glibc have no such call."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def map_large_blocks() -> None:
    """So that they are given back once they are freed. By itself glibc takes ever larger ones from its heap, where they
    leave holes, and the process grows. Other libraries have no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, MAPPED_BYTES)


def keep_few_kernels() -> None:
    """On a CPU oneDNN makes a kernel for each shape of product, and keeps the last 1,024: of a trainer, whose batches
    hardly ever have the same number of tokens, they made 26 MB in eight minutes and serve nobody. Must come before the
    first product."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KEPT_KERNELS))
