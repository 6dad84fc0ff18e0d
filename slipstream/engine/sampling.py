"""Keyed Gumbel sampling: token = argmax(x + noise(seed, position, token)) with x = logits * inverse temperature.

Owns the torch and numba twins of the noise that `rng.py` defines (`triton_sampling.py` has the third), and the top-k,
top-p and min-p cuts. Tensors in, tensors out: nothing here reads a device value, so a CUDA graph can hold it.
Noise is keyed by vocabulary id, never by rank, and cuts are thresholds on values, so a row's result does not depend on
the rows beside it, to the bit. Of equal scores the lowest token id wins. The log-probability is that before the cuts;
less the logarithm of the mass that the cuts kept, it is that of the distribution the token was drawn from.
A row that holds NaN or +inf, or nothing above -inf, gives token -1 and log-probability NaN.

Axes: N rows, V vocabulary, 2 the low and high 32 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from slipstream.rng import GOLDEN, MASK32, MIX_A, MIX_B

RACE_SLACK = 1.001
"""Covers the rounding of float32 weights and noise when the race decides which noise cannot win."""
FIXED_ONE = 2.0**44
"""1 in the fixed point of `_fixed_point`."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How to sample each row: tensors with one entry a row, on the device of the logits."""

    seed_N2: Tensor
    """int64: low and high 32 bits of the seed."""
    position_N: Tensor
    """int64: absolute position of the token to be sampled."""
    inverse_temperature_N: Tensor
    """float32; 1 for greedy rows."""
    greedy_N: Tensor
    """bool: no noise."""
    top_k_N: Tensor
    """int64; 0 is off."""
    top_p_N: Tensor
    """float32; 1 is off."""
    min_p_N: Tensor
    """float32; 0 is off."""


class Samples(NamedTuple):
    tokens_N: Tensor
    """int64."""
    logprobs_N: Tensor
    """float32, before the cuts."""
    log_kept_N: Tensor
    """float32: log of the probability mass that the cuts kept, 0 without a cut."""


def sample_rows(logits_NV: Tensor, rows: SamplingRows, *, with_cuts: bool) -> Samples:
    """A token of each row. `with_cuts=False` promises that no row has a cut: no sort."""
    if with_cuts:
        threshold_N, log_kept_N = thresholds(scaled(logits_NV, rows), rows.top_k_N, rows.top_p_N, rows.min_p_N)
    else:
        threshold_N = torch.full_like(rows.inverse_temperature_N, -math.inf)
        log_kept_N = torch.zeros_like(rows.inverse_temperature_N)
    if logits_NV.device.type == "cpu":
        return Samples(*sample_by_race(logits_NV, rows, threshold_N), log_kept_N)
    if logits_NV.device.type == "cuda":
        from slipstream.engine.triton_sampling import sample_by_triton  # a machine without a GPU may lack triton

        return Samples(*sample_by_triton(logits_NV, rows, threshold_N), log_kept_N)
    return Samples(*sample_plainly(logits_NV, rows, threshold_N), log_kept_N)


def sample_plainly(logits_NV: Tensor, rows: SamplingRows, threshold_N: Tensor) -> tuple[Tensor, Tensor]:
    """The plain twin: noise for every token, then argmax."""
    x_NV = scaled(logits_NV, rows)
    noise_NV = gumbel_noise(rows.seed_N2, rows.position_N, x_NV.shape[1]).masked_fill(rows.greedy_N.unsqueeze(1), 0.0)
    scores_NV = (x_NV + noise_NV).masked_fill(x_NV < threshold_N.unsqueeze(1), -math.inf)
    top_N = x_NV.amax(-1)
    tokens_N = scores_NV.argmax(-1).masked_fill(~top_N.isfinite(), -1)
    return tokens_N, _logprobs(x_NV, top_N, _fixed_point(x_NV - top_N.unsqueeze(1)).sum(-1), tokens_N)


