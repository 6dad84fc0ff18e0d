# mypy: disable-error-code="no-untyped-def"
"""`step.pack` and `step.commit`, the plain twins, as three Triton kernels instead of a hundred small operations.

One program sees all slots (a few thousand at most), so the rows are found by one running sum. Sizes and launches follow
from shapes alone: a CUDA graph can hold them.

Axes: T packed tokens (padded), R rows (padded), S slots and the trash slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.engine.batcher import MAX_STOP_TOKENS
from slipstream.engine.sampling import SamplingRows
from slipstream.engine.state import NO_TOKEN, StepState
from slipstream.models.cached import PackedRows
from slipstream.models.launching import await_inputs, overlap

TOKEN_BLOCK = 128
_NO_TOKEN = tl.constexpr(NO_TOKEN)


def pack(state: StepState, num_tokens: int, num_rows: int) -> tuple[Tensor, PackedRows, SamplingRows]:
    device = state.report.device
    num_lines = state.num_slots + 1

    def of_rows(dtype: torch.dtype, *more: int) -> Tensor:
        return torch.empty(num_rows, *more, dtype=dtype, device=device)

    slot_R, length_R = of_rows(torch.int64), of_rows(torch.int32)
    start_R1 = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    sampling = SamplingRows(
        seed_N2=of_rows(torch.int64, 2),
        position_N=of_rows(torch.int64),
        inverse_temperature_N=of_rows(torch.float32),
        greedy_N=of_rows(torch.bool),
        top_k_N=of_rows(torch.int64),
        top_p_N=of_rows(torch.float32),
        min_p_N=of_rows(torch.float32),
    )
    _find_rows[(1,)](
        state["known"], state["computed"], state["allotted"], state["live"],
        state["seed_low"], state["seed_high"], state["inverse_temperature"], state["greedy"],
        state["top_k"], state["top_p"], state["min_p"], state.report,
        slot_R, start_R1, length_R, sampling.seed_N2, sampling.position_N, sampling.inverse_temperature_N,
        sampling.greedy_N, sampling.top_k_N, sampling.top_p_N, sampling.min_p_N,
        num_lines, num_rows, BLOCK=triton.next_power_of_2(max(num_lines, num_rows + 1)), num_warps=8, **overlap(device),
    )  # fmt: skip
    ids_T, slot_T, position_T = (torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(3))
    tokens = state["tokens"]
    _place_tokens[(triton.cdiv(num_tokens, TOKEN_BLOCK),)](
        start_R1, slot_R, state["computed"], tokens, ids_T, slot_T, position_T,
        num_tokens, num_rows, state.trash_slot, tokens.shape[1], BLOCK=TOKEN_BLOCK, **overlap(device),
    )  # fmt: skip
    return ids_T, PackedRows(slot_T, position_T, slot_R, start_R1, length_R, state["table"]), sampling


def commit(state: StepState, rows: PackedRows, tokens_R: Tensor, logprobs_R: Tensor) -> None:
    num_rows = len(rows.slot_R)
    buffer = state["tokens"]
    _commit[(1,)](
        rows.slot_R, rows.length_R, tokens_R, logprobs_R,
        state["known"], state["computed"], state["limit"], state["live"], state["scripted"], state["stops"],
        buffer, state.report, num_rows, state.num_slots + 1, buffer.shape[1],
        STOPS=MAX_STOP_TOKENS, BLOCK=triton.next_power_of_2(num_rows), num_warps=8, **overlap(buffer.device),
    )  # fmt: skip


@triton.jit
def _find_rows(
    known_ptr, computed_ptr, allotted_ptr, live_ptr, low_ptr, high_ptr, inverse_ptr, greedy_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, report_ptr,
    slot_out, start_out, length_out, seed_out, position_out, inverse_out, greedy_out, top_k_out, top_p_out, min_p_out,
    num_lines, num_rows, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Slots that run move to the front, in order, with all that their rows need; other rows are the trash slot's."""
    await_inputs(OVERLAPS)
    slot = tl.arange(0, BLOCK)
    here = slot < num_lines
    known = tl.load(known_ptr + slot, here, other=0)
    computed = tl.load(computed_ptr + slot, here, other=0)
    allotted = tl.load(allotted_ptr + slot, here, other=0)
    count = tl.minimum(allotted, known - computed) * tl.load(live_ptr + slot, here, other=0)
    count = tl.maximum(count, 0)
    runs = count > 0
    row = tl.cumsum(runs.to(tl.int32), 0) - 1
    end = tl.cumsum(count, 0)
    running = tl.sum(runs.to(tl.int32), 0)
    total = tl.sum(count, 0)
    tl.store(report_ptr + slot, _NO_TOKEN, here)
    tl.store(report_ptr + num_lines + slot, _NO_TOKEN, here)

    tl.store(slot_out + row, slot.to(tl.int64), runs)
    tl.store(start_out + row, end - count, runs)
    tl.store(length_out + row, computed + count, runs)
    tl.store(position_out + row, known.to(tl.int64), runs)
    mask32 = 0xFFFFFFFF
    tl.store(seed_out + 2 * row, tl.load(low_ptr + slot, runs, other=0).to(tl.int64) & mask32, runs)
    tl.store(seed_out + 2 * row + 1, tl.load(high_ptr + slot, runs, other=0).to(tl.int64) & mask32, runs)
    tl.store(inverse_out + row, tl.load(inverse_ptr + slot, runs, other=0.0), runs)
    tl.store(greedy_out + row, tl.load(greedy_ptr + slot, runs, other=0) > 0, runs)
    tl.store(top_k_out + row, tl.load(top_k_ptr + slot, runs, other=0).to(tl.int64), runs)
    tl.store(top_p_out + row, tl.load(top_p_ptr + slot, runs, other=0.0), runs)
    tl.store(min_p_out + row, tl.load(min_p_ptr + slot, runs, other=0.0), runs)

    rest = (slot >= running) & (slot < num_rows)
    zero = slot * 0
    tl.store(slot_out + slot, zero.to(tl.int64) + num_lines - 1, rest)
    tl.store(start_out + slot, zero + total, (slot >= running) & (slot <= num_rows))
    tl.store(length_out + slot, zero, rest)
    tl.store(position_out + slot, zero.to(tl.int64), rest)
    tl.store(seed_out + 2 * slot, zero.to(tl.int64), rest)
    tl.store(seed_out + 2 * slot + 1, zero.to(tl.int64), rest)
    tl.store(inverse_out + slot, zero.to(tl.float32), rest)
    tl.store(greedy_out + slot, zero > 0, rest)
    tl.store(top_k_out + slot, zero.to(tl.int64), rest)
    tl.store(top_p_out + slot, zero.to(tl.float32), rest)
    tl.store(min_p_out + slot, zero.to(tl.float32), rest)


