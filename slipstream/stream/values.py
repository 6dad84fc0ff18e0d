"""All weights as one line of values, cut into buckets of bounded size. Values are bits as integers.

The sender cuts weights as they come, one at a time; the receiver reads and writes any stretch of its model's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slipstream.models.digest import bits_of, tensor_digest

BITS = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}
"""Number formats of engines -> integers of the same width."""


def dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in BITS:
        raise ValueError(f"weights travel as {', '.join(BITS)}, not {name}")
    return name


def cut(tensors: Iterable[Tensor], bucket_values: int) -> Iterator[Tensor]:
    """Their bits in buckets of so many values, the last one smaller; copies, each as soon as it is full."""
    filled = 0
    bucket: Tensor | None = None
    for tensor in tensors:
        bits = bits_of(tensor)
        while len(bits):
            if bucket is None:
                bucket, filled = bits.new_empty(bucket_values), 0
            taken = bits[: bucket_values - filled]
            bucket[filled : filled + len(taken)] = taken
            filled, bits = filled + len(taken), bits[len(taken) :]
            if filled == bucket_values:
                yield bucket
                bucket = None
    if bucket is not None:
        yield bucket[:filled].clone()


class OnePass:
    """One pass over the weights: each in the engines' format, tied ones once; notes names, shapes and hashes."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.digests: dict[str, str] = {}

    def __iter__(self) -> Iterator[Tensor]:
        seen: dict[tuple[int, torch.Size, tuple[int, ...], int], StorageWeakRef] = {}
        for name, weight in self._weights:
            weight = weight.detach()
            place = weight.data_ptr(), weight.shape, weight.stride(), weight.element_size()
            # One that is gone by now, such as a shard's whole, may have left its place to this one.
            if weight.numel() and place in seen and not seen[place].expired():
                continue
            seen[place] = StorageWeakRef(weight.untyped_storage())
            cast = weight.to(self._dtype)
            self._shapes[name] = tuple(weight.shape)
            self.digests[name] = tensor_digest(cast)
            yield cast

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple(self._shapes.items())

    def check_against(self, before: Sequence[tuple[str, tuple[int, ...]]], *, whole: bool = False) -> None:
        """ValueError if these are not the same, as far as they have come."""
        now = self.tensors
        if now != (tuple(before) if whole else tuple(before[: len(now)])):
            other = next((one for one, old in zip(now, before, strict=False) if one != old), "fewer weights")
            raise ValueError(f"these are not the weights of the version before: {other}")


class ModelValues:
    """A model's own weights as one line, in the order of `tensors`. ValueError if they are not these."""

    def __init__(self, own: Mapping[str, Tensor], tensors: Sequence[tuple[str, tuple[int, ...]]], dtype: str) -> None:
        told = dict(tensors)
        for name, shape in tensors:
            if name not in own or tuple(own[name].shape) != shape:
                raise ValueError(f"weight {name} {shape} does not fit this model")
            if dtype_name(own[name].dtype) != dtype:
                raise ValueError(f"weight {name} is {own[name].dtype} here and travels as {dtype}")
        missing = sorted(own.keys() - told.keys())
        if missing:
            raise ValueError(f"weights are missing: {', '.join(missing[:3])} and {max(0, len(missing) - 3)} more")
        weights = [own[name] for name in told]
        self._flat = [bits_of(weight) for weight in weights]
        # bits_of copies what is not contiguous; such weights are written back at the end.
        self._apart = [(w, flat) for w, flat in zip(weights, self._flat, strict=True) if not w.is_contiguous()]
        self._starts = [0, *accumulate(len(flat) for flat in self._flat)]
        self._dtype = weights[0].dtype if weights else torch.float32

    def read(self, start: int, stop: int) -> Tensor:
        parts = [flat[a:b] for flat, a, b in self._pieces(start, stop)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, start: int, bits: Tensor) -> None:
        done = 0
        for flat, a, b in self._pieces(start, start + len(bits)):
            flat[a:b].copy_(bits[done : done + b - a])
            done += b - a

    def settle(self) -> None:
        """After the last write."""
        for weight, flat in self._apart:
            weight.copy_(flat.view(self._dtype).view(weight.shape))

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        for flat, (first, after) in zip(self._flat, pairwise(self._starts), strict=True):
            low, high = max(start, first), min(stop, after)
            if low < high:
                yield flat, low - first, high - first
