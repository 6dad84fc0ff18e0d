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

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.engine.drafting import Drafter
from slipstream.engine.sampling import SamplingRows, sample_rows
from slipstream.engine.state import NO_TOKEN, StepState
from slipstream.models.cached import KVPages, PackedRows
from slipstream.models.packed import row_logits
from slipstream.rng import MASK32


@dataclass(frozen=True, slots=True)
class StepSizes:
    """At least what the live slots need; the rest is padding. A CUDA graph is made for one of these."""

    num_tokens: int
    num_rows: int
    num_samples: int
    with_drafts: bool
    """Whether the drafter is asked."""
    with_cuts: bool
    """Whether any slot has top-k, top-p or min-p."""
    depth: int = 0
    """How many tokens ahead a learned drafter goes, if there is one."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    ids_T: Tensor
    rows: PackedRows
    sample_start_R1: Tensor
    """int32: row r owns the samples from sample_start_R1[r] up to that of r + 1."""
    sampled_at_N: Tensor
    """The packed token whose logits a sample comes from."""
    sampling: SamplingRows
    num_drafts: int
    """That a row can have in this step."""


def run_step(
    model: PreTrainedModel, pages: KVPages, state: StepState, sizes: StepSizes, drafter: Drafter | None = None
) -> None:
    """Run every live slot's allotted tokens, and note in `state.report` what was sampled."""
    room_now, pack_now, commit_now = room_for_drafts, pack, commit
    if state.report.is_cuda:
        from slipstream.engine import triton_step  # a machine without a GPU may lack triton

        room_now, pack_now, commit_now = triton_step.room_for_drafts, triton_step.pack, triton_step.commit
    if drafter is not None and sizes.with_drafts:
        drafter.draft(state, room_now(state, sizes), num_rows=sizes.num_rows, depth=sizes.depth)
    step = pack_now(state, sizes)
    logits_NV = row_logits(model, step.ids_T, pages, step.rows, step.sampled_at_N)
    tokens_N, logprobs_N = sample_rows(logits_NV, step.sampling, with_cuts=sizes.with_cuts)
    commit_now(state, step, tokens_N, logprobs_N)
    if drafter is not None:
        drafter.learn(state, step.rows)


def pack(state: StepState, sizes: StepSizes) -> PackedStep:
    """The tokens to run, slot by slot, where they belong, and which of them are sampled at, and how."""
    num_rows, device = sizes.num_rows, state.report.device
    known_S, computed_S = state["known"], state["computed"]
    # Slots that run move to the front, in order; those that do not all land on one place too many, which is dropped.
    count_S = torch.minimum(state["allotted"], known_S - computed_S + _drafted(state, sizes)) * state["live"]
    count_S = count_S.clamp(min=0)
    runs_S = count_S > 0
    row_S = torch.where(runs_S, runs_S.cumsum(0) - 1, num_rows)
    slots_S = torch.arange(len(count_S), device=device)
    slot_R1 = torch.full((num_rows + 1,), state.trash_slot, device=device).scatter_(0, row_S, slots_S)
    slot_R1[num_rows:].fill_(state.trash_slot)
    slot_R = slot_R1[:num_rows]
    length_R = computed_S[slot_R] + count_S[slot_R]
    start_R1 = _starts(count_S[slot_R])
    row_T, offset_T = _places(start_R1, sizes.num_tokens)
    slot_T = slot_R1[row_T]
    position_T = ((computed_S[slot_T] + offset_T) * (row_T < num_rows)).long()
    drafted_T = position_T - known_S[slot_T]
    ids_T = state["tokens"][slot_T, position_T.clamp(max=state["tokens"].shape[1] - 1)]
    if sizes.with_drafts:
        drafts_T = state["drafts"][slot_T, drafted_T.clamp(0, state.max_drafts - 1)]
        ids_T = torch.where(drafted_T >= 0, drafts_T, ids_T)

    num_samples_R = (length_R - known_S[slot_R] + 1).clamp(min=0) * (count_S[slot_R] > 0)
    sample_start_R1 = _starts(num_samples_R)
    row_N, offset_N = _places(sample_start_R1, sizes.num_samples)
    real_N = row_N < num_rows
    sampled_at_N = start_R1[(row_N + 1).clamp(max=num_rows)] - num_samples_R[row_N.clamp(max=num_rows - 1)] + offset_N
    rows = PackedRows(slot_T, position_T, slot_R, start_R1, length_R, state["table"])
    slot_N = slot_R1[row_N]
    return PackedStep(
        ids_T=ids_T.long(),
        rows=rows,
        sample_start_R1=sample_start_R1,
        sampled_at_N=(sampled_at_N * real_N).long(),
        sampling=sampling_rows(state, slot_N, ((known_S[slot_N] + offset_N) * real_N).long()),
        num_drafts=state.max_drafts if sizes.with_drafts else 0,
    )


