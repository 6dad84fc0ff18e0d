# mypy: disable-error-code="no-untyped-def"
"""The rules of `widths.py`, their plain twin, as numba kernels: on a CPU fifty tensor operations would cost too much.

Axes: S slots and the trash slot, K levels, J tokens a step may give.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from slipstream.draft.widths import FAVOUR, FORGETTING, LEVELS, LOG_STEP, MOST, START_WIDTH, WIDER


@numba.njit(cache=True, inline="always")
def _cap(is_aimd, window, hits, tries, behind, level):
    """`widths.caps` of one row and level."""
    if level == 0:
        return 0
    if behind > 0:
        level = min(FAVOUR * level, LEVELS - 1)
    if is_aimd:
        return min(window, level)
    odds = (np.float32(hits) + np.float32(1)) / (np.float32(tries) + np.float32(2))
    wide = np.float32(level) * np.float32(LOG_STEP) / np.float32(math.log(odds))
    return int(max(min(math.floor(wide), MOST), level == LEVELS - 1))


@numba.njit(cache=True)
def earned_widths(
    is_aimd, live_S, known_S, computed_S, allotted_S, limit_S, window_S, hits_S, tries_S, max_drafts, width_S
):  # fmt: skip
    """Drafts each slot may have, if it decodes: as many as it has earned, may run and can still use."""
    for slot in range(len(width_S)):
        width_S[slot] = 0
        if live_S[slot] > 0 and known_S[slot] - computed_S[slot] == 1:
            most = min(allotted_S[slot] - 1, limit_S[slot] - known_S[slot] - 1, max_drafts)
            earned = _cap(is_aimd, window_S[slot], hits_S[slot], tries_S[slot], 0, LEVELS - 1)
            width_S[slot] = max(0, min(most, earned))


@numba.njit(cache=True)
def share_out(is_aimd, found_S, window_S, hits_S, tries_S, behind_S, room, given_S):
    """`widths.share_out`."""
    chosen, rest = 0, room
    for level in range(LEVELS):
        total = 0
        for slot in range(len(found_S)):
            window, hits, tries = window_S[slot], hits_S[slot], tries_S[slot]
            total += min(found_S[slot], _cap(is_aimd, window, hits, tries, behind_S[slot], level))
        if total > room:
            break
        chosen, rest = level, room - total
    for slot in range(len(found_S)):
        window, hits, tries, behind = window_S[slot], hits_S[slot], tries_S[slot], behind_S[slot]
        given_S[slot] = min(found_S[slot], _cap(is_aimd, window, hits, tries, behind, chosen))
        milder = min(found_S[slot], _cap(is_aimd, window, hits, tries, behind, min(chosen + 1, LEVELS - 1)))
        more = min(milder - given_S[slot], rest)
        given_S[slot] += more
        rest -= more


@numba.njit(cache=True)
def learn(report_SX, live_S, known_S, base_S, shelved_S, library_B, window_S, hits_S, tries_S, max_drafts):
    """Texts go on, and rows that had drafts earn more or fewer: `HistoryDrafter.learn_plainly`."""
    width = max_drafts + 1
    for slot in range(len(live_S)):
        count, tried = report_SX[slot, 0], report_SX[slot, 1]
        right = 0
        for index in range(count):
            if shelved_S[slot]:
                library_B[base_S[slot] + known_S[slot] - count + index] = report_SX[slot, 2 + index]
            right += report_SX[slot, 2 + 2 * width + index] > 0
        if live_S[slot] == 0:
            tried = min(tried, count)
        if tried > 0:
            all_right = right == tried
            start = min(START_WIDTH, max_drafts)
            window_S[slot] = min(window_S[slot] + WIDER, max_drafts) if all_right else start
            hits_S[slot] = hits_S[slot] * np.float32(FORGETTING) + np.float32(right)
            tries_S[slot] = tries_S[slot] * np.float32(FORGETTING) + np.float32(right + (not all_right))
