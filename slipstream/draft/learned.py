"""Drafts of a learned model: one layer over the target's hidden states (`eagle.py`), run inside the engine's step.

Its keys lie in the target's pages, as one more layer, so whatever shares, copies or recomputes pages does so for both.
After a step it takes in the tokens that ran, each with the token that came after it, and keeps the hidden state of each
slot's last one. Before the next step it goes on from there: a token, drawn with the very noise with which the target
will draw at that position, then the next from that, as a chain.

Axes: T packed tokens, R rows, S slots and the trash slot, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.draft import growing
from slipstream.draft.eagle import Features, build_draft
from slipstream.draft.fast_eagle import FastDraft
from slipstream.engine.packing import DraftSizes, sampling_rows
from slipstream.engine.sampling import sample_rows
from slipstream.engine.state import StepState
from slipstream.engine.strategy import Feeding
from slipstream.engine.trees import KeptPath
from slipstream.models.cached import KVPages, PackedRows
from slipstream.models.packed import head_logits
from slipstream.models.weights import after_writing, cast_weights, write_weights
from slipstream.types import MODEL_ORIGIN


class ModelGuesser:
    def __init__(self, *, num_slots: int, kind: str = "eagle3", seed: int = 0) -> None:
        self._num_slots, self._kind, self._seed = num_slots, kind, seed

    def attach(self, target: PreTrainedModel, pages: KVPages, max_length: int) -> None:
        """To the engine whose target it drafts for."""
        weight = target.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        model = build_draft(target.config, self._kind, self._seed).to(weight.device).eval()
        self.model = model.requires_grad_(False)
        cast_weights(self.model, weight.dtype)
        self.pages = pages
        self._target, self._features = target, Features(target, self._kind)
        self._fast = FastDraft(self.model, weight.detach(), pages, max_length)
        after_writing(self.model, self._fast.refresh)
        width = self.model.config.hidden_size
        self.hidden_SD, self.normed_SD = (
            torch.zeros(self._num_slots + 1, width, dtype=weight.dtype, device=weight.device) for _ in range(2)
        )
        """By slot: that of its last known token but one, which knows the last; and what goes to the head."""
        self.kept_at_S = torch.zeros(self._num_slots + 1, dtype=torch.int32, device=weight.device)
        """How many tokens were known then: who knows more by now goes on from nothing. (Of another sequence, who has
        just as many, the drafts are wrong, once.)"""

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """New weights, in place: graphs stay valid."""
        write_weights(self.model, weights)

    def learn(self, state: StepState, rows: PackedRows, kept: KeptPath | None, feeding: Feeding) -> None:
        """After a step: what it ran, with what came of it; of a step of trees, what was kept."""
        if kept is not None:
            self._take_in_path(state, rows, kept)
        elif feeding == Feeding.ALL:
            self._take_in(state, rows)
        elif feeding == Feeding.KEYS:
            self._fast.remember(_followers(state, rows), self._fast.fuse(self._features.take()), rows)
        else:
            self._features.drop()

    def _take_in(self, state: StepState, rows: PackedRows) -> None:
        hidden_TD, normed_TD = self.forward(_followers(state, rows), self._fast.fuse(self._features.take()), rows)
        first_R = rows.length_R - rows.start_R1.diff()
        at_R = state["known"][rows.slot_R] - 2 - first_R
        here_R = (at_R >= 0) & (at_R < rows.start_R1.diff())
        place_R = (rows.start_R1[:-1] + at_R.clamp(min=0)).clamp(max=len(hidden_TD) - 1).long()
        self._keep(state, rows.slot_R.long(), hidden_TD[place_R], normed_TD[place_R], here_R)

    def _take_in_path(self, state: StepState, rows: PackedRows, kept: KeptPath) -> None:
        hidden_TD = self._fast.fuse(self._features.take()[kept.at_T])
        hidden_TD, normed_TD = self.forward(_followers(state, kept.rows), hidden_TD, kept.rows)
        num_rows = len(kept.count_R)
        last_R = (kept.count_R - 1).clamp(min=0).long()
        place_R = torch.arange(num_rows, device=last_R.device) * (len(hidden_TD) // num_rows) + last_R
        slot_R = rows.slot_R.long()
        self._keep(state, slot_R, hidden_TD[place_R], normed_TD[place_R], kept.count_R > 0)

    def _keep(self, state: StepState, slot_R: Tensor, hidden_RD: Tensor, normed_RD: Tensor, here_R: Tensor) -> None:
        self.hidden_SD.index_copy_(0, slot_R, hidden_RD)
        self.normed_SD.index_copy_(0, slot_R, normed_RD)
        goes_on_R = here_R & (state["live"][slot_R] > 0)
        self.kept_at_S.index_copy_(0, slot_R, torch.where(goes_on_R, state["known"][slot_R], 0))

    def guess(self, state: StepState, width_S: Tensor, found_S: Tensor, sizes: DraftSizes) -> Tensor:
        """Write drafts for slots that may have some and have none; how many each has then."""
        wanted_S, slot_R = self._askers(state, width_S, found_S, sizes.num_rows)
        last_R = self._last_places(state, width_S, slot_R)
        start_R1 = torch.arange(sizes.num_rows + 1, dtype=torch.int32, device=slot_R.device)
        hidden_RD, normed_RD, known_R = self.hidden_SD[slot_R], self.normed_SD[slot_R], state["known"][slot_R].long()
        rows, drafts = sampling_rows(state, slot_R, known_R), list[Tensor]()
        for place in range(sizes.depth):
            token_R, _, _ = sample_rows(
                self.logits(normed_RD), replace(rows, position_N=known_R + place), with_cuts=False
            )
            drafts.append(token_R.clamp(min=0))
            if place + 1 < sizes.depth:
                position_R = torch.minimum((known_R - 1 + place).clamp(min=0), last_R) * (slot_R < state.trash_slot)
                chain = PackedRows(slot_R, position_R, slot_R, start_R1, (position_R + 1).int(), state["table"])
                hidden_RD, normed_RD = self.forward(drafts[-1], hidden_RD, chain)
        state["drafts"][slot_R, : sizes.depth] = torch.stack(drafts, 1).int()
        state["sources"].index_fill_(0, slot_R, MODEL_ORIGIN)
        return torch.where(wanted_S, width_S.clamp(max=sizes.depth), found_S)

    def guess_trees(self, state: StepState, width_S: Tensor, found_S: Tensor, sizes: DraftSizes) -> Tensor:
        """As `guess`, with several drafts after each, the likeliest first (`growing.py`); a chain where some are."""
        wanted_S, slot_R = self._askers(state, width_S, found_S, sizes.num_rows)
        state["parents"].copy_(torch.arange(state.max_drafts, device=slot_R.device) - 1)
        last_R = self._last_places(state, width_S, slot_R)
        growth = growing.grow(self, state, slot_R, last_R, depth=sizes.depth, branches=sizes.branches)
        num = growth.tokens_RC.shape[1]
        for name, values in (("drafts", growth.tokens_RC), ("parents", growth.parents_RC)):
            state[name][slot_R, :num] = values.int()
        state["sources"].index_fill_(0, slot_R, MODEL_ORIGIN)
        return torch.where(wanted_S, width_S.clamp(max=num), found_S)

    def _askers(self, state: StepState, width_S: Tensor, found_S: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Which slots want the model's drafts, and these slots as rows, the trash slot after them."""
        wanted_S = (width_S > 0) & (found_S == 0) & (self.kept_at_S == state["known"])
        slots_S = torch.arange(len(wanted_S), device=wanted_S.device)
        row_S = torch.where(wanted_S, wanted_S.cumsum(0) - 1, num_rows).clamp(max=num_rows)
        slot_R1 = torch.full((num_rows + 1,), state.trash_slot, device=wanted_S.device).scatter_(0, row_S, slots_S)
        return wanted_S, slot_R1[:num_rows]  # the last one is where all others landed

    def _last_places(self, state: StepState, width_S: Tensor, slot_R: Tensor) -> Tensor:
        """Of the pages that each slot has for this step: what would lie beyond is another's, or nowhere. Drafts that
        reach so far are never verified."""
        size = self.pages.page_tokens
        last_R = (state["known"][slot_R] - 1 + width_S[slot_R]).clamp(0, state["tokens"].shape[1] - 1)
        return ((last_R // size + 1) * size - 1).long()

    def forward(self, next_T: Tensor, hidden_TD: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """The drafter's hidden states, and what goes to the head; its keys are written."""
        return self._fast.forward(next_T, hidden_TD, rows)

    def logits(self, normed_RD: Tensor) -> Tensor:
        return head_logits(self._target, normed_RD)


def _followers(state: StepState, rows: PackedRows) -> Tensor:
    """The token that came after each of these."""
    if state.report.is_cuda:
        from slipstream.draft.triton_eagle import followers  # a machine without a GPU may lack triton

        return followers(state["tokens"], rows.slot_T, rows.position_T)
    longest = state["tokens"].shape[1]
    return state["tokens"][rows.slot_T, (rows.position_T + 1).clamp(max=longest - 1)].long().clamp(min=0)
