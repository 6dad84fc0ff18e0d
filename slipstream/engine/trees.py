"""A step whose drafts are trees: where their tokens belong, and which path through them was sampled.

Drafts are packed as ever, one after another behind the last known token, each after the one it follows (`parents` in
the state). A draft's position is that of its level, its keys lie at its place in the pack, and it attends along its
path: the very keys, in the very order, that it would find if the path were the text. So a sample at a draft is what
would have been sampled there. Of the drafts that follow one token at most one is what was sampled, so what is kept is a
path; its keys then move to where their positions are.

Axes: T packed tokens, R rows, N samples, J drafts of a slot, M = J + 1 the last known token and the drafts, D levels,
I = D + 1 tokens that a slot can win.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.engine.packing import PackedStep
from slipstream.engine.sampling import Samples, SamplingRows
from slipstream.engine.state import StepState
from slipstream.models.cached import Branches, PackedRows

NO_FORK = 2**30


@dataclass(frozen=True, slots=True)
class Tree:
    rows: PackedRows
    """A row a token."""
    sampling: SamplingRows
    level_RJ: Tensor
    """Of each draft, from 0 on."""
    path_RJD: Tensor
    """The drafts from the first level to each draft; past its level anything."""


@dataclass(frozen=True, slots=True)
class KeptPath:
    """What was sampled, a row a slot that ran."""

    rows: PackedRows
    """The tokens that now have keys, I for each slot, one a row; those beyond what was kept are padding."""
    at_T: Tensor
    """Where each of these was in the step's pack."""
    count_R: Tensor
    """Tokens won."""
    sources_RD: Tensor
    """Where the kept drafts' keys are, and where they belong; the same where there is none to move."""
    targets_RD: Tensor


def branch(state: StepState, step: PackedStep, depth: int) -> Tree:
    """The packed step with every draft at its level."""
    rows = step.rows
    level_SJ, path_SJD = tree_paths(state["parents"], depth)
    known_T = state["known"][rows.slot_T]
    draft_T = (rows.position_T - known_T).long()
    is_draft_T = (draft_T >= 0) & (rows.slot_T < state.trash_slot)
    draft_T = draft_T.clamp(0, state.max_drafts - 1)
    position_T = torch.where(is_draft_T, known_T + level_SJ[rows.slot_T, draft_T], rows.position_T)
    num_tokens, device = len(position_T), position_T.device
    total = rows.start_R1[-1]
    index_T1 = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
    branches = Branches(
        place_T=rows.position_T,
        fork_T=torch.where(is_draft_T, known_T, NO_FORK).int(),
        path_TD=(known_T.unsqueeze(1) + path_SJD[rows.slot_T, draft_T]).int(),
    )
    position_N = (position_T[step.sampled_at_N] + 1) * (step.sampling.position_N > 0)  # padding stays at 0
    return Tree(
        rows=PackedRows(
            slot_T=rows.slot_T,
            position_T=position_T,
            slot_R=rows.slot_T,
            start_R1=torch.minimum(index_T1, total),
            length_R=((position_T + 1) * (index_T1[:-1] < total)).int(),
            table_SW=rows.table_SW,
            branches=branches,
        ),
        sampling=replace(step.sampling, position_N=position_N),
        level_RJ=level_SJ[rows.slot_R],
        path_RJD=path_SJD[rows.slot_R],
    )


