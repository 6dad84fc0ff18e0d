"""A drafter of one decoder layer over the target's own hidden states (EAGLE-3): its weights and its forward.

At position i it is given the token at i + 1 and the target's features of position i, its hidden states after a low, a
middle and a high layer; it says what the token at i + 2 is. Further ahead it goes on from its own hidden state in place
of the features. Embedding and head are the target's, shared and never changed. Parameters have the names and shapes
that vLLM and SGLang load (`export.py`).

Axes: T packed tokens, D hidden size, F = 3 D features, H query heads, K key/value heads, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from slipstream.models.attention import AttentionForm

NUM_FEATURES = 3


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """After how many layers hidden states are taken. Those of vLLM and SGLang, where there are enough layers."""
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return max(0, num_layers - 2), num_layers - 1, num_layers


def draft_config(target: PretrainedConfig) -> LlamaConfig:
    """A Llama layer of the target's width, whatever the target's family."""
    text = target.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None) or {}
    return LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)},
        max_position_embeddings=text.max_position_embeddings,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
    )


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        width, query = 2 * config.hidden_size, config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, query, bias=False)
        self.k_proj = nn.Linear(width, key, bias=False)
        self.v_proj = nn.Linear(width, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)


class DraftModel(nn.Module):
    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        assert config.head_dim is not None
        self.form = AttentionForm(float(config.head_dim**-0.5))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.fc = nn.Linear(NUM_FEATURES * config.hidden_size, config.hidden_size, bias=False)
            self.midlayer = _Layer(config)
            self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=config.initializer_range)
        self._rotary = LlamaRotaryEmbedding(config)

    def begin(self, embeds_TD: Tensor, hidden_TD: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [T, H, D / H], key and value [T, K, D / H]."""
        layer, size = self.midlayer, self.config.head_dim
        both = torch.cat([layer.input_layernorm(embeds_TD), layer.hidden_norm(hidden_TD)], -1)
        projections = layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj
        query, key, value = (project(both).unflatten(-1, (-1, size)) for project in projections)
        cos, sin = self._rotary(embeds_TD.unsqueeze(0), position_T.unsqueeze(0))
        query, key = (
            turned[0].transpose(0, 1)
            for turned in apply_rotary_pos_emb(
                query.transpose(0, 1).unsqueeze(0), key.transpose(0, 1).unsqueeze(0), cos, sin
            )
        )
        return query, key, value

    def finish(self, hidden_TD: Tensor, attended: Tensor) -> Tensor:
        """The hidden state with which drafting goes on; `head_input` of it goes to the target's head."""
        layer = self.midlayer
        hidden_TD = hidden_TD + layer.self_attn.o_proj(attended.flatten(1))
        return hidden_TD + layer.mlp(layer.post_attention_layernorm(hidden_TD))  # type: ignore[no-any-return]

    def head_input(self, hidden_TD: Tensor) -> Tensor:
        return self.norm(hidden_TD)  # type: ignore[no-any-return]

    def turns(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, in float32: [T, D / H] both."""
        cos, sin = self._rotary(torch.zeros(1, device=position_T.device), position_T.unsqueeze(0))
        return cos[0], sin[0]


class Features:
    """The target's hidden states that the drafter is given, caught as they pass in a forward."""

    def __init__(self, target: PreTrainedModel) -> None:
        base: Any = target.base_model
        wanted = feature_layers(len(base.layers))
        self._caught: list[Tensor | None] = [None] * NUM_FEATURES
        self._hooks = []
        for place, number in enumerate(wanted):
            module = base.layers[number - 1] if number else base.embed_tokens

            def catch(_: Any, __: Any, out: Any, place: int = place) -> None:
                self._caught[place] = (out[0] if isinstance(out, tuple) else out)[0].detach()

            self._hooks.append(module.register_forward_hook(catch))

    def take(self) -> Tensor:
        """[T, F] of the last forward."""
        caught, self._caught = self._caught, [None] * NUM_FEATURES
        assert all(one is not None for one in caught), "no forward of the target came before"
        return torch.cat([one for one in caught if one is not None], -1)

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
