# mypy: disable-error-code="no-untyped-def"
"""The matrix product of a few rows on a GPU: a Triton kernel where cuBLAS has too few blocks to fill the device.

A product without split reductions is cut along the outputs only; for the tall weights of a decoder layer cuBLAS's large
tiles then leave most of the GPU idle. Narrow tiles do not. Each output is one accumulator over the whole reduction, in
order, as in cuBLAS, and on Hopper the bits are the same (docs/log.md). Exactness rests on that, so `agrees` asks the
device itself, for every shape, before the kernel is used.

With an activation the weight is that of gates and of what they multiply, one half after the other: a program computes
some outputs of both halves and their product.

Axes: M rows, N outputs, K the reduction.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear
from triton.runtime.errors import OutOfResources

from slipstream.models.launching import await_inputs, overlap
from slipstream.models.products import MOST_FEW_ROWS
from slipstream.models.triton_layers import act_mul, activate

if TYPE_CHECKING:
    from slipstream.models.fused import Activation

MOST_FEW_OUTPUTS, LEAST_MANY_OUTPUTS = 3072, 16384
SHORT_REDUCTION = 1024


def tiling(num_outputs: int, num_inputs: int) -> tuple[int, int, int, int] | None:
    """Outputs a block, step of the reduction, stages and warps for a weight of this shape; None where cuBLAS is as
    fast. The best of 138 tilings on an H200 with weights that come from memory (docs/log.md)."""
    if num_inputs % 16:
        return None
    if num_outputs <= MOST_FEW_OUTPUTS:
        return (16, 128, 6, 2) if num_inputs < SHORT_REDUCTION else (16, 512, 6, 2)
    if num_outputs >= LEAST_MANY_OUTPUTS:
        return (64, 64, 3, 4) if num_inputs < SHORT_REDUCTION else (64, 128, 3, 4)
    return None


def small_product(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: Activation | None = None
) -> Tensor:
    """x weight^T + bias for at most MOST_FEW_ROWS rows; with an activation, that of the first half times the second."""
    num_rows, num_inputs = x_MK.shape
    num_outputs = weight_NK.shape[0]
    cut = tiling(num_outputs, num_inputs)
    assert cut is not None and num_rows <= MOST_FEW_ROWS and x_MK.is_contiguous() and weight_NK.is_contiguous()
    block_outputs, block_inputs, num_stages, num_warps = cut
    if activation is not None:
        num_outputs, block_outputs = num_outputs // 2, block_outputs // 2
    out_MN = x_MK.new_empty(num_rows, num_outputs)
    _product[(triton.cdiv(num_outputs, block_outputs),)](
        x_MK, weight_NK, weight_NK if bias_N is None else bias_N, out_MN, num_rows, num_outputs, num_inputs,
        HAS_BIAS=bias_N is not None, IS_GATED=activation is not None, SILU=activation == "silu",
        ROWS=MOST_FEW_ROWS, BLOCK_N=block_outputs, BLOCK_K=block_inputs,
        num_stages=num_stages, num_warps=num_warps, **overlap(x_MK.device),
    )  # fmt: skip
    return out_MN


@cache
def agrees(
    num_outputs: int,
    num_inputs: int,
    has_bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    activation: Activation | None = None,
) -> bool:
    """Whether the kernel runs on this device and cuBLAS gives the same bits for this shape, by trial; with an
    activation, whether both variants do."""
    if tiling(num_outputs, num_inputs) is None or dtype not in (torch.bfloat16, torch.float16):
        return False
    draw = torch.Generator(device).manual_seed(0)
    x_MK, weight_NK, bias_1N = (
        torch.randn(rows, columns, generator=draw, device=device).to(dtype)
        for rows, columns in ((128, num_inputs), (num_outputs, num_inputs), (1, num_outputs))
    )
    bias_N = bias_1N[0] if has_bias else None
    many_MN = linear(x_MK, weight_NK, bias_N)
    try:
        same = [torch.equal(small_product(x_MK[:n], weight_NK, bias_N), many_MN[:n]) for n in (1, 5, MOST_FEW_ROWS)]
        if activation is not None:
            few = small_product(x_MK[:MOST_FEW_ROWS], weight_NK, bias_N, activation)
            same.append(torch.equal(few, act_mul(many_MN[:MOST_FEW_ROWS].contiguous(), activation)))
        return all(same)
    except OutOfResources:  # a GPU with less shared memory
        return False


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """`num_outputs`: of one half, if gated."""
    await_inputs(OVERLAPS)
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    rows_here, outputs_here = row < num_rows, output < num_outputs
    dtype = out_ptr.dtype.element_ty
    at_x = x_ptr + row[:, None] * num_inputs + step[None, :]
    at_weight = weight_ptr + output[None, :].to(tl.int64) * num_inputs + step[:, None]
    other_half = tl.cast(num_outputs, tl.int64) * num_inputs
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    other_total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        here = first + step < num_inputs
        weights_here = outputs_here[None, :] & here[:, None]
        x = tl.load(at_x + first, rows_here[:, None] & here[None, :], other=0.0)
        total = tl.dot(x, tl.load(at_weight + first, weights_here, other=0.0), total)
        if IS_GATED:
            other_total = tl.dot(x, tl.load(at_weight + other_half + first, weights_here, other=0.0), other_total)
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, outputs_here, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            other_total += tl.load(bias_ptr + num_outputs + output, outputs_here, other=0.0).to(tl.float32)[None, :]
    result = total.to(dtype)
    if IS_GATED:
        result = activate(result.to(tl.float32), other_total.to(dtype).to(tl.float32), dtype, SILU)
    tl.store(out_ptr + row[:, None] * num_outputs + output[None, :], result, rows_here[:, None] & outputs_here[None, :])
