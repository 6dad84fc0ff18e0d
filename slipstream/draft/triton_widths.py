# mypy: disable-error-code="no-untyped-def"
"""The rules of `widths.py`, their plain twin, as Triton kernels, instead of fifty tensor operations in every step.

One program sees all slots where rows have to be weighed against each other; elsewhere each slot has its own.

Axes: S slots and the trash slot, J tokens a step may give.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.draft.widths import FAVOUR, FORGETTING, LEVELS, LOG_STEP, MOST, START_WIDTH, WIDER, Rule
from slipstream.engine.state import StepState
from slipstream.models.launching import await_inputs, overlap

_LEVELS, _LOG_STEP, _MOST = tl.constexpr(LEVELS), tl.constexpr(LOG_STEP), tl.constexpr(MOST)
_FORGETTING, _WIDER, _FAVOUR = tl.constexpr(FORGETTING), tl.constexpr(WIDER), tl.constexpr(FAVOUR)


def earned_widths(
    state: StepState, rule: Rule, window_S: Tensor, hits_S: Tensor, tries_S: Tensor, max_drafts: int
) -> Tensor:
    """Drafts each slot may have, if it decodes: as many as it has earned, may run and can still use."""
    width_S = torch.empty_like(window_S)
    num_lines = len(window_S)
    _earned[(1,)](
        *(state[name] for name in ("live", "known", "computed", "allotted", "limit")),
        window_S, hits_S, tries_S, width_S, num_lines, max_drafts,
        IS_AIMD=rule == "aimd", BLOCK=triton.next_power_of_2(num_lines), **overlap(window_S.device),
    )  # fmt: skip
    return width_S


def share_out(
    state: StepState, rule: Rule, found_S: Tensor, window_S: Tensor, hits_S: Tensor, tries_S: Tensor, room: Tensor
) -> None:
    """`widths.share_out`, into what is `drafted`."""
    num_lines = len(found_S)
    _share[(1,)](
        found_S, window_S, hits_S, tries_S, state["behind"], room, state["drafted"], num_lines,
        IS_AIMD=rule == "aimd", BLOCK=triton.next_power_of_2(num_lines), num_warps=8, **overlap(found_S.device),
    )  # fmt: skip


def learn(
    state: StepState, base_S: Tensor, start_S: Tensor, end_S: Tensor, library_B: Tensor,
    window_S: Tensor, hits_S: Tensor, tries_S: Tensor, max_drafts: int,
) -> None:  # fmt: skip
    """`HistoryDrafter.learn_plainly`."""
    _learn[(len(window_S),)](
        state.report, state["live"], state["known"], base_S, start_S, end_S, library_B, window_S, hits_S, tries_S,
        state.report.shape[1], max_drafts, min(START_WIDTH, max_drafts), WIDTH=max_drafts + 1,
        BLOCK=triton.next_power_of_2(max_drafts + 1), num_warps=1,
        enable_fp_fusion=False,  # to the bit what the plain rules give
        **overlap(window_S.device),
    )  # fmt: skip


@triton.jit
def _cap(window, hits, tries, level, IS_AIMD: tl.constexpr):
    """`widths.caps` at one level."""
    if IS_AIMD:
        return tl.minimum(window, level)
    odds = (hits + 1.0) / (tries + 2.0)
    wide = tl.minimum(tl.floor(level.to(tl.float32) * _LOG_STEP / tl.log(odds)), _MOST)
    wide = tl.where(level == _LEVELS - 1, tl.maximum(wide, 1.0), wide)
    return tl.where(level == 0, 0, wide.to(tl.int32))


@triton.jit
def _earned(
    live_ptr, known_ptr, computed_ptr, allotted_ptr, limit_ptr, window_ptr, hits_ptr, tries_ptr, width_out,
    num_lines, max_drafts, IS_AIMD: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    slot = tl.arange(0, BLOCK)
    here = slot < num_lines
    known = tl.load(known_ptr + slot, here, other=0)
    decodes = (known - tl.load(computed_ptr + slot, here, other=0) == 1) & (tl.load(live_ptr + slot, here, other=0) > 0)
    most = tl.minimum(tl.load(allotted_ptr + slot, here, other=0), tl.load(limit_ptr + slot, here, other=0) - known) - 1
    window = tl.load(window_ptr + slot, here, other=0)
    hits, tries = tl.load(hits_ptr + slot, here, other=0.0), tl.load(tries_ptr + slot, here, other=0.0)
    earned = _cap(window, hits, tries, slot * 0 + _LEVELS - 1, IS_AIMD)
    width = tl.minimum(tl.minimum(most, earned), max_drafts)
    tl.store(width_out + slot, tl.where(decodes, tl.maximum(width, 0), 0), here)


@triton.jit
def _share(
    found_ptr, window_ptr, hits_ptr, tries_ptr, behind_ptr, room_ptr, given_out, num_lines,
    IS_AIMD: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    slot = tl.arange(0, BLOCK)
    here = slot < num_lines
    found = tl.load(found_ptr + slot, here, other=0)
    window = tl.load(window_ptr + slot, here, other=0)
    hits, tries = tl.load(hits_ptr + slot, here, other=0.0), tl.load(tries_ptr + slot, here, other=0.0)
    favour = tl.where(tl.load(behind_ptr + slot, here, other=0) > 0, _FAVOUR, 1)
    room = tl.load(room_ptr).to(tl.int32)
    chosen = 0
    for level in range(1, _LEVELS):
        level_S = tl.minimum(favour * level, _LEVELS - 1)
        total = tl.sum(tl.minimum(found, _cap(window, hits, tries, level_S, IS_AIMD)), 0)
        chosen = tl.where(total <= room, level, chosen)
    given = tl.minimum(found, _cap(window, hits, tries, tl.minimum(favour * chosen, _LEVELS - 1), IS_AIMD))
    next_S = tl.minimum(favour * (chosen + 1), _LEVELS - 1)
    more = tl.minimum(found, _cap(window, hits, tries, next_S, IS_AIMD)) - given
    left = room - tl.sum(given, 0) - (tl.cumsum(more, 0) - more)
    tl.store(given_out + slot, given + tl.minimum(more, tl.maximum(left, 0)), here)


@triton.jit
def _learn(
    report_ptr, live_ptr, known_ptr, base_ptr, start_ptr, end_ptr, library_ptr, window_ptr, hits_ptr, tries_ptr,
    line_size, max_drafts, start_width, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    slot = tl.program_id(0)
    line = report_ptr + slot * line_size
    count, tried = tl.load(line), tl.load(line + 1)
    if count > 0:
        index = tl.arange(0, BLOCK)
        new = index < count
        first = tl.load(base_ptr + slot) + tl.load(known_ptr + slot) - count
        if tl.load(end_ptr + slot) > tl.load(start_ptr + slot):
            tl.store(library_ptr + first + index, tl.load(line + 2 + index, new, other=0), new)
        right = tl.sum((tl.load(line + 2 + 2 * WIDTH + index, new, other=0) > 0).to(tl.int32), 0)
        # A right draft that ended its sequence leaves those after it untried.
        tried = tl.where(tl.load(live_ptr + slot) > 0, tried, tl.minimum(tried, count))
        if tried > 0:
            window = tl.load(window_ptr + slot)
            grown = tl.where(right == tried, tl.minimum(window + _WIDER, max_drafts), start_width)
            missed = tl.where(right == tried, 0, 1)
            tl.store(window_ptr + slot, grown)
            tl.store(hits_ptr + slot, tl.load(hits_ptr + slot) * _FORGETTING + right.to(tl.float32))
            tl.store(tries_ptr + slot, tl.load(tries_ptr + slot) * _FORGETTING + (right + missed).to(tl.float32))
