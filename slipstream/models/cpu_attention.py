"""The CPU kernel of cached attention: every packed token over its slot's pages, in float32, one token at a time.

Its plain twin is `cached.attend_rows_plainly`; `tests/test_models_packed.py` compares them. The order of additions
within a token depends on that token's position alone, which is what makes decode, verify and prefill agree to the bit.

Nor does it depend on who compiled the kernel. numba optimises the body of a parallel loop twice, the second time what
the first left; the process that compiled it runs the one, those that load it from the cache the other. Where a sum that
may be added up in any order stood in such a body, they added it up in two. As a function of its own it comes there with
its order settled.

Axes: T packed tokens, S slots, W pages of one slot, P pages, H query heads, K key/value heads, C tokens of a page,
D head size.
"""

from __future__ import annotations

import math

import numba
import numpy as np

_IN_ORDER = {"contract", "nsz"}
_ANY_ORDER = {"reassoc", *_IN_ORDER}


@numba.njit(fastmath=_ANY_ORDER, cache=True)
def _dot(x_D, y_D):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for d in range(x_D.shape[0]):
        total += x_D[d] * y_D[d]
    return total


@numba.njit(parallel=True, fastmath=_IN_ORDER, cache=True)
def attend_tokens(  # type: ignore[no-untyped-def]
    query_THD, keys_PKCD, values_PKCD, table_SW, slot_T, position_T, fork_T, path_TD, scaling, window, softcap, sinks_H,
    out_THD,
):  # fmt: skip
    num_kv_heads, page_tokens = keys_PKCD.shape[1:3]
    group, value_size = query_THD.shape[1] // num_kv_heads, values_PKCD.shape[3]
    for work in numba.prange(query_THD.shape[0] * num_kv_heads):
        token, kv_head = work // num_kv_heads, work % num_kv_heads
        pages, end = table_SW[slot_T[token]], position_T[token] + 1
        start = max(0, end - window) if window > 0 else 0
        fork = fork_T[token] if fork_T.shape[0] > 0 else end
        first = kv_head * group
        weights = np.empty((group, end - start), np.float32)
        largest = np.full(group, -np.inf, np.float32)
        for at in range(start, end):
            place = at if at < fork else path_TD[token, at - fork]
            key_D = keys_PKCD[pages[place // page_tokens], kv_head, place % page_tokens]
            for head in range(group):
                score = _dot(query_THD[token, first + head], key_D) * scaling
                if softcap > 0:
                    score = np.float32(math.tanh(score / softcap)) * softcap
                weights[head, at - start] = score
                largest[head] = max(largest[head], score)
        for head in range(group):
            total = np.float32(0)
            if sinks_H.shape[0] > 0:
                largest[head] = max(largest[head], sinks_H[first + head])
                total += np.float32(math.exp(sinks_H[first + head] - largest[head]))
            for at in range(end - start):
                weights[head, at] = np.float32(math.exp(weights[head, at] - largest[head]))
                total += weights[head, at]
            for at in range(end - start):
                weights[head, at] /= total
        mix = np.zeros((group, value_size), np.float32)
        for at in range(start, end):
            place = at if at < fork else path_TD[token, at - fork]
            value_D = values_PKCD[pages[place // page_tokens], kv_head, place % page_tokens]
            for head in range(group):
                share = weights[head, at - start]
                for d in range(value_size):
                    mix[head, d] += share * value_D[d]
        for head in range(group):
            for d in range(value_size):
                out_THD[token, first + head, d] = mix[head, d]
