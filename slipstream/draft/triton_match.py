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

from slipstream.draft.match import BLOCK, BLOCK_PLACES, MAX_PLACES
from slipstream.draft.shelves import MAX_MATCH, NO_TEXT, OWN_TEXT
from slipstream.engine.state import StepState
from slipstream.engine.triton_sampling import gumbel, row_keys
from slipstream.models.launching import await_inputs, overlap

_NO_TEXT, _OWN_TEXT = tl.constexpr(NO_TEXT), tl.constexpr(OWN_TEXT)


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
    length_SN = torch.empty(num_lines, num_blocks, dtype=torch.int32, device=device)
    place_SNI = torch.empty(num_lines, num_blocks, BLOCK_PLACES, dtype=torch.int32, device=device)
    place_SP = torch.empty(num_lines, MAX_PLACES, dtype=torch.int32, device=device)
    found_S = torch.empty_like(width_S)
    _search[(num_lines, num_blocks)](
        tokens, state["known"], width_S, start_S, end_S, library_B, length_SN, place_SNI, tokens.shape[1], num_blocks,
        BLOCK=BLOCK, KEPT=BLOCK_PLACES, MAX_MATCH=MAX_MATCH, **overlap(device),
    )  # fmt: skip
    _vote[(num_lines,)](
        state["known"], width_S, state["greedy"], state["seed_low"], state["seed_high"], base_S, own_S,
        library_B, weights_B, sources_B, min_match, length_SN, place_SNI, place_SP,
        drafts, state["sources"], found_S, num_blocks, drafts.shape[1],
        BLOCKS=triton.next_power_of_2(num_blocks), KEPT=BLOCK_PLACES, PLACES=MAX_PLACES,
        WIDTH=triton.next_power_of_2(drafts.shape[1]), **overlap(device),
    )  # fmt: skip
    return found_S


@triton.jit
def _search(
    tokens_ptr, known_ptr, width_ptr, start_ptr, end_ptr, library_ptr, length_out, place_out, max_length, num_blocks,
    BLOCK: tl.constexpr, KEPT: tl.constexpr, MAX_MATCH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The longest match in one block of a slot's shelf, and the last places that have it."""
    await_inputs(OVERLAPS)
    slot, block = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(start_ptr + slot), tl.load(end_ptr + slot)
    first = start + block * BLOCK
    best = 0
    if (tl.load(width_ptr + slot) > 0) & (first < end - 1):
        known = tl.load(known_ptr + slot)
        text = tokens_ptr + slot.to(tl.int64) * max_length + known - 1
        place = first + tl.arange(0, BLOCK)
        here = place < end - 1
        match = here & (tl.load(library_ptr + place, here, other=_NO_TEXT) == tl.load(text))
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
        out = place_out + (slot * num_blocks + block) * KEPT
        for kept in tl.static_range(KEPT):
            last = tl.max(tl.where(length == best, place, -1), 0)
            tl.store(out + KEPT - 1 - kept, last)
            length = tl.where(place == last, -1, length)
    tl.store(length_out + slot * num_blocks + block, best)


@triton.jit
def _vote(
    known_ptr, width_ptr, greedy_ptr, low_ptr, high_ptr, base_ptr, own_ptr, library_ptr, weights_ptr, sources_ptr,
    min_match_ptr, length_ptr, place_ptr, scratch_ptr, drafts_out, sources_out, found_out, num_blocks, max_drafts,
    BLOCKS: tl.constexpr, KEPT: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The drafts of one slot, one after another, by the votes of the places with the longest match."""
    await_inputs(OVERLAPS)
    slot = tl.program_id(0)
    width = tl.load(width_ptr + slot)
    found = 0
    if width > 0:
        entry = tl.arange(0, BLOCKS * KEPT)
        length = tl.load(length_ptr + slot * num_blocks + entry // KEPT, entry < num_blocks * KEPT, other=0)
        longest = tl.max(length, 0)
        votes_here = (length == longest) & (length >= tl.maximum(tl.load(min_match_ptr), 1))
        place = tl.load(place_ptr + slot * num_blocks * KEPT + entry, votes_here, other=-1)
        votes_here = votes_here & (place >= 0)
        # The last PLACES of them move together, in order; the next read must see them.
        count = tl.sum(votes_here.to(tl.int32), 0)
        rank = tl.cumsum(votes_here.to(tl.int32), 0) - 1 - tl.maximum(count - PLACES, 0)
        tl.store(scratch_ptr + slot * PLACES + rank, place, votes_here & (rank >= 0))
        tl.debug_barrier()
        index = tl.arange(0, PLACES)
        alive = index < count
        place_P = tl.load(scratch_ptr + slot * PLACES + index, alive, other=0)
        weight_P = tl.load(weights_ptr + place_P, alive, other=0)
        column = tl.arange(0, WIDTH)
        next_PJ = tl.load(
            library_ptr + place_P[:, None] + 1 + column[None, :],
            alive[:, None] & (column < width)[None, :],
            other=_NO_TEXT,
        )
        known, greedy = tl.load(known_ptr + slot), tl.load(greedy_ptr + slot)
        low, high = tl.load(low_ptr + slot), tl.load(high_ptr + slot)
        base, own = tl.load(base_ptr + slot), tl.load(own_ptr + slot)
        going = count > 0
        while going & (found < width):
            token_P = tl.sum(tl.where(column[None, :] == found, next_PJ, 0), 1)
            alive = alive & (token_P != _NO_TEXT)
            same_PP = (token_P[:, None] == token_P[None, :]) & alive[None, :]
            votes_P = tl.sum(tl.where(same_PP, weight_P[None, :], 0), 1)
            k0, k1 = row_keys(low, high, known + found)
            score_P = tl.log(tl.maximum(votes_P, 1).to(tl.float32))
            score_P += tl.where(greedy > 0, 0.0, gumbel(token_P, k0, k1))
            score_P = tl.where(alive & (votes_P > 0), score_P, -float("inf"))
            best = tl.max(score_P, 0)
            going = best > -float("inf")
            if going:
                # Of equals the first: all that say the same have the same score.
                winner = tl.min(tl.where(score_P == best, index, PLACES), 0)
                token = tl.sum(tl.where(index == winner, token_P, 0), 0)
                alive = alive & (token_P == token)
                chosen = tl.min(tl.where(alive, index, PLACES), 0)
                where = tl.sum(tl.where(index == chosen, place_P, 0), 0)
                is_own = (where >= own) & (where < base + known)
                tl.store(drafts_out + slot * max_drafts + found, token)
                source = tl.load(sources_ptr + where)
                tl.store(sources_out + slot * max_drafts + found, tl.where(is_own, _OWN_TEXT, source))
                found += 1
    tl.store(found_out + slot, found)
