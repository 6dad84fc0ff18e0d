"""Decoder layers in ten kernels instead of fifty: their fused forward, for the layers that `recognise.py` knows.

Owns the fused forward and the plain twins of the kernels in `triton_layers.py` and `cpu_layers.py`; the products and
their storage are in `products.py`. Parameters keep their names, shapes and identity. A fused model has no backward, and
must not be moved or cast.

Axes: T packed tokens, N hidden size, I inner size of the MLP, H query heads, K key/value heads, D head size, R rotated
part of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.models import cpu_layers
from slipstream.models.attention import AttentionForm, current_attention
from slipstream.models.cached import CachedRows
from slipstream.models.products import Product
from slipstream.models.rotary import Rotary

Activation = Literal["silu", "gelu_tanh"]

KERNEL_DEVICES = {"cuda"}
"""Where the Triton kernels run. Tests add the CPU, with Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class Norm:
    """One normalisation of rows, in float32, rounded as the family rounds it."""

    weight: Tensor | None
    eps: float
    rounds_first: bool = True
    """Llama rounds to the model's dtype before it multiplies with the weight; Gemma and OLMo 2 do it after."""
    plus_one: bool = False
    centred: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """How a row of the stacked product is cut: H heads of queries, K of keys, K of values."""

    num_query: int
    num_key: int
    size: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None

    @property
    def norms_all_at_once(self) -> bool:
        """One norm over all heads of a token (OLMo 2), not one a head (Qwen 3)."""
        return self.query_norm is not None and self.query_norm.weight.numel() != self.size  # type: ignore[union-attr]


def normalise_plainly(x: Tensor, norm: Norm) -> Tensor:
    wide = x.float()
    if norm.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.weight is None:
        return wide.to(x.dtype)
    if norm.rounds_first:
        return norm.weight * wide.to(x.dtype)
    return (wide * (1.0 + norm.weight.float() if norm.plus_one else norm.weight)).to(x.dtype)


def add_norm_plainly(
    x_TN: Tensor, delta_TN: Tensor | None, after: Norm | None, scale: float, before: Norm | None
) -> tuple[Tensor, Tensor | None]:
    """The residual stream x + scale * after(delta), and `before` of that for the next product."""
    if delta_TN is not None:
        delta_TN = delta_TN if after is None else normalise_plainly(delta_TN, after)
        x_TN = x_TN + (delta_TN if scale == 1.0 else delta_TN * scale)
    return x_TN, None if before is None else normalise_plainly(x_TN, before)


def act_mul_plainly(gate_up: Tensor, activation: Activation) -> Tensor:
    """Not by torch's own activations: threads share these out, cut anywhere, and on a CPU the last numbers before a cut
    are computed by other instructions, which round otherwise. So a row would be another in other company."""
    gate, up = gate_up.chunk(2, -1)
    wide = gate.float()
    if activation == "silu":
        exponent = -wide
    else:  # x (1 + tanh u) / 2 = x / (1 + exp(-2u))
        exponent = wide.square().mul_(0.044715).add_(1.0).mul_(wide).mul_(-2.0 * math.sqrt(2.0 / math.pi))
    below = exponent.exp_().add_(1.0)
    return torch.div(wide, below, out=below).to(gate.dtype) * up


def _normalise_heads(x_THD: Tensor, norm: Norm) -> Tensor:
    """Over as many numbers as the norm has weights: a head, or all heads of a token."""
    assert norm.weight is not None
    return normalise_plainly(x_THD.flatten(1).unflatten(1, (-1, norm.weight.numel())), norm).view_as(x_THD)


