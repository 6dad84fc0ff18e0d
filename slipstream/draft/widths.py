"""How many drafts each row gets: what a row has earned, and what fits beside the others.

Two rules. `aimd`: a window that grows by two when all drafts were right and falls back to two when one was not. `odds`:
as many as are likely enough, from the row's own record of right and wrong drafts. When not all fit, the least likely
are left out first: every rule gives each row a cap for each of LEVELS levels of strictness, and the mildest that fits
is taken. Rows that are behind, which all others may have to wait for, are judged FAVOUR times as mildly.

Axes: S slots, K levels.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["aimd", "odds"]

START_WIDTH, WIDER = 2, 2
LEVELS = 65
"""Of the first level all caps are 0."""
LEAST_CHANCE = 0.15
"""A draft that is less likely to be right is not tried: verifying it costs more than it may win."""
LOG_STEP = math.log(LEAST_CHANCE) / (LEVELS - 1)
"""From one level to the next: of the chance that a draft must have to be tried."""
FAVOUR = 4
"""A draft for a row that is behind counts with the fourth root of its chance; of windows, with four times the level."""
MOST = 10_000
"""A cap on caps, where nothing was ever wrong."""
FORGETTING = 0.9
"""The share of a row's record that is kept at each step with drafts."""


def caps(rule: Rule, window_S: Tensor, hits_S: Tensor, tries_S: Tensor, behind_S: Tensor) -> Tensor:
    """[S, K], growing with K: drafts a row may have at each level."""
    level_K = torch.arange(LEVELS, device=window_S.device)
    level_SK = torch.where((behind_S > 0).unsqueeze(1), (FAVOUR * level_K).clamp(max=LEVELS - 1), level_K)
    if rule == "aimd":
        return torch.minimum(window_S.unsqueeze(1), level_SK).int()
    # The j-th draft is right with chance odds ** j; the mildest level asks for LEAST_CHANCE, the strictest for 1.
    odds_S = (hits_S + 1.0) / (tries_S + 2.0)
    wide_SK = (level_SK.float() * LOG_STEP / odds_S.log().unsqueeze(1)).floor().clamp(max=MOST)
    # One at the mildest level, however bad the record: a row that is never tried could not mend it.
    wide_SK = torch.where(level_SK == LEVELS - 1, wide_SK.clamp(min=1), wide_SK)
    return torch.where(level_SK == 0, 0, wide_SK).int()


def share_out(found_S: Tensor, caps_SK: Tensor, room: Tensor) -> Tensor:
    """Drafts each row gets: those found, capped by the mildest level that fits; what is left goes to the first rows
    that the next level would give more, as far as it goes."""
    allowed_SK = torch.minimum(found_S.unsqueeze(1), caps_SK)
    level = ((allowed_SK.sum(0) <= room).sum() - 1).clamp(min=0)
    given_S = allowed_SK.index_select(1, level.view(1)).squeeze(1)
    next_S = allowed_SK.index_select(1, (level + 1).clamp(max=caps_SK.shape[1] - 1).view(1)).squeeze(1)
    more_S = next_S - given_S
    left_S = room - given_S.sum() - (more_S.cumsum(0) - more_S)
    return given_S + torch.minimum(more_S, left_S.clamp(min=0))


def learn_widths(
    tried_S: Tensor, right_S: Tensor, window_S: Tensor, hits_S: Tensor, tries_S: Tensor, max_drafts: int
) -> None:
    """In place, after a step. A row without drafts has learned nothing."""
    drafted_S = tried_S > 0
    all_right_S = right_S == tried_S
    grown_S = torch.where(all_right_S, (window_S + WIDER).clamp(max=max_drafts), min(START_WIDTH, max_drafts))
    window_S.copy_(torch.where(drafted_S, grown_S, window_S))
    keep_S = torch.where(drafted_S, FORGETTING, 1.0)
    hits_S.copy_(hits_S * keep_S + right_S)
    tries_S.copy_(tries_S * keep_S + torch.where(all_right_S, right_S, right_S + 1))
