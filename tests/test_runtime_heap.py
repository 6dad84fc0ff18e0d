"""Large blocks of a process that trains do not lie in its heap, where they leave holes; what is freed goes back."""

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


KERNELS = """
import ctypes
import sys
import torch
from slipstream.runtime.heap import keep_few_kernels

if sys.argv[1] == "few":
    keep_few_kernels()
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
info = ctypes.CDLL(None).mallinfo2
info.restype = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
weight, used = torch.randn(64, 64), {}
for rows in range(1, 801):
    torch.ops.mkldnn._linear_pointwise(torch.randn(rows, 64), weight, None, "none", [], "")
    used[rows] = info().uordblks
print(used[500] - used[200], used[800] - used[200])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc")
def test_few_kernels_are_kept_for_shapes_that_do_not_come_again() -> None:
    grown = {}
    for way in ("few", "as it is"):
        done = subprocess.run([sys.executable, "-c", KERNELS, way], capture_output=True, text=True, check=True)
        grown[way] = [int(number) for number in done.stdout.split()]
    assert min(grown["as it is"]) > 1e6
    if platform.machine() == "x86_64":  # there, oneDNN keeps half of it elsewhere, for as long as the process lives
        assert grown["few"][0] < 0.6 * grown["as it is"][0]
    else:
        assert max(grown["few"]) < 1e6


GIVING_BACK = """
import gc
from pathlib import Path
from slipstream.runtime.heap import give_back

def allocated_kb():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

class Node:
    pass

gc.disable()
give_back()
before = allocated_kb()
for _ in range(2000):  # in cycles, so that only a collection finds them
    node = Node()
    node.itself, node.block = node, bytes(20_000)
pin = bytes(20_000)  # lies above the holes
del node
large = allocated_kb()
give_back()
print(large - before, allocated_kb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a call of glibc")
def test_garbage_and_the_holes_it_leaves_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", GIVING_BACK], capture_output=True, text=True, check=True)
    grown_kb, kept_kb = map(int, done.stdout.split())
    assert grown_kb > 30_000 and kept_kb < 0.2 * grown_kb
