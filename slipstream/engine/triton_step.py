# mypy: disable-error-code="no-untyped-def"
"""`packing.pack`, `packing.room_for_drafts` and `step.commit`, the plain twins, in five Triton kernels, not a hundred.

One program sees all slots (a few thousand at most), so the rows are found by one running sum. Sizes and launches follow
from shapes alone: a CUDA graph can hold them.

Axes: T packed tokens (padded), R rows (padded), N samples (padded), S slots and the trash slot, J tokens a step may
give.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.engine.packing import PackedStep, StepSizes
from slipstream.engine.sampling import Samples, SamplingRows
from slipstream.engine.slots import MAX_STOP_TOKENS
from slipstream.engine.state import StepState
from slipstream.models.cached import PackedRows
from slipstream.models.launching import await_inputs, overlap

BLOCK_PLACES = 128


def pack(state: StepState, sizes: StepSizes) -> PackedStep:
    device = state.report.device
    num_lines = state.num_slots + 1
    num_rows, num_samples, num_tokens = sizes.num_rows, sizes.num_samples, sizes.num_tokens

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    slot_R, length_R = new(torch.int64, num_rows), new(torch.int32, num_rows)
    start_R1, sample_start_R1 = (new(torch.int32, num_rows + 1) for _ in range(2))
    _find_rows[(1,)](
        state["known"], state["computed"], state["allotted"], state["live"], state["drafted"], state.report,
        slot_R, start_R1, sample_start_R1, length_R, num_lines, num_rows, state.report.shape[1],
        DRAFTS=sizes.with_drafts, BLOCK=triton.next_power_of_2(max(num_lines, num_rows + 1)), num_warps=8,
        **overlap(device),
    )  # fmt: skip
    ids_T, slot_T, position_T = (new(torch.int64, num_tokens) for _ in range(3))
    tokens, drafts = state["tokens"], state["drafts"]
    _place_tokens[(triton.cdiv(num_tokens, BLOCK_PLACES),)](
        start_R1, slot_R, state["computed"], state["known"], tokens, drafts, ids_T, slot_T, position_T,
        num_tokens, num_rows, state.trash_slot, tokens.shape[1], drafts.shape[1],
        DRAFTS=sizes.with_drafts, BLOCK=BLOCK_PLACES, **overlap(device),
    )  # fmt: skip
    sampling = SamplingRows(
        seed_N2=new(torch.int64, num_samples, 2),
        position_N=new(torch.int64, num_samples),
        inverse_temperature_N=new(torch.float32, num_samples),
        greedy_N=new(torch.bool, num_samples),
        top_k_N=new(torch.int64, num_samples),
        top_p_N=new(torch.float32, num_samples),
        min_p_N=new(torch.float32, num_samples),
    )
    sampled_at_N = new(torch.int64, num_samples)
    _place_samples[(triton.cdiv(num_samples, BLOCK_PLACES),)](
        start_R1, sample_start_R1, slot_R, state["known"],
        state["seed_low"], state["seed_high"], state["inverse_temperature"], state["greedy"],
        state["top_k"], state["top_p"], state["min_p"],
        sampled_at_N, sampling.seed_N2, sampling.position_N, sampling.inverse_temperature_N,
        sampling.greedy_N, sampling.top_k_N, sampling.top_p_N, sampling.min_p_N,
        num_samples, num_rows, state.trash_slot, BLOCK=BLOCK_PLACES, **overlap(device),
    )  # fmt: skip
    rows = PackedRows(slot_T, position_T, slot_R, start_R1, length_R, state["table"])
    num_drafts = state.max_drafts if sizes.with_drafts else 0
    return PackedStep(ids_T, rows, sample_start_R1, sampled_at_N, sampling, num_drafts)


def room_for_drafts(state: StepState, limits: Tensor) -> Tensor:
    room = torch.empty((), dtype=torch.int32, device=state.report.device)
    num_lines = state.num_slots + 1
    _room[(1,)](
        *(state[name] for name in ("known", "computed", "allotted", "live")), room, num_lines,
        limits, BLOCK=triton.next_power_of_2(num_lines), **overlap(room.device),
    )  # fmt: skip
    return room


def commit(state: StepState, step: PackedStep, samples: Samples) -> None:
    rows, buffer, drafts = step.rows, state["tokens"], state["drafts"]
    _commit[(len(rows.slot_R),)](
        rows.slot_R, rows.length_R, step.sample_start_R1, *samples,
        state["known"], state["computed"], state["limit"], state["live"], state["scripted"], state["stops"],
        drafts, state["sources"], buffer, state.report, state.trash_slot, buffer.shape[1], drafts.shape[1],
        WIDTH=state.max_drafts + 1, BLOCK=triton.next_power_of_2(state.max_drafts + 1), STOPS=MAX_STOP_TOKENS,
        num_warps=1, **overlap(buffer.device),
    )  # fmt: skip


@triton.jit
def _room(
    known_ptr, computed_ptr, allotted_ptr, live_ptr, room_out, num_lines, limits_ptr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    slot = tl.arange(0, BLOCK)
    here = slot < num_lines
    due = tl.load(known_ptr + slot, here, other=0) - tl.load(computed_ptr + slot, here, other=0)
    due *= tl.load(live_ptr + slot, here, other=0)
    count = tl.minimum(tl.load(allotted_ptr + slot, here, other=0), due)
    samplers = tl.sum(((count == due) & (count > 0)).to(tl.int32), 0)
    num_tokens, num_samples = tl.load(limits_ptr), tl.load(limits_ptr + 1)
    tl.store(room_out, tl.minimum(num_tokens - tl.sum(count, 0), num_samples - samplers))


@triton.jit(do_not_specialize=["num_rows"])
def _find_rows(
    known_ptr, computed_ptr, allotted_ptr, live_ptr, drafted_ptr, report_ptr,
    slot_out, start_out, sample_start_out, length_out, num_lines, num_rows, report_width,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Slots that run move to the front, in order, with what they run; other rows are the trash slot's."""
    await_inputs(OVERLAPS)
    slot = tl.arange(0, BLOCK)
    here = slot < num_lines
    known = tl.load(known_ptr + slot, here, other=0)
    computed = tl.load(computed_ptr + slot, here, other=0)
    due = known - computed
    if DRAFTS:
        due += tl.load(drafted_ptr + slot, here, other=0)
    count = tl.minimum(tl.load(allotted_ptr + slot, here, other=0), due) * tl.load(live_ptr + slot, here, other=0)
    count = tl.maximum(count, 0)
    runs = count > 0
    samples = tl.where(runs, tl.maximum(computed + count - known + 1, 0), 0)
    row = tl.cumsum(runs.to(tl.int32), 0) - 1
    end = tl.cumsum(count, 0)
    sample_end = tl.cumsum(samples, 0)
    running = tl.sum(runs.to(tl.int32), 0)
    tl.store(report_ptr + slot * report_width, slot * 0, here)
    tl.store(report_ptr + slot * report_width + 1, slot * 0, here)

    tl.store(slot_out + row, slot.to(tl.int64), runs)
    tl.store(start_out + row, end - count, runs)
    tl.store(sample_start_out + row, sample_end - samples, runs)
    tl.store(length_out + row, computed + count, runs)
    rest = (slot >= running) & (slot < num_rows)
    tl.store(slot_out + slot, (slot * 0 + num_lines - 1).to(tl.int64), rest)
    tl.store(start_out + slot, slot * 0 + tl.sum(count, 0), (slot >= running) & (slot <= num_rows))
    tl.store(sample_start_out + slot, slot * 0 + tl.sum(samples, 0), (slot >= running) & (slot <= num_rows))
    tl.store(length_out + slot, slot * 0, rest)


