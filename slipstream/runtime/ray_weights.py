"""Weights to nodes that do not see the run's folder: editions of the publisher's shelf travel through Ray's object
store to a shelf of that node, from which the workers there take them as they would from the other.

Nothing is trusted on the way: buckets are read and written with their checksums, and the receiver compares the content
hash of what it wrote with the version's. An edition is put into the store once, however many workers want it; its
bytes come to a node once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import ray

from slipstream.stream.editions import Edition, shortest_chain
from slipstream.stream.shelf import Shelf


@dataclass(frozen=True, slots=True)
class Parcel:
    """Editions that lead to a version."""

    editions: tuple[tuple[str, tuple[Any, ...]], ...]
    """Of each, its manifest and a reference to the bytes of every bucket."""
    kept: tuple[str, ...]
    """Names of all editions that the publisher still has: others may go."""


class ParcelPost:
    """The driver's end: it sees the shelf that the trainer writes."""

    def __init__(self, folder: Path) -> None:
        self._shelf, self._lock = Shelf(folder), Lock()
        self._stored: dict[str, tuple[str, tuple[Any, ...]]] = {}

    def parcel(self, number: int, held: int | None) -> Parcel:
        """What leads a worker that holds version `held` to this one; LookupError if nothing does."""
        names = self._shelf.names()
        chain = way_to(self._shelf, number, held)
        if chain is None:
            raise LookupError(f"nothing in {self._shelf.folder} leads to version {number}")
        with self._lock:
            for gone in self._stored.keys() - set(names):
                del self._stored[gone]
            return Parcel(tuple(self._put(edition) for edition in chain), tuple(names))

    def _put(self, edition: Edition) -> tuple[str, tuple[Any, ...]]:
        stored = self._stored.get(edition.name)
        if stored is None or Edition.from_json(stored[0]) != edition:
            stored = self._stored[edition.name] = edition.to_json(), tuple(self._buckets(edition))
        return stored

    def _buckets(self, edition: Edition) -> Sequence[Any]:
        references = []
        for index in range(len(edition.buckets)):
            found = self._shelf.bucket(edition.name, edition.version.number, index)
            if found is None:
                raise LookupError(f"bucket {index} of {edition.name} is gone from {self._shelf.folder}")
            references.append(ray.put(bytes(found[1])))
        return references


def way_to(shelf: Shelf, number: int, held: int | None) -> list[Edition] | None:
    """What leads a worker that holds version `held` to this one; None if nothing there does."""
    editions = [edition for name in shelf.names() if (edition := shelf.edition(name)) is not None]
    at = next((edition.version for edition in editions if edition.version.number == held), None)
    return shortest_chain(editions, at, number)


def take_in(parcel: Parcel, folder: Path) -> None:
    """Onto the shelf of this node, which its workers share: what is there already is not fetched."""
    shelf = Shelf(folder)
    with shelf.only_writer():
        for manifest, references in parcel.editions:
            edition = Edition.from_json(manifest)
            if shelf.edition(edition.name) == edition:
                continue
            sending = shelf.begin(edition.version.number, None if edition.base is None else edition.base.number)
            for bucket, reference in zip(edition.buckets, references, strict=True):
                sending.put(bucket, ray.get(reference))
            sending.end(edition)
        # Later ones may have come by another way meanwhile.
        shelf.forget_before(min(int(name.partition(".")[0]) for name in parcel.kept))
