"""One step of the engine, as tensor code without a host read: draft -> pack -> forward -> sample -> accept and commit.

Which tokens run follows from the state on the device alone; the host only gives sizes that are large enough. So the
same lines run eagerly (on CPU, and as the plain twin) and inside a CUDA graph, and a step can be launched before the
results of the one before are known. The functions below are the plain twins of the kernels in `triton_step.py`.

A row that decodes runs its last known token and the drafts for what follows. A token is sampled at each of them, with
the noise of its position, and kept as long as the draft it follows was what had been sampled there: so the tokens are
those that would have been sampled one by one. Keys of drafts that were not are overwritten later.

Axes: T packed tokens (padded), R rows (padded), N samples (padded), S slots, V vocabulary, J tokens a step may give.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.engine import trees
from slipstream.engine.drafting import Drafter
from slipstream.engine.packing import DraftSizes, PackedStep, StepSizes, pack, room_for_drafts
from slipstream.engine.sampling import Samples, sample_rows
from slipstream.engine.slots import NO_TOKEN
from slipstream.engine.state import StepState
from slipstream.models.cached import KVPages
from slipstream.models.packed import row_logits


def draft_step(state: StepState, sizes: DraftSizes, drafter: Drafter, limits: Tensor) -> None:
    """Before a step with drafts: whatever the drafter has for the slots that decode. `limits`: of the step."""
    room_now = room_for_drafts
    if state.report.is_cuda:
        from slipstream.engine import triton_step  # a machine without a GPU may lack triton

        room_now = triton_step.room_for_drafts
    drafter.draft(state, room_now(state, limits), sizes)


def run_step(
    model: PreTrainedModel,
    pages: KVPages,
    state: StepState,
    sizes: StepSizes,
    drafter: Drafter | None = None,
    *,
    forward_in: AbstractContextManager[object] = nullcontext(),
) -> None:
    """Run every live slot's allotted tokens, and note in `state.report` what was sampled. `forward_in`: context of the
    model's forward."""
    pack_now, commit_now = pack, commit
    if state.report.is_cuda:
        from slipstream.engine import triton_step  # a machine without a GPU may lack triton

        pack_now, commit_now = triton_step.pack, triton_step.commit
    step = pack_now(state, sizes)
    tree = trees.branch(state, step, sizes.tree_depth) if sizes.tree_depth else None
    rows, sampling = (tree.rows, tree.sampling) if tree is not None else (step.rows, step.sampling)
    with forward_in:
        logits_NV = row_logits(model, step.ids_T, pages, rows, step.sampled_at_N)
    samples = sample_rows(logits_NV, sampling, with_cuts=sizes.with_cuts)
    del logits_NV  # most of a graph's memory
    kept = None
    if tree is None:
        commit_now(state, step, samples)
    else:
        kept = trees.commit(state, step, tree, samples)
        pages.move(state["table"], step.rows.slot_R, kept.sources_RD, kept.targets_RD)
    if drafter is not None:
        drafter.learn(state, step.rows, kept, sizes.feeding)


def commit(state: StepState, step: PackedStep, samples: Samples) -> None:
    """Append what was sampled as far as the drafts were right; end what has ended; report it."""
    slot_R, buffer, width = step.rows.slot_R, state["tokens"], step.num_drafts + 1
    known_R, limit_R, live_R = (state[name][slot_R] for name in ("known", "limit", "live"))
    num_samples_R = step.sample_start_R1.diff()
    index_J = torch.arange(width, device=slot_R.device)
    here_RJ = index_J < num_samples_R.unsqueeze(1)
    at_RJ = (step.sample_start_R1[:-1].unsqueeze(1) + index_J).clamp(max=len(samples.tokens_N) - 1)
    sampled_RJ = samples.tokens_N.int()[at_RJ]
    logprobs_RJ, log_kept_RJ = (values_N[at_RJ].view(torch.int32) for values_N in samples[1:])
    place_RJ = (known_R.unsqueeze(1) + index_J).clamp(max=buffer.shape[1] - 1).long()
    there_RJ = buffer[slot_R.unsqueeze(1), place_RJ]
    walked_RJ = torch.where((state["scripted"][slot_R] > 0).unsqueeze(1), there_RJ, sampled_RJ)

    # A sample counts if all drafts before it were what was sampled there, and nothing before it was the end.
    draft_RJ = torch.nn.functional.pad(state["drafts"][slot_R, : step.num_drafts], (0, 1), value=NO_TOKEN)
    right_RJ = (walked_RJ == draft_RJ) & (index_J + 1 < num_samples_R.unsqueeze(1))
    stops_RJ = (walked_RJ.unsqueeze(2) == state["stops"][slot_R].unsqueeze(1)).any(2)
    ends_RJ = stops_RJ | (known_R.unsqueeze(1) + index_J + 1 >= limit_R.unsqueeze(1)) | (sampled_RJ < 0)
    goes_on_RJ = right_RJ & ~ends_RJ
    counts_RJ = here_RJ & torch.cat([torch.ones_like(here_RJ[:, :1]), goes_on_RJ[:, :-1].cumprod(1).bool()], 1)
    counts_RJ = counts_RJ & (live_R > 0).unsqueeze(1)
    count_R = counts_RJ.sum(1)
    ended_R = (counts_RJ & ends_RJ).any(1)

    # What does not count goes to the trash slot's first place.
    flat_RJ = torch.where(
        counts_RJ, slot_R.unsqueeze(1) * buffer.shape[1] + place_RJ, state.trash_slot * buffer.shape[1]
    )
    buffer.view(-1).scatter_(0, flat_RJ.flatten(), (walked_RJ * counts_RJ).flatten())
    state["computed"].index_copy_(0, slot_R, torch.where(count_R > 0, known_R + count_R - 1, step.rows.length_R).int())
    state["known"].index_copy_(0, slot_R, (known_R + count_R).int())
    state["live"].index_copy_(0, slot_R, (live_R * ~ended_R).int())

    origins_RJ = torch.nn.functional.pad(state["sources"][slot_R, : step.num_drafts], (0, 1)) * right_RJ
    reported_RJ = torch.where(sampled_RJ < 0, sampled_RJ, walked_RJ)
    tried_R = (num_samples_R - 1).clamp(min=0) * (count_R > 0)
    state.report[:, :2].fill_(0)
    state.report[:, :2].index_copy_(0, slot_R, torch.stack([count_R, tried_R], 1).int())
    for part, line_RJ in enumerate((reported_RJ, logprobs_RJ, origins_RJ, log_kept_RJ)):
        first = 2 + part * (state.max_drafts + 1)
        state.report[:, first : first + width].index_copy_(0, slot_R, line_RJ.int())