@triton.jit
def _row_of(start_ptr, slot_ptr, place, num_rows, trash_slot):
    """Of a place: its row, whether it is one (not padding), its slot, and the place within the row."""
    low = place * 0
    high = low + num_rows
    width = num_rows
    while width > 0:
        middle = (low + high) // 2
        searching = low < high
        passed = tl.load(start_ptr + middle + 1, searching, other=0) <= place
        low = tl.where(searching & passed, middle + 1, low)
        high = tl.where(searching & (passed == 0), middle, high)
        width = width // 2
    real = low < num_rows
    slot = tl.where(real, tl.load(slot_ptr + low, real, other=0), trash_slot)
    return low, real, slot, place - tl.load(start_ptr + low, real, other=0)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _place_tokens(
    start_ptr, slot_ptr, computed_ptr, known_ptr, tokens_ptr, drafts_ptr, ids_out, slot_out, position_out,
    num_tokens, num_rows, trash_slot, max_length, max_drafts,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = token < num_tokens
    _, real, slot, offset = _row_of(start_ptr, slot_ptr, token, num_rows, trash_slot)
    position = tl.where(real, tl.load(computed_ptr + slot, real, other=0) + offset, 0)
    drafted = position - tl.load(known_ptr + slot, real, other=1)
    is_draft = drafted >= 0
    token_id = tl.load(tokens_ptr + slot * max_length + position, here & (is_draft == 0), other=0)
    if DRAFTS:
        token_id += tl.load(drafts_ptr + slot * max_drafts + drafted, here & is_draft, other=0)
    tl.store(slot_out + token, slot, here)
    tl.store(position_out + token, position.to(tl.int64), here)
    tl.store(ids_out + token, token_id.to(tl.int64), here)


@triton.jit(do_not_specialize=["num_samples", "num_rows"])
def _place_samples(
    start_ptr, sample_start_ptr, slot_ptr, known_ptr, low_ptr, high_ptr, inverse_ptr, greedy_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr,
    at_out, seed_out, position_out, inverse_out, greedy_out, top_k_out, top_p_out, min_p_out,
    num_samples, num_rows, trash_slot, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = sample < num_samples
    row, real, slot, offset = _row_of(sample_start_ptr, slot_ptr, sample, num_rows, trash_slot)
    # The samples of a row are at its last tokens.
    from_end = tl.load(sample_start_ptr + row + 1, real, other=0) - sample
    at = tl.where(real, tl.load(start_ptr + row + 1, real, other=0) - from_end, 0)
    position = tl.where(real, tl.load(known_ptr + slot, real, other=0) + offset, 0)
    mask32 = 0xFFFFFFFF
    tl.store(at_out + sample, at.to(tl.int64), here)
    tl.store(position_out + sample, position.to(tl.int64), here)
    tl.store(seed_out + 2 * sample, tl.load(low_ptr + slot).to(tl.int64) & mask32, here)
    tl.store(seed_out + 2 * sample + 1, tl.load(high_ptr + slot).to(tl.int64) & mask32, here)
    tl.store(inverse_out + sample, tl.load(inverse_ptr + slot), here)
    tl.store(greedy_out + sample, tl.load(greedy_ptr + slot) > 0, here)
    tl.store(top_k_out + sample, tl.load(top_k_ptr + slot).to(tl.int64), here)
    tl.store(top_p_out + sample, tl.load(top_p_ptr + slot), here)
    tl.store(min_p_out + sample, tl.load(min_p_ptr + slot), here)


@triton.jit
def _commit(
    slot_ptr, length_ptr, sample_start_ptr, tokens_ptr, logprobs_ptr, log_kept_ptr,
    known_ptr, computed_ptr, limit_ptr, live_ptr,
    scripted_ptr, stops_ptr, drafts_ptr, sources_ptr, buffer_ptr, report_ptr, trash_slot, max_length, max_drafts,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STOPS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row: its samples side by side."""
    await_inputs(OVERLAPS)
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    if slot < trash_slot:
        first = tl.load(sample_start_ptr + row)
        num_samples = tl.load(sample_start_ptr + row + 1) - first
        known = tl.load(known_ptr + slot)
        live = tl.load(live_ptr + slot)
        index = tl.arange(0, BLOCK)
        here = index < num_samples
        sampled = tl.load(tokens_ptr + first + index, here, other=0).to(tl.int32)
        logprob = tl.load(logprobs_ptr + first + index, here, other=0.0)
        log_kept = tl.load(log_kept_ptr + first + index, here, other=0.0)
        scripted = tl.load(scripted_ptr + slot) > 0
        at = slot * max_length + known + index
        walked = tl.where(scripted, tl.load(buffer_ptr + at, here & (known + index < max_length), other=0), sampled)

        has_draft = index + 1 < num_samples
        draft = tl.load(drafts_ptr + slot * max_drafts + index, has_draft, other=0)
        source = tl.load(sources_ptr + slot * max_drafts + index, has_draft, other=0)
        right = has_draft & (walked == draft)
        ends = (known + index + 1 >= tl.load(limit_ptr + slot)) | (sampled < 0)
        for number in tl.static_range(STOPS):
            ends = ends | (walked == tl.load(stops_ptr + slot * STOPS + number))
        # The first sample whose draft was wrong, or that ends the sequence, is the last that counts.
        last = tl.min(tl.where(here & (right & (ends == 0)), BLOCK, index), 0)
        count = tl.where((num_samples > 0) & (live > 0), tl.minimum(last + 1, num_samples), 0)
        counts = index < count
        ended = tl.max((counts & ends).to(tl.int32), 0)

        tl.store(buffer_ptr + at, walked, counts)
        tl.store(known_ptr + slot, known + count)
        tl.store(computed_ptr + slot, tl.where(count > 0, known + count - 1, tl.load(length_ptr + row)))
        tl.store(live_ptr + slot, tl.where(ended > 0, 0, live))
        line = report_ptr + slot * (2 + 4 * WIDTH)
        tl.store(line, count)
        tl.store(line + 1, tl.where(count > 0, num_samples - 1, 0))
        wide = index < WIDTH
        tl.store(line + 2 + index, tl.where(sampled < 0, sampled, walked), wide & counts)
        tl.store(line + 2 + WIDTH + index, logprob.to(tl.int32, bitcast=True), wide & counts)
        tl.store(line + 2 + 2 * WIDTH + index, tl.where(right, source, 0), wide & counts)
        tl.store(line + 2 + 3 * WIDTH + index, log_kept.to(tl.int32, bitcast=True), wide & counts)
