"""The packed `[1, T]` forward of a Hugging Face causal language model, for generation and for training.

Owns the calling convention: no mask, no Hugging Face cache, explicit positions, attention from the context.

Axes: T packed tokens, N rows that want logits, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.models.attention import Attention, Documents, attending
from slipstream.models.cached import CachedRows, KVPages, PackedRows


def row_logits(model: PreTrainedModel, ids_T: Tensor, pages: KVPages, rows: PackedRows, logits_at_N: Tensor) -> Tensor:
    """Logits at the chosen packed tokens, as the model gives them; keys and values of all tokens are written."""
    return logits_of(model, ids_T, rows.position_T, CachedRows(pages, rows), logits_at_N)


def logits_of(
    model: PreTrainedModel, ids_T: Tensor, position_T: Tensor, attention: Attention, logits_at_N: Tensor
) -> Tensor:
    """Logits [N, V] at the chosen packed tokens, with this attention."""
    with attending(attention):
        out = model(
            input_ids=ids_T.unsqueeze(0),
            position_ids=position_T.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logits_at_N,
        )
    logits: Tensor = out.logits[0]
    return logits


def document_hidden(model: PreTrainedModel, ids_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Last hidden states [T, D] of documents packed one after another; differentiable."""
    assert sum(lengths) == ids_T.shape[0], "lengths must add up to the packed tokens"
    positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(ids_T.device)
    with attending(Documents(lengths)):
        out = model.base_model(input_ids=ids_T.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


@dataclass(frozen=True, slots=True)
class AfterHead:
    """What a family does to the logits that its head gives."""

    divided_by: float | None = None
    """By Granite."""
    times: float | None = None
    """In Cohere."""
    cap: float | None = None
    """That they stay within in Gemma 2."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> AfterHead:
        names = ("logits_scaling", "logit_scale", "final_logit_softcapping")
        return cls(*(getattr(config.get_text_config(), name, None) or None for name in names))

    def __call__(self, logits: Tensor) -> Tensor:
        if self.divided_by is not None:
            logits = logits / self.divided_by
        if self.times is not None:
            logits = logits * self.times
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def slope(self, given: Tensor) -> Tensor | float:
        """How much what it has given changes with what it was given."""
        slope = (self.times or 1.0) / (self.divided_by or 1.0)
        return slope if self.cap is None else slope * (1.0 - (given / self.cap) ** 2)


def head_logits(model: PreTrainedModel, hidden_ND: Tensor) -> Tensor:
    """Float32 logits of hidden states, with what the family does after the head; `tests` compare with the module."""
    logits_NV: Tensor = model.get_output_embeddings()(hidden_ND).float()
    return AfterHead.of(model.config)(logits_NV)