def norm_rope_plainly(qkv: Tensor, heads: Heads, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, H, D], key and value [T, K, D]."""
    num_query, num_both = heads.num_query, heads.num_query + heads.num_key
    both, value = qkv.unflatten(-1, (-1, heads.size)).tensor_split([num_both], 1)
    if heads.query_norm is not None and heads.key_norm is not None:
        pairs = zip(both.tensor_split([num_query], 1), (heads.query_norm, heads.key_norm), strict=True)
        both = torch.cat([_normalise_heads(part, norm) for part, norm in pairs], 1)
    if rotary is not None:
        cos, sin = (tensor.unsqueeze(1) for tensor in rotary.of_tokens())
        turned, kept = both.tensor_split([cos.shape[-1]], -1)
        low, high = turned.chunk(2, -1)
        turned = (turned * cos + torch.cat((-high, low), -1) * sin).to(qkv.dtype)
        both = torch.cat((turned, kept), -1) if kept.shape[-1] else turned
    return both[:, :num_query], both[:, num_query:], value


def kernels_for(x: Tensor) -> Any:
    """Something with `add_norm`, `act_mul` and `norm_rope_write`, which is None where only the plain twins serve."""
    if x.device.type in KERNEL_DEVICES:
        from slipstream.models import triton_layers

        return triton_layers
    return cpu_layers if x.device.type == "cpu" and x.dtype == torch.float32 else _PLAIN


_PLAIN = SimpleNamespace(add_norm=add_norm_plainly, act_mul=act_mul_plainly, norm_rope_write=None)


class Handover:
    """A layer's last addition and the next layer's first norm are one kernel: here the norm waits for its taker."""

    _given: tuple[Tensor, Norm, Tensor] | None = None

    def give(self, hidden_1TN: Tensor, norm: Norm | None, normed_TN: Tensor | None) -> Tensor:
        self._given = None if norm is None or normed_TN is None else (hidden_1TN, norm, normed_TN)
        return hidden_1TN

    def take(self, hidden_1TN: Tensor, norm: Norm | None) -> Tensor:
        """`norm` of the hidden states, as [T, N]: given, if it was this norm of exactly this tensor, or computed."""
        given, self._given = self._given, None
        if given is not None and given[0] is hidden_1TN and given[1] is norm:
            return given[2]
        x_TN = hidden_1TN[0]
        return x_TN if norm is None else kernels_for(x_TN).add_norm(x_TN, None, None, 1.0, norm)[1]


@dataclass
class FusedLayer:
    """The forward of one decoder layer."""

    layer: int
    heads: Heads
    form: AttentionForm
    uses_rope: bool
    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    activation: Activation
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    residual_scale: float
    handover: Handover
    next_norm: Norm | None = None
    """What the next module does first with this layer's output, if it takes it from the handover."""

    def __call__(
        self, hidden_states: Tensor, *, attention_mask: Any = None, position_embeddings: Any = None, **_: Any
    ) -> Tensor:
        assert hidden_states.shape[0] == 1, "packed batches have one row"
        assert not hidden_states.requires_grad, "a fused model has no backward"
        if attention_mask is not None:
            raise ValueError("a fused model was given an attention mask, which the engine cannot serve")
        kernels, scale, x_TN = kernels_for(hidden_states), self.residual_scale, hidden_states[0]
        rotary = _rotary(position_embeddings) if self.uses_rope else None
        normed_TN = self.handover.take(hidden_states, self.before_attention)
        delta_TN = self.output(self._attend(self.qkv(normed_TN), rotary))
        x_TN, normed_TN = kernels.add_norm(x_TN, delta_TN, self.after_attention, scale, self.before_mlp)
        inner_TI = self.gate_up.activated(x_TN if normed_TN is None else normed_TN, self.activation, kernels.act_mul)
        delta_TN = self.down(inner_TI)
        x_TN, normed_TN = kernels.add_norm(x_TN, delta_TN, self.after_mlp, scale, self.next_norm)
        return self.handover.give(x_TN.unsqueeze(0), self.next_norm, normed_TN)

    def _attend(self, qkv: Tensor, rotary: Rotary | None) -> Tensor:
        attention = current_attention()
        write = kernels_for(qkv).norm_rope_write
        if isinstance(attention, CachedRows) and write is not None:
            # Only the shapes of these views are read.
            heads = qkv.unflatten(-1, (-1, self.heads.size))
            key, value = heads[:, self.heads.num_query :].chunk(2, 1)
            keys, values = attention.pages.of_layer(self.layer, key, value)
            query = write(qkv, self.heads, rotary, attention.rows, keys, values)
            return attention.read(query, keys, values, self.form).flatten(1)
        query, key, value = norm_rope_plainly(qkv, self.heads, rotary)
        return attention.attend(self.layer, query, key, value, self.form).flatten(1)


def _rotary(position_embeddings: Any) -> Rotary:
    """As Hugging Face has them, or from a table."""
    if isinstance(position_embeddings, Rotary):
        return position_embeddings
    return Rotary(position_embeddings[0][0], position_embeddings[1][0])


def fused_norm(norm: Norm, handover: Handover, hidden_states: Tensor) -> Tensor:
    """The model's last norm, which the last layer has computed already."""
    return handover.take(hidden_states, norm).unsqueeze(0)
