"""Attention of packed rows over cached keys and values: prefill, decode and verify tokens in one forward.

Owns the KV tensors and the choice of kernel. A sequence's keys lie in pages of a fixed number of tokens, named by its
slot's line of the page table. Every packed token knows its slot and its position; its key and value are written there
first, then it attends to positions 0..own of its slot. Padding tokens belong to a trash slot with a trash page.

Invariant: a token's output depends on its own query and its slot's keys alone, bit for bit, whatever else is in the
batch and however its row is cut: decode, verify and chunked prefill agree exactly. Both kernels keep it, because the
order of additions within a token depends on its position only.

Axes: T packed tokens, R rows, S slots, W pages of one slot, P pages, K key/value heads, H query heads, C tokens of a
page, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slipstream.models.attention import AttentionForm, attend_causally
from slipstream.models.cpu_attention import attend_tokens

NO_FORK, NO_PATH = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)
"""For the CPU kernel: no branches."""


@dataclass(frozen=True, slots=True)
class Branches:
    """Rows of one token each, row t having token t, of which some are alternatives to one another: their keys cannot
    lie where their positions are, so each token knows where its own and its ancestors' lie."""

    place_T: Tensor
    """Where a token's key is written, in its slot."""
    fork_T: Tensor
    """int32: the position from which on keys lie along the token's path; before it, at their positions."""
    path_TD: Tensor
    """int32: the places of the keys at positions fork, fork + 1 and so on, up to the token's own."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Which packed token belongs where. Tensors of fixed sizes on the model's device, so that a CUDA graph holds them.

    Row r owns the packed tokens start_R1[r] up to start_R1[r + 1]. Rows without tokens come last; tokens from
    start_R1[-1] on are padding, at position 0 of the trash slot, which is the table's last line.
    """

    slot_T: Tensor
    position_T: Tensor
    slot_R: Tensor
    start_R1: Tensor
    """int32, R + 1 of them, never decreasing."""
    length_R: Tensor
    """int32: keys of the row's slot after this forward, its own tokens included; 0 for a row without tokens."""
    table_SW: Tensor
    """int32 page numbers; entries past a slot's last page point to the trash page."""
    branches: Branches | None = None

    @property
    def place_T(self) -> Tensor:
        """Where each token's key is written: at its position, unless it has alternatives."""
        return self.position_T if self.branches is None else self.branches.place_T


