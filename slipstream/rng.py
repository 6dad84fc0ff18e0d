"""Keyed randomness: a number depends on (seed, purpose, ids, position), never on the order of calls.

Owns the definition of the sampling noise; `engine/sampling.py` holds its torch and numba twins, which a test compares
with this file bit by bit. The noise of token v at position p of a rollout with 64-bit seed s is

    bits = mix(mix(v + k0) ^ k1)   with   k0 = mix(mix(p ^ lo(s)) + hi(s)),  k1 = mix(k0 ^ hi(s) ^ 0x9E3779B9)
    gumbel = -log(-log((bits + 0.5) / 2^32))            (float64, then rounded to float32)

All 32 bits are used: 24 would cut the tail so that tokens below 6e-8 could never be sampled.
"""

from __future__ import annotations

import hashlib
import math
import random

MASK32 = 0xFFFFFFFF
MIX_A = 0x7FEB352D
MIX_B = 0x846CA68B
GOLDEN = 0x9E3779B9


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed for the thing that `parts` names; different parts give independent seeds."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def keyed_random(*parts: int | str) -> random.Random:
    """A Python generator for the thing that `parts` names, e.g. the shuffle of one epoch."""
    return random.Random(derive_seed(*parts))


def mix(x: int) -> int:
    """A 32-bit bijection with low bias (two multiply-xorshift rounds)."""
    x ^= x >> 16
    x = (x * MIX_A) & MASK32
    x ^= x >> 15
    x = (x * MIX_B) & MASK32
    x ^= x >> 16
    return x


def row_keys(seed: int, position: int) -> tuple[int, int]:
    """The two 32-bit keys of one row of logits: the token sampled at `position` of the rollout with `seed`."""
    low, high = seed & MASK32, seed >> 32
    k0 = mix((mix(position ^ low) + high) & MASK32)
    k1 = mix(k0 ^ high ^ GOLDEN)
    return k0, k1


def noise_bits(seed: int, position: int, token_id: int) -> int:
    k0, k1 = row_keys(seed, position)
    return mix(mix((token_id + k0) & MASK32) ^ k1)


def gumbel(seed: int, position: int, token_id: int) -> float:
    """The noise added to the logit of `token_id`; round to float32 before use."""
    uniform = (noise_bits(seed, position, token_id) + 0.5) / 2.0**32
    return -math.log(-math.log(uniform))
