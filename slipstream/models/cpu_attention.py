"""The CPU kernel of cached attention: every packed token over its own page, in float32, one token at a time.

Its plain twin is `attention.attend_causally`; `tests/test_models_packed.py` compares them. The order of additions
within a token depends on that token's position alone, which is what makes decode, verify and prefill agree to the bit.

Axes: T packed tokens, P pages, H query heads, K key/value heads, S page size in tokens, D head size.
"""

from __future__ import annotations

import math

import numba
import numpy as np

# Contracting and reordering inside one dot product is fixed at compile time, so it does not depend on the batch.
_FAST = {"reassoc", "contract", "nsz"}


@numba.njit(parallel=True, fastmath=_FAST, cache=True)
def attend_tokens(query_THD, keys_PKSD, values_PKSD, page_T, position_T, scaling, window, softcap, sinks_H, out_THD):  # type: ignore[no-untyped-def]
    num_kv_heads, size, value_size = keys_PKSD.shape[1], query_THD.shape[2], values_PKSD.shape[3]
    group = query_THD.shape[1] // num_kv_heads
    for work in numba.prange(query_THD.shape[0] * num_kv_heads):
        token, kv_head = work // num_kv_heads, work % num_kv_heads
        page, end = page_T[token], position_T[token] + 1
        start = max(0, end - window) if window > 0 else 0
        weights = np.empty(end - start, np.float32)
        for head in range(kv_head * group, (kv_head + 1) * group):
            largest = np.float32(-np.inf)
            for at in range(start, end):
                score = np.float32(0)
                for d in range(size):
                    score += query_THD[token, head, d] * keys_PKSD[page, kv_head, at, d]
                score *= scaling
                if softcap > 0:
                    score = np.float32(math.tanh(score / softcap)) * softcap
                weights[at - start] = score
                largest = max(largest, score)
            total = np.float32(0)
            if sinks_H.shape[0] > 0:
                largest = max(largest, sinks_H[head])
                total += np.float32(math.exp(sinks_H[head] - largest))
            for at in range(end - start):
                weights[at] = np.float32(math.exp(weights[at] - largest))
                total += weights[at]
            for d in range(value_size):
                out_THD[token, head, d] = 0
            for at in range(start, end):
                share = weights[at - start] / total
                for d in range(value_size):
                    out_THD[token, head, d] += share * values_PKSD[page, kv_head, at, d]
