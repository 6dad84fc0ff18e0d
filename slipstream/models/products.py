"""The matrix products of the engine's model: stacked, packed on a CPU, with a kernel for few rows on a GPU.

Owns the storage that stacked linear layers share: their parameters become views of it, so a weight is written once.
On a CPU the weights are also kept in the layout that oneDNN multiplies from, since laying them out again in every call
costs more than a short product; that copy is made anew whenever weights are written (`weights.write_weights`).

Invariant: a row's bits do not depend on the number of rows. On a CPU rows are padded to a height that keeps it
(`heights.py`); on a GPU what is faster than the plain product is used only for shapes where that was asked and agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from slipstream.models.heights import Form, can_pack, heights_of, multiply_at, pack, packed_product

if TYPE_CHECKING:
    from slipstream.models.fused import Activation

MOST_FEW_ROWS = 16
"""More rows than this a GPU gives to cuBLAS."""


class Product:
    """Linear layers of the same input as one product."""

    def __init__(
        self, linears: Sequence[nn.Linear], activation: Activation | None = None, *, exact: bool = True
    ) -> None:
        """`activation`: of the first of two, which then multiplies the second, if `activated` will be asked. `exact`
        off: on a CPU a row's bits may depend on the number of rows, which then are not padded."""
        self._weight, self._pieces = _stack([layer.weight for layer in linears])
        self._bias: Tensor | None = None
        if linears[0].bias is not None:
            self._bias, pieces = _stack([layer.bias for layer in linears])
            self._pieces += pieces
        weight = self._weight
        form = weight.shape[0], weight.shape[1], self._bias is not None, weight.dtype
        self._has_kernel = weight.is_cuda and _kernel_agrees(*form, weight.device, activation)
        self._packs = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._heights: tuple[int, ...] = ()
        """On a CPU, those at which it multiplies."""
        if weight.device.type == "cpu" and exact:
            self._heights = heights_of(Form(*form, "packed" if self._packs else "linear"))
        self._packed: Tensor | None = None
        self.refresh()

    def __call__(self, x: Tensor) -> Tensor:
        self._check_place()
        if self._heights:
            return multiply_at(self._heights, self._multiply, x)
        if self._serves_few(x):
            return self._of_few(x)
        return self._multiply(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    @property
    def serves_any_height(self) -> bool:
        """With the same bits, so that nobody else needs to pad for it."""
        return bool(self._heights)

    def _multiply(self, x_MK: Tensor) -> Tensor:
        assert not self._packs or self._packed is not None, "released; refresh comes before the next product"
        if self._packed is None:
            return linear(x_MK, self._weight, self._bias)
        return packed_product(x_MK, self._packed, self._bias)

    def activated(self, x: Tensor, activation: Activation, act_mul: Callable[[Tensor, Activation], Tensor]) -> Tensor:
        """For gates and what they multiply: the whole of it in one kernel where there is one, else by `act_mul`."""
        return self._of_few(x, activation) if self._serves_few(x) else act_mul(self(x), activation)

    def _check_place(self) -> None:
        for stack, offset, parameter in self._pieces:
            assert parameter.data_ptr() == stack.data_ptr() + offset, "weights moved or cast after fusing; fuse last"

    def _serves_few(self, x: Tensor) -> bool:
        return self._has_kernel and x.numel() <= MOST_FEW_ROWS * x.shape[-1]

    def _of_few(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        from slipstream.models.small_product import small_product  # a machine without a GPU may lack triton

        self._check_place()
        return small_product(x.flatten(0, -2), self._weight, self._bias, activation).unflatten(0, x.shape[:-1])

    def __deepcopy__(self, memo: dict[int, object]) -> Product:
        raise AssertionError("a fused model was copied, and its products would stay with the original; fuse last")

    def refresh(self) -> None:
        """The weights were written: pack them again."""
        if self._packs:
            self._packed = pack(self._weight)

    def release(self) -> None:
        """Give the packed copy back; `refresh` must come before the next product."""
        self._packed = None


def _stack(parameters: Sequence[Tensor]) -> tuple[Tensor, list[tuple[Tensor, int, Tensor]]]:
    """One tensor with the parameters as views of it, and where in it each of them has to stay."""
    if len(parameters) == 1:
        return parameters[0].detach(), []
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, rows in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = rows
    return whole, [(whole, parameter.data_ptr() - whole.data_ptr(), parameter) for parameter in parameters]


def _kernel_agrees(*form_and_device: object) -> bool:
    from slipstream.models.small_product import agrees  # a machine without a GPU may lack triton

    return agrees(*form_and_device)  # type: ignore[arg-type]
