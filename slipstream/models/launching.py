"""How our Triton kernels follow one another on a GPU: the next is launched while the one before still runs.

A step is some three hundred kernels of a few microseconds, and starting one takes about one. From Hopper on, a kernel
may be started early ("programmatic dependent launch"): it comes on the device, then waits until the one before has
ended and its results can be read. Every program of such a kernel must call `await_inputs` before it reads or writes
what others do, so that the end of a kernel is also the end of all before it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch arguments of a kernel that calls `await_inputs`."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}


@triton.jit
def await_inputs(OVERLAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