def room_for_drafts(state: StepState, sizes: StepSizes) -> Tensor:
    """A number on the device: how many drafts fit beside the tokens that must run."""
    due_S = (state["known"] - state["computed"]) * state["live"]
    count_S = torch.minimum(state["allotted"], due_S)
    num_samplers = ((count_S == due_S) & (count_S > 0)).sum()
    return torch.minimum(sizes.num_tokens - count_S.sum(), sizes.num_samples - num_samplers)


def _drafted(state: StepState, sizes: StepSizes) -> Tensor:
    """Drafts left by an earlier step do not count when this one has none."""
    return state["drafted"] if sizes.with_drafts else torch.zeros_like(state["drafted"])


def _starts(count_R: Tensor) -> Tensor:
    start_R1 = torch.zeros(len(count_R) + 1, dtype=torch.int32, device=count_R.device)
    torch.cumsum(count_R, 0, dtype=torch.int32, out=start_R1[1:])
    return start_R1


def _places(start_R1: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The row of each of `num` places, R for padding, and the place within it."""
    place_T = torch.arange(num, dtype=torch.int32, device=start_R1.device)
    row_T = torch.searchsorted(start_R1[1:], place_T, right=True)
    return row_T, place_T - start_R1[row_T]


def sampling_rows(state: StepState, slot_N: Tensor, position_N: Tensor) -> SamplingRows:
    """How the tokens at these positions of these slots are sampled."""
    seed_N2 = torch.stack([state["seed_low"][slot_N], state["seed_high"][slot_N]], 1).long() & MASK32
    return SamplingRows(
        seed_N2=seed_N2,
        position_N=position_N,
        inverse_temperature_N=state["inverse_temperature"][slot_N],
        greedy_N=state["greedy"][slot_N] > 0,
        top_k_N=state["top_k"][slot_N].long(),
        top_p_N=state["top_p"][slot_N],
        min_p_N=state["min_p"][slot_N],
    )


def commit(state: StepState, step: PackedStep, tokens_N: Tensor, logprobs_N: Tensor) -> None:
    """Append what was sampled as far as the drafts were right; end what has ended; report it."""
    slot_R, buffer, width = step.rows.slot_R, state["tokens"], step.num_drafts + 1
    known_R, limit_R, live_R = (state[name][slot_R] for name in ("known", "limit", "live"))
    num_samples_R = step.sample_start_R1.diff()
    index_J = torch.arange(width, device=slot_R.device)
    here_RJ = index_J < num_samples_R.unsqueeze(1)
    at_RJ = (step.sample_start_R1[:-1].unsqueeze(1) + index_J).clamp(max=len(tokens_N) - 1)
    sampled_RJ, logprobs_RJ = tokens_N.int()[at_RJ], logprobs_N[at_RJ]
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
    for part, line_RJ in enumerate((reported_RJ, logprobs_RJ.view(torch.int32), origins_RJ)):
        first = 2 + part * (state.max_drafts + 1)
        state.report[:, first : first + width].index_copy_(0, slot_R, line_RJ.int())
