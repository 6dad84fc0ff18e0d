"""Large blocks of a process that trains do not lie in its heap, where they would leave holes."""

from __future__ import annotations

import multiprocessing
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

from slipstream.runtime.coats import map_large_blocks

APART, IN_HEAP = 10, 11


def look_for_a_block(is_mapped: bool) -> None:
    """Exits with APART or IN_HEAP."""
    if is_mapped:
        map_large_blocks()
    np.empty(16 << 20, np.uint8)  # freed at once, after which smaller ones may lie in the heap
    block = np.empty(3 << 20, np.uint8)
    heap = next(line for line in Path("/proc/self/maps").read_text().splitlines() if "[heap]" in line)
    start, end = (int(number, 16) for number in heap.split()[0].split("-"))
    sys.exit(IN_HEAP if start <= block.ctypes.data < end else APART)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.parametrize("is_mapped", [True, False])
def test_large_blocks_are_mapped_apart(is_mapped: bool) -> None:
    process = multiprocessing.get_context("fork").Process(target=look_for_a_block, args=(is_mapped,))
    process.start()
    process.join()
    assert process.exitcode == (APART if is_mapped else IN_HEAP)
