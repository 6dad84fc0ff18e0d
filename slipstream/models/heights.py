"""In steps of which heights a CPU's matrix product gives a row the same bits: found out by trial, once for each shape.

Libraries choose their kernel by the number of rows, and kernels add in orders of their own. oneDNN with AMX has others
for up to 32 rows of bfloat16 than for more, MKL others for one row, for a few, and for many.

The trial multiplies what cancels: of weights drawn at random, large ones and small ones, each stands in two columns, of
a row's numbers each stands twice with opposite signs. The true result is zero, what comes out is what rounding left,
and most of that is other numbers as soon as the order of additions is another one. Numbers drawn freely would not tell:
in bfloat16 one result in hundreds or thousands shows that the sums were others, and a rollout meets it (docs/log.md).

Axes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

MOST_ROWS = 128
"""Steps of an engine on a CPU are no higher."""
SMALL = 1 << 20
"""Up to so many weights every height is tried, which takes tenths of a second; of larger ones these:"""
SOME_HEIGHTS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, MOST_ROWS)

DRAWN_ROWS = 4096
"""Of weights, which then come again."""


def multiply_at(heights: Sequence[int], multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`multiply` rows of [..., M, K], padded to the next of the heights, in several parts if there is none."""
    parts = x.flatten(0, -2).split(heights[-1])
    outs = [multiply(padded_to(height_for(heights, len(part)), part))[: len(part)] for part in parts]
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).unflatten(0, x.shape[:-1])


def height_for(heights: Sequence[int], num_rows: int) -> int:
    """The least of them with room for so many."""
    return heights[bisect_left(heights, num_rows)]


def padded_to(height: int, rows_MK: Tensor) -> Tensor:
    if len(rows_MK) == height:
        return rows_MK
    padded_MK = rows_MK.new_zeros(height, rows_MK.shape[1])
    padded_MK[: len(rows_MK)] = rows_MK
    return padded_MK


def pack(weight_NK: Tensor) -> Tensor:
    """In the layout that oneDNN multiplies from."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK, None)
    return packed


def packed_product(x_MK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
    out_MN: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK.contiguous(), packed, bias_N, "none", [], "")
    return out_MN


def can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def heights_of(
    num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype, *, packs: bool, num_threads: int
) -> tuple[int, ...]:
    """The largest of them, and all that have the same bits, wherever among the rows a row is."""
    weight_NK, row_1K = _what_cancels(num_outputs, num_inputs, dtype)
    bias_N = weight_NK.new_zeros(num_outputs) if has_bias else None
    packed = pack(weight_NK) if packs else None
    x_MK = row_1K.expand(MOST_ROWS, -1).contiguous()
    found: dict[bytes, list[int]] = {}
    tried: Sequence[int] = range(1, MOST_ROWS + 1) if weight_NK.numel() <= SMALL else SOME_HEIGHTS
    for height in tried:
        x = x_MK[:height]
        out_MN = linear(x, weight_NK, bias_N) if packed is None else packed_product(x, packed, bias_N)
        if torch.equal(out_MN, out_MN[:1].expand_as(out_MN)):
            found.setdefault(out_MN[0].float().numpy().tobytes(), []).append(height)
    return tuple(max(found.values(), key=max))


def common_heights(model: nn.Module, *, least: int) -> tuple[int, ...]:
    """Those which all plain linear layers of a model on a CPU have, which nobody pads for."""
    forms = {
        (*module.weight.shape, module.bias is not None, module.weight.dtype)
        for module in model.modules()
        if type(module) is nn.Linear and "forward" not in vars(module)
    }
    common = set(range(least, MOST_ROWS + 1))
    for form in forms:
        common &= set(heights_of(*form, packs=False, num_threads=torch.get_num_threads()))
    if not common:
        raise ValueError(
            "engine.exact cannot hold here: this processor's products have the same bits at no height that all linear "
            "layers of this model share, and models/recognise.py does not know its layers; take a model that it knows"
        )
    return tuple(sorted(common))


def _what_cancels(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights, and a row of which each product is what rounding leaves."""
    draw, half = torch.Generator().manual_seed(0), num_inputs // 2
    order_K = torch.randperm(num_inputs, generator=draw)
    drawn: list[Tensor] = []
    for num_rows, sign in ((min(num_outputs, DRAWN_ROWS), 1.0), (1, -1.0)):
        sizes, numbers = torch.randn(2, num_rows, half, generator=draw)
        numbers = (numbers * (2 * sizes).exp()).to(dtype)
        drawn.append(torch.zeros(num_rows, num_inputs, dtype=dtype))
        drawn[-1][:, order_K[:half]], drawn[-1][:, order_K[half : 2 * half]] = numbers, sign * numbers
    weight_NK, row_1K = drawn
    return weight_NK.repeat(-(-num_outputs // len(weight_NK)), 1)[:num_outputs].contiguous(), row_1K
