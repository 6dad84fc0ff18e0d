"""The content hash of weights: the same on a CPU and on a GPU, at the price of reading them once.

A tensor's bits are cut into blocks of 32-bit words. A block is hashed to 64 bits where it lies, by the sum of each word
times the 64-bit number of its place (multilinear hashing: for numbers drawn at random, two different blocks agree with
a probability below 2^-32, whichever they are); BLAKE2b hashes the blocks' sums, in order, on the host. So a changed
value, two that changed places, or a block in the place of another are noticed. Meant for faults, not for an adversary,
who could look up the numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

BLOCK_WORDS = 16384
_BLOCKS_AT_ONCE = {"cpu": 256, "cuda": 512}
"""Blocks that are multiplied in one go; bounds the memory for the products, 128 KiB a block."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """Its bits as integers of the same width, flat; a view where the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])


def tensor_digest(tensor: Tensor) -> str:
    """32 hex digits over shape, dtype and bits."""
    digest = hashlib.blake2b(f"{tuple(tensor.shape)}{tensor.dtype}".encode(), digest_size=16)
    digest.update(_block_sums(_words(bits_of(tensor))).cpu().numpy().tobytes())
    return digest.hexdigest()


def combined_digest(tensors: Mapping[str, str]) -> str:
    """Of the digests of named tensors, in whatever order they come: 32 hex digits."""
    text = "\n".join(f"{name}\x1f{digest}" for name, digest in sorted(tensors.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _words(bits: Tensor) -> Tensor:
    """Flat int32, a view where possible; the last word of an odd number of smaller values ends with zeros."""
    if len(bits) == 0:
        return torch.empty(0, dtype=torch.int32, device=bits.device)
    per_word = 4 // bits.element_size()
    if per_word > 1 and len(bits) % per_word:
        bits = torch.nn.functional.pad(bits, (0, per_word - len(bits) % per_word))
    elif per_word > 1 and bits.storage_offset() % per_word:
        bits = bits.clone()
    return bits.view(torch.int32)


def _block_sums(words: Tensor) -> Tensor:
    """int64, modulo 2^64; the last block is as if zeros followed."""
    numbers = _numbers(words.device)
    whole = len(words) - len(words) % BLOCK_WORDS
    rows = words[:whole].view(-1, BLOCK_WORDS).split(_BLOCKS_AT_ONCE.get(words.device.type, 256))
    sums = [(part.to(torch.int64) * numbers).sum(1) for part in rows]
    if whole < len(words):
        rest = words[whole:].to(torch.int64)
        sums.append((rest * numbers[: len(rest)]).sum(0, keepdim=True))
    return torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64)


@cache
def _numbers(device: torch.device) -> Tensor:
    drawn = hashlib.shake_256(b"slipstream weights").digest(BLOCK_WORDS * 8)
    return torch.from_numpy(np.frombuffer(drawn, "<i8").copy()).to(device)
