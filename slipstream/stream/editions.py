"""Editions of weights: what a version looks like on its way, how an engine gets from one to another, what may go wrong.

A version (number and content hash) comes in editions: in full, or as what changed since a base. An edition is a row of
buckets, each so many values of all weights laid end to end, and a manifest that tells their checksums and the content
hash that the receiver must find once it has written them. Pure.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from math import prod
from typing import Protocol

import xxhash

from slipstream.types import WeightVersion


def checksum(payload: bytes | memoryview) -> str:
    """Of a bucket's bytes on their way; 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(payload)


@dataclass(frozen=True, slots=True)
class Bucket:
    coding: str
    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Edition:
    version: WeightVersion
    base: WeightVersion | None
    """What must be there before; None if nothing."""
    dtype: str
    bucket_values: int
    """Values in a bucket; the last may have fewer."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes, in the order in which the values lie."""
    buckets: tuple[Bucket, ...]

    @property
    def name(self) -> str:
        return edition_name(self.version.number, None if self.base is None else self.base.number)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def num_values(self) -> int:
        return sum(prod(shape) for _, shape in self.tensors)

    def span(self, index: int) -> tuple[int, int]:
        """First value of a bucket, and the one after its last."""
        return index * self.bucket_values, min((index + 1) * self.bucket_values, self.num_values)

    def to_json(self) -> str:
        """With a checksum of its own."""
        body = json.dumps(asdict(self))
        return json.dumps({"checksum": checksum(body.encode()), "edition": body})

    @staticmethod
    def from_json(text: str | bytes) -> Edition:
        """ValueError if it is not what `to_json` wrote."""
        try:
            told = json.loads(text)
            if checksum(told["edition"].encode()) != told["checksum"]:
                raise ValueError("its checksum differs")
            body = json.loads(told["edition"])
            return Edition(
                WeightVersion(**body["version"]),
                None if body["base"] is None else WeightVersion(**body["base"]),
                body["dtype"],
                body["bucket_values"],
                tuple((name, tuple(shape)) for name, shape in body["tensors"]),
                tuple(Bucket(**bucket) for bucket in body["buckets"]),
            )
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise ValueError(f"not a manifest ({error!r})") from error


def edition_name(number: int, base: int | None) -> str:
    return f"{number:06d}.full" if base is None else f"{number:06d}.on.{base:06d}"


class Sending(Protocol):
    """One edition on its way. Buckets come in order, each as soon as it is encoded."""

    def put(self, bucket: Bucket, payload: bytes | memoryview) -> None: ...

    def end(self, edition: Edition) -> None:
        """All buckets were put; from here on it is a version."""

    def give_up(self) -> None:
        """Nobody will miss it."""


class Channel(Protocol):
    """Where editions can be sent to: a shelf, or others through a tree."""

    def begin(self, number: int, base: int | None) -> Sending: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that a worker did not take."""

    worker: str
    version: int
    edition: str
    bucket: int | None
    """None: every bucket was in order, and the weights that came of them were not."""
    expected: str
    found: str

    def __str__(self) -> str:
        where = "the weights" if self.bucket is None else f"bucket {self.bucket}"
        return (
            f"{self.worker} refused version {self.version} ({self.edition}): {where} should have hash {self.expected}"
            f" and has {self.found}"
        )


class RefusedWeights(RuntimeError):
    """A version could not be taken, however often it was tried. If `torn`, the model holds parts of two versions and
    must not be used until a version has been written in full; else it holds what it held."""

    def __init__(self, worker: str, number: int, refusals: Sequence[Refusal], *, torn: bool) -> None:
        state = "its weights are torn" if torn else "it keeps the weights that it has"
        reasons = "; ".join(str(refusal) for refusal in refusals)
        super().__init__(f"{worker} could not take version {number}, {state}: {reasons}")
        self.worker, self.number, self.refusals, self.torn = worker, number, tuple(refusals), torn


class VersionMissing(LookupError):
    """No chain of editions leads to the version from what the worker holds."""


def shortest_chain(editions: Iterable[Edition], held: WeightVersion | None, number: int) -> list[Edition] | None:
    """The editions to apply one after another, of the fewest bytes; None if there is no way. Empty if it is held."""
    by_base: dict[WeightVersion | None, list[Edition]] = {}
    for edition in editions:
        by_base.setdefault(edition.base, []).append(edition)
    order = count()
    # A full edition needs nothing, so it can follow on whatever is held.
    ways: list[tuple[int, int, WeightVersion | None, list[Edition]]] = [(0, next(order), held, [])]
    done: set[WeightVersion | None] = set()
    while ways:
        num_bytes, _, at, chain = heapq.heappop(ways)
        if at is not None and at.number == number:
            return chain
        if at in done:
            continue
        done.add(at)
        full = by_base.get(None, []) if not chain and at is not None else []
        for edition in [*by_base.get(at, []), *full]:
            way = num_bytes + edition.num_bytes, next(order), edition.version, [*chain, edition]
            heapq.heappush(ways, way)
    return None
