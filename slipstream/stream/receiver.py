"""The receiving side: brings a model from the version that it holds to another, through editions on a shelf.

Invariants. A model's weights are written only after every bucket of the whole chain was read and found in order; until
then a fault leaves them as they are. While they are written `version` is None, and it is told only once their content
hash is that of the version. If it is not (the base was not what it seemed), the next try takes a full edition.

Where the trainer lends what it has just published (`neighbours.py`) that is copied instead, and its hash is looked at
in the same way.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from slipstream.models.weights import fingerprint, named_weights, tell_written
from slipstream.stream.coding import decode
from slipstream.stream.editions import Edition, Refusal, RefusedWeights, VersionMissing, edition_name, shortest_chain
from slipstream.stream.neighbours import Borrower
from slipstream.stream.shelf import DamagedBucket, Shelf
from slipstream.stream.values import BITS, ModelValues
from slipstream.types import WeightVersion

REPEATS = 3
REPEAT_AFTER_S = 0.05
TRIES_OF_AN_EDITION = 2
"""Then another way is taken, if there is one."""
POLL_S = 0.005
WRITTEN_S = 30.0
"""How long a version that is lent, and could not be borrowed, may take to be on the shelf."""
LENT = "lent"
"""Stands for the name of an edition."""


class Receiver:
    def __init__(
        self, folder: Path, worker_name: str, *, repeats: int = REPEATS, borrower: Borrower | None = None
    ) -> None:
        """`repeats`: how often a version is tried again after a fault. `borrower`: where the trainer lends."""
        self.worker_name, self.repeats = worker_name, repeats
        self._borrower = borrower
        self.version: WeightVersion | None = None
        """What the model holds, as far as this receiver knows."""
        self.torn = False
        """The model holds parts of two versions."""
        self.refusals: list[Refusal] = []
        """Since the beginning."""
        self._shelf = Shelf(folder)
        self._staged: dict[tuple[str, int], tuple[str, memoryview]] = {}

    @torch.no_grad()
    def catch_up(self, model: nn.Module, to_number: int, *, wait_s: float = 0.0) -> WeightVersion:
        """Write a version into the model, in place, from whatever it holds.

        `wait_s`: how long to wait for a version that is not complete yet; buckets that have come are looked at
        meanwhile. VersionMissing if no way leads there, RefusedWeights if it was tried as often as allowed, ValueError
        if these are not weights of this model. Weights on a GPU must not be in use.
        """
        faults: Counter[str] = Counter()
        refused: list[Refusal] = []
        if self._borrower is not None:
            outcome = self._borrow(model, to_number, self._borrower)
            if isinstance(outcome, WeightVersion):
                return outcome
            refused += self._report([outcome] if outcome is not None else [])
            wait_s = max(wait_s, WRITTEN_S)
        deadline_s = time.monotonic() + wait_s
        try:
            for attempt in range(self.repeats + 1):
                if attempt:
                    time.sleep(REPEAT_AFTER_S * attempt)
                avoided = {name for name, num_faults in faults.items() if num_faults >= TRIES_OF_AN_EDITION}
                chain, damaged = self._chain(to_number, avoided, deadline_s)
                refused += self._report(damaged)
                faults.update(refusal.edition for refusal in damaged)
                if chain is None:
                    if damaged:
                        continue
                    if faults:
                        break
                    held = "nothing known" if self.version is None else f"version {self.version.number}"
                    raise VersionMissing(
                        f"{self.worker_name} holds {held}, and nothing in {self._shelf.folder} leads to {to_number}"
                    )
                refusal = self._take(model, chain)
                if refusal is None:
                    assert self.version is not None
                    return self.version
                refused += self._report([refusal])
                faults[refusal.edition] += 1
            raise RefusedWeights(self.worker_name, to_number, refused, torn=self.torn)
        finally:
            self._staged.clear()

    def _chain(
        self, number: int, avoided: set[str], deadline_s: float
    ) -> tuple[list[Edition] | None, Sequence[Refusal]]:
        while True:
            waits = time.monotonic() < deadline_s and not avoided  # else it is there, and is no good
            if not waits or self._shelf.has(number):
                editions, damaged = self._editions()
                usable = [edition for edition in editions if edition.name not in avoided]
                chain = shortest_chain(usable, self._held(editions), number)
                if chain is not None or damaged or not waits:
                    return chain, damaged
            if not self._look_ahead(number):
                time.sleep(POLL_S)

    def _held(self, editions: Sequence[Edition]) -> WeightVersion | None:
        """None too if the shelf has another version of that number: the run went back before it."""
        others = {one.version.digest for one in editions if self.version and one.version.number == self.version.number}
        return self.version if self.version and others <= {self.version.digest} else None

    def _editions(self) -> tuple[list[Edition], list[Refusal]]:
        """Those that are complete, and what is wrong with others."""
        editions, damaged = [], []
        for name in self._shelf.names():
            try:
                edition = self._shelf.edition(name)
            except ValueError as error:
                number = int(name.partition(".")[0])
                damaged.append(Refusal(self.worker_name, number, name, None, "a manifest", str(error)))
            else:
                if edition is not None:
                    editions.append(edition)
        return editions, damaged

    def _look_ahead(self, number: int) -> bool:
        """Stage a bucket of the edition under way that will be needed; False if there is none yet."""
        held = None if self.version is None else self.version.number
        names = [edition_name(number, held)] if held is not None else []
        for name in [*names, edition_name(number, None)]:
            index = sum(1 for staged, _ in self._staged if staged == name)
            try:
                bucket = self._shelf.bucket(name, number, index)
            except DamagedBucket:
                return False  # it is looked at again, and told, once the version is there
            if bucket is not None:
                self._staged[name, index] = bucket
                return True
        return False

    def _borrow(self, model: nn.Module, number: int, borrower: Borrower) -> WeightVersion | Refusal | None:
        """The version, or what was wrong with it; None if it is not lent here."""
        own = dict(named_weights(model))
        device = next(iter(own.values())).device
        loan = borrower.ask(number, device)
        if loan is None:
            return None
        values = ModelValues(own, loan.tensors, loan.dtype)
        self.version, self.torn = None, True
        for index, bucket in enumerate(loan.buckets):
            values.write(index * loan.bucket_values, bucket)
        values.settle()
        return self._settle(model, loan.version, LENT) or loan.version

    def _take(self, model: nn.Module, chain: Sequence[Edition]) -> Refusal | None:
        """Verify, then write; what was wrong, if anything."""
        own = dict(named_weights(model))
        for edition in chain:  # ValueError before anything is read
            ModelValues(own, edition.tensors, edition.dtype)
        refusal = self._stage(chain)
        if refusal is not None or not chain:
            return refusal
        self.version, self.torn = None, True
        for edition in chain:
            self._write(ModelValues(own, edition.tensors, edition.dtype), edition)
        return self._settle(model, chain[-1].version, chain[-1].name)

    def _settle(self, model: nn.Module, wanted: WeightVersion, edition: str) -> Refusal | None:
        """What the model holds now, if it is what it should be."""
        tell_written(model)
        found = fingerprint(model)
        if found != wanted.digest:
            return Refusal(self.worker_name, wanted.number, edition, None, wanted.digest, found)
        self.version, self.torn = wanted, False
        return None

    def _stage(self, chain: Sequence[Edition]) -> Refusal | None:
        for edition in chain:
            number = edition.version.number
            for index, bucket in enumerate(edition.buckets):
                key, expected = (edition.name, index), bucket.checksum
                if key in self._staged and self._staged[key][0] == expected:
                    continue
                try:
                    there = self._shelf.bucket(edition.name, number, index)
                    found = "nothing" if there is None else there[0]
                except DamagedBucket as error:
                    there, found = None, error.found
                if there is None or found != expected:
                    return Refusal(self.worker_name, number, edition.name, index, expected, found)
                self._staged[key] = there
        return None

    def _write(self, values: ModelValues, edition: Edition) -> None:
        for index in range(len(edition.buckets)):
            start, stop = edition.span(index)
            _, payload = self._staged[edition.name, index]
            base = None if edition.base is None else values.read(start, stop)
            values.write(start, decode(payload, stop - start, BITS[edition.dtype], base))
        values.settle()

    def _report(self, refusals: Sequence[Refusal]) -> Sequence[Refusal]:
        for refusal in refusals:
            warnings.warn(str(refusal), stacklevel=4)
        self.refusals += refusals
        return refusals
