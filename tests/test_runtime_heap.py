"""Large blocks of a process that trains do not lie in its heap, where they would leave holes."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from slipstream.runtime.heap import map_large_blocks

if sys.argv[1] == "mapped":
    map_large_blocks()
np.empty(16 << 20, np.uint8)  # freed at once, after which smaller ones may lie in the heap
block = np.empty(3 << 20, np.uint8)
heap = next(line for line in Path("/proc/self/maps").read_text().splitlines() if "[heap]" in line)
start, end = (int(number, 16) for number in heap.split()[0].split("-"))
print("in the heap" if start <= block.ctypes.data < end else "apart")
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.parametrize(("way", "where"), [("mapped", "apart"), ("as it is", "in the heap")])
def test_large_blocks_are_mapped_apart(way: str, where: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == where
