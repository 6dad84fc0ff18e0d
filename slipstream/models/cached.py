"""Attention of packed rows over cached keys and values: prefill, decode and verify tokens in one forward.

Owns the KV tensors and the two ways to attend over them. A page holds one whole sequence, so a sequence's keys are one
contiguous view. Every packed token names its page and its position; its key and value are written there first, then it
attends to positions 0..own of its page. The tokens of padding write to a trash page behind the last real one.

Invariant (CPU): a token's output depends on its own query and page alone, bit for bit, whatever else is in the batch
and however its row is cut: decode, verify and chunked prefill agree exactly.

Axes: T packed tokens, P pages, H query heads, K key/value heads, S page size in tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream.models.attention import AttentionForm, attend_causally
from slipstream.models.cpu_attention import attend_tokens


@dataclass
class KVPages:
    """Keys and values of every layer. Layers are allocated when first written, since only they know their shape."""

    num_pages: int
    page_tokens: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def trash_page(self) -> int:
        return self.num_pages

    def of_layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's [P + 1, K, S, D] keys and values."""
        if layer not in self.layers:
            # The CPU kernel computes in float32: bfloat16 values are exact in it, and converting once is cheaper.
            dtype = torch.float32 if key.device.type == "cpu" else key.dtype
            self.layers[layer] = tuple(  # type: ignore[assignment]
                torch.zeros(
                    self.num_pages + 1,
                    tensor.shape[1],
                    self.page_tokens,
                    tensor.shape[2],
                    dtype=dtype,
                    device=key.device,
                )
                for tensor in (key, value)
            )
        return self.layers[layer]

    def copy_start(self, source: int, target: int, num_tokens: int) -> None:
        """Give the target page the first tokens of the source page: a group shares its prompt's prefill."""
        for keys, values in self.layers.values():
            keys[target, :, :num_tokens] = keys[source, :, :num_tokens]
            values[target, :, :num_tokens] = values[source, :, :num_tokens]


class CachedRows:
    """The attention context of one packed forward over KV pages."""

    def __init__(self, pages: KVPages, rows: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        """`rows`: (page, first position, number of tokens), in packed order."""
        self.pages = pages
        self.rows = rows
        self.page_T = torch.tensor([page for page, _, length in rows for _ in range(length)], device=device)
        self.position_T = torch.tensor(
            [start + offset for _, start, length in rows for offset in range(length)], device=device
        )
        self._places_by_heads: dict[int, Tensor] = {}
        self._masks: dict[int | None, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        keys, values = self.pages.of_layer(layer, key, value)
        index = self._places(key.shape[1])
        for pages, new in ((keys, key), (values, value)):
            pages.view(-1, new.shape[-1]).index_copy_(0, index, new.reshape(-1, new.shape[-1]).to(pages.dtype))
        by_device = self._by_token if query.device.type == "cpu" else self._by_row
        return by_device(query, keys, values, form)

    def _by_token(self, query: Tensor, keys: Tensor, values: Tensor, form: AttentionForm) -> Tensor:
        out = np.empty((*query.shape[:2], values.shape[-1]), np.float32)
        sinks = form.sinks_H
        attend_tokens(
            query.detach().float().contiguous().numpy(),
            keys.numpy(),
            values.numpy(),
            self.page_T.numpy(),
            self.position_T.numpy(),
            np.float32(form.scaling),
            form.sliding_window or 0,
            np.float32(form.softcap or 0.0),
            np.zeros(0, np.float32) if sinks is None else sinks.detach().float().numpy(),
            out,
        )
        return torch.from_numpy(out).to(query.dtype)

    def _by_row(self, query: Tensor, keys: Tensor, values: Tensor, form: AttentionForm) -> Tensor:
        """Rows of one token in a single call, longer rows one by one."""
        plain = form.softcap is None and form.sinks_H is None
        single = self._single
        if plain and len(single) == len(query):
            return self._decode(query, keys, values, form)
        out = torch.empty(*query.shape[:2], values.shape[-1], dtype=query.dtype, device=query.device)
        if plain and len(single) > 0:
            out[single] = self._decode(query[single], keys, values, form)
        at = 0
        for page, start, length in self.rows:
            if length > 1 or not plain:
                key = keys[page, :, : start + length].transpose(0, 1)
                value = values[page, :, : start + length].transpose(0, 1)
                out[at : at + length] = attend_causally(query[at : at + length], key, value, form)
            at += length
        return out

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, form: AttentionForm) -> Tensor:
        """One token a row, over all pages as they lie, so that no keys are gathered."""
        num_rows, num_heads, size = query.shape
        num_pages, num_kv_heads = keys.shape[:2]
        page_R, mask = self._decode_mask(form.sliding_window)
        by_page = query.new_zeros(num_pages, num_kv_heads, num_heads // num_kv_heads, size)
        by_page.index_copy_(0, page_R, query.reshape(num_rows, num_kv_heads, -1, size))
        longest = mask.shape[-1]
        out = scaled_dot_product_attention(
            by_page, keys[:, :, :longest], values[:, :, :longest], attn_mask=mask, scale=form.scaling
        )
        return out.index_select(0, page_R).view(num_rows, num_heads, values.shape[-1])

    def _places(self, num_kv_heads: int) -> Tensor:
        """Where each token's keys lie, head by head, in the layer's pages seen as rows of D; made once a forward."""
        if num_kv_heads not in self._places_by_heads:
            heads = torch.arange(num_kv_heads, device=self.page_T.device)
            row_TK = self.page_T.unsqueeze(1) * num_kv_heads + heads
            place_TK = row_TK * self.pages.page_tokens + self.position_T.unsqueeze(1)
            self._places_by_heads[num_kv_heads] = place_TK.flatten()
        return self._places_by_heads[num_kv_heads]

    @cached_property
    def _single(self) -> Tensor:
        """Packed places of the rows of one token."""
        ends = accumulate(length for _, _, length in self.rows)
        places = [end - 1 for end, (_, _, length) in zip(ends, self.rows, strict=True) if length == 1]
        return torch.tensor(places, dtype=torch.long, device=self.page_T.device)

    def _decode_mask(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Pages of the single-token rows, and which keys each page's query may see: [P + 1, 1, 1, longest]."""
        if window not in self._masks:
            page_R, position_R = self.page_T[self._single], self.position_T[self._single]
            longest = 1 + max(start for _, start, length in self.rows if length == 1)
            # The memory-efficient kernel wants an aligned mask; keys past a row's own position are masked anyway.
            longest = min(-(-longest // 64) * 64, self.pages.page_tokens)
            own_P = torch.zeros(self.pages.num_pages + 1, dtype=torch.long, device=page_R.device)
            own_P[page_R] = position_R
            at_key = torch.arange(longest, device=page_R.device)
            mask = at_key <= own_P.unsqueeze(1)
            if window is not None:
                mask &= at_key > own_P.unsqueeze(1) - window
            self._masks[window] = page_R, mask[:, None, None, :]
        return self._masks[window]
