"""Elementwise operations on a CPU whose results do not depend on where in a tensor a number lies.

torch splits a tensor among threads and computes each share with vector instructions, and what is left at its end, less
than two vectors, with scalar ones. In sigmoid, silu, softplus, mish, elu, pow, in rsqrt of bfloat16 and others the two
round differently (`tests/test_models_elementwise.py` finds out which do here). So the last numbers of a step's last
row, and those before each cut, would depend on the number of rows.

Within `AlikeEverywhere` they run on one thread, padded to whole vectors: every number takes the vector instructions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

VECTOR_NUMBERS = 64
"""Two vectors of the most numbers that a processor has: AVX-512 holds 32 of 16 bits."""

ROUNDED_ONCE = {
    "_to_copy", "abs", "bitwise_and", "bitwise_not", "bitwise_or", "clamp", "clamp_max", "clamp_min", "clone",
    "copy", "eq", "ge", "gt", "isnan", "le", "logical_and", "logical_not", "logical_or", "lt", "masked_fill",
    "maximum", "minimum", "mul", "ne", "neg", "relu", "sqrt", "where",
}  # fmt: skip
"""Operations with one rounding, which IEEE 754 prescribes to all instructions alike. They are left as they are."""

aten = torch.ops.aten
_BY_OTHERS = get_decompositions([aten.glu, aten.log_sigmoid_forward])  # type: ignore[no-untyped-call]
"""Operations that mix numbers of several places, as a sequence of elementwise ones."""


Kind = Literal["as it is", "by others", "unless scaled", "if squared", "in float32", "on whole vectors"]


class AlikeEverywhere(TorchDispatchMode):
    """The context in which a model's forward gives a row the same bits wherever in a step it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind_of(func)
        match kind:
            case "as it is":
                is_safe = True
            case "by others":
                with self:
                    return _BY_OTHERS[func](*args, **kwargs)
            case "unless scaled":
                is_safe = not kwargs
            case "if squared":
                is_safe = args[1] == 2
            case "in float32":
                is_safe = args[0].dtype == torch.float32
            case "on whole vectors":
                is_safe = False
        return func(*args, **kwargs) if is_safe else _on_whole_vectors(func, args, kwargs)


@cache
def _kind_of(func: Any) -> Kind:
    if func in _BY_OTHERS:
        return "by others"
    gives_numbers = all(str(one.type) == "Tensor" for one in func._schema.returns)  # not one answer about all
    if torch.Tag.pointwise not in func.tags or not gives_numbers:
        return "as it is"
    name = func.overloadpacket.__name__
    if not name.startswith("_"):
        name = name.rstrip("_")
    if name in ("add", "sub", "div"):  # which may multiply or cut off too
        return "unless scaled"
    if name == "pow" and func._overloadname == "Tensor_Scalar":
        return "if squared"
    if name == "rsqrt":  # a root and a division, of 16 bits with a rounding in between or without
        return "in float32"
    return "as it is" if name in ROUNDED_ONCE else "on whole vectors"


def _on_whole_vectors(func: Any, args: Any, kwargs: Any) -> Any:
    """Tensors of no dimensions stay so: torch takes them for numbers, which do not decide the result's format."""
    out = kwargs.get("out")
    if out is not None:
        kwargs = kwargs | {"out": out.new_empty(0)}
    given = [value for value in args if isinstance(value, Tensor) and value.ndim]
    if not any(tensor.is_floating_point() for tensor in given):
        return func(*args, **kwargs)
    shape = given[0].shape
    if any(tensor.shape != shape for tensor in given):
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))
    count = shape.numel()
    padding = -count % VECTOR_NUMBERS

    def padded(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        row = value.expand(shape).reshape(-1)
        return pad(row, (0, padding), value=1.0) if padding else row

    with _one_thread():
        computed = func(*[padded(value) for value in args], **kwargs)
    results = tree_map(lambda row: row[:count].view(shape), computed)
    if not func._schema.is_mutable:
        return results
    return args[0].copy_(results) if out is None else out.resize_(shape).copy_(results)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Of torch alone: no kernel of ours runs within."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
