"""Products of Triton's interpreter, as a GPU's tensor cores compute them: a row's bits do not depend on the other rows.

The interpreter multiplies with numpy, and numpy with OpenBLAS, which has processors (Haswell's kernels, which all with
AVX2 and no AVX-512 get) where a row's terms are added in an order that depends on the number of rows. A test of what a
kernel promises would then test that library.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


def product(x_MK: np.ndarray, y_KN: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The matrix product of the last two axes, each number's terms added from the first to the last."""
    x_MK, y_KN = x_MK.astype(dtype), y_KN.astype(dtype)
    total_MN = x_MK[..., :1] * y_KN[..., :1, :]
    for k in range(1, x_MK.shape[-1]):
        total_MN += x_MK[..., k : k + 1] * y_KN[..., k : k + 1, :]
    return total_MN


def multiply_in_order() -> None:
    """Make `tl.dot` of the interpreter multiply so, in this process from here on."""
    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if any(one.dtype.primitive_bitwidth == 8 for one in (a, b)):
            return original(self, a, b, d, *precision)  # numbers of 8 bits are converted there
        dtype = d.data.dtype
        return interpreter.TensorHandle(product(a.data, b.data, dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