def sample_by_race(logits_NV: Tensor, rows: SamplingRows, threshold_N: Tensor) -> tuple[Tensor, Tensor]:
    """The CPU's way: the same tokens and log-probabilities, without computing noise that cannot win."""
    x_NV = scaled(logits_NV, rows)
    top_N, likeliest_N = x_NV.max(-1)
    tokens_N = likeliest_N.masked_fill(~top_N.isfinite(), -1)
    total_N = torch.empty_like(tokens_N)
    _race(
        x_NV.numpy(),
        (x_NV - top_N.unsqueeze(1)).exp_().numpy(),
        threshold_N.numpy(),
        torch.cat(row_keys(rows.seed_N2, rows.position_N), 1).numpy().astype(np.uint32),
        (~rows.greedy_N & (tokens_N >= 0)).numpy(),
        RACE_SLACK,
        tokens_N.numpy(),
        total_N.numpy(),
    )
    return tokens_N, _logprobs(x_NV, top_N, total_N, tokens_N)


def scaled(logits_NV: Tensor, rows: SamplingRows) -> Tensor:
    """x: float32, contiguous, one multiplication a token."""
    return logits_NV.contiguous().float() * rows.inverse_temperature_N.unsqueeze(1)


def thresholds(x_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest x that each row may sample, and the log of the mass of all that it may.

    Top-k, then top-p of what is left, then min-p; ties with the lowest stay in.
    """
    vocab_size = x_NV.shape[1]
    ranked_NV = x_NV.sort(-1, descending=True).values
    top_N1 = ranked_NV[:, :1]
    last_N = torch.where(top_k_N > 0, top_k_N.clamp(max=vocab_size), vocab_size) - 1
    in_top_k_NV = ranked_NV >= ranked_NV.gather(1, last_N.unsqueeze(1))
    every_NV = _fixed_point(ranked_NV.double() - top_N1)
    mass_NV = every_NV * in_top_k_NV
    up_to_NV = mass_NV.cumsum(-1)
    top_p_N1 = top_p_N.double().unsqueeze(1)
    in_top_p_NV = ((up_to_NV - mass_NV) < top_p_N1 * up_to_NV[:, -1:]) | (top_p_N1 >= 1)
    num_kept_N1 = (in_top_k_NV & in_top_p_NV).sum(-1, keepdim=True).clamp(min=1)
    lowest_N1 = ranked_NV.gather(1, num_kept_N1 - 1)
    threshold_N1 = torch.maximum(lowest_N1, top_N1 + min_p_N.double().log().float().unsqueeze(1))
    # Integer sums: where nothing is cut they are equal, and the logarithm is 0 exactly.
    kept_N, total_N = (every_NV * (ranked_NV >= threshold_N1)).sum(-1), every_NV.sum(-1)
    log_kept_N = (kept_N.double() / total_N).log().float()
    return threshold_N1.squeeze(1), log_kept_N.masked_fill(~top_N1.squeeze(1).isfinite(), 0.0)


def gumbel_noise(seed_N2: Tensor, position_N: Tensor, vocab_size: int) -> Tensor:
    """Float32 noise [N, V] as `rng.gumbel` has it."""
    return _noise_at(seed_N2, position_N, torch.arange(vocab_size, device=seed_N2.device))


def noise_of(rows: SamplingRows, token_NK: Tensor) -> Tensor:
    """What is added to the scores of these tokens: [N, K]; 0 in greedy rows."""
    return _noise_at(rows.seed_N2, rows.position_N, token_NK).masked_fill(rows.greedy_N.unsqueeze(1), 0.0)


def _noise_at(seed_N2: Tensor, position_N: Tensor, tokens: Tensor) -> Tensor:
    k0_N1, k1_N1 = row_keys(seed_N2, position_N)
    bits = _mix(_mix((tokens + k0_N1) & MASK32) ^ k1_N1)
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


def row_keys(seed_N2: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
    """The keys of `rng.row_keys`, int64 [N, 1] each."""
    low_N1, high_N1 = seed_N2.split(1, dim=1)
    k0_N1 = _mix((_mix(position_N.unsqueeze(1) ^ low_N1) + high_N1) & MASK32)
    return k0_N1, _mix(k0_N1 ^ high_N1 ^ GOLDEN)


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * MIX_A) & MASK32
    x = x ^ (x >> 15)
    x = (x * MIX_B) & MASK32
    return x ^ (x >> 16)


def _fixed_point(below_top_NV: Tensor) -> Tensor:
    """exp(x - top) as integers: their sums are exact in any order, so a row's do not depend on how N x V is shared
    out to threads, as those of floats do; nor do they lose digits, as torch's log_softmax does (5e-5 at V = 152k)."""
    assert below_top_NV.shape[1] < 2**19, "sums would leave 63 bits"
    return (below_top_NV.exp() * FIXED_ONE).long()


def _logprobs(x_NV: Tensor, top_N: Tensor, total_N: Tensor, tokens_N: Tensor) -> Tensor:
    """x[token] - logsumexp(x), with `total_N` the sum of exp(x - top) in fixed point; NaN where there is no token."""
    picked_N = x_NV.gather(1, tokens_N.clamp(min=0).unsqueeze(1)).squeeze(1)
    logprobs_N = (picked_N.double() - top_N) - (total_N.double() / FIXED_ONE).log()
    return logprobs_N.float().masked_fill(tokens_N < 0, math.nan)


@numba.njit(cache=True, inline="always")
def _mix32(x):  # type: ignore[no-untyped-def]
    x ^= x >> np.uint32(16)
    x = np.uint32(x * np.uint32(MIX_A))
    x ^= x >> np.uint32(15)
    x = np.uint32(x * np.uint32(MIX_B))
    return x ^ (x >> np.uint32(16))


@numba.njit(cache=True, inline="always")
def _bits(token, k0, k1):  # type: ignore[no-untyped-def]
    return _mix32(_mix32(np.uint32(np.uint32(token) + k0)) ^ k1)


@numba.njit(cache=True, inline="always")
def _noise(bits):  # type: ignore[no-untyped-def]
    uniform = (np.float64(bits) + 0.5) * 2.0**-32
    return np.float32(-math.log(-math.log(uniform)))


@numba.njit(cache=True)
def gumbel_of(low, high, position, token):  # type: ignore[no-untyped-def]
    """`rng.gumbel` as float32, of one token, for kernels that draw with the noise of a row."""
    high = np.uint32(high)
    k0 = _mix32(np.uint32(_mix32(np.uint32(position) ^ np.uint32(low)) + high))
    return _noise(_bits(token, k0, _mix32(k0 ^ high ^ np.uint32(GOLDEN))))


@numba.njit(cache=True, inline="always")
def _reach(top, best, slack):  # type: ignore[no-untyped-def]
    """Times a token's weight exp(x - top): how far below 2^32 its bits may lie for its score to reach `best`.

    Rounding x + noise to float32 can lift a score by half a unit in the last place, 2^-24 of it; four times that is
    allowed for. The cap keeps 0 * reach from being NaN.
    """
    return np.float32(min(slack * math.exp(np.float64(top) - best + abs(best) * 2.0**-22) * 2.0**32, 1e37))


@numba.njit(parallel=True, cache=True)
def _race(x_NV, weights_NV, threshold_N, keys_N2, races_N, slack, tokens_N, total_N):  # type: ignore[no-untyped-def]
    """Sums the weights; replaces the likeliest token by the winner in each row that races.

    Token v beats the best so far only if its uniform u lies within exp(x_v - best) of 1: noise(u) > d means
    -log(u) < exp(-d), and 1 - u <= -log(u); so 1 - u < exp(x_v - best) = weight_v * exp(top - best).
    One multiplication and one comparison spare two logarithms for almost every token.
    """
    for row in numba.prange(x_NV.shape[0]):
        total = np.int64(0)
        for token in range(x_NV.shape[1]):
            total += np.int64(weights_NV[row, token] * np.float32(FIXED_ONE))
        total_N[row] = total
        if races_N[row]:
            k0, k1 = keys_N2[row, 0], keys_N2[row, 1]
            winner = tokens_N[row]
            top = x_NV[row, winner]
            best = np.float32(top + _noise(_bits(winner, k0, k1)))
            reach = _reach(top, best, slack)
            for token in range(x_NV.shape[1]):
                bits = _bits(token, k0, k1)
                if np.float32(np.uint32(0xFFFFFFFF) - bits) < weights_NV[row, token] * reach + np.float32(1.0):
                    score = np.float32(x_NV[row, token] + _noise(bits))
                    wins = score > best or (score == best and token < winner)
                    if wins and x_NV[row, token] >= threshold_N[row]:
                        best, winner = score, token
                        reach = _reach(top, best, slack)
            tokens_N[row] = winner
