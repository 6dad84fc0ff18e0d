"""Tiny models of many families, a small Llama for the engine, and requests for it. The same call, the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.cached import PackedRows
from slipstream.rng import derive_seed
from slipstream.types import Request, SamplingParams

VOCABULARY = 97

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 6}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}

# Family -> what its config needs beside COMMON, so that the family's own feature is at work in the test.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": WINDOW,
    "gemma": {"head_dim": 8},
    "gemma2": {
        "head_dim": 8, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0,
        **WINDOW, **ALTERNATING,
    },
    "gemma3_text": {"head_dim": 8, **WINDOW, **ALTERNATING},
    "phi3": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "granite": {
        "logits_scaling": 4.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7, "embedding_multiplier": 3.0,
    },
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, **WINDOW, **ALTERNATING},
    "glm4": {"head_dim": 8},
    "gpt_neox": {},
    "starcoder2": WINDOW,
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW, **ALTERNATING},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def family_config(family: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[family](**(COMMON | FAMILIES.get(family, {}) | changes))


def build_family(family: str, attention: str, **changes: Any) -> PreTrainedModel:
    """The family's causal language model in float32, with weights large enough that every part of it shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        family_config(family, **changes), attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_attn_implementation(attention)
    return model.eval()


def small_llama(
    seed: int = 0, *, dtype: torch.dtype = torch.float32, attention: str = ATTENTION_NAME
) -> LlamaForCausalLM:
    """Two layers, 97 tokens: an engine step takes milliseconds."""
    torch.manual_seed(seed)
    config = LlamaConfig(**COMMON | {"num_hidden_layers": 2, "initializer_range": 0.3, "max_position_embeddings": 512})
    model = LlamaForCausalLM(config).to(dtype)
    model.set_attn_implementation(attention)
    return model.eval()


def wide_llama(dtype: torch.dtype) -> LlamaForCausalLM:
    """One layer with the widths of SmolLM2, whose products libraries compute in other ways at other heights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = LlamaForCausalLM(LlamaConfig(**COMMON | sizes | {"num_hidden_layers": 1, "initializer_range": 0.1}))
    model.set_attn_implementation(ATTENTION_NAME)
    return model.to(dtype).eval()


def wide_gpt2(dtype: torch.dtype) -> GPT2LMHeadModel:
    """One layer with the widths of GPT-2, whose weights stand inputs first."""
    torch.manual_seed(0)
    sizes = {"n_embd": 768, "n_head": 12, "n_layer": 1, "n_positions": 128, "initializer_range": 0.1}
    special = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **special))
    model.set_attn_implementation(ATTENTION_NAME)
    return model.to(dtype).eval()


def group(name: str, prompt: tuple[int, ...], num_samples: int, *, seed: int = 0, **sampling: Any) -> list[Request]:
    """Requests of one prompt; stop tokens only where asked for."""
    params = SamplingParams(**{"max_new_tokens": 12} | sampling)
    return [
        Request(f"{name}/{sample}", name, prompt, derive_seed(seed, name, sample), params)
        for sample in range(num_samples)
    ]


def packed_rows(
    cuts: Sequence[tuple[int, int, int]], table: Tensor, *, num_padding: int = 0, num_empty: int = 0
) -> PackedRows:
    """Rows of (slot, first position, tokens) cuts; the table's last line is the trash slot's."""
    trash = len(table) - 1
    lengths = [length for _, _, length in cuts]
    device = table.device
    return PackedRows(
        slot_T=torch.tensor([slot for slot, _, n in cuts for _ in range(n)] + [trash] * num_padding, device=device),
        position_T=torch.tensor(
            [start + i for _, start, n in cuts for i in range(n)] + [0] * num_padding, device=device
        ),
        slot_R=torch.tensor([slot for slot, _, _ in cuts] + [trash] * num_empty, device=device),
        start_R1=torch.tensor([0, *accumulate(lengths), *[sum(lengths)] * num_empty], dtype=torch.int32, device=device),
        length_R=torch.tensor([start + n for _, start, n in cuts] + [0] * num_empty, dtype=torch.int32, device=device),
        table_SW=table,
    )
