"""One step of the engine, as tensor code without a host read: pack -> forward -> sample -> commit.

Which tokens run follows from the state on the device alone; the host only gives sizes that are large enough. So the
same lines run eagerly (on CPU, and as the plain twin) and inside a CUDA graph, and a step can be launched before the
results of the one before are known. `pack` and `commit` are the plain twins of the kernels in `triton_step.py`.

Axes: T packed tokens (padded), R rows (padded), S slots, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.engine.sampling import SamplingRows, sample_rows
from slipstream.engine.state import NO_TOKEN, StepState
from slipstream.models.cached import KVPages, PackedRows
from slipstream.models.packed import row_logits
from slipstream.rng import MASK32


def run_step(
    model: PreTrainedModel, pages: KVPages, state: StepState, *, num_tokens: int, num_rows: int, with_cuts: bool
) -> None:
    """Run every live slot's allotted tokens, and note in `state.report` what was sampled.

    `num_tokens` and `num_rows` must be at least what the live slots need; the rest is padding. `with_cuts` says whether
    any slot has top-k, top-p or min-p.
    """
    pack_now, commit_now = pack, commit
    if state.report.is_cuda:
        from slipstream.engine import triton_step  # a machine without a GPU may lack triton

        pack_now, commit_now = triton_step.pack, triton_step.commit
    ids_T, rows, sampling = pack_now(state, num_tokens, num_rows)
    last_R = (rows.start_R1[1:] - 1).clamp(min=0)
    logits_RV = row_logits(model, ids_T, pages, rows, last_R)
    tokens_R, logprobs_R = sample_rows(logits_RV, sampling, with_cuts=with_cuts)
    commit_now(state, rows, tokens_R, logprobs_R)


def pack(state: StepState, num_tokens: int, num_rows: int) -> tuple[Tensor, PackedRows, SamplingRows]:
    """The tokens to run, slot by slot, where they belong, and how each row samples; empties the report."""
    state.report.fill_(NO_TOKEN)
    computed_S = state["computed"]
    count_S = torch.minimum(state["allotted"], state["known"] - computed_S) * state["live"]
    runs_S = count_S > 0
    # Slots with tokens move to the front, in order; those without all land on one place too many, which is dropped.
    row_S = torch.where(runs_S, runs_S.cumsum(0) - 1, num_rows)
    slots_S = torch.arange(len(count_S), device=count_S.device)
    slot_R1 = torch.full((num_rows + 1,), state.trash_slot, device=count_S.device).scatter_(0, row_S, slots_S)
    slot_R1[num_rows:].fill_(state.trash_slot)
    slot_R = slot_R1[:num_rows]
    start_R1 = torch.zeros(num_rows + 1, dtype=torch.int32, device=count_S.device)
    torch.cumsum(count_S[slot_R], 0, dtype=torch.int32, out=start_R1[1:])

    token_T = torch.arange(num_tokens, dtype=torch.int32, device=count_S.device)
    row_T = torch.searchsorted(start_R1[1:], token_T, right=True)
    slot_T = slot_R1[row_T]
    position_T = (computed_S[slot_T] + token_T - start_R1[row_T]) * (row_T < num_rows)
    position_T = position_T.long()
    rows = PackedRows(
        slot_T=slot_T,
        position_T=position_T,
        slot_R=slot_R,
        start_R1=start_R1,
        length_R=computed_S[slot_R] + count_S[slot_R],
        table_SW=state["table"],
    )
    return state["tokens"][slot_T, position_T].long(), rows, _sampling_rows(state, slot_R)


def _sampling_rows(state: StepState, slot_R: Tensor) -> SamplingRows:
    seed_R2 = torch.stack([state["seed_low"][slot_R], state["seed_high"][slot_R]], 1).long() & MASK32
    return SamplingRows(
        seed_N2=seed_R2,
        position_N=state["known"][slot_R].long(),
        inverse_temperature_N=state["inverse_temperature"][slot_R],
        greedy_N=state["greedy"][slot_R] > 0,
        top_k_N=state["top_k"][slot_R].long(),
        top_p_N=state["top_p"][slot_R],
        min_p_N=state["min_p"][slot_R],
    )


def commit(state: StepState, rows: PackedRows, tokens_R: Tensor, logprobs_R: Tensor) -> None:
    """Append the sampled tokens of the rows that have come to their last known token; end what has ended."""
    slot_R = rows.slot_R
    known_R, limit_R, live_R = (state[name][slot_R] for name in ("known", "limit", "live"))
    samples_R = (rows.length_R == known_R) & (live_R > 0)

    buffer = state["tokens"]
    place_R = known_R.long().clamp(max=buffer.shape[1] - 1)
    there_R = buffer[slot_R, place_R]
    sampled_R = tokens_R.int()
    walked_R = torch.where(state["scripted"][slot_R] > 0, there_R, sampled_R)
    buffer[slot_R, place_R] = torch.where(samples_R, walked_R, there_R)

    known_R = known_R + samples_R
    stopped_R = (walked_R.unsqueeze(1) == state["stops"][slot_R]).any(1)
    ended_R = samples_R & (stopped_R | (known_R >= limit_R) | (sampled_R < 0))
    state["known"].index_copy_(0, slot_R, known_R.int())
    state["computed"].index_copy_(0, slot_R, rows.length_R)
    state["live"].index_copy_(0, slot_R, (live_R * ~ended_R).int())

    reported_R = torch.where(samples_R, torch.where(sampled_R < 0, sampled_R, walked_R), NO_TOKEN)
    bits_R = torch.where(samples_R, logprobs_R.view(torch.int32), NO_TOKEN)
    state.report[0].index_copy_(0, slot_R, reported_R.int())
    state.report[1].index_copy_(0, slot_R, bits_R.int())
