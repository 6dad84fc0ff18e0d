# mypy: disable-error-code="no-untyped-def"
"""Keys and values copied on a GPU: one kernel for all layers of a shape, instead of four operations a layer.

The plain twins are `KVPages.move_plainly` and `copy_plainly`. Where sequences are short and share their prompts, a page
is copied in nearly every step, and 120 launches are as long as the step.

Axes: R rows, D places of a row, K key/value heads, C tokens of a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.cached import KVPages

COPIED = 4096
"""Numbers that a program copies."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def move_keys(pages: KVPages, table_SW: Tensor, slot_R: Tensor, sources_RD: Tensor, targets_RD: Tensor) -> None:
    for (num_heads, size, dtype), addresses in _addresses(pages).items():
        _move[(len(slot_R), num_heads, len(addresses))](
            addresses, table_SW, table_SW.stride(0), slot_R, sources_RD.contiguous(), targets_RD.contiguous(),
            num_heads, NUM=sources_RD.shape[1], PAGE_TOKENS=pages.page_tokens, SIZE=size,
            BLOCK=triton.next_power_of_2(size), TYPE=_TYPES[dtype], num_warps=1,
        )  # fmt: skip


def copy_pages(pages: KVPages, sources: Tensor, targets: Tensor) -> None:
    """Whole ones; no target is also a source."""
    for (num_heads, size, dtype), addresses in _addresses(pages).items():
        num = num_heads * pages.page_tokens * size
        _copy[(len(sources), len(addresses), triton.cdiv(num, COPIED))](
            addresses, sources.contiguous(), targets.contiguous(), num, BLOCK=COPIED, TYPE=_TYPES[dtype]
        )


def _addresses(pages: KVPages) -> dict[tuple[int, int, torch.dtype], Tensor]:
    """Where the tensors of all layers begin, by shape; made when a first step runs eagerly, before any is captured."""
    tensors = [tensor for pair in pages.layers.values() for tensor in pair]
    known = pages.addresses
    if known is None or known[0] != len(tensors):
        by_shape: dict[tuple[int, int, torch.dtype], list[int]] = {}
        for tensor in tensors:
            by_shape.setdefault((tensor.shape[1], tensor.shape[3], tensor.dtype), []).append(tensor.data_ptr())
        device = tensors[0].device
        known = len(tensors), {shape: torch.tensor(found, device=device) for shape, found in by_shape.items()}
        pages.addresses = known
    return known[1]


@triton.jit
def _move(
    addresses, table, table_stride, slots, sources, targets, num_heads,
    NUM: tl.constexpr, PAGE_TOKENS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One head of one layer's keys or values, for one row: places in order, as a target may be a later source's."""
    row, head, tensor = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = tl.load(addresses + tensor).to(tl.pointer_type(TYPE))
    line = table + tl.load(slots + row) * table_stride
    dim = tl.arange(0, BLOCK)
    for index in tl.static_range(NUM):
        source = tl.load(sources + row * NUM + index)
        target = tl.load(targets + row * NUM + index)
        if source != target:
            source_page = tl.load(line + source // PAGE_TOKENS).to(tl.int64)
            target_page = tl.load(line + target // PAGE_TOKENS).to(tl.int64)
            source_at = ((source_page * num_heads + head) * PAGE_TOKENS + source % PAGE_TOKENS) * SIZE + dim
            target_at = ((target_page * num_heads + head) * PAGE_TOKENS + target % PAGE_TOKENS) * SIZE + dim
            tl.store(base + target_at, tl.load(base + source_at, dim < SIZE, other=0.0), dim < SIZE)


@triton.jit
def _copy(addresses, sources, targets, num, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    """A part of one page of one layer's keys or values."""
    page, tensor, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = tl.load(addresses + tensor).to(tl.pointer_type(TYPE))
    index = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(base + tl.load(sources + page) * num + index, index < num, other=0.0)
    tl.store(base + tl.load(targets + page) * num + index, values, index < num)
