"""In steps of which heights a CPU's matrix product gives a row the same bits: found out by trial, once for each form.

Libraries choose their kernel by the number of rows, and kernels add in orders of their own. oneDNN with AMX has others
for up to 32 rows of bfloat16 than for more, MKL others for one row, for a few, and for many, and for each number of
threads.

The trial multiplies what cancels: of weights drawn at random, large ones and small ones, each stands in two columns, of
a row's numbers each stands twice with opposite signs. The true result is zero, what comes out is what rounding left,
and most of that is other numbers as soon as the order of additions is another one. Numbers drawn freely would not tell:
in bfloat16 one result in hundreds or thousands shows that the sums were others, and a rollout meets it (docs/log.md).
A bias is of the size of what rounding leaves, so that it matters whether the sum begins or ends with it.

Axes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from slipstream.models.threads import use_threads

MOST_ROWS = 128
"""Steps of an engine on a CPU are no higher."""
SMALL = 1 << 20
"""Up to so many weights every height is tried, which takes tenths of a second; of larger ones these:"""
SOME_HEIGHTS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, MOST_ROWS)

DRAWN_ROWS = 4096
"""Of weights, which then come again."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a library may choose a kernel by, beside the height and the number of threads."""

    num_outputs: int
    num_inputs: int
    has_bias: bool
    dtype: torch.dtype
    way: Literal["linear", "packed", "transposed"] = "linear"
    """By which product: torch's, that of `pack`ed weights, or that of weights which stand inputs first."""

    @classmethod
    def of(cls, layer: nn.Linear | Conv1D) -> Form:
        rows, columns = layer.weight.shape
        if isinstance(layer, nn.Linear):
            return cls(rows, columns, layer.bias is not None, layer.weight.dtype)
        return cls(columns, rows, layer.bias is not None, layer.weight.dtype, "transposed")


class StepHeights:
    """Of which heights an engine's steps on a CPU are."""

    def __init__(self, heights: Sequence[int]) -> None:
        self._heights, self._num_threads = heights, use_threads()

    @property
    def most(self) -> int:
        return self._heights[-1]

    def pad(self, num_rows: int) -> int:
        """To the next of them."""
        if torch.get_num_threads() != self._num_threads:
            raise RuntimeError(
                f"torch has {torch.get_num_threads()} threads now and had {self._num_threads} when this engine was "
                "built, with which products have other bits: call torch.set_num_threads before, or build another engine"
            )
        return height_for(self._heights, num_rows)


def multiply_at(heights: Sequence[int], multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`multiply` rows of [..., M, K], padded to the next of the heights, in several parts if there is none.

    More rows than a step has are of documents, which nobody compares to the bit: they are multiplied as they are."""
    rows_MK = x.flatten(0, -2)
    if len(rows_MK) > MOST_ROWS:
        out_MN = multiply(rows_MK)
    else:
        parts = rows_MK.split(heights[-1])
        outs = [multiply(padded_to(height_for(heights, len(part)), part))[: len(part)] for part in parts]
        out_MN = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out_MN.unflatten(0, x.shape[:-1])


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


def heights_of(form: Form) -> tuple[int, ...]:
    """The largest of them, and all that have the same bits, wherever among the rows a row is."""
    return _tried(form, use_threads())


@cache
def _tried(form: Form, num_threads: int) -> tuple[int, ...]:
    """With the threads that torch has; what was found with another number is kept too."""
    weight_NK, row_1K = _what_cancels(form)
    x_MK = row_1K.expand(MOST_ROWS, -1).contiguous()
    multiply = _multiplier(form, weight_NK, None)
    if form.has_bias:
        multiply = _multiplier(form, weight_NK, multiply(x_MK)[0])
    found: dict[bytes, list[int]] = {}
    tried: Sequence[int] = range(1, MOST_ROWS + 1) if weight_NK.numel() <= SMALL else SOME_HEIGHTS
    for height in tried:
        out_MN = multiply(x_MK[:height])
        if torch.equal(out_MN, out_MN[:1].expand_as(out_MN)):
            found.setdefault(out_MN[0].float().numpy().tobytes(), []).append(height)
    return tuple(max(found.values(), key=max))


def common_heights(model: nn.Module, *, least: int) -> tuple[int, ...]:
    """Those which all products of a model on a CPU have that nobody pads for."""
    forms = {
        Form.of(module)
        for module in model.modules()
        if isinstance(module, nn.Linear | Conv1D) and "forward" not in vars(module)
    }
    common = set(range(least, MOST_ROWS + 1))
    for form in forms:
        common &= set(heights_of(form))
    if not common:
        raise ValueError(
            "engine.exact cannot hold here: this processor's products have the same bits at no height that all linear "
            "layers of this model share, and models/recognise.py does not know its layers; take a model that it knows, "
            "or write engine.exact: false to go on without it"
        )
    return tuple(sorted(common))


def _multiplier(form: Form, weight_NK: Tensor, bias_N: Tensor | None) -> Callable[[Tensor], Tensor]:
    if form.way == "packed":
        packed = pack(weight_NK)
        return lambda x_MK: packed_product(x_MK, packed, bias_N)
    if form.way == "linear":
        return lambda x_MK: linear(x_MK, weight_NK, bias_N)
    weight_KN = weight_NK.T.contiguous()
    return lambda x_MK: x_MK @ weight_KN if bias_N is None else torch.addmm(bias_N, x_MK, weight_KN)


def _what_cancels(form: Form) -> tuple[Tensor, Tensor]:
    """Weights, and a row of which each product is what rounding leaves."""
    draw, half = torch.Generator().manual_seed(0), form.num_inputs // 2
    order_K = torch.randperm(form.num_inputs, generator=draw)
    drawn: list[Tensor] = []
    for num_rows, sign in ((min(form.num_outputs, DRAWN_ROWS), 1.0), (1, -1.0)):
        sizes, numbers = torch.randn(2, num_rows, half, generator=draw)
        numbers = (numbers * (2 * sizes).exp()).to(form.dtype)
        drawn.append(torch.zeros(num_rows, form.num_inputs, dtype=form.dtype))
        drawn[-1][:, order_K[:half]], drawn[-1][:, order_K[half : 2 * half]] = numbers, sign * numbers
    weight_NK, row_1K = drawn
    return weight_NK.repeat(-(-form.num_outputs // len(weight_NK)), 1)[: form.num_outputs].contiguous(), row_1K
