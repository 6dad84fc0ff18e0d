# mypy: disable-error-code="no-untyped-def"
"""`match.draft_slots_serial` on a GPU: two Triton kernels, one searches blocks of shelves, one lets the places vote.

The search reads each shelf once; where nothing matches a row's last token it looks no further back. Grids depend on the
library's largest shelf and on the number of slots alone, so a CUDA graph can hold them.

Axes: S slots and the trash slot, N blocks of a shelf, P places that vote, J drafts of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.draft.match import BLOCK, BLOCK_PLACES, MAX_PLACES, SHARPNESS
from slipstream.draft.shelves import ALIGNMENT, MAX_MATCH, NO_TEXT, OWN_TEXT
from slipstream.engine.state import StepState
from slipstream.engine.triton_sampling import gumbel, row_keys
from slipstream.models.launching import await_inputs, overlap

FEW_BLOCKS, BLOCKS_TOGETHER = 32, 2
"""Blocks that one program searches: one on short shelves; on long ones several, or starting programs takes longest."""
_SHARPNESS = tl.constexpr(SHARPNESS)
_NO_TEXT, _OWN_TEXT, _ALIGNMENT = tl.constexpr(NO_TEXT), tl.constexpr(OWN_TEXT), tl.constexpr(ALIGNMENT)


def draft_slots(
    state: StepState,
    width_S: Tensor,
    start_S: Tensor,
    end_S: Tensor,
    base_S: Tensor,
    own_S: Tensor,
    library_B: Tensor,
    weights_B: Tensor,
    sources_B: Tensor,
    *,
    min_match: Tensor,
    longest_shelf: int,
) -> Tensor:
    """Write drafts and sources into the state; how many were found for each slot, at most `width_S`."""
    tokens, drafts, device = state["tokens"], state["drafts"], library_B.device
    num_lines, num_blocks = len(width_S), triton.cdiv(longest_shelf, BLOCK)
    together = 1 if num_blocks <= FEW_BLOCKS else BLOCKS_TOGETHER
    num_blocks = triton.cdiv(num_blocks, together) * together
    length_SN, count_SN = (torch.empty(num_lines, num_blocks, dtype=torch.int32, device=device) for _ in range(2))
    place_SNI = torch.empty(num_lines, num_blocks, BLOCK_PLACES, dtype=torch.int32, device=device)
    found_S = torch.empty_like(width_S)
    _search[(num_lines, num_blocks // together)](
        tokens, state["known"], width_S, start_S, end_S, library_B, min_match, length_SN, count_SN, place_SNI,
        tokens.shape[1], num_blocks,
        BLOCK=BLOCK, TOGETHER=together, KEPT=BLOCK_PLACES, MAX_MATCH=MAX_MATCH, **overlap(device),
    )  # fmt: skip
    _vote[(num_lines,)](
        state["known"], width_S, state["greedy"], state["seed_low"], state["seed_high"], base_S, own_S,
        library_B, weights_B, sources_B, min_match, length_SN, count_SN, place_SNI,
        drafts, state["sources"], found_S, num_blocks, drafts.shape[1],
        BLOCKS=triton.next_power_of_2(num_blocks), KEPT=BLOCK_PLACES, PLACES=MAX_PLACES,
        WIDTH=triton.next_power_of_2(drafts.shape[1]), num_warps=1, **overlap(device),
    )  # fmt: skip
    return found_S


@triton.jit
def _search(
    tokens_ptr, known_ptr, width_ptr, start_ptr, end_ptr, library_ptr, min_match_ptr, length_out, count_out, place_out,
    max_length, num_blocks,
    BLOCK: tl.constexpr, TOGETHER: tl.constexpr, KEPT: tl.constexpr, MAX_MATCH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The longest match in some blocks of a slot's shelf, and in each block the last places that have it, in order."""
    await_inputs(OVERLAPS)
    slot = tl.program_id(0)
    start, end = tl.multiple_of(tl.load(start_ptr + slot), _ALIGNMENT), tl.load(end_ptr + slot)
    known, width = tl.load(known_ptr + slot), tl.load(width_ptr + slot)
    text = tokens_ptr + slot.to(tl.int64) * max_length + known - 1
    has_two = (tl.load(min_match_ptr) > 1) & (known > 1)
    last = tl.load(text, known > 0, other=_NO_TEXT)
    before_last = tl.load(text - 1, has_two, other=_NO_TEXT)
    end = tl.where(width > 0, end, 0)
    read_end = tl.multiple_of(tl.cdiv(end, _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT)
    first_block = tl.program_id(1) * TOGETHER
    worth_a_look = True
    if has_two:
        # Two tokens in a row match in few places: mostly one look at all blocks together is enough.
        place = start + first_block * BLOCK + tl.arange(0, TOGETHER * BLOCK)
        # Four places at a time, since both ends of what is read are aligned.
        match = tl.load(library_ptr + place, place < read_end, other=_NO_TEXT) == last
        match = match & (place < end - 1) & (place > start)
        match = match & (tl.load(library_ptr + place - 1, match, other=_NO_TEXT) == before_last)
        worth_a_look = tl.max(match.to(tl.int32), 0) > 0
    if worth_a_look:
        for number in range(TOGETHER):
            block = first_block + number
            place = start + block * BLOCK + tl.arange(0, BLOCK)
            match = tl.load(library_ptr + place, place < read_end, other=_NO_TEXT) == last
            match = match & (place < end - 1)
            if has_two:
                match = match & (place > start)
                match = match & (tl.load(library_ptr + place - 1, match, other=_NO_TEXT) == before_last)
            best = 0
            count = 0
            if tl.max(match.to(tl.int32), 0) > 0:
                match = match & (tl.load(library_ptr + place + 1, match, other=_NO_TEXT) != _NO_TEXT)
                length = match.to(tl.int32)
                back = 1
                longest = tl.minimum(MAX_MATCH, known)
                while (back < longest) & (tl.max(match.to(tl.int32), 0) > 0):
                    match = match & (place - back >= start)
                    match = match & (tl.load(library_ptr + place - back, match, other=_NO_TEXT) == tl.load(text - back))
                    length += match.to(tl.int32)
                    back += 1
                best = tl.max(length, 0)
                is_best = (length == best).to(tl.int32)
                count = tl.sum(is_best, 0)
                rank = tl.cumsum(is_best, 0) - 1 - tl.maximum(count - KEPT, 0)
                out = place_out + (slot * num_blocks + block) * KEPT
                tl.store(out + rank, place, (is_best > 0) & (rank >= 0))
                count = tl.minimum(count, KEPT)
            tl.store(length_out + slot * num_blocks + block, best)
            tl.store(count_out + slot * num_blocks + block, count)
    else:
        nothing = tl.zeros([TOGETHER], tl.int32)
        blocks = slot * num_blocks + first_block + tl.arange(0, TOGETHER)
        tl.store(length_out + blocks, nothing)
        tl.store(count_out + blocks, nothing)


@triton.jit
def _vote(
    known_ptr, width_ptr, greedy_ptr, low_ptr, high_ptr, base_ptr, own_ptr, library_ptr, weights_ptr, sources_ptr,
    min_match_ptr, length_ptr, count_ptr, place_ptr, drafts_out, sources_out, found_out, num_blocks, max_drafts,
    BLOCKS: tl.constexpr, KEPT: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The drafts of one slot by the votes of the places with the longest match: as far as all that are left say the
    same, without a vote."""
    await_inputs(OVERLAPS)
    slot = tl.program_id(0)
    width = tl.load(width_ptr + slot).to(tl.int32)
    found = 0
    if width > 0:
        block_N = tl.arange(0, BLOCKS)
        here_N = block_N < num_blocks
        length_N = tl.load(length_ptr + slot * num_blocks + block_N, here_N, other=0)
        longest = tl.max(length_N, 0)
        votes_N = here_N & (length_N == longest) & (length_N >= tl.maximum(tl.load(min_match_ptr), 1))
        end_N = tl.cumsum(tl.load(count_ptr + slot * num_blocks + block_N, votes_N, other=0), 0)
        count = tl.max(end_N, 0)
        # The last PLACES of them: in which block each lies, and after how many others there.
        index = tl.arange(0, PLACES)
        rank_P = tl.maximum(count - PLACES, 0) + index
        alive = rank_P < count
        past_PN = end_N[None, :] <= rank_P[:, None]
        block_P = tl.sum(past_PN.to(tl.int32), 1)
        first_P = tl.max(tl.where(past_PN, end_N[None, :], 0), 1)
        place_P = tl.load(place_ptr + (slot * num_blocks + block_P) * KEPT + rank_P - first_P, alive, other=0)
        weight_P = tl.load(weights_ptr + place_P, alive, other=0)
        alive = alive & (weight_P > 0)
        column = tl.arange(0, WIDTH)
        next_PJ = tl.load(
            library_ptr + place_P[:, None] + 1 + column[None, :],
            alive[:, None] & (column < width)[None, :],
            other=_NO_TEXT,
        )
        known, greedy = tl.load(known_ptr + slot), tl.load(greedy_ptr + slot)
        low, high = tl.load(low_ptr + slot), tl.load(high_ptr + slot)
        base, own = tl.load(base_ptr + slot), tl.load(own_ptr + slot)
        going = tl.max(alive.to(tl.int32), 0) > 0
        while going:
            chosen = tl.min(tl.where(alive, index, PLACES), 0)
            where = tl.sum(tl.where(index == chosen, place_P, 0), 0)
            is_own = (where >= own) & (where < base + known)
            source = tl.where(is_own, _OWN_TEXT, tl.load(sources_ptr + where))
            low_J = tl.min(tl.where(alive[:, None], next_PJ, 0x7FFFFFFF), 0)
            high_J = tl.max(tl.where(alive[:, None], next_PJ, _NO_TEXT), 0)
            agreed = (low_J == high_J) & (low_J != _NO_TEXT)
            # From `found` on; where a vote was just taken, the first of them is its result.
            until = tl.min(tl.where((agreed == 0) & (column >= found), column, WIDTH), 0)
            until = tl.minimum(until, width)
            said = (column >= found) & (column < until)
            tl.store(drafts_out + slot * max_drafts + column, low_J, said)
            tl.store(sources_out + slot * max_drafts + column, low_J * 0 + source, said)
            found = until
            going = found < width
            if going:
                token_P = tl.load(library_ptr + place_P + 1 + found, alive, other=_NO_TEXT)
                left = alive & (token_P != _NO_TEXT)
                best = -float("inf")
                best_token = _NO_TEXT
                first = tl.min(tl.where(left, index, PLACES), 0)
                k0, k1 = row_keys(low, high, known + found)
                while first < PLACES:
                    token = tl.sum(tl.where(index == first, token_P, 0), 0)
                    same = left & (token_P == token)
                    score = _SHARPNESS * tl.log(tl.sum(tl.where(same, weight_P, 0), 0).to(tl.float32))
                    score += tl.where(greedy > 0, 0.0, gumbel(token, k0, k1))
                    if score > best:  # of equals the first
                        best, best_token = score, token
                    left = left & (token_P != token)
                    first = tl.min(tl.where(left, index, PLACES), 0)
                going = best_token != _NO_TEXT
                alive = alive & (token_P == best_token)
    tl.store(found_out + slot, found)
