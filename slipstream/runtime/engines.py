"""An engine as a recipe has it."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slipstream.config import Config
from slipstream.draft.eagle import build_draft, draft_config
from slipstream.draft.history import Past
from slipstream.draft.selector import Selector
from slipstream.engine.engine import GRAPH_BYTES, PAGE_TOKENS, Engine
from slipstream.models.precision import precision_of
from slipstream.models.weights import cast_weights
from slipstream.runtime.drafting import build_drafter, learns, settle_source
from slipstream.runtime.placement import TRAINER_BYTES, USABLE, kv_tokens_in
from slipstream.types import SamplingParams

WORKSPACE_BYTES = 1 << 30
"""Of a process on a GPU, beside weights, keys and values and graphs."""


def build_engine(
    config: Config,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    past: Past | None = None,
    selector: Selector | None = None,
) -> Engine:
    """An engine with its own copy of the weights, in the engine's number format, that drafts if the recipe lets it."""
    served: PreTrainedModel = copy.deepcopy(model).requires_grad_(False)
    cast_weights(served, precision_of(config.engine.dtype, model))
    return engine_around(served, config, tokenizer, device, past, selector)


def engine_around(
    served: PreTrainedModel,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    past: Past | None = None,
    selector: Selector | None = None,
    *,
    others_follow: bool = False,
) -> Engine:
    """One that computes with this very model, which nobody else may. `others_follow`: they wait for its slots
    elsewhere, where it does not see them."""
    settings = config.engine
    config = settle_source(config, device)
    drafts = config.draft.source != "off"
    engine = Engine(
        served,
        max_sequences=settings.max_sequences,
        max_length=config.max_length,
        kv_tokens=settings.kv_tokens,
        exact=settings.exact,
        drafter=build_drafter(config, past, device) if drafts else None,
        policy=(selector or Selector(has_price=device.type == "cuda")) if drafts else None,
        decode=lambda token_ids: str(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)),
        others_follow=others_follow,
    )
    if device.type == "cuda":
        engine.load_kernels(with_cuts=SamplingParams(**config.sampling.model_dump()).cuts_tail)
    return engine


def fit_memory(config: Config, model: PreTrainedModel, most_bytes: int | None) -> Config:
    """With room for as many keys and values as a process may take that has nothing but this model on its GPU yet.
    `most_bytes`: of the GPU, in all; None: what is free. A recipe that says how many it wants gets them."""
    device = next(model.parameters()).device
    if device.type != "cuda" or config.engine.kv_tokens is not None:
        return config
    torch.cuda.empty_cache()  # of weights in the format they were loaded in
    taken, free = torch.cuda.memory_allocated(device), USABLE * torch.cuda.mem_get_info(device)[0]
    room = free if most_bytes is None else min(free, most_bytes - taken)
    wanted = config.engine.max_sequences * -(-config.max_length // PAGE_TOKENS) * PAGE_TOKENS
    room -= GRAPH_BYTES + WORKSPACE_BYTES + drafter_bytes(config, model)
    kv_tokens = kv_tokens_in(room, kv_token_bytes(config, model), wanted, config.max_length)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"kv_tokens": kv_tokens})})


def kv_token_bytes(config: Config, model: PreTrainedModel) -> int:
    """Keys and values of a token, in all layers, of which a drafter is one."""
    text = model.config.get_text_config()
    num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    numbers = text.num_hidden_layers * num_heads * head_size
    if learns(config):
        draft = draft_config(model.config)
        assert draft.num_key_value_heads is not None and draft.head_dim is not None
        numbers += draft.num_key_value_heads * draft.head_dim
    return 2 * numbers * model.dtype.itemsize


def drafter_bytes(config: Config, model: PreTrainedModel) -> float:
    """That a drafter takes beside its policy while it learns, and the texts it learns from."""
    if not learns(config):
        return 0.0
    with torch.device("meta"):
        draft = build_draft(model.config, config.drafter.kind)
    return TRAINER_BYTES * sum(one.numel() for one in draft.parameters()) + config.drafter.memory_gb * 1e9


def choose_device(setting: str) -> torch.device:
    if setting == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no CUDA device here; use device=cpu or device=auto")
    return torch.device("cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu")
