# mypy: disable-error-code="no-untyped-def"
"""The matrix product of a few rows on a GPU: a Triton kernel where cuBLAS has too few blocks to fill the device.

A product without split reductions is cut along the outputs only; for the tall weights of a decoder layer cuBLAS's large
tiles then leave most of the GPU idle. Narrow tiles do not. Each output is one accumulator over the whole reduction, in
order, as in cuBLAS, and on Hopper the bits are the same (docs/log.md). Exactness rests on that, so `agrees` asks the
device itself, for every shape, before the kernel is used.

Axes: M rows, N outputs, K the reduction.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

MAX_ROWS = 16
"""More rows than this go to cuBLAS."""
# Measured on an H200: (outputs a block, step of the reduction, stages, warps) for tall and for wide weights.
TALL, WIDE = (16, 256, 4, 2), (64, 64, 5, 4)
TALL_OUTPUTS, WIDE_OUTPUTS, TALL_REDUCTION = 4096, 16384, 16384


def tiling(num_outputs: int, num_inputs: int) -> tuple[int, int, int, int] | None:
    """How the kernel cuts a weight of this shape; None where cuBLAS is as fast."""
    if num_inputs % 16:
        return None
    if num_outputs <= TALL_OUTPUTS and num_inputs <= TALL_REDUCTION:
        return TALL
    return WIDE if num_outputs >= WIDE_OUTPUTS else None


def small_product(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """x weight^T + bias for at most MAX_ROWS rows."""
    num_rows, num_inputs = x_MK.shape
    num_outputs = weight_NK.shape[0]
    cut = tiling(num_outputs, num_inputs)
    assert cut is not None and num_rows <= MAX_ROWS and x_MK.is_contiguous() and weight_NK.is_contiguous()
    block_outputs, block_inputs, num_stages, num_warps = cut
    out_MN = x_MK.new_empty(num_rows, num_outputs)
    _product[(triton.cdiv(num_outputs, block_outputs),)](
        x_MK, weight_NK, weight_NK if bias_N is None else bias_N, out_MN, num_rows, num_outputs, num_inputs,
        HAS_BIAS=bias_N is not None, ROWS=MAX_ROWS, BLOCK_N=block_outputs, BLOCK_K=block_inputs,
        num_stages=num_stages, num_warps=num_warps,
    )  # fmt: skip
    return out_MN


@cache
def agrees(num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device's cuBLAS gives the same bits for this shape, by trial."""
    if tiling(num_outputs, num_inputs) is None or dtype not in (torch.bfloat16, torch.float16):
        return False
    draw = torch.Generator(device).manual_seed(0)
    x_MK, weight_NK, bias_1N = (
        torch.randn(rows, columns, generator=draw, device=device).to(dtype)
        for rows, columns in ((128, num_inputs), (num_outputs, num_inputs), (1, num_outputs))
    )
    bias_N = bias_1N[0] if has_bias else None
    many_MN = linear(x_MK, weight_NK, bias_N)
    return all(torch.equal(small_product(x_MK[:n], weight_NK, bias_N), many_MN[:n]) for n in (1, 5, MAX_ROWS))


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    rows_here, outputs_here = row < num_rows, output < num_outputs
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        here = first + step < num_inputs
        x = tl.load(
            x_ptr + row[:, None] * num_inputs + first + step[None, :], rows_here[:, None] & here[None, :], other=0.0
        )
        weight = tl.load(
            weight_ptr + output[None, :].to(tl.int64) * num_inputs + first + step[:, None],
            outputs_here[None, :] & here[:, None],
            other=0.0,
        )
        total = tl.dot(x, weight, total)
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, outputs_here, other=0.0).to(tl.float32)[None, :]
    at = row[:, None] * num_outputs + output[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), rows_here[:, None] & outputs_here[None, :])
