"""The packed `[1, T]` forward of a Hugging Face causal language model, for generation and for training.

Owns the calling convention: no mask, no Hugging Face cache, explicit positions, attention from the context.

Axes: T packed tokens, N rows that want logits, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.models.attention import Documents, attending
from slipstream.models.cached import CachedRows, KVPages, PackedRows


def row_logits(model: PreTrainedModel, ids_T: Tensor, pages: KVPages, rows: PackedRows, logits_at_N: Tensor) -> Tensor:
    """Logits at the chosen packed tokens, as the model gives them; keys and values of all tokens are written."""
    with attending(CachedRows(pages, rows)):
        out = model(
            input_ids=ids_T.unsqueeze(0),
            position_ids=rows.position_T.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logits_at_N,
        )
    logits: Tensor = out.logits[0]
    return logits


def document_hidden(model: PreTrainedModel, ids_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Last hidden states [T, D] of documents packed one after another; differentiable."""
    assert sum(lengths) == ids_T.shape[0], "lengths must add up to the packed tokens"
    positions = torch.cat([torch.arange(length, device=ids_T.device) for length in lengths])
    with attending(Documents(lengths)):
        out = model.base_model(input_ids=ids_T.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def head_logits(model: PreTrainedModel, hidden_ND: Tensor) -> Tensor:
    """Float32 logits of hidden states, with what the family does after the head; `tests` compare with the module."""
    config = model.config.get_text_config()
    logits_NV = model.get_output_embeddings()(hidden_ND).float()
    if getattr(config, "logits_scaling", None):  # Granite divides
        logits_NV = logits_NV / config.logits_scaling
    if getattr(config, "logit_scale", None):  # Cohere multiplies
        logits_NV = logits_NV * config.logit_scale
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    if softcap:
        logits_NV = torch.tanh(logits_NV / softcap) * softcap
    return logits_NV
