"""Keyed Gumbel sampling: token = argmax(logprob + noise(seed, position, token)), logprob = log_softmax(logits / T).

Owns the torch and numba twins of the noise that `rng.py` defines, and the top-k / top-p / min-p cuts. Noise is keyed by
vocabulary id, never by rank, and cuts are thresholds on values, so one row's result does not depend on other rows.
Of equal scores the lowest token id wins. The log-probability returned is that before the cuts.

Axes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numba
import numpy as np
import torch
from torch import Tensor

from slipstream.rng import MASK32, MIX_A, MIX_B, row_keys
from slipstream.types import SamplingParams


def sample(
    logits_NV: Tensor, seeds: Sequence[int], positions: Sequence[int], params: Sequence[SamplingParams]
) -> tuple[list[int], list[float]]:
    """Sample one token a row from float32 logits."""
    assert logits_NV.dtype == torch.float32
    temperature_N = torch.tensor([p.temperature or 1.0 for p in params], device=logits_NV.device)
    scores_NV = logits_NV / temperature_N.unsqueeze(1)
    # log_softmax reduces row by row; logsumexp may cut a row into threads' shares, which would change its bits.
    logprobs_NV = scores_NV.log_softmax(-1)
    cut_NV = cut_tail(logprobs_NV, params)
    pick = pick_on_cpu if logits_NV.device.type == "cpu" else pick_plainly
    tokens_N = pick(cut_NV, seeds, positions)
    greedy = [i for i, p in enumerate(params) if p.temperature == 0]
    if greedy:
        tokens_N[greedy] = logits_NV[greedy].argmax(-1)
    return tokens_N.tolist(), logprobs_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1).tolist()


def pick_plainly(logprobs_NV: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The plain twin: noise for every token, then argmax. Also the GPU's way."""
    return (logprobs_NV + gumbel_noise(seeds, positions, logprobs_NV.shape[1], logprobs_NV.device)).argmax(-1)


def pick_on_cpu(logprobs_NV: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The same tokens, without computing noise that cannot win."""
    keys_N2 = np.array([row_keys(s, p) for s, p in zip(seeds, positions, strict=True)], np.uint32)
    tokens_N = np.empty(len(seeds), np.int64)
    _race(
        logprobs_NV.contiguous().numpy(), logprobs_NV.exp().numpy(), logprobs_NV.argmax(-1).numpy(), keys_N2, tokens_N
    )
    return torch.from_numpy(tokens_N)


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Float32 noise [N, V] as `rng.gumbel` has it."""
    keys = torch.tensor([row_keys(s, p) for s, p in zip(seeds, positions, strict=True)], dtype=torch.long)
    k0, k1 = keys.to(device).unsqueeze(2).unbind(1)
    token = torch.arange(vocab_size, device=device)
    bits = _mix(_mix((token + k0) & MASK32) ^ k1)
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


def cut_tail(logprobs_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities with everything below each row's thresholds at minus infinity."""
    rows = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1 or p.min_p > 0]
    if not rows:
        return logprobs_NV
    cut_NV = logprobs_NV.clone()
    for i in rows:
        cut_NV[i] = _cut_row(logprobs_NV[i], params[i])
    return cut_NV


def _cut_row(logprobs_V: Tensor, params: SamplingParams) -> Tensor:
    """top-k, then top-p of what is left, then min-p; ties with the threshold stay in."""
    kept = logprobs_V
    if params.top_k:
        threshold = kept.topk(min(params.top_k, kept.numel())).values[-1]
        kept = kept.masked_fill(kept < threshold, float("-inf"))
    if params.top_p < 1:
        probs = kept.softmax(-1).sort(descending=True)
        before = probs.values.cumsum(-1) - probs.values
        threshold = probs.values[before < params.top_p][-1]
        kept = kept.masked_fill(kept.softmax(-1) < threshold, float("-inf"))
    if params.min_p > 0:
        kept = kept.masked_fill(kept < kept.max() + math.log(params.min_p), float("-inf"))
    return kept


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * MIX_A) & MASK32
    x = x ^ (x >> 15)
    x = (x * MIX_B) & MASK32
    return x ^ (x >> 16)


@numba.njit(cache=True, inline="always")
def _bits(token, k0, k1):  # type: ignore[no-untyped-def]
    x = np.uint32(np.uint32(token) + k0)
    for turn in range(2):
        x ^= x >> np.uint32(16)
        x = np.uint32(x * np.uint32(MIX_A))
        x ^= x >> np.uint32(15)
        x = np.uint32(x * np.uint32(MIX_B))
        x ^= x >> np.uint32(16)
        if turn == 0:
            x ^= k1
    return x


@numba.njit(cache=True, inline="always")
def _score(score, bits):  # type: ignore[no-untyped-def]
    uniform = (np.float64(bits) + 0.5) * 2.0**-32
    return np.float32(score + np.float32(-math.log(-math.log(uniform))))


@numba.njit(parallel=True, cache=True)
def _race(logprobs_NV, probs_NV, likeliest_N, keys_N2, tokens_N):  # type: ignore[no-untyped-def]
    """Token v beats the best so far only if its uniform u lies within exp(logprob_v - best) of 1.

    g(u) > d  means  -log(u) < exp(-d),  and  1 - u <= -log(u);  so  1 - u < exp(logprob_v - best) = prob_v / exp(best).
    One multiplication and one comparison spare two logarithms for almost every token.
    """
    for row in numba.prange(logprobs_NV.shape[0]):
        k0, k1 = keys_N2[row, 0], keys_N2[row, 1]
        winner = likeliest_N[row]
        best = _score(logprobs_NV[row, winner], _bits(winner, k0, k1))
        # A per mille of slack covers the rounding of the probabilities and of the float32 sum.
        factor = np.float32(1.001 * math.exp(-best) * 2.0**32)
        for token in range(logprobs_NV.shape[1]):
            bits = _bits(token, k0, k1)
            if np.float32(np.uint32(0xFFFFFFFF) - bits) < probs_NV[row, token] * factor + np.float32(1.0):
                score = _score(logprobs_NV[row, token], bits)
                if score > best or (score == best and token < winner):
                    best, winner = score, token
                    factor = np.float32(1.001 * math.exp(-best) * 2.0**32)
        tokens_N[row] = winner
