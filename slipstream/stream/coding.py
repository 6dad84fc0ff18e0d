"""Weights as bytes, exact to the bit: in full, or as what changed since a base that the other side holds too.

Values are integers here, the bits of floats. A change is the distance along the line of all floats from -NaN to NaN
(one step for neighbours, also across zero), modulo 2^width, so every pattern of bits comes back, NaN and -0.0 included;
zigzag makes small distances of either sign small numbers. Arrays of integers are written byte plane by byte plane, each
compressed by zstandard: planes of high bytes are nearly constant and cost nothing. A payload is the coding's letter and

    full        the bits as they lie: compressing them takes longer than sending them (docs/log.md)
    dense       planes of every value's change
    sparse      planes of the gaps between changed places, planes of the changes there
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
import zstandard
from torch import Tensor

FULL, DENSE, SPARSE = b"F", b"D", b"S"
NAMES = {FULL: "full", DENSE: "dense", SPARSE: "sparse"}
DENSE_FROM = 0.4
"""Share of changed values from which telling the change of every value is smaller than telling where they are."""

LEVEL = 1
"""Of zstandard; higher ones take several times as long for 1-2 % (docs/log.md)."""

_PLANE = struct.Struct("<BQQ")
"""Before every plane: whether it is compressed, its bytes before and after."""


class BrokenPayload(ValueError):
    """Bytes that `encode` cannot have written, or that tell of a bucket of another size."""


@dataclass(frozen=True, slots=True)
class Coded:
    coding: str
    payload: bytes
    num_changed: int
    """Values that differ from the base; all of them without one."""


def encode(bits: Tensor, base: Tensor | None) -> Coded:
    """`bits`, `base`: flat int16 or int32, of the same size and on the same device."""
    if base is None:
        return Coded("full", _as_they_lie(bits), len(bits))
    places = (bits != base).nonzero().view(-1)
    if len(places) < DENSE_FROM * len(bits) or len(places) == 0:
        gaps = torch.diff(places, prepend=places.new_full((1,), -1)) - 1
        coded = SPARSE + _pack(gaps.to(torch.int32)) + _pack(_changes(bits[places], base[places]))
    else:
        coded = DENSE + _pack(_changes(bits, base))
    if len(coded) > bits.nbytes:
        coded = _as_they_lie(bits)
    return Coded(NAMES[coded[:1]], coded, len(places))


def decode(payload: bytes | memoryview, size: int, dtype: torch.dtype, base: Tensor | None) -> Tensor:
    """The bits again; on the base's device, which is left as it is, or on the host. BrokenPayload says what is wrong,
    ValueError that a base is needed."""
    view = memoryview(payload)
    coding = bytes(view[:1])
    if coding not in NAMES:
        raise BrokenPayload(f"there is no coding {coding!r}")
    if coding == FULL:
        if len(view) - 1 != size * dtype.itemsize:
            raise BrokenPayload(f"{len(view) - 1} bytes instead of {size * dtype.itemsize}")
        return torch.frombuffer(bytearray(view[1:]), dtype=dtype) if size else torch.empty(0, dtype=dtype)
    if base is None:
        raise ValueError("this tells what changed since a base; a base is needed")
    if coding == DENSE:
        (changes,) = _unpack(view[1:], [(dtype, size)])
        return _changed(base, changes)
    gaps, changes = _unpack(view[1:], [(torch.int32, None), (dtype, None)])
    if len(gaps) != len(changes):
        raise BrokenPayload(f"{len(changes)} changes at {len(gaps)} places")
    places = (gaps.to(base.device).to(torch.int64) + 1).cumsum(0) - 1
    if len(places) and not (bool((gaps >= 0).all()) and int(places[-1]) < size):
        raise BrokenPayload(f"a change lies outside of {size} values")
    bits = base.clone()
    bits[places] = _changed(base[places], changes)
    return bits


def _as_they_lie(bits: Tensor) -> bytes:
    return b"".join((FULL, bits.cpu().numpy().data))


def _changes(bits: Tensor, base: Tensor) -> Tensor:
    return _zigzag(_on_the_line(bits) - _on_the_line(base))


def _changed(base: Tensor, changes: Tensor) -> Tensor:
    return _on_the_line(_on_the_line(base) + _unzigzag(changes.to(base.device)))


def _on_the_line(bits: Tensor) -> Tensor:
    """In the order of the floats; the other way round it is the same."""
    width = 8 * bits.element_size()
    return bits ^ ((bits >> (width - 1)) & torch.iinfo(bits.dtype).max)


def _zigzag(distance: Tensor) -> Tensor:
    return (distance << 1) ^ (distance >> (8 * distance.element_size() - 1))


def _unzigzag(number: Tensor) -> Tensor:
    half = (number >> 1) & torch.iinfo(number.dtype).max
    return half ^ -(number & 1)


def _pack(values: Tensor) -> bytes:
    compress = zstandard.ZstdCompressor(level=LEVEL).compress
    packed = []
    for plane in range(values.element_size()):
        raw = (values >> (8 * plane)).to(torch.uint8).cpu().numpy().data
        small = compress(raw)
        stored = small if len(small) < len(raw) else raw
        packed += [_PLANE.pack(stored is small, len(raw), len(stored)), stored]
    return b"".join(packed)


def _unpack(data: memoryview, wanted: list[tuple[torch.dtype, int | None]]) -> list[Tensor]:
    """The arrays of these dtypes and, where given, sizes; nothing may be left over."""
    arrays = []
    for dtype, size in wanted:
        values: Tensor | None = None
        for plane in range(dtype.itemsize):
            raw, data = _next_plane(data, size)
            part = torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else torch.empty(0, dtype=torch.uint8)
            shifted = part.to(dtype) << (8 * plane)
            if values is not None and len(values) != len(part):
                raise BrokenPayload(f"planes of {len(values)} and {len(part)} values")
            values = shifted if values is None else values.bitwise_or_(shifted)
        assert values is not None
        arrays.append(values)
    if len(data):
        raise BrokenPayload(f"{len(data)} bytes too many")
    return arrays


def _next_plane(data: memoryview, size: int | None) -> tuple[bytearray, memoryview]:
    """Its bytes, and what follows them."""
    if len(data) < _PLANE.size:
        raise BrokenPayload(f"it ends after {len(data)} bytes of a plane's head")
    compressed, num_values, num_stored = _PLANE.unpack(data[: _PLANE.size])
    stored, rest = data[_PLANE.size :][:num_stored], data[_PLANE.size + num_stored :]
    if len(stored) < num_stored or (size is not None and size != num_values):
        raise BrokenPayload(f"a plane of {num_values} values, {len(stored)} of {num_stored} bytes are there")
    try:
        raw = zstandard.ZstdDecompressor().decompress(stored, num_values) if compressed else stored
    except zstandard.ZstdError as error:
        raise BrokenPayload(str(error)) from error
    if len(raw) != num_values:
        raise BrokenPayload(f"a plane of {len(raw)} values instead of {num_values}")
    return bytearray(raw), rest
