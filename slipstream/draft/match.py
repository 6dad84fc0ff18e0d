"""Drafts by longest suffix match: where has this text's end occurred before, and what came next?

`draft_plainly` is the plain twin of the numba kernel here and of the Triton kernels in `triton_match.py`. Among all
places with the longest match the next token is chosen with the sequence's own sampling noise: argmax of SHARPNESS *
log(votes) + noise, as the model's own choice is argmax of log(probability) + noise. Few votes are a poor estimate of a
probability, hence the factor; with it this agrees with the model more often than the most frequent continuation does,
without it less often (docs/log.md).

Axes: S slots, B places of the library, J drafts of a slot.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numba
import numpy as np

from slipstream.draft.shelves import MAX_MATCH, NO_TEXT, OWN_TEXT
from slipstream.engine.sampling import gumbel_of

BLOCK = 1024
"""Places of a shelf that are searched together; of each at most BLOCK_PLACES are kept, the last ones."""
BLOCK_PLACES = 16
SHARPNESS = 3.0
SERIAL_PLACES = 1 << 17
"""With fewer places to search in all, waking the other threads costs more than it saves."""
MAX_PLACES = 32
"""Places with the longest match that vote; the last ones, which are those of siblings."""


def draft_plainly(
    text: Sequence[int],
    shelf: Sequence[int],
    weights: Sequence[int],
    min_match: int,
    num_drafts: int,
    noise: Callable[[int, int], float],
) -> tuple[list[int], list[int]]:
    """The drafts, and for each the place of its first vote. `noise(index, token)`: of the index-th next token."""
    longest, places = max(1, min_match), list[int]()
    for first in range(0, len(shelf), BLOCK):
        lengths = {end: _match_length(text, shelf, end) for end in range(first, min(first + BLOCK, len(shelf) - 1))}
        best = max(lengths.values(), default=0)
        found = [end for end, length in lengths.items() if length == best][-BLOCK_PLACES:]
        if best >= longest:
            places, longest = (places if best == longest else []) + found, best
    places = places[-MAX_PLACES:]
    drafts: list[int] = []
    chosen: list[int] = []
    for index in range(num_drafts):
        votes: Counter[int] = Counter()
        for place in places:
            if shelf[place + 1 + index] != NO_TEXT:
                votes[shelf[place + 1 + index]] += weights[place]
        if not votes:
            break
        drafts.append(max(votes, key=lambda token: SHARPNESS * math.log(votes[token]) + noise(index, token)))
        places = [place for place in places if shelf[place + 1 + index] == drafts[-1]]
        chosen.append(places[0])
    return drafts, chosen


def _match_length(text: Sequence[int], shelf: Sequence[int], end: int) -> int:
    """Tokens of the text's end that are found up to `end`, if something follows there."""
    if shelf[end + 1] == NO_TEXT:
        return 0
    length = 0
    while length < min(MAX_MATCH, len(text), end + 1) and shelf[end - length] == text[-1 - length]:
        length += 1
    return length


@numba.njit(cache=True)
def find_places(text_L, known, library_B, start, end, min_match, places_P):  # type: ignore[no-untyped-def]
    """Write the places that vote, in order; their number."""
    longest, count = max(1, min_match), 0
    last = text_L[known - 1]
    block_places = np.empty(BLOCK_PLACES, np.int64)
    for first in range(start, end, BLOCK):
        best, num_found = 0, 0
        for place in range(first, min(first + BLOCK, end - 1)):
            if library_B[place] != last or library_B[place + 1] == NO_TEXT:
                continue
            length = 1
            while (
                length < MAX_MATCH
                and length < known
                and place - length >= start
                and library_B[place - length] == text_L[known - 1 - length]
            ):
                length += 1
            if length > best:
                best, num_found = length, 0
            if length == best:
                if num_found == BLOCK_PLACES:
                    for index in range(1, BLOCK_PLACES):
                        block_places[index - 1] = block_places[index]
                    num_found -= 1
                block_places[num_found] = place
                num_found += 1
        if best < longest:
            continue
        if best > longest:
            longest, count = best, 0
        for index in range(num_found):
            if count == MAX_PLACES:
                for other in range(1, MAX_PLACES):
                    places_P[other - 1] = places_P[other]
                count -= 1
            places_P[count] = block_places[index]
            count += 1
    return count


def _draft_slots(  # type: ignore[no-untyped-def]
    tokens_SL, known_S, width_S, greedy_S, seed_S2, start_S, end_S, base_S, own_S, library_B, weights_B, sources_B,
    min_match, drafts_SJ, sources_SJ, found_S,
):  # fmt: skip
    """For every slot at most `width_S` drafts; how many were found. A slot's shelf is [start, end); its own text
    begins at `own_S`, and position 0 of its sequence would lie at `base_S`."""
    for slot in numba.prange(len(known_S)):
        found_S[slot] = 0
        if width_S[slot] <= 0 or end_S[slot] <= start_S[slot]:
            continue
        known = known_S[slot]
        places = np.empty(MAX_PLACES, np.int64)
        count = find_places(tokens_SL[slot], known, library_B, start_S[slot], end_S[slot], min_match, places)
        for index in range(width_S[slot]):
            best_score, best_token = -np.inf, NO_TEXT
            for candidate in range(count):
                token = library_B[places[candidate] + 1 + index]
                if token == NO_TEXT:
                    continue
                votes = 0
                for other in range(count):
                    if library_B[places[other] + 1 + index] == token:
                        votes += weights_B[places[other]]
                score = SHARPNESS * math.log(votes)
                if not greedy_S[slot]:
                    score += gumbel_of(seed_S2[slot, 0], seed_S2[slot, 1], known + index, token)
                if score > best_score:
                    best_score, best_token = score, token
            if best_token == NO_TEXT:
                break
            kept = 0
            for candidate in range(count):
                if library_B[places[candidate] + 1 + index] == best_token:
                    places[kept] = places[candidate]
                    kept += 1
            count = kept
            drafts_SJ[slot, index] = best_token
            is_own = own_S[slot] <= places[0] < base_S[slot] + known
            sources_SJ[slot, index] = OWN_TEXT if is_own else sources_B[places[0]]
            found_S[slot] = index + 1


draft_slots_serial = numba.njit(cache=True)(_draft_slots)
draft_slots_parallel = numba.njit(cache=True, parallel=True)(_draft_slots)
