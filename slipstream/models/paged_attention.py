"""Attention of packed rows over KV pages on a GPU: one Triton kernel for decode, verify and chunked prefill.

Owns the kernels and their launch; `cached.py` owns the pages and the plain twin. The launch depends on shapes alone, so
that a CUDA graph can hold it.

Where rows are few, several programs share a block's splits, and the last of them to arrive joins what all have left.

Invariant: a token's bits depend on its own query, position and keys alone. Its keys are cut into splits of fixed size
at absolute positions; each is summed page by page, and they are joined in order, whoever summed them. Masked keys add
exact zeros, sums over keys are dots (whose order depends neither on warps nor on block rows), and no compiler may fuse
multiplications with additions. So decode, verify and chunked prefill agree, in any batch and with any padding.

Axes: as in `cached.py`, and M block rows: the G query heads of one key/value head, for some tokens of one row; V head
size of values, where D is that of keys.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.attention import AttentionForm
from slipstream.models.cached import PackedRows
from slipstream.models.launching import await_inputs, overlap

SPLIT_TOKENS = 256
"""Keys of one split. Another number gives other bits."""
PROGRAMS_PER_PROCESSOR = 8
"""Enough to fill a GPU. Where rows and heads are fewer, several programs share the splits of a block of rows."""
MAX_PARTIAL_BYTES = 256 * 2**20
"""Splits are not shared where their float32 results would be larger: a long prefill has programs enough without."""
JOINED_ROWS = 128
"""Rows of partial results that one program reads at a time, so that it does not wait for each split by itself."""
BUFFER_SHARE = 0.57
"""Of the shared memory a program may ask for, the part that holds pages on their way (128 of Hopper's 227 KiB)."""

LOG2_E = tl.constexpr(math.log2(math.e))
NO_PEAK = tl.constexpr(-1.0e30)  # finite, so that a difference of two of them is no NaN


def attend_paged(
    query_THD: Tensor,
    keys_PKCD: Tensor,
    values_PKCD: Tensor,
    rows: PackedRows,
    form: AttentionForm,
    *,
    arrivals: Tensor | None = None,
    split_tokens: int = SPLIT_TOKENS,
    num_workers: int | None = None,
) -> Tensor:
    """Every token's attention to positions 0..own of its slot: [T, H, D of values]; zeros for padding tokens.

    `num_workers` programs share the splits of a block of rows (by default as many as fill the GPU); bits are the same.
    `arrivals`: from `new_arrivals`, may not serve two calls at a time; by default made anew.
    """
    branches = rows.branches
    assert branches is None or len(rows.slot_R) == len(query_THD), "branching rows have one token each"
    num_tokens, num_heads, key_size = query_THD.shape
    _, num_kv_heads, page_tokens, value_size = values_PKCD.shape
    num_rows, table_width = rows.slot_R.shape[0], rows.table_SW.shape[1]
    assert keys_PKCD.is_contiguous() and values_PKCD.is_contiguous() and rows.table_SW.is_contiguous()
    assert page_tokens >= 16 and page_tokens & (page_tokens - 1) == 0 and split_tokens % page_tokens == 0
    query_THD = query_THD if query_THD.stride(2) == 1 else query_THD.contiguous()

    group = num_heads // num_kv_heads
    # No more rows than one token's heads need: from 64 on Hopper multiplies by wgmma, which may round otherwise, and
    # decode would no longer equal verify. For the same reason the number of warps is the same for every shape.
    block_rows = max(16 if num_tokens <= num_rows else 32, triton.next_power_of_2(group))
    block_tokens = block_rows // group
    # Row r starts at block start // block_tokens + r, so rows never share a block; only the first T rows have tokens.
    num_blocks = (num_tokens - 1) // block_tokens + min(num_rows, num_tokens)
    num_splits = triton.cdiv(table_width * page_tokens, split_tokens)
    partial_shape = num_tokens, num_heads, num_splits
    if num_workers is None:
        small = math.prod(partial_shape) * (value_size + 2) * 4 <= MAX_PARTIAL_BYTES
        num_workers = _programs(query_THD.device) // (min(num_blocks, num_tokens) * num_kv_heads) if small else 1
    num_workers = max(1, min(num_workers, num_splits))
    is_shared = num_workers > 1

    out = query_THD.new_empty(num_tokens, num_heads, value_size)
    peaks, weights, mixes = out, out, out
    if is_shared:
        if arrivals is None:
            arrivals = new_arrivals(out.device, num_blocks * num_kv_heads)
        assert num_blocks * num_kv_heads <= arrivals.numel()
        peaks, weights = (torch.empty(partial_shape, dtype=torch.float32, device=out.device) for _ in range(2))
        mixes = torch.empty(*partial_shape, value_size, dtype=torch.float32, device=out.device)
    sinks = out if form.sinks_H is None else form.sinks_H.contiguous()
    path_width = 0 if branches is None else branches.path_TD.shape[1]
    padded_key_size, padded_value_size = (max(16, triton.next_power_of_2(size)) for size in (key_size, value_size))
    page_bytes = page_tokens * (padded_key_size + padded_value_size) * keys_PKCD.element_size()
    num_buffers = min(2, int(BUFFER_SHARE * _shared_bytes(query_THD.device)) // page_bytes)
    _attend_splits[(num_blocks, num_kv_heads, num_workers)](
        query_THD, keys_PKCD, values_PKCD, rows.start_R1, rows.length_R, rows.slot_R, rows.table_SW, sinks,
        *((out, out) if branches is None else (branches.fork_T, branches.path_TD)),
        out, peaks, weights, mixes, out if arrivals is None else arrivals,
        form.scaling, query_THD.stride(0), query_THD.stride(1),
        num_tokens, num_rows, num_kv_heads, table_width, num_splits, num_workers, path_width,
        IS_SHARED=is_shared, GROUP=group, BLOCK_ROWS=block_rows, BLOCK_TOKENS=block_tokens, PAGE_TOKENS=page_tokens,
        SPLIT_TOKENS=split_tokens, KEY_SIZE=key_size, PADDED_KEY_SIZE=padded_key_size, VALUE_SIZE=value_size,
        PADDED_VALUE_SIZE=padded_value_size, WINDOW=form.sliding_window or 0, SOFTCAP=form.softcap or 0.0,
        HAS_SINKS=form.sinks_H is not None, HAS_PATHS=branches is not None,
        JOINED_AT_ONCE=max(1, JOINED_ROWS // block_rows),
        num_stages=1 + 2 * num_buffers,  # two stages each: a page's number is fetched, then its content
        num_warps=4, enable_fp_fusion=False, **overlap(out.device),
    )  # fmt: skip
    return out


def new_arrivals(device: torch.device, num_shared: int | None = None) -> Tensor:
    """Counters of the programs that have done their part, one for a block of rows and a key/value head; zeros again
    after every call. By default as many as are shared at most."""
    return torch.zeros(num_shared or 2 * _programs(device), dtype=torch.int32, device=device)


@cache
def _programs(device: torch.device) -> int:
    """How many fill the device."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    return int(PROGRAMS_PER_PROCESSOR * processors)


@cache
def _shared_bytes(device: torch.device) -> int:
    """What one program may use; in the interpreter any number will do."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@triton.jit
def _find_row(starts, num_rows, block, BLOCK_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last row whose first block is not past this one."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK_TOKENS + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _join(peak_M, weight_M, mix_MV, next_peak_M, next_weight_M, next_mix_MV):  # type: ignore[no-untyped-def]
    """The softmax over two sets of keys from those over each; a set wholly masked changes no bit of the other's.

    peak: the largest score in powers of two; weight: the sum of 2 ** (score - peak); mix: the values' sum so weighted.
    """
    joint_peak_M = tl.maximum(peak_M, next_peak_M)
    shrink_M = tl.exp2(peak_M - joint_peak_M)
    next_shrink_M = tl.exp2(next_peak_M - joint_peak_M)
    weight_M = weight_M * shrink_M + next_weight_M * next_shrink_M
    return joint_peak_M, weight_M, mix_MV * shrink_M[:, None] + next_mix_MV * next_shrink_M[:, None]


@triton.jit
def _normalise(peak_M, weight_M, mix_MV, sinks, head_M, valid_M, HAS_SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Divide by the sum of weights, which a head's sink joins. No keys at all give zero."""
    if HAS_SINKS:
        sink_M = tl.load(sinks + head_M, mask=valid_M, other=0.0).to(tl.float32) * LOG2_E
        joint_peak_M = tl.maximum(peak_M, sink_M)
        shrink_M = tl.exp2(peak_M - joint_peak_M)
        weight_M = weight_M * shrink_M + tl.exp2(sink_M - joint_peak_M)
        mix_MV = mix_MV * shrink_M[:, None]
    return mix_MV / tl.where(weight_M > 0.0, weight_M, 1.0)[:, None]


@triton.jit(do_not_specialize=[
    "num_tokens", "num_rows", "num_kv_heads", "table_width", "num_splits", "num_workers", "path_width",
])  # fmt: skip
def _attend_splits(  # type: ignore[no-untyped-def]
    query, keys, values, starts, lengths, slots, table, sinks, forks, paths, out, peaks, weights, mixes, arrivals,
    scaling, query_token_stride, query_head_stride,
    num_tokens, num_rows, num_kv_heads, table_width, num_splits, num_workers, path_width,
    IS_SHARED: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, KEY_SIZE: tl.constexpr, PADDED_KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, PADDED_VALUE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_PATHS: tl.constexpr, JOINED_AT_ONCE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One block of a row's tokens, with the query heads of one key/value head, over every num_workers-th split."""
    await_inputs(OVERLAPS)
    block, kv_head, worker = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index_M = tl.arange(0, BLOCK_ROWS)
    index_V = tl.arange(0, PADDED_VALUE_SIZE)
    head_M = kv_head * GROUP + index_M % GROUP
    total = tl.load(starts + num_rows)
    if (worker == 0) & ((block + 1) * BLOCK_TOKENS > total):
        padding_M = block * BLOCK_TOKENS + index_M // GROUP
        empty_M = (padding_M >= total) & (padding_M < num_tokens) & (index_M < BLOCK_TOKENS * GROUP)
        at_MV = (padding_M * num_kv_heads * GROUP + head_M)[:, None] * VALUE_SIZE + index_V[None, :]
        zeros_MV = tl.zeros([BLOCK_ROWS, PADDED_VALUE_SIZE], out.dtype.element_ty)
        tl.store(out + at_MV, zeros_MV, mask=empty_M[:, None] & (index_V < VALUE_SIZE)[None, :])

    row = _find_row(starts, num_rows, block, BLOCK_TOKENS)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    length = tl.load(lengths + row)
    first_token = (block - start // BLOCK_TOKENS - row) * BLOCK_TOKENS
    if first_token < count:
        index_C = tl.arange(0, PAGE_TOKENS)
        index_D = tl.arange(0, PADDED_KEY_SIZE)
        token_M = first_token + index_M // GROUP
        valid_M = (token_M < count) & (index_M < BLOCK_TOKENS * GROUP)
        position_M = tl.where(valid_M, length - count + token_M, -1)
        first_position = length - count + first_token
        last_position = length - count + tl.minimum(first_token + BLOCK_TOKENS, count) - 1
        first_key = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW else 0

        at_MD = ((start + token_M) * query_token_stride + head_M * query_head_stride)[:, None] + index_D[None, :]
        query_MD = tl.load(query + at_MD, mask=valid_M[:, None] & (index_D < KEY_SIZE)[None, :], other=0.0)
        query_MD = query_MD.to(keys.dtype.element_ty)
        ones_CO = tl.full([PAGE_TOKENS, 16], 1.0, values.dtype.element_ty)
        line = table + tl.load(slots + row) * table_width
        out_M = (start + token_M) * num_kv_heads * GROUP + head_M
        writable_MV = valid_M[:, None] & (index_V < VALUE_SIZE)[None, :]
        all_peak_M = tl.full([BLOCK_ROWS], NO_PEAK, tl.float32)
        all_weight_M = tl.zeros([BLOCK_ROWS], tl.float32)
        all_mix_MV = tl.zeros([BLOCK_ROWS, PADDED_VALUE_SIZE], tl.float32)

        first_split, end_split = first_key // SPLIT_TOKENS, last_position // SPLIT_TOKENS + 1
        for split in range(first_split + worker, end_split, num_workers):
            peak_M = tl.full([BLOCK_ROWS], NO_PEAK, tl.float32)
            weight_MO = tl.zeros([BLOCK_ROWS, 16], tl.float32)
            mix_MV = tl.zeros([BLOCK_ROWS, PADDED_VALUE_SIZE], tl.float32)
            first_page = tl.maximum(split * (SPLIT_TOKENS // PAGE_TOKENS), first_key // PAGE_TOKENS)
            end_page = tl.minimum((split + 1) * (SPLIT_TOKENS // PAGE_TOKENS), last_position // PAGE_TOKENS + 1)
            for page in range(first_page, end_page):
                key_position_C = page * PAGE_TOKENS + index_C
                if HAS_PATHS:  # rows of one token: from the fork on, its keys lie along its path
                    ahead_C = key_position_C - tl.load(forks + row)
                    is_ahead_C = (ahead_C >= 0) & (key_position_C < length)
                    stored_C = tl.load(paths + row * path_width + ahead_C, mask=is_ahead_C, other=0)
                    stored_C = tl.where(is_ahead_C, stored_C, key_position_C)
                    page_C = tl.load(line + stored_C // PAGE_TOKENS).to(tl.int64)
                    place_C = (page_C * num_kv_heads + kv_head) * PAGE_TOKENS + stored_C % PAGE_TOKENS
                else:
                    place_C = (tl.load(line + page).to(tl.int64) * num_kv_heads + kv_head) * PAGE_TOKENS + index_C
                at_CD = place_C[:, None] * KEY_SIZE + index_D[None, :]
                if PADDED_KEY_SIZE == KEY_SIZE:
                    key_CD = tl.load(keys + at_CD)
                else:
                    key_CD = tl.load(keys + at_CD, mask=(index_D < KEY_SIZE)[None, :], other=0.0)
                score_MC = tl.dot(query_MD, tl.trans(key_CD), input_precision="ieee") * scaling
                if SOFTCAP > 0.0:  # tanh(x) = 1 - 2 / (1 + exp(2 x)), which saturates without overflow into NaN
                    score_MC = SOFTCAP - 2.0 * SOFTCAP / (1.0 + tl.exp2(score_MC * (2.0 * LOG2_E / SOFTCAP)))
                seen_MC = key_position_C[None, :] <= position_M[:, None]
                if WINDOW:
                    seen_MC &= key_position_C[None, :] > position_M[:, None] - WINDOW
                score_MC = tl.where(seen_MC, score_MC * LOG2_E, float("-inf"))

                new_peak_M = tl.maximum(peak_M, tl.max(score_MC, 1))
                shrink_M = tl.exp2(peak_M - new_peak_M)
                weight_MC = tl.exp2(score_MC - new_peak_M[:, None]).to(values.dtype.element_ty)
                # The rest of the last page is another sequence's leavings, perhaps no finite numbers.
                readable_CV = (key_position_C < length)[:, None]
                if PADDED_VALUE_SIZE != VALUE_SIZE:
                    readable_CV = readable_CV & (index_V < VALUE_SIZE)[None, :]
                at_CV = place_C[:, None] * VALUE_SIZE + index_V[None, :]
                value_CV = tl.load(values + at_CV, mask=readable_CV, other=0.0)
                weight_MO = tl.dot(weight_MC, ones_CO, weight_MO * shrink_M[:, None], input_precision="ieee")
                mix_MV = tl.dot(weight_MC, value_CV, mix_MV * shrink_M[:, None], input_precision="ieee")
                peak_M = new_peak_M

            weight_M = tl.max(weight_MO, 1)  # 16 equal columns
            if IS_SHARED:
                at_M = out_M * num_splits + split
                tl.store(peaks + at_M, peak_M, mask=valid_M)
                tl.store(weights + at_M, weight_M, mask=valid_M)
                tl.store(mixes + at_M[:, None] * VALUE_SIZE + index_V[None, :], mix_MV, mask=writable_MV)
            else:
                all_peak_M, all_weight_M, all_mix_MV = _join(
                    all_peak_M, all_weight_M, all_mix_MV, peak_M, weight_M, mix_MV
                )

        is_last = True
        if IS_SHARED:
            # The last to arrive sees what the others have stored: all threads' stores come before the count.
            tl.debug_barrier()
            here = arrivals + block * num_kv_heads + kv_head
            is_last = tl.atomic_add(here, 1, sem="acq_rel") == num_workers - 1
            if is_last:
                tl.store(here, 0)
                for chunk in range(first_split, end_split, JOINED_AT_ONCE):
                    for index in tl.static_range(JOINED_AT_ONCE):
                        split = chunk + index
                        at_M = out_M * num_splits + split
                        here_M = valid_M & (split + index_M * 0 < end_split)
                        peak_M = tl.load(peaks + at_M, mask=here_M, other=NO_PEAK, cache_modifier=".cg")
                        weight_M = tl.load(weights + at_M, mask=here_M, other=0.0, cache_modifier=".cg")
                        mix_MV = tl.load(
                            mixes + at_M[:, None] * VALUE_SIZE + index_V[None, :],
                            mask=here_M[:, None] & (index_V < VALUE_SIZE)[None, :], other=0.0, cache_modifier=".cg",
                        )  # fmt: skip
                        all_peak_M, all_weight_M, all_mix_MV = _join(
                            all_peak_M, all_weight_M, all_mix_MV, peak_M, weight_M, mix_MV
                        )
        if is_last:
            out_MV = _normalise(all_peak_M, all_weight_M, all_mix_MV, sinks, head_M, valid_M, HAS_SINKS)
            at_MV = out_M[:, None] * VALUE_SIZE + index_V[None, :]
            tl.store(out + at_MV, out_MV.to(out.dtype.element_ty), mask=writable_MV)
