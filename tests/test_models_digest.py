"""The content hash of weights: equal for equal bits wherever they lie, and different for anything else."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import small_llama
from torch import Tensor

from slipstream.models.digest import BLOCK_WORDS, combined_digest, tensor_digest
from slipstream.models.weights import fingerprint

DTYPES = [torch.bfloat16, torch.float32]


def digest_by_eye(tensor: Tensor) -> str:
    """The definition, word by word in Python's integers."""
    numbers = np.frombuffer(hashlib.shake_256(b"slipstream weights").digest(BLOCK_WORDS * 8), "<u8").tolist()
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 4), "<i4").tolist()
    digest = hashlib.blake2b(f"{tuple(tensor.shape)}{tensor.dtype}".encode(), digest_size=16)
    for start in range(0, len(words), BLOCK_WORDS):
        total = sum(word * number for word, number in zip(words[start : start + BLOCK_WORDS], numbers, strict=False))
        digest.update((total % 2**64).to_bytes(8, "little"))
    return digest.hexdigest()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 3, 1000, BLOCK_WORDS, 2 * BLOCK_WORDS + 5, 300 * BLOCK_WORDS + 1])
def test_it_is_what_it_says(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    if size < 100_000:
        assert tensor_digest(tensor) == digest_by_eye(tensor)
    shifted = torch.cat([torch.zeros(1, dtype=dtype), tensor])[1:]
    assert tensor_digest(shifted) == tensor_digest(tensor), "wherever in a storage it lies"
    assert tensor_digest(tensor.repeat_interleave(2)[::2]) == tensor_digest(tensor)


@settings(max_examples=30)
@given(data=st.data(), size=st.integers(2, 70_000), dtype=st.sampled_from(DTYPES))
def test_any_flipped_bits_and_any_two_values_that_changed_places_are_noticed(
    data: st.DataObject, size: int, dtype: torch.dtype
) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    before = tensor_digest(tensor)
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4, unique=True))
    width = 8 * tensor.element_size()
    bits = tensor.clone().view({16: torch.int16, 32: torch.int32}[width])
    bit = data.draw(st.integers(0, width - 1))
    for place in places:  # the same bit in each, as a stuck line would do it; sign bits are where sums cancel
        bits[place] ^= torch.tensor(-1 << bit if bit == width - 1 else 1 << bit, dtype=bits.dtype)
    assert tensor_digest(bits.view(dtype)) != before
    first, second = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert (tensor_digest(swapped) == before) == bool(tensor[first] == tensor[second])


def test_what_compares_equal_and_is_not_the_same_differs() -> None:
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    assert tensor_digest(torch.zeros(2, 3)) != tensor_digest(torch.zeros(3, 2)) != tensor_digest(torch.zeros(6))
    assert tensor_digest(torch.zeros(2)) != tensor_digest(torch.zeros(2, dtype=torch.int32))
    assert tensor_digest(torch.zeros(3)) != tensor_digest(torch.zeros(4))


def test_blocks_that_changed_places_are_noticed() -> None:
    tensor = torch.randn(3, BLOCK_WORDS)
    assert tensor_digest(tensor[[1, 0, 2]]) != tensor_digest(tensor)


def test_a_model_s_fingerprint_depends_on_names_and_not_on_their_order() -> None:
    model = small_llama(0)
    before = fingerprint(model)
    assert fingerprint(small_llama(0)) == before != fingerprint(small_llama(1))
    digests = {name: tensor_digest(tensor) for name, tensor in model.named_parameters()}
    assert combined_digest(dict(reversed(digests.items()))) == before
    first, second, *_ = digests
    assert combined_digest(digests | {first: digests[second], second: digests[first]}) != before
