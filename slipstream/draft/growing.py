"""Trees of drafts from a learned drafter: at each level the likeliest few go on, each with its likeliest few.

Of a token that follows, the likeliest are those with the highest score once the target's own noise is added, which is
what the target will choose by; how far one is ahead of the others says how sure it is. A path is as sure as all its
tokens together, and drafts are given in that order, so that whatever is cut off was the least likely. The tree is the
drafter's own: its keys lie at places of their own, behind the text, until the step overwrites them.

Axes: R rows, B branches, C drafts of a tree, W ways in, V vocabulary, L levels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from slipstream.engine.packing import sampling_rows
from slipstream.engine.sampling import SamplingRows, noise_of, sample_rows
from slipstream.engine.state import StepState
from slipstream.models.cached import Branches, PackedRows

NO_SCORE = 1e4
FALLING = 1e-3
"""A draft is this much less likely than the one before it even if it is sure, so that it never comes first."""


class Grower(Protocol):
    hidden_SD: Tensor
    normed_SD: Tensor

    def forward(self, next_T: Tensor, hidden_TD: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """The drafter's hidden states, and what goes to the head; its keys are written."""

    def logits(self, normed_RD: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Growth:
    tokens_RC: Tensor
    parents_RC: Tensor
    """The draft that each follows, always an earlier one; -1: the last known token."""


def grow(drafter: Grower, state: StepState, slot_R: Tensor, last_R: Tensor, *, depth: int, branches: int) -> Growth:
    """As many drafts as a slot can have, of all that were thought of. `last_R`: the last place that each may write."""
    num_rows, device = len(slot_R), slot_R.device
    known_R1 = state["known"][slot_R].unsqueeze(1).long()
    is_real_R1 = (slot_R < state.trash_slot).unsqueeze(1)
    index_B = torch.arange(branches, device=device)
    longest = state["tokens"].shape[1]
    hidden_RBD = drafter.hidden_SD[slot_R].unsqueeze(1)
    normed_RWD = drafter.normed_SD[slot_R].unsqueeze(1)
    tokens_RWB, sureness_RWB = _likeliest(
        drafter, normed_RWD, sampling_rows(state, slot_R, known_R1.flatten()), branches
    )
    sampling = sampling_rows(state, slot_R.repeat_interleave(branches), known_R1.repeat_interleave(branches))
    level_RC = sureness_RWB.flatten(1)
    tokens, sureness = [tokens_RWB.flatten(1)], [level_RC]
    parents = [torch.full_like(tokens[0], -1)]
    chosen_RB, num_before = index_B.expand(num_rows, -1), 0
    places_RBL = torch.empty(num_rows, branches, 0, dtype=torch.long, device=device)
    hidden_RBD = hidden_RBD.expand(-1, branches, -1)
    for level in range(1, depth):
        position_RB = ((known_R1 + level - 2).clamp(0, longest - 1) * is_real_R1).expand(-1, branches)
        here_RB = ((known_R1 - 1 + (level - 1) * branches).clamp(min=0) * is_real_R1) + index_B
        here_RB = torch.minimum(here_RB, last_R.unsqueeze(1))  # near the end of a page some share a place
        places_RBL = torch.cat([places_RBL, here_RB.unsqueeze(-1)], -1)
        rows = _rows(state, slot_R, position_RB, (known_R1 - 1).clamp(min=0), places_RBL)
        fed_T = tokens[-1].gather(1, chosen_RB).clamp(min=0).flatten()
        hidden_TD, normed_TD = drafter.forward(fed_T, hidden_RBD.flatten(0, 1).contiguous(), rows)
        hidden_RBD, normed_RWD = (one_TD.unflatten(0, (num_rows, branches)) for one_TD in (hidden_TD, normed_TD))
        tokens_RWB, sureness_RWB = _likeliest(
            drafter, normed_RWD, replace(sampling, position_N=sampling.position_N + level), branches
        )
        level_RC = (level_RC.gather(1, chosen_RB).unsqueeze(-1) + sureness_RWB - FALLING).flatten(1)
        tokens.append(tokens_RWB.flatten(1))
        sureness.append(level_RC)
        parents.append((num_before + chosen_RB).repeat_interleave(branches, 1))
        num_before += tokens[-2].shape[1]
        chosen_RB = level_RC.topk(branches, 1).indices
        way_RB = chosen_RB // branches
        places_RBL = places_RBL.gather(1, way_RB.unsqueeze(-1).expand_as(places_RBL))
        hidden_RBD = hidden_RBD.gather(1, way_RB.unsqueeze(-1).expand_as(hidden_RBD))
    return _best_first(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(sureness, 1), state.max_drafts)


def _best_first(tokens_RC: Tensor, parents_RC: Tensor, sureness_RC: Tensor, most: int) -> Growth:
    """What a draft follows is surer than itself, so it is among those given, and before it."""
    order_RC = sureness_RC.topk(min(most, tokens_RC.shape[1]), 1).indices
    rank_RC = torch.zeros_like(tokens_RC)
    rank_RC.scatter_(1, order_RC, torch.arange(order_RC.shape[1], device=order_RC.device).expand_as(order_RC))
    parent_RC = parents_RC.gather(1, order_RC)
    return Growth(
        tokens_RC.gather(1, order_RC), torch.where(parent_RC >= 0, rank_RC.gather(1, parent_RC.clamp(min=0)), -1)
    )


def _likeliest(drafter: Grower, normed_RWD: Tensor, rows: SamplingRows, branches: int) -> tuple[Tensor, Tensor]:
    """Of each way the tokens that may come next, and how sure each is, as logarithms: [R, W, B] both."""
    logits_NV = drafter.logits(normed_RWD.flatten(0, 1)).contiguous()
    take = take_plainly
    if logits_NV.is_cuda:
        from slipstream.draft import triton_growing  # a machine without a GPU may lack triton

        take = triton_growing.take
    tokens_NB = torch.empty(len(logits_NV), branches, dtype=torch.long, device=logits_NV.device)
    scores_NB = torch.empty(len(logits_NV), branches, device=logits_NV.device)
    for number in range(branches):
        token_N, *_ = sample_rows(logits_NV, rows, with_cuts=False)
        take(logits_NV, rows, token_N, number, tokens_NB, scores_NB)
    shape = *normed_RWD.shape[:2], branches
    return tokens_NB.view(shape), scores_NB.log_softmax(1).view(shape)


def take_plainly(
    logits_NV: Tensor, rows: SamplingRows, token_N: Tensor, number: int, tokens_NB: Tensor, scores_NB: Tensor
) -> None:
    """Note each row's best token and its score, and rule it out for the next; no number makes a low score."""
    token_N1 = token_N.clamp(min=0).unsqueeze(1)
    x_N1 = logits_NV.gather(1, token_N1).float() * rows.inverse_temperature_N.unsqueeze(1)
    score_N1 = x_N1 + noise_of(rows, token_N1)
    tokens_NB[:, number : number + 1] = token_N1
    scores_NB[:, number : number + 1] = torch.where(score_N1.abs() < NO_SCORE, score_N1, -NO_SCORE)
    logits_NV.scatter_(1, token_N1, -torch.inf)


def _rows(state: StepState, slot_R: Tensor, position_RB: Tensor, fork_R1: Tensor, places_RBL: Tensor) -> PackedRows:
    slot_T = slot_R.repeat_interleave(position_RB.shape[1])
    position_T = position_RB.flatten().contiguous()
    start_T1 = torch.arange(len(slot_T) + 1, dtype=torch.int32, device=slot_T.device)
    branches = Branches(
        place_T=places_RBL[..., -1].flatten().contiguous(),
        fork_T=fork_R1.expand_as(position_RB).flatten().int().contiguous(),
        path_TD=places_RBL.flatten(0, 1).int().contiguous(),
    )
    return PackedRows(slot_T, position_T, slot_T, start_T1, (position_T + 1).int(), state["table"], branches)
