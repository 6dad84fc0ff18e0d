# mypy: disable-error-code="no-untyped-def"
"""Triton kernels between the products of a decoder layer; their plain twins are in `fused.py`.

Invariant: a row's bits do not depend on how many rows there are. A program works on one token, block sizes and warps
follow from the model's sizes alone, and the number of tokens is not even an argument, since Triton compiles other code
for numbers that are multiples of 16.

Axes: T packed tokens, N hidden size, H query heads, K key/value heads, D head size, R rotated part of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.cached import PackedRows
from slipstream.models.launching import await_inputs, overlap
from slipstream.models.rotary import Rotary

if TYPE_CHECKING:
    from slipstream.models.fused import Activation, Heads, Norm

ACT_BLOCK = 1024
ROPE_TILE = 512


@triton.jit
def _weigh(x, weight, dtype: tl.constexpr, ROUNDS_FIRST: tl.constexpr, PLUS_ONE: tl.constexpr):
    """Normalised float32 numbers times the weight, rounded to `dtype` before or after, as float32."""
    if ROUNDS_FIRST:
        x = x.to(dtype).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    return (x * weight).to(dtype).to(tl.float32)


@triton.jit
def _normalise(
    x, weight_ptr, at, here, dtype: tl.constexpr, N: tl.constexpr, EPS: tl.constexpr,
    WEIGHTED: tl.constexpr, ROUNDS_FIRST: tl.constexpr, PLUS_ONE: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """A row, zero where not `here`."""
    if CENTRED:
        x = tl.where(here, x - tl.sum(x, 0) / N, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / N + EPS)
    if WEIGHTED:
        weight = tl.load(weight_ptr + at, here, other=0.0).to(tl.float32)
        x = _weigh(x, weight, dtype, ROUNDS_FIRST, PLUS_ONE)
    return x.to(dtype).to(tl.float32)


@triton.jit
def _add_norm(
    x_ptr, delta_ptr, after_ptr, before_ptr, sum_ptr, normed_ptr,
    SCALE: tl.constexpr, AFTER_EPS: tl.constexpr, BEFORE_EPS: tl.constexpr,
    ADDS: tl.constexpr, NORMS_AFTER: tl.constexpr, NORMS_BEFORE: tl.constexpr,
    WEIGHTED: tl.constexpr, ROUNDS_FIRST: tl.constexpr, PLUS_ONE: tl.constexpr, CENTRED: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * N
    at = tl.arange(0, BLOCK)
    here = at < N
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row + at, here, other=0.0).to(tl.float32)
    if ADDS:
        delta = tl.load(delta_ptr + row + at, here, other=0.0).to(tl.float32)
        if NORMS_AFTER:
            delta = _normalise(
                delta, after_ptr, at, here, dtype, N, AFTER_EPS, WEIGHTED, ROUNDS_FIRST, PLUS_ONE, CENTRED
            )
        if SCALE != 1.0:
            delta = (delta * SCALE).to(dtype).to(tl.float32)
        x = (x + delta).to(dtype)
        tl.store(sum_ptr + row + at, x, here)
        x = x.to(tl.float32)
    if NORMS_BEFORE:
        x = _normalise(x, before_ptr, at, here, dtype, N, BEFORE_EPS, WEIGHTED, ROUNDS_FIRST, PLUS_ONE, CENTRED)
        tl.store(normed_ptr + row + at, x.to(dtype), here)


def add_norm(
    x_TN: Tensor, delta_TN: Tensor | None, after: Norm | None, scale: float, before: Norm | None
) -> tuple[Tensor, Tensor | None]:
    """The residual stream x + scale * after(delta), and `before` of that for the next product."""
    if delta_TN is None and before is None:
        return x_TN, None
    num_tokens, size = x_TN.shape
    assert x_TN.is_contiguous() and (delta_TN is None or (delta_TN.is_contiguous() and delta_TN.dtype == x_TN.dtype))
    norms = [norm for norm in (after, before) if norm is not None]
    kinds = {(norm.weight is not None, norm.rounds_first, norm.plus_one, norm.centred) for norm in norms}
    assert len(kinds) < 2, "the norms of a layer are of one kind"
    weighted, rounds_first, plus_one, centred = kinds.pop() if kinds else (False, True, False, False)
    block = triton.next_power_of_2(size)
    sum_TN = x_TN if delta_TN is None else torch.empty_like(x_TN)
    normed_TN = None if before is None else torch.empty_like(x_TN)
    # Pointers that the kernel will not touch have to be some tensor.
    _add_norm[(num_tokens,)](
        x_TN,
        x_TN if delta_TN is None else delta_TN,
        x_TN if after is None or after.weight is None else after.weight,
        x_TN if before is None or before.weight is None else before.weight,
        sum_TN,
        sum_TN if normed_TN is None else normed_TN,
        SCALE=scale,
        AFTER_EPS=0.0 if after is None else after.eps,
        BEFORE_EPS=0.0 if before is None else before.eps,
        ADDS=delta_TN is not None,
        NORMS_AFTER=after is not None,
        NORMS_BEFORE=before is not None,
        WEIGHTED=weighted,
        ROUNDS_FIRST=rounds_first,
        PLUS_ONE=plus_one,
        CENTRED=centred,
        N=size,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
        **overlap(x_TN.device),
    )
    return sum_TN, normed_TN


@triton.jit
def activate(gate, up, dtype: tl.constexpr, SILU: tl.constexpr):
    """The activation of float32 gates, rounded to `dtype`, times `up`, rounded again."""
    exponent = gate
    if not SILU:
        # x (1 + tanh u) / 2 = x / (1 + exp(-2u))
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = (gate / (1.0 + tl.exp(-exponent))).to(dtype).to(tl.float32)
    return (active * up).to(dtype)


@triton.jit
def _act_mul(
    gate_up_ptr, out_ptr, SILU: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    await_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < SIZE
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + token * 2 * SIZE + at, here, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * SIZE + SIZE + at, here, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * SIZE + at, activate(gate, up, dtype, SILU), here)


def act_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    assert gate_up.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    grid = num_tokens, triton.cdiv(size, ACT_BLOCK)
    _act_mul[grid](gate_up, out, SILU=activation == "silu", SIZE=size, BLOCK=ACT_BLOCK, **overlap(gate_up.device))
    return out


@triton.jit
def _norm_rope_write(
    qkv_ptr, query_ptr, keys_ptr, values_ptr, query_weight_ptr, key_weight_ptr, cos_ptr, sin_ptr, position_ptr,
    slot_ptr, place_ptr, table_ptr, table_stride,
    EPS: tl.constexpr, NORMS: tl.constexpr, AT_ONCE: tl.constexpr, ROUNDS_FIRST: tl.constexpr, PLUS_ONE: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, LOOKS_UP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_HEADS query, key or value heads of one token: the tiles of queries first, values last."""
    await_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    QUERY_TILES: tl.constexpr = (H + BLOCK_HEADS - 1) // BLOCK_HEADS
    KEY_TILES: tl.constexpr = (K + BLOCK_HEADS - 1) // BLOCK_HEADS
    kind = (tile >= QUERY_TILES).to(tl.int32) + (tile >= QUERY_TILES + KEY_TILES).to(tl.int32)
    first = tl.where(kind == 0, 0, tl.where(kind == 1, QUERY_TILES, QUERY_TILES + KEY_TILES))
    part = tl.where(kind == 0, 0, tl.where(kind == 1, H, H + K))
    num_heads = tl.where(kind == 0, H, K)

    head = ((tile - first) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    # As rows, since the interpreter has no masks of one number and a row.
    is_query, is_key, is_value = kind + dim * 0 == 0, kind + dim * 0 == 1, kind + dim * 0 == 2
    here = (head < num_heads) & (dim < D)
    turned = (head < num_heads) & (dim < R) & (is_query | is_key)
    other_dim = tl.where(dim < R // 2, dim + R // 2, dim - R // 2)
    dtype = qkv_ptr.dtype.element_ty
    heads_ptr = qkv_ptr + token * (H + 2 * K) * D + (part + head) * D
    x = tl.load(heads_ptr + dim, here, other=0.0).to(tl.float32)
    other = tl.load(heads_ptr + other_dim, turned, other=0.0).to(tl.float32)

    if NORMS:
        if AT_ONCE:
            weight_at = head * D
            mean = tl.sum(tl.sum(x * x, 1), 0) / (num_heads * D)
        else:
            weight_at = head * 0
            mean = (tl.sum(x * x, 1) / D)[:, None]
        scale = tl.rsqrt(mean + EPS)
        weight = tl.load(query_weight_ptr + weight_at + dim, here & is_query, other=0.0).to(tl.float32)
        weight += tl.load(key_weight_ptr + weight_at + dim, here & is_key, other=0.0).to(tl.float32)
        other_weight = tl.load(query_weight_ptr + weight_at + other_dim, turned & is_query, other=0.0).to(tl.float32)
        other_weight += tl.load(key_weight_ptr + weight_at + other_dim, turned & is_key, other=0.0).to(tl.float32)
        x = tl.where(is_value, x, _weigh(x * scale, weight, dtype, ROUNDS_FIRST, PLUS_ONE))
        other = _weigh(other * scale, other_weight, dtype, ROUNDS_FIRST, PLUS_ONE)

    if R > 0:
        # Rounded where torch rounds: after each product if the cosines are as narrow as the queries.
        rotary_dtype = cos_ptr.dtype.element_ty
        turn = tl.load(position_ptr + token).to(tl.int64) if LOOKS_UP else token
        cos = tl.load(cos_ptr + turn * R + dim, turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + turn * R + dim, turned, other=0.0).to(tl.float32)
        other = tl.where(dim < R // 2, -other, other)
        x = (x * cos).to(rotary_dtype).to(tl.float32) + (other * sin).to(rotary_dtype).to(tl.float32)
    x = x.to(dtype)

    tl.store(query_ptr + (token * H + head) * D + dim, x, here & is_query)
    position = tl.load(place_ptr + token).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    page = tl.load(table_ptr + slot * table_stride + position // PAGE_TOKENS).to(tl.int64)
    place = ((page * K + head) * PAGE_TOKENS + position % PAGE_TOKENS) * D + dim
    tl.store(keys_ptr + place, x.to(keys_ptr.dtype.element_ty), here & is_key)
    tl.store(values_ptr + place, x.to(values_ptr.dtype.element_ty), here & is_value)


def norm_rope_write(
    qkv: Tensor, heads: Heads, rotary: Rotary | None, rows: PackedRows, keys: Tensor, values: Tensor
) -> Tensor:
    """The query [T, H, D]; keys and values [P, K, C, D] get their new entries."""
    num_tokens, (num_query, num_key, size) = qkv.shape[0], (heads.num_query, heads.num_key, heads.size)
    for pages in (keys, values):
        assert pages.is_contiguous() and pages.shape[1::2] == (num_key, size)
    assert qkv.is_contiguous() and rows.table_SW.stride(1) == 1
    assert rows.slot_T.stride(0) == rows.place_T.stride(0) == 1
    cos, sin = (qkv, qkv) if rotary is None else (rotary.cosines.contiguous(), rotary.sines.contiguous())
    position_T = None if rotary is None else rotary.position_T
    assert position_T is None or position_T.is_contiguous()
    assert cos.dtype in (qkv.dtype, torch.float32)
    query = qkv.new_empty(num_tokens, num_query, size)
    norm, key_norm = heads.query_norm, heads.key_norm
    block_d = triton.next_power_of_2(size)
    if heads.norms_all_at_once:
        block_heads = triton.next_power_of_2(max(num_query, num_key))
    else:
        block_heads = max(1, min(triton.next_power_of_2(num_query), ROPE_TILE // block_d))
    grid = num_tokens, triton.cdiv(num_query, block_heads) + 2 * triton.cdiv(num_key, block_heads)
    _norm_rope_write[grid](
        qkv,
        query,
        keys,
        values,
        qkv if norm is None else norm.weight,
        qkv if key_norm is None else key_norm.weight,
        cos,
        sin,
        rows.place_T if position_T is None else position_T,
        rows.slot_T,
        rows.place_T,
        rows.table_SW,
        rows.table_SW.stride(0),
        EPS=0.0 if norm is None else norm.eps,
        NORMS=norm is not None,
        AT_ONCE=heads.norms_all_at_once,
        ROUNDS_FIRST=norm is None or norm.rounds_first,
        PLUS_ONE=norm is not None and norm.plus_one,
        H=num_query,
        K=num_key,
        D=size,
        R=0 if rotary is None else cos.shape[-1],
        LOOKS_UP=position_T is not None,
        PAGE_TOKENS=keys.shape[2],
        BLOCK_HEADS=block_heads,
        BLOCK_D=block_d,
        num_warps=4 if block_heads * block_d <= 2048 else 8,
        **overlap(qkv.device),
    )
    return query
