"""How Hugging Face modules reach our attention: one registered function, and a context that says what to attend to.

Owns the name under which attention is registered, the context switch, and attention over packed documents (training).
Attention over cached rows (generation) is in `cached.py`. The function looks its context up instead of taking it as
an argument, because some model families drop unknown arguments on the way down.

Axes: T packed tokens, H query heads, K key/value heads, L tokens of one document, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "slipstream"


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What a layer's attention computes, beside the queries, keys and values."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


class Attention(Protocol):
    """What the current context does for one layer: query [T, H, D], key and value [T, K, D] -> output [T, H, D]."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor: ...


_current: list[Attention] = []


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Run the model's forward inside this with the attention it shall use."""
    _current.append(attention)
    try:
        yield
    finally:
        _current.pop()


def current_attention() -> Attention:
    assert _current, "the model was called outside `attending(...)`"
    return _current[-1]


def _registered(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    attention = current_attention()
    assert query.shape[0] == 1, "packed batches have one row"
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} makes an attention mask of its own, which the engine cannot serve")
    form = AttentionForm(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    query_THD, key_TKD, value_TKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer = module.layer_idx
    assert isinstance(layer, int)
    return attention.attend(layer, query_THD, key_TKD, value_TKD, form).unsqueeze(0), None


# cuDNN plans anew for every shape, and every document and decode step has a shape of its own here: ten times slower.
torch.backends.cuda.enable_cudnn_sdp(False)

# No mask function is registered under this name on purpose: Hugging Face then builds no mask at all.
AttentionInterface.register(ATTENTION_NAME, _registered)


@dataclass(frozen=True, slots=True)
class Documents:
    """Causal attention confined to each of several documents packed one after another."""

    lengths: Sequence[int]
    _ends: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """On each device, where documents end: the same in every layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        largest = largest_flash_head(query.device)
        if largest and fits_flash(dtype := computed_in(query), query.shape[-1], value.shape[-1], largest, form):
            return self._attend_at_once(query.to(dtype), key.to(dtype), value.to(dtype), form)
        return self.attend_one_by_one(query, key, value, form)

    def attend_one_by_one(self, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """The plain twin: a call for each document."""
        # split, not slices: the backward of a slice is a gradient of the whole packed tensor for each document.
        documents = zip(*(tensor.split(list(self.lengths)) for tensor in (query, key, value)), strict=True)
        return torch.cat([attend_causally(q, k, v, form) for q, k, v in documents])

    def _attend_at_once(self, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """All documents in one flash kernel, which exists for 16-bit numbers on CUDA."""
        ends, longest = self._ends_on(query.device), max(self.lengths)
        group = query.shape[1] // key.shape[1]
        window = -1 if form.sliding_window is None else form.sliding_window - 1
        out = varlen_attn(
            query.contiguous(),
            key.repeat_interleave(group, 1),  # older torch has no enable_gqa here
            value.repeat_interleave(group, 1),
            ends,
            ends,
            longest,
            longest,
            scale=form.scaling,
            window_size=(window, 0),
        )
        assert isinstance(out, Tensor)
        return out

    def _ends_on(self, device: torch.device) -> Tensor:
        if device not in self._ends:
            self._ends[device] = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=device)
        return self._ends[device]


def computed_in(query: Tensor) -> torch.dtype:
    """The numbers that attention computes with. Under autocast these are not the ones it is given: rotary positions
    leave queries and keys in float32."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


@cache
def largest_flash_head(device: torch.device) -> int:
    """Of heads that torch's flash kernel has forward and backward on this device; 0 if it has none."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return 0
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return 0
    return 256 if capability in ((8, 0), (9, 0)) else 192  # others lack the shared memory for a larger backward


def fits_flash(dtype: torch.dtype, head_size: int, value_size: int, largest: int, form: AttentionForm) -> bool:
    if form.softcap is not None or form.sinks_H is not None or head_size != value_size:
        return False
    return dtype in (torch.bfloat16, torch.float16) and head_size % 8 == 0 and head_size <= largest


def attend_causally(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    """One sequence, its queries being the last of its positions: query [Q, H, D], key, value [L, K, D] -> [Q, H, D]."""
    num_queries, length = query.shape[0], key.shape[0]
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    mask = None
    if (form.sliding_window is not None and length > form.sliding_window) or 1 < num_queries < length:
        at_query = torch.arange(length - num_queries, length, device=query.device).unsqueeze(1)
        at_key = torch.arange(length, device=query.device)
        mask = at_key <= at_query
        if form.sliding_window is not None:
            mask &= at_key > at_query - form.sliding_window
    if form.softcap is None and form.sinks_H is None:
        causal = mask is None and num_queries > 1
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=form.scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1)
    if mask is None:
        mask = torch.ones(num_queries, length, dtype=torch.bool, device=query.device).tril(length - num_queries)
    return _attend_by_hand(q[0], k[0], v[0], mask, form).transpose(0, 1)


def _attend_by_hand(query_HQD: Tensor, key: Tensor, value: Tensor, mask: Tensor, form: AttentionForm) -> Tensor:
    """Softmax attention with soft-capped scores or attention sinks, which torch's own attention does not have."""
    group = query_HQD.shape[0] // key.shape[0]
    key_HLD, value_HLD = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = (query_HQD @ key_HLD.transpose(1, 2)).float() * form.scaling
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if form.sinks_H is not None:
        sinks = form.sinks_H.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(value.dtype) @ value_HLD
