"""Drafts of a learned model: one layer over the target's hidden states (`eagle.py`), run inside the engine's step.

Its keys lie in the target's pages, as one more layer, so whatever shares, copies or recomputes pages does so for both.
After a step it takes in the tokens that ran, each with the token that came after it, and keeps the hidden state of each
slot's last one. Before the next step it goes on from there: a token, drawn with the very noise with which the target
will draw at that position, then the next from that, as a chain.

Axes: T packed tokens, R rows, S slots and the trash slot, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.draft.eagle import Features, build_draft
from slipstream.engine.sampling import sample_rows
from slipstream.engine.state import StepState
from slipstream.engine.step import sampling_rows
from slipstream.models.cached import CachedRows, KVPages, PackedRows
from slipstream.models.packed import head_logits
from slipstream.models.weights import cast_weights, write_weights

DRAFT_LAYER = -1
"""Of the pages: where the drafter's keys are."""
SOURCE = 4
"""Of `types.ORIGIN_NAMES`."""


class ModelGuesser:
    def __init__(self, *, num_slots: int, kind: str = "eagle3", seed: int = 0) -> None:
        self._num_slots, self._kind, self._seed = num_slots, kind, seed

    def attach(self, target: PreTrainedModel, pages: KVPages) -> None:
        """To the engine whose target it drafts for."""
        weight = target.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        self.model = build_draft(target.config, self._kind, self._seed).to(weight.device).eval()
        cast_weights(self.model, weight.dtype)
        self._target, self._pages, self._features = target, pages, Features(target, self._kind)
        width = self.model.config.hidden_size
        self.hidden_SD = torch.zeros(self._num_slots + 1, width, dtype=weight.dtype, device=weight.device)
        """By slot: that of its last known token but one, which knows the last."""
        self.ready_S = torch.zeros(self._num_slots + 1, dtype=torch.int32, device=weight.device)

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """New weights, in place: graphs stay valid."""
        write_weights(self.model, weights)

    def take_in(self, state: StepState, rows: PackedRows) -> None:
        """After a step: what it ran, with what came of it."""
        longest = state["tokens"].shape[1]
        next_T = state["tokens"][rows.slot_T, (rows.position_T + 1).clamp(max=longest - 1)].long().clamp(min=0)
        hidden_TD = self._forward(next_T, self.model.fuse(self._features.take()), rows)
        first_R = rows.length_R - rows.start_R1.diff()
        at_R = state["known"][rows.slot_R] - 2 - first_R
        here_R = (at_R >= 0) & (at_R < rows.start_R1.diff()) & (state["live"][rows.slot_R] > 0)
        place_R = (rows.start_R1[:-1] + at_R.clamp(min=0)).clamp(max=len(hidden_TD) - 1).long()
        slot_R = rows.slot_R.long()
        self.hidden_SD.index_copy_(0, slot_R, hidden_TD[place_R])
        self.ready_S.index_copy_(0, slot_R, here_R.int())

    def guess(self, state: StepState, width_S: Tensor, found_S: Tensor, *, num_rows: int, depth: int) -> Tensor:
        """Write drafts for slots that may have some and have none; how many each has then."""
        wanted_S = (width_S > 0) & (found_S == 0) & (self.ready_S > 0)
        slots_S = torch.arange(len(wanted_S), device=wanted_S.device)
        row_S = torch.where(wanted_S, wanted_S.cumsum(0) - 1, num_rows).clamp(max=num_rows)
        slot_R1 = torch.full((num_rows + 1,), state.trash_slot, device=wanted_S.device).scatter_(0, row_S, slots_S)
        slot_R = slot_R1[:num_rows]  # the last one is where all others landed
        start_R1 = torch.arange(num_rows + 1, dtype=torch.int32, device=wanted_S.device)
        hidden_RD, known_R = self.hidden_SD[slot_R], state["known"][slot_R]
        for place in range(depth):
            rows = sampling_rows(state, slot_R, (known_R + place).long())
            tokens_R, _ = sample_rows(self._logits(hidden_RD), rows, with_cuts=False)
            state["drafts"][slot_R, place] = tokens_R.int()
            state["sources"][slot_R, place] = SOURCE
            if place + 1 < depth:
                position_R = (known_R - 1 + place).clamp(min=0).long() * (slot_R < state.trash_slot)
                chain = PackedRows(slot_R, position_R, slot_R, start_R1, (position_R + 1).int(), state["table"])
                hidden_RD = self._forward(tokens_R.clamp(min=0), hidden_RD, chain)
        return torch.where(wanted_S, width_S.clamp(max=depth), found_S)

    def _forward(self, next_T: Tensor, hidden_TD: Tensor, rows: PackedRows) -> Tensor:
        embeds_TD = self._target.get_input_embeddings()(next_T)
        residual_TD, query, key, value = self.model.begin(embeds_TD, hidden_TD, rows.position_T)
        attended = CachedRows(self._pages, rows).attend(DRAFT_LAYER, query, key, value, self.model.form)
        return self.model.finish(residual_TD, attended)

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        return head_logits(self._target, self.model.head_input(hidden_RD))