@triton.jit
def _place_tokens(
    start_ptr, slot_ptr, computed_ptr, tokens_ptr, ids_out, slot_out, position_out,
    num_tokens, num_rows, trash_slot, max_length, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = token < num_tokens
    # The row of a token: as many rows as end at or before it.
    low = token * 0
    high = low + num_rows
    width = num_rows
    while width > 0:
        middle = (low + high) // 2
        searching = low < high
        passed = tl.load(start_ptr + middle + 1, searching, other=0) <= token
        low = tl.where(searching & passed, middle + 1, low)
        high = tl.where(searching & (passed == 0), middle, high)
        width = width // 2
    real = low < num_rows
    slot = tl.load(slot_ptr + low, real, other=0)
    slot = tl.where(real, slot, trash_slot)
    offset = token - tl.load(start_ptr + low, real, other=0)
    position = tl.where(real, tl.load(computed_ptr + slot, real, other=0) + offset, 0).to(tl.int64)
    tl.store(slot_out + token, slot, here)
    tl.store(position_out + token, position, here)
    tl.store(ids_out + token, tl.load(tokens_ptr + slot * max_length + position, here, other=0).to(tl.int64), here)


@triton.jit
def _commit(
    slot_ptr, length_ptr, tokens_ptr, logprobs_ptr, known_ptr, computed_ptr, limit_ptr, live_ptr, scripted_ptr,
    stops_ptr, buffer_ptr, report_ptr, num_rows, num_lines, max_length, STOPS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    row = tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + row, row < num_rows, other=0)
    real = (row < num_rows) & (slot < num_lines - 1)
    length = tl.load(length_ptr + row, real, other=0)
    known = tl.load(known_ptr + slot, real, other=0)
    samples = real & (length == known) & (tl.load(live_ptr + slot, real, other=0) > 0)

    at = slot * max_length + known
    sampled = tl.load(tokens_ptr + row, real, other=0).to(tl.int32)
    scripted = tl.load(scripted_ptr + slot, real, other=0) > 0
    walked = tl.where(scripted, tl.load(buffer_ptr + at, samples & scripted, other=0), sampled)
    tl.store(buffer_ptr + at, walked, samples)

    ended = (known + 1 >= tl.load(limit_ptr + slot, real, other=0)) | (sampled < 0)
    for index in tl.static_range(STOPS):
        ended = ended | (walked == tl.load(stops_ptr + slot * STOPS + index, real, other=_NO_TOKEN))
    tl.store(known_ptr + slot, known + 1, samples)
    tl.store(computed_ptr + slot, length, real)
    tl.store(live_ptr + slot, row * 0, samples & ended)
    logprob = tl.load(logprobs_ptr + row, real, other=0.0)
    tl.store(report_ptr + slot, tl.where(sampled < 0, sampled, walked), samples)
    tl.store(report_ptr + num_lines + slot, logprob.to(tl.int32, bitcast=True), samples)