def tree_paths(parents_SJ: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The level of each draft, and the drafts on the way to it."""
    num_drafts, device = parents_SJ.shape[1], parents_SJ.device
    up_SJ = torch.arange(num_drafts, device=device).expand_as(parents_SJ)
    ways = [up_SJ]
    for _ in range(depth - 1):
        up_SJ = torch.where(up_SJ >= 0, parents_SJ.long().gather(1, up_SJ.clamp(min=0)), -1)
        ways.append(up_SJ)
    up_SJD = torch.stack(ways, -1)
    level_SJ = (up_SJD >= 0).sum(-1) - 1
    back_SJD = (level_SJ.unsqueeze(-1) - torch.arange(depth, device=device)).clamp(min=0)
    return level_SJ, up_SJD.gather(-1, back_SJD).clamp(min=0)


def commit(state: StepState, step: PackedStep, tree: Tree, samples: Samples) -> KeptPath:
    """Append the path that was sampled; end what has ended; report it."""
    slot_R, buffer, depth = step.rows.slot_R, state["tokens"], tree.path_RJD.shape[2]
    longest = buffer.shape[1]
    known_R, limit_R, live_R = (state[name][slot_R] for name in ("known", "limit", "live"))
    num_samples_R = step.sample_start_R1.diff()
    index_M = torch.arange(state.max_drafts + 1, device=slot_R.device)
    at_RM = (step.sample_start_R1[:-1].unsqueeze(1) + index_M).clamp(max=len(samples.tokens_N) - 1)
    here_RM = index_M < num_samples_R.unsqueeze(1)
    sampled_RM = samples.tokens_N.int()[at_RM]
    logprobs_RM, log_kept_RM = (values_N[at_RM].view(torch.int32) for values_N in samples[1:])
    level_RM = torch.nn.functional.pad(tree.level_RJ + 1, (1, 0))
    place_RM = (known_R.unsqueeze(1) + level_RM).clamp(max=longest - 1)
    is_scripted_R1 = (state["scripted"][slot_R] > 0).unsqueeze(1)
    walked_RM = torch.where(is_scripted_R1, buffer[slot_R.unsqueeze(1), place_RM], sampled_RM)
    stops_RM = (walked_RM.unsqueeze(2) == state["stops"][slot_R].unsqueeze(1)).any(2)
    ends_RM = stops_RM | (known_R.unsqueeze(1) + level_RM + 1 >= limit_R.unsqueeze(1)) | (sampled_RM < 0)

    # A draft is kept if it and all before it on its path are what was sampled, and nothing there was the end.
    parent_RJ = (state["parents"][slot_R].long() + 1).clamp(0, state.max_drafts)
    matches_RJ = (walked_RM.gather(1, parent_RJ) == state["drafts"][slot_R]) & here_RM[:, 1:]
    is_right_RJ = matches_RJ & ~ends_RM.gather(1, parent_RJ)
    passed_RJD = is_right_RJ.gather(1, tree.path_RJD.flatten(1)).view_as(tree.path_RJD)
    passed_RJD |= torch.arange(depth, device=slot_R.device) > tree.level_RJ.unsqueeze(-1)
    runs_R = (num_samples_R > 0) & (live_R > 0)
    is_kept_RJ = passed_RJD.all(-1) & is_right_RJ & runs_R.unsqueeze(1)
    # By the deepest, not by their number: a drafter whose numbers are broken may give the same draft twice.
    count_R = (1 + ((tree.level_RJ + 1) * is_kept_RJ).amax(1)) * runs_R

    # The token of each new place: sampled at the last known token, then at the kept draft of each level.
    node_RI = torch.zeros(len(slot_R), depth + 2, dtype=torch.long, device=slot_R.device)
    node_RI.scatter_(1, torch.where(is_kept_RJ, tree.level_RJ + 1, depth + 1), index_M[1:].expand_as(is_kept_RJ))
    node_RI = node_RI[:, : depth + 1]
    index_I = index_M[: depth + 1]
    counts_RI = index_I < count_R.unsqueeze(1)
    node_RI = node_RI * counts_RI
    tokens_RI = walked_RM.gather(1, node_RI)
    ended_R = (ends_RM.gather(1, node_RI) & counts_RI).any(1)
    trash = state.trash_slot * longest  # what does not count goes to the trash slot's first place
    flat_RI = torch.where(counts_RI, slot_R.unsqueeze(1) * longest + known_R.unsqueeze(1) + index_I, trash)
    buffer.view(-1).scatter_(0, flat_RI.flatten(), (tokens_RI * counts_RI).flatten())
    computed_R = torch.where(count_R > 0, known_R + count_R - 1, step.rows.length_R)
    state["computed"].index_copy_(0, slot_R, computed_R.int())
    state["known"].index_copy_(0, slot_R, (known_R + count_R).int())
    state["live"].index_copy_(0, slot_R, (live_R * ~ended_R).int())

    nowhere = state.max_drafts + 1
    origins_RM = torch.zeros(len(slot_R), nowhere + 1, dtype=torch.int32, device=slot_R.device)
    origins_RM.scatter_(1, torch.where(matches_RJ, parent_RJ, nowhere), state["sources"][slot_R])
    sampled_RI = sampled_RM.gather(1, node_RI)
    tried_R = (num_samples_R - 1).clamp(min=0) * (count_R > 0)
    state.report[:, :2].fill_(0)
    state.report[:, :2].index_copy_(0, slot_R, torch.stack([count_R, tried_R], 1).int())
    reported_RI = torch.where(sampled_RI < 0, sampled_RI, tokens_RI)
    lines = reported_RI, *(values_RM.gather(1, node_RI) for values_RM in (logprobs_RM, origins_RM, log_kept_RM))
    for part, line_RI in enumerate(lines):
        first = 2 + part * (state.max_drafts + 1)
        state.report[:, first : first + depth + 1].index_copy_(0, slot_R, line_RI.int())
    return _kept(state, step, slot_R, known_R, count_R, node_RI, counts_RI)


def _kept(
    state: StepState,
    step: PackedStep,
    slot_R: Tensor,
    known_R: Tensor,
    count_R: Tensor,
    node_RI: Tensor,
    counts_RI: Tensor,
) -> KeptPath:
    known_R1 = known_R.unsqueeze(1)
    index_I = torch.arange(node_RI.shape[1], device=slot_R.device)
    slot_T = torch.where(counts_RI, slot_R.unsqueeze(1), state.trash_slot).flatten()
    position_T = ((known_R1 - 1 + index_I) * counts_RI).flatten().long()
    first_N = step.sampled_at_N[step.sample_start_R1[:-1].long().clamp(max=len(step.sampled_at_N) - 1)]
    start_T1 = torch.arange(len(slot_T) + 1, dtype=torch.int32, device=slot_R.device)
    rows = PackedRows(slot_T, position_T, slot_T, start_T1, (position_T + 1).int(), state["table"])
    last_R1 = (known_R1 - 1).clamp(min=0)
    return KeptPath(
        rows=rows,
        at_T=((first_N.unsqueeze(1) + node_RI) * counts_RI).flatten().clamp(max=len(step.ids_T) - 1),
        count_R=count_R,
        sources_RD=(last_R1 + node_RI * counts_RI)[:, 1:],
        targets_RD=(last_R1 + index_I * counts_RI)[:, 1:],
    )
