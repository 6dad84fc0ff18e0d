"""The CPU's kernels between the products of a decoder layer, for float32; their plain twins are in `fused.py`.

The same functions as `triton_layers.py`. When few rows decode, dozens of small torch operations a layer cost more than
what they compute; here a row is read and written once.

Invariant: a row's bits do not depend on how many rows there are. Rows are computed one by one, in an order of additions
that is fixed when the kernel is compiled, in the same one for all who load it (`cpu_attention.py` says how).

Axes: T packed tokens, N hidden size, I inner size of the MLP, J twice that, H query heads, K key/value
heads, D head size, R rotated part of a head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from torch import Tensor

from slipstream.models.cached import PackedRows
from slipstream.models.rotary import Rotary

if TYPE_CHECKING:
    from slipstream.models.fused import Activation, Heads, Norm

_IN_ORDER = {"contract", "nsz"}
_ANY_ORDER = {"reassoc", *_IN_ORDER}
_LOG_2_HIGH = np.float32(0.693359375)
_LOG_2_LOW = np.float32(math.log(2) - 0.693359375)
"""The first has few digits, so that its multiples are exact."""
_NONE = np.zeros(0, np.float32)
SERIAL_NUMBERS = 1 << 15
"""Below this many numbers waking the other threads costs more than it saves."""


def add_norm(
    x_TN: Tensor, delta_TN: Tensor | None, after: Norm | None, scale: float, before: Norm | None
) -> tuple[Tensor, Tensor | None]:
    """The residual stream x + scale * after(delta), and `before` of that for the next product."""
    if delta_TN is None and before is None:
        return x_TN, None
    sum_TN = x_TN if delta_TN is None else torch.empty_like(x_TN)
    normed_TN = None if before is None else torch.empty_like(x_TN)
    kernel: Any = _add_norm_serial if x_TN.numel() < SERIAL_NUMBERS else _add_norm_parallel
    kernel(
        _array(x_TN),
        _array(x_TN if delta_TN is None else delta_TN),
        delta_TN is not None,
        np.float32(scale),
        *_norm_arguments(after),
        *_norm_arguments(before),
        _array(sum_TN),
        _array(sum_TN if normed_TN is None else normed_TN),
    )
    return sum_TN, normed_TN


def norm_rope_write(
    qkv: Tensor, heads: Heads, rotary: Rotary | None, rows: PackedRows, keys: Tensor, values: Tensor
) -> Tensor:
    """The query [T, H, D]; keys and values [P, K, C, D] get their new entries."""
    query = qkv.new_empty(qkv.shape[0], heads.num_query, heads.size)
    cos, sin = (torch.empty(len(qkv), 0),) * 2 if rotary is None else rotary.of_tokens()
    kernel: Any = _norm_rope_write_serial if qkv.numel() < SERIAL_NUMBERS else _norm_rope_write_parallel
    kernel(
        _array(qkv).reshape(len(qkv), -1, heads.size),
        heads.num_query,
        heads.num_key,
        *_norm_arguments(heads.query_norm),
        *_norm_arguments(heads.key_norm),
        _array(cos.float()),
        _array(sin.float()),
        rows.slot_T.numpy(),
        rows.place_T.numpy(),
        rows.table_SW.numpy(),
        _array(query),
        keys.numpy(),
        values.numpy(),
    )
    return query


def act_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """The activation of the first half of each row, times the second half."""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    kernel: Any = _act_mul_serial if out.numel() < SERIAL_NUMBERS else _act_mul_parallel
    kernel(_array(gate_up), activation == "silu", _array(out))
    return out


def _array(tensor: Tensor) -> np.ndarray:
    assert tensor.is_contiguous()
    return tensor.detach().numpy()


def _norm_arguments(norm: Norm | None) -> tuple[Any, ...]:
    """(whether there is one, weight or nothing, epsilon, whether to add one to the weight, whether to centre)"""
    if norm is None:
        return False, _NONE, np.float32(0), False, False
    weight = _NONE if norm.weight is None else _array(norm.weight)
    return True, weight, np.float32(norm.eps), norm.plus_one, norm.centred


@numba.njit(fastmath=_ANY_ORDER, cache=True)
def _statistics(x_N, centred):  # type: ignore[no-untyped-def]
    """Mean, or 0 if not centred, and mean square around it."""
    size = x_N.shape[0]
    mean = np.float32(0)
    if centred:
        for n in range(size):
            mean += x_N[n]
        mean /= np.float32(size)
    square = np.float32(0)
    for n in range(size):
        square += (x_N[n] - mean) * (x_N[n] - mean)
    return mean, square / np.float32(size)


@numba.njit(fastmath=_IN_ORDER, cache=True, inline="always")
def _weight_at(weight_N, n, plus_one):  # type: ignore[no-untyped-def]
    if weight_N.shape[0] == 0:
        return np.float32(1)
    return weight_N[n] + np.float32(1) if plus_one else weight_N[n]


def _add_norm(  # type: ignore[no-untyped-def]
    x_TN, delta_TN, adds, scale,
    norms_after, after_N, after_eps, after_plus_one, after_centred,
    norms_before, before_N, before_eps, before_plus_one, before_centred,
    sum_TN, normed_TN,
):  # fmt: skip
    size = x_TN.shape[1]
    for t in numba.prange(x_TN.shape[0]):
        if adds:
            mean, factor = np.float32(0), np.float32(1)
            if norms_after:
                mean, square = _statistics(delta_TN[t], after_centred)
                factor = np.float32(1) / np.float32(math.sqrt(square + after_eps))
            for n in range(size):
                delta = delta_TN[t, n]
                if norms_after:
                    delta = (delta - mean) * factor * _weight_at(after_N, n, after_plus_one)
                sum_TN[t, n] = x_TN[t, n] + delta * scale
        if norms_before:
            mean, square = _statistics(sum_TN[t], before_centred)
            factor = np.float32(1) / np.float32(math.sqrt(square + before_eps))
            for n in range(size):
                weight = _weight_at(before_N, n, before_plus_one)
                normed_TN[t, n] = (sum_TN[t, n] - mean) * factor * weight


def _norm_rope_write(  # type: ignore[no-untyped-def]
    qkv_TXD, num_query, num_key,
    norms_query, query_N, query_eps, query_plus_one, query_centred,
    norms_key, key_N, key_eps, key_plus_one, key_centred,
    cos_TR, sin_TR, slot_T, place_T, table_SW, query_THD, keys_PKCD, values_PKCD,
):  # fmt: skip
    size, rotated, page_tokens = qkv_TXD.shape[2], cos_TR.shape[1], keys_PKCD.shape[2]
    half = rotated // 2
    for t in numba.prange(qkv_TXD.shape[0]):
        page = table_SW[slot_T[t], place_T[t] // page_tokens]
        offset = place_T[t] % page_tokens
        row_D = np.empty(size, np.float32)
        all_query, all_key = np.float32(0), np.float32(0)  # mean squares, for one norm over all heads of a token
        if norms_query and query_N.shape[0] != size:
            for head in range(num_query):
                all_query += _statistics(qkv_TXD[t, head], False)[1] / np.float32(num_query)
            for head in range(num_key):
                all_key += _statistics(qkv_TXD[t, num_query + head], False)[1] / np.float32(num_key)
        for head in range(num_query + num_key):
            is_query = head < num_query
            number = head if is_query else head - num_query
            for d in range(size):
                row_D[d] = qkv_TXD[t, head, d]
            if norms_query:
                weights, eps = (query_N, query_eps) if is_query else (key_N, key_eps)
                plus_one = query_plus_one if is_query else key_plus_one
                at_once = weights.shape[0] != size
                first = number * size if at_once else 0
                square = all_query if is_query else all_key
                if not at_once:
                    square = _statistics(row_D, False)[1]
                factor = np.float32(1) / np.float32(math.sqrt(square + eps))
                for d in range(size):
                    row_D[d] = row_D[d] * factor * _weight_at(weights, first + d, plus_one)
            for d in range(half):
                low, high = row_D[d], row_D[d + half]
                row_D[d] = low * cos_TR[t, d] - high * sin_TR[t, d]
                row_D[d + half] = high * cos_TR[t, d + half] + low * sin_TR[t, d + half]
            for d in range(size):
                if is_query:
                    query_THD[t, number, d] = row_D[d]
                else:
                    keys_PKCD[page, number, offset, d] = row_D[d]
        for head in range(num_key):
            for d in range(size):
                values_PKCD[page, head, offset, d] = qkv_TXD[t, num_query + num_key + head, d]


@numba.njit(fastmath=_IN_ORDER, cache=True, inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    """To 1 in 10 million; infinite beyond 88, and never less than 1e-38. By arithmetic alone, so that the compiler
    computes many at once: 2^n times a polynomial of what is left, which is at most log(2) / 2."""
    too_large = x > np.float32(88.0)
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if too_large else x
    n = np.float32(np.rint(x * np.float32(math.log2(math.e))))
    x = x - n * _LOG_2_HIGH - n * _LOG_2_LOW
    sum_ = np.float32(1 / 5040)
    sum_ = sum_ * x + np.float32(1 / 720)
    sum_ = sum_ * x + np.float32(1 / 120)
    sum_ = sum_ * x + np.float32(1 / 24)
    sum_ = sum_ * x + np.float32(1 / 6)
    sum_ = sum_ * x + np.float32(1 / 2)
    sum_ = sum_ * x * x + x + np.float32(1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23))
    return np.float32(np.inf) if too_large else sum_ * power.view(np.float32)


@numba.njit(fastmath=_IN_ORDER, cache=True, inline="always")
def _act_mul_row(gate_I, up_I, silu, out_I):  # type: ignore[no-untyped-def]
    one, cubic, slope = np.float32(1), np.float32(0.044715), np.float32(-2 * math.sqrt(2 / math.pi))
    if silu:
        for i in range(out_I.shape[0]):
            out_I[i] = gate_I[i] / (one + _exp(-gate_I[i])) * up_I[i]
    else:  # x (1 + tanh u) / 2 = x / (1 + exp(-2u))
        for i in range(out_I.shape[0]):
            exponent = slope * gate_I[i] * (one + cubic * gate_I[i] * gate_I[i])
            out_I[i] = gate_I[i] / (one + _exp(exponent)) * up_I[i]


def _act_mul(gate_up_TJ, silu, out_TI):  # type: ignore[no-untyped-def]
    size = out_TI.shape[1]
    for t in numba.prange(out_TI.shape[0]):
        _act_mul_row(gate_up_TJ[t, :size], gate_up_TJ[t, size:], silu, out_TI[t])


_add_norm_serial = numba.njit(fastmath=_IN_ORDER, cache=True)(_add_norm)
_add_norm_parallel = numba.njit(fastmath=_IN_ORDER, cache=True, parallel=True)(_add_norm)
_norm_rope_write_serial = numba.njit(fastmath=_IN_ORDER, cache=True)(_norm_rope_write)
_norm_rope_write_parallel = numba.njit(fastmath=_IN_ORDER, cache=True, parallel=True)(_norm_rope_write)
# A division that may raise an error, as Python's, is computed one at a time.
_act_mul_serial = numba.njit(fastmath=_IN_ORDER, cache=True, error_model="numpy")(_act_mul)
_act_mul_parallel = numba.njit(fastmath=_IN_ORDER, cache=True, error_model="numpy", parallel=True)(_act_mul)
