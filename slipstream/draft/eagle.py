"""Drafters of one decoder layer over the target's own hidden states (EAGLE): their weights and their forward.

At position i a drafter is given the token at i + 1 and the target's features of position i; it says what the token at
i + 2 is. Further ahead it goes on from its own hidden state in place of the features. Embedding and head are the
target's, shared and never changed. Features of `eagle3` are the target's hidden states after a low, a middle and a high
layer, fused; that of `eagle1` is the one that goes to the target's head, and so does its own hidden state. Parameters
have the names and shapes that vLLM and SGLang load (`export.py`).

Axes: T packed tokens, D hidden size, F features (3 D or D), H query heads, K key/value heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

FEATURES = {"eagle3": 3, "eagle1": 1}
"""By kind: hidden states of the target that it is given."""


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """After how many layers hidden states are taken. Those of vLLM and SGLang, where there are enough layers."""
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return max(0, num_layers - 2), num_layers - 1, num_layers


def draft_config(target: PretrainedConfig) -> LlamaConfig:
    """A Llama layer of the target's width, whatever the target's family.

    Its heads are as wide as the target's, but their number divides the hidden size, as every Llama's does: engines that
    load an exported drafter insist on it. Targets with heads of their own width (Qwen3, Gemma) need not be like that.
    """
    text = target.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope  # by type of layer, in some families
    num_heads = _largest_divisor(text.hidden_size, text.num_attention_heads)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    return LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=max(inner) if isinstance(inner, Sequence) else inner,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=_largest_divisor(num_heads, getattr(text, "num_key_value_heads", None) or num_heads),
        head_dim=size + size % 2,  # rotary positions turn pairs
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)},
        max_position_embeddings=text.max_position_embeddings,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
    )


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(min(most, number), 0, -1) if number % divisor == 0)


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, query, bias=False)
        self.k_proj = nn.Linear(width, key, bias=False)
        self.v_proj = nn.Linear(width, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, width)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)


class _LayerOfBoth(_Layer):
    """Its attention sees the token's embedding beside the hidden state, each normed by itself."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class DraftModel(nn.Module):
    """What both kinds share. `fuse` the features, or go on from what `finish` gave; `begin`; attend; `finish`."""

    fc: nn.Linear

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        assert config.head_dim is not None
        self.form = AttentionForm(float(config.head_dim**-0.5))
        self._rotary = LlamaRotaryEmbedding(config)

    def fuse(self, features_TF: Tensor) -> Tensor:
        """The hidden state [T, D] that stands for the target's features."""
        raise NotImplementedError

    def begin(self, embeds_TD: Tensor, hidden_TD: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `finish` adds to [T, D]; query [T, H, D / H], key and value [T, K, D / H]."""
        raise NotImplementedError

    def finish(self, residual_TD: Tensor, attended: Tensor) -> Tensor:
        """The hidden state with which drafting goes on; `head_input` of it goes to the target's head."""
        layer = self.layer
        hidden_TD = residual_TD + layer.self_attn.o_proj(attended.flatten(1))
        return hidden_TD + layer.mlp(layer.post_attention_layernorm(hidden_TD))  # type: ignore[no-any-return]

    def head_input(self, hidden_TD: Tensor) -> Tensor:
        raise NotImplementedError

    def turns(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, in float32: [T, D / H] both."""
        cos, sin = self._rotary(torch.zeros(1, device=position_T.device), position_T.unsqueeze(0))
        return cos[0], sin[0]

    @property
    def layer(self) -> _Layer:
        raise NotImplementedError

    def _project(self, inputs: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.self_attn
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        query, key, value = (project(inputs).unflatten(-1, (-1, self.config.head_dim)) for project in projections)
        cos, sin = self._rotary(inputs.unsqueeze(0), position_T.unsqueeze(0))
        query, key = (
            turned[0].transpose(0, 1)
            for turned in apply_rotary_pos_emb(
                query.transpose(0, 1).unsqueeze(0), key.transpose(0, 1).unsqueeze(0), cos, sin
            )
        )
        return query, key, value


class Eagle3(DraftModel):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(FEATURES["eagle3"] * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _LayerOfBoth(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def fuse(self, features_TF: Tensor) -> Tensor:
        return self.fc(features_TF)  # type: ignore[no-any-return]

    def begin(self, embeds_TD: Tensor, hidden_TD: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = self.midlayer
        both = torch.cat([layer.input_layernorm(embeds_TD), layer.hidden_norm(hidden_TD)], -1)
        return hidden_TD, *self._project(both, position_T)

    def head_input(self, hidden_TD: Tensor) -> Tensor:
        return self.norm(hidden_TD)  # type: ignore[no-any-return]

    @property
    def layer(self) -> _Layer:
        return self.midlayer


class Eagle1(DraftModel):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(config, config.hidden_size)])

    def fuse(self, features_TF: Tensor) -> Tensor:
        return features_TF

    def begin(self, embeds_TD: Tensor, hidden_TD: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        joined_TD = self.fc(torch.cat([embeds_TD, hidden_TD], -1))
        return joined_TD, *self._project(joined_TD, position_T)

    def head_input(self, hidden_TD: Tensor) -> Tensor:
        return hidden_TD

    @property
    def layer(self) -> _Layer:
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        return layer


KINDS: dict[str, type[DraftModel]] = {"eagle3": Eagle3, "eagle1": Eagle1}


def kind_of(names: Iterable[str]) -> str:
    """Whose weights have these names."""
    return "eagle3" if any(name.startswith("midlayer.") for name in names) else "eagle1"


def build_draft(target: PretrainedConfig, kind: str, seed: int = 0) -> DraftModel:
    """An untaught drafter for a target."""
    config = draft_config(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = KINDS[kind](config)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)
    return model


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """ValueError if an eagle3 drafter cannot find them."""
    layers = getattr(target.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"drafter.kind=eagle3 takes hidden states between decoder layers, which {type(target).__name__} does not "
            "have under the name `layers`; write drafter.kind=eagle1, or draft.source=history"
        )
    return layers


def check_draftable(target: PreTrainedModel, kind: str) -> None:
    """ValueError if no drafter of this kind can be made for the target."""
    embeddings_VD = target.get_input_embeddings().weight
    assert isinstance(embeddings_VD, Tensor)
    hidden_size, width = target.config.get_text_config().hidden_size, embeddings_VD.shape[1]
    if width != hidden_size:
        raise ValueError(
            f"{type(target).__name__} has embeddings of {width} numbers and hidden states of {hidden_size}: a learned "
            "drafter needs them as wide as each other; write draft.source=history"
        )
    if kind == "eagle3":
        decoder_layers(target)


class Features:
    """The target's hidden states that a drafter of this kind is given, caught as they pass in a forward."""

    def __init__(self, target: PreTrainedModel, kind: str) -> None:
        modules: list[Any] = [target.base_model]  # whose result is what goes to the head
        if kind == "eagle3":
            layers = decoder_layers(target)
            numbers = feature_layers(len(layers))
            modules = [layers[number - 1] if number else target.get_input_embeddings() for number in numbers]
        self._caught: list[Tensor | None] = [None] * len(modules)
        self._hooks = []
        for place, module in enumerate(modules):

            def catch(_: Any, __: Any, out: Any, place: int = place) -> None:
                self._caught[place] = (out if isinstance(out, Tensor) else out[0])[0].detach()

            self._hooks.append(module.register_forward_hook(catch))

    def take(self) -> Tensor:
        """[T, F] of the last forward."""
        caught, self._caught = self._caught, [None] * len(self._caught)
        assert all(one is not None for one in caught), "no forward of the target came before"
        return torch.cat([one for one in caught if one is not None], -1)

    def drop(self) -> None:
        """Those of the last forward: a graph's memory is not held by what nobody reads."""
        self._caught = [None] * len(self._caught)

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