@dataclass
class KVPages:
    """Keys and values of every layer. Layers are allocated when first written, since only they know their shape."""

    num_pages: int
    page_tokens: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    arrivals: Tensor | None = None
    """On a GPU, what the attention kernel counts with; one for all layers, since they run one after another."""
    addresses: tuple[int, dict[tuple[int, int, torch.dtype], Tensor]] | None = None
    """On a GPU: where the layers lie, for `moving.py`, and how many tensors there were when it was made."""

    @property
    def trash_page(self) -> int:
        return self.num_pages

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)

    def of_layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's [P + 1, K, C, D] keys and values."""
        if layer not in self.layers:
            capturing = key.is_cuda and torch.cuda.is_current_stream_capturing()
            assert not capturing, "a graph would allocate, and at every replay empty, the pages"
            # The CPU kernel computes in float32: bfloat16 values are exact in it, and converting once is cheaper.
            dtype = torch.float32 if key.device.type == "cpu" else key.dtype
            shapes = ((self.num_pages + 1, new.shape[1], self.page_tokens, new.shape[2]) for new in (key, value))
            keys, values = (torch.zeros(shape, dtype=dtype, device=key.device) for shape in shapes)
            self.layers[layer] = keys, values
            if key.is_cuda and self.arrivals is None:
                from slipstream.models.paged_attention import new_arrivals

                self.arrivals = new_arrivals(key.device)
        return self.layers[layer]

    def clear(self) -> None:
        """Give all of it back to the device."""
        self.layers.clear()
        self.addresses = None

    def move(self, table_SW: Tensor, slot_R: Tensor, sources_RD: Tensor, targets_RD: Tensor) -> None:
        """Copy keys and values within slots, from places to places not after them, in order."""
        if table_SW.is_cuda:
            from slipstream.models.moving import move_keys

            move_keys(self, table_SW, slot_R, sources_RD, targets_RD)
        else:
            self.move_plainly(table_SW, slot_R, sources_RD, targets_RD)

    def move_plainly(self, table_SW: Tensor, slot_R: Tensor, sources_RD: Tensor, targets_RD: Tensor) -> None:
        size, slot_R1 = self.page_tokens, slot_R.unsqueeze(1)
        source_page, target_page = (table_SW[slot_R1, places // size].long() for places in (sources_RD, targets_RD))
        for keys, values in self.layers.values():
            for tensor in (keys, values):
                tensor[target_page, :, targets_RD % size] = tensor[source_page, :, sources_RD % size]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages: a sequence that goes on alone from a page it shared."""
        if sources.is_cuda and self.layers:
            from slipstream.models.moving import copy_pages

            copy_pages(self, sources, targets)
        else:
            self.copy_plainly(sources, targets)

    def copy_plainly(self, sources: Tensor, targets: Tensor) -> None:
        for keys, values in self.layers.values():
            keys[targets] = keys[sources]
            values[targets] = values[sources]


class CachedRows:
    """The attention context of one packed forward over KV pages."""

    def __init__(self, pages: KVPages, rows: PackedRows) -> None:
        self.pages = pages
        self.rows = rows
        self._places_by_heads: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        keys, values = self.write(layer, key, value)
        return self.read(query, keys, values, form)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, with these among them."""
        keys, values = self.pages.of_layer(layer, key, value)
        index = self._places(key.shape[1])
        for pages, new in ((keys, key), (values, value)):
            pages.view(-1, new.shape[-1]).index_copy_(0, index, new.reshape(-1, new.shape[-1]).to(pages.dtype))
        return keys, values

    def read(self, query: Tensor, keys: Tensor, values: Tensor, form: AttentionForm) -> Tensor:
        """Attend over keys already written."""
        if query.device.type == "cpu":
            return self._read_on_cpu(query, keys, values, form)
        if query.device.type == "cuda":
            from slipstream.models.paged_attention import attend_paged

            return attend_paged(query, keys, values, self.rows, form, arrivals=self.pages.arrivals)
        return attend_rows_plainly(query, keys, values, self.rows, form)

    def _read_on_cpu(self, query: Tensor, keys: Tensor, values: Tensor, form: AttentionForm) -> Tensor:
        out = np.empty((*query.shape[:2], values.shape[-1]), np.float32)
        sinks, branches = form.sinks_H, self.rows.branches
        attend_tokens(
            query.detach().float().contiguous().numpy(),
            keys.numpy(),
            values.numpy(),
            self.rows.table_SW.numpy(),
            self.rows.slot_T.numpy(),
            self.rows.position_T.numpy(),
            NO_FORK if branches is None else branches.fork_T.numpy(),
            NO_PATH if branches is None else branches.path_TD.numpy(),
            np.float32(form.scaling),
            form.sliding_window or 0,
            np.float32(form.softcap or 0.0),
            np.zeros(0, np.float32) if sinks is None else sinks.detach().float().numpy(),
            out,
        )
        return torch.from_numpy(out).to(query.dtype)

    def _places(self, num_kv_heads: int) -> Tensor:
        """Where each token's keys lie, head by head, in the layer's pages seen as rows of D; made once a forward."""
        if num_kv_heads not in self._places_by_heads:
            rows, size = self.rows, self.pages.page_tokens
            page_T = rows.table_SW[rows.slot_T, rows.place_T // size].long()
            row_TK = page_T.unsqueeze(1) * num_kv_heads + torch.arange(num_kv_heads, device=page_T.device)
            place_TK = row_TK * size + (rows.place_T % size).unsqueeze(1)
            self._places_by_heads[num_kv_heads] = place_TK.flatten()
        return self._places_by_heads[num_kv_heads]


def attend_rows_plainly(query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, form: AttentionForm) -> Tensor:
    """The plain twin of both kernels: gather each row's keys and attend, row by row; padding gives zeros."""
    out = query.new_zeros(*query.shape[:2], values.shape[-1])
    starts, lengths, slots = rows.start_R1.tolist(), rows.length_R.tolist(), rows.slot_R.tolist()
    for start, end, length, slot in zip(starts, starts[1:], lengths, slots, strict=False):
        if end == start:
            continue
        places = torch.arange(length, device=query.device)
        if rows.branches is not None:
            fork = int(rows.branches.fork_T[start])
            places[fork:] = rows.branches.path_TD[start, : max(0, length - fork)].long()
        pages, size = rows.table_SW[slot].long(), keys.shape[2]
        key, value = (tensor[pages[places // size], :, places % size].to(query.dtype) for tensor in (keys, values))
        out[start:end] = attend_causally(query[start:end], key, value, form)
    return out
