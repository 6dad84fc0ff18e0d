"""An engine as a recipe has it."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slipstream.config import Config
from slipstream.draft.history import Past
from slipstream.draft.selector import Selector
from slipstream.engine.engine import Engine
from slipstream.models.precision import resolve_precision
from slipstream.models.weights import cast_weights
from slipstream.runtime.drafting import build_drafter, settle_source


def build_engine(
    config: Config,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    past: Past | None = None,
    selector: Selector | None = None,
) -> Engine:
    """An engine with its own copy of the weights, in the engine's number format, that drafts if the recipe lets it."""
    dtype = resolve_precision(config.engine.dtype, device)
    served: PreTrainedModel = copy.deepcopy(model).requires_grad_(False)
    cast_weights(served, dtype)
    return engine_around(served, config, tokenizer, device, past, selector)


def engine_around(
    served: PreTrainedModel,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    past: Past | None = None,
    selector: Selector | None = None,
) -> Engine:
    """One that computes with this very model, which nobody else may."""
    settings = config.engine
    config = settle_source(config, device)
    drafts = config.draft.source != "off"
    return Engine(
        served,
        max_sequences=settings.max_sequences,
        max_length=config.max_length,
        kv_tokens=settings.kv_tokens,
        exact=settings.exact,
        drafter=build_drafter(config, past, device) if drafts else None,
        policy=(selector or Selector()) if drafts else None,
        decode=lambda token_ids: str(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)),
    )


def choose_device(setting: str) -> torch.device:
    if setting == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no CUDA device here; use device=cpu or device=auto")
    return torch.device("cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu")
