"""Weights as bytes: whatever goes in comes out, to the bit, and a plain reader of the format gets the same."""

from __future__ import annotations

import struct

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from slipstream.models.digest import bits_of
from slipstream.stream.coding import BrokenPayload, decode, encode

DTYPES = {torch.int16: ("h", 16), torch.int32: ("i", 32)}


def read_planes(data: bytes, width_bytes: int) -> tuple[list[int], bytes]:
    """Unsigned integers, and the rest of the data."""
    numbers: list[int] = []
    for plane in range(width_bytes):
        compressed, num_values, num_stored = struct.unpack("<BQQ", data[:17])
        stored, data = data[17 : 17 + num_stored], data[17 + num_stored :]
        raw = zstandard.decompress(stored, num_values) if compressed else stored
        assert len(raw) == num_values
        numbers = [a + (b << (8 * plane)) for a, b in zip(numbers or [0] * len(raw), raw, strict=True)]
    return numbers, data


def moved(value: int, number: int, width: int) -> int:
    """`value`, the bits of a float, after a change told as a zigzag number: along the line of all floats, in Python."""
    top = 1 << (width - 1)
    place = value if value < top else (2 * top - 1 - value) - top  # of unsigned bits: -NaN lowest, -0.0 is -1, 0.0 is 0
    place += number // 2 if number % 2 == 0 else -(number // 2) - 1
    place = (place + top) % (2 * top) - top
    return place if place >= 0 else 2 * top - 1 - (place + top)


def decode_plainly(payload: bytes, size: int, dtype: torch.dtype, base: Tensor | None) -> list[int]:
    """One value after another; signed bits."""
    letter, width = DTYPES[dtype]
    if payload[:1] == b"F":
        return list(struct.unpack(f"<{size}{letter}", payload[1:]))
    assert base is not None
    bits = [value % (1 << width) for value in base.tolist()]
    if payload[:1] == b"D":
        numbers, rest = read_planes(payload[1:], width // 8)
        places = list(range(size))
    else:
        gaps, rest = read_planes(payload[1:], 4)
        numbers, rest = read_planes(rest, width // 8)
        places, place = [], -1
        for gap in gaps:
            place += gap + 1
            places.append(place)
    assert rest == b""
    for place, number in zip(places, numbers, strict=True):
        bits[place] = moved(bits[place], number, width)
    return [value - (1 << width) if value >> (width - 1) else value for value in bits]


@st.composite
def versions(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Any bits, and others that differ from them a little, much, or not at all."""
    dtype = draw(st.sampled_from([torch.int16, torch.int32]))
    size = draw(st.integers(0, 400))
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    kind = {torch.int16: "int16", torch.int32: "int32"}[dtype]
    base = torch.from_numpy(draw(arrays(kind, size, elements=st.integers(low, high))))
    new = base.clone()
    if size:
        changes = draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(low, high)), max_size=40))
        for place, value in changes:
            new[place] = value
        if draw(st.booleans()):
            new = new ^ torch.from_numpy(draw(arrays(kind, size, elements=st.integers(0, 3))))
    return base, new


@settings(max_examples=150)
@given(pair=versions())
def test_what_is_decoded_is_what_was_encoded(pair: tuple[Tensor, Tensor]) -> None:
    base, new = pair
    kept = base.clone()
    for reference in (base, None):
        coded = encode(new, reference)
        assert torch.equal(decode(coded.payload, len(new), new.dtype, reference), new)
        assert decode_plainly(coded.payload, len(new), new.dtype, reference) == new.tolist()
        assert len(coded.payload) <= new.nbytes + 1 or new.nbytes < 200
    assert coded.coding == "full" and encode(new, base).num_changed == int((new != base).sum())
    assert torch.equal(base, kept), "the base is left as it is"


SPECIAL = [0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40, 3.4e38, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_others", [0, 5000], ids=["dense", "sparse"])
def test_special_values_come_back_to_the_bit(dtype: torch.dtype, num_others: int) -> None:
    values = torch.tensor(SPECIAL).to(dtype)
    new = torch.cat([values.repeat_interleave(len(SPECIAL)), torch.ones(num_others, dtype=dtype)])
    base = torch.cat([values.repeat(len(SPECIAL)), torch.ones(num_others, dtype=dtype)])
    coded = encode(bits_of(new), bits_of(base))
    assert num_others == 0 or coded.coding == "sparse"
    assert torch.equal(decode(coded.payload, len(new), bits_of(new).dtype, bits_of(base)), bits_of(new))


def test_the_smallest_coding_is_taken() -> None:
    torch.manual_seed(0)
    base = bits_of(torch.randn(100_000).bfloat16())
    step = torch.randint(0, 2, base.shape, dtype=torch.int16) * 2 - 1
    shares = {}
    for share in (0.0, 0.02, 0.3, 0.7):
        new = torch.where(torch.rand(base.shape) < share, base + step, base)
        coded = encode(new, base)
        shares[share] = coded.coding, len(coded.payload) / base.nbytes
    assert [coding for coding, _ in shares.values()] == ["sparse", "sparse", "sparse", "dense"]
    assert shares[0.0][1] < 0.001 and shares[0.02][1] < 0.015 and shares[0.3][1] < 0.1 and shares[0.7][1] < 0.15
    noise = torch.randint(-(2**15), 2**15, base.shape, dtype=torch.int16)
    assert encode(noise, base).coding == "full", "what has nothing in common with its base"


def test_a_payload_that_cannot_be_is_refused() -> None:
    base = bits_of(torch.randn(1000))
    new = base.clone()
    new[[3, 999]] += 1
    for payload in (encode(new, base).payload, encode(base + 1, base).payload, encode(new, None).payload):
        for broken in (payload[:-1], payload[:9], payload + b"x", b"?" + payload[1:], b""):
            with pytest.raises(BrokenPayload):
                decode(broken, 1000, torch.int32, base)
        with pytest.raises(BrokenPayload):
            decode(payload, 999, torch.int32, base[:999])
    with pytest.raises(ValueError, match="base"):
        decode(encode(new, base).payload, 1000, torch.int32, None)
