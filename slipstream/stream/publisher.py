"""The sending side: weights as the trainer has them, encoded bucket by bucket onto a shelf and into other channels.

Keeps the bits of the last version, where the weights lie, to tell what changed since. A bucket is written and sent by a
second thread while the next one is encoded, so at most WAITING of an edition are in memory beside that copy. Every
`full_every`-th version is there in full too.

With a lender a version is there as soon as its bits are: it is encoded and written in the background, for whoever
cannot borrow it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.models.digest import combined_digest
from slipstream.stream.coding import encode
from slipstream.stream.editions import Bucket, Channel, Edition, Sending, checksum
from slipstream.stream.neighbours import Lender, Loan
from slipstream.stream.shelf import Shelf
from slipstream.stream.values import OnePass, cut, dtype_name
from slipstream.types import WeightVersion

BUCKET_BYTES = 32 << 20
FULL_EVERY = 8
WAITING = 2
"""Encoded buckets that may wait to be written."""


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a version."""

    version: WeightVersion
    num_values: int
    num_changed: int
    """Since the version before; all values if there was none to compare with."""
    delta_bytes: int | None
    full_bytes: int | None
    """As written; None if there is no such edition."""
    seconds: float


class Publisher:
    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        full_every: int = FULL_EVERY,
        bucket_bytes: int = BUCKET_BYTES,
        channels: Sequence[Channel] = (),
        lender: Lender | None = None,
    ) -> None:
        """`dtype`: the engines' number format. With `full_every` 1 every version is sent in full and nothing is kept.
        `channels`: further places to send every edition to, beside the shelf in `folder`. `lender`: for workers on this
        device."""
        if full_every < 1 or bucket_bytes < dtype.itemsize:
            raise ValueError("full_every is at least 1, and a bucket holds at least one value")
        self.dtype, self.full_every = dtype, full_every
        self.last: Published | None = None
        self._dtype_name = dtype_name(dtype)
        self._bucket_values = bucket_bytes // dtype.itemsize
        self._shelf = Shelf(folder)
        self._channels: list[Channel] = [self._shelf, *channels]
        self._kept: list[Tensor] = []
        """The last version's bits, bucket by bucket; empty unless `last` can be a base."""
        self._tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
        self._since_full = 0
        self._lender = lender
        self._background = ThreadPoolExecutor(1, "editions")
        self._under_way: Future[WeightVersion] | None = None

    @torch.no_grad()
    def publish(self, weights: Iterable[tuple[str, Tensor]], number: int) -> WeightVersion:
        """Send a version; returns once it is there for all, or lent. Whatever the shelf held from this number on is
        forgotten: a run that resumed from a checkpoint goes another way from there. ValueError if these are not the
        weights of the version before, by name, shape and order."""
        self.look(wait=True)
        if self._lender is None:
            return self._write(OnePass(weights, self.dtype), number)
        pass_on = OnePass(weights, self.dtype)
        buckets = tuple(cut(pass_on, self._bucket_values))
        version = WeightVersion(number, combined_digest(pass_on.digests))
        lent = self._lender.lend(Loan(version, self._dtype_name, self._bucket_values, pass_on.tensors, buckets))
        if lent is not None:
            buckets = lent.buckets
        self._under_way = self._background.submit(self._write, pass_on, number, iter(buckets))
        if lent is None:
            self.look(wait=True)
        return version

    def look(self, *, wait: bool = False) -> None:
        """Raises what went wrong in the background, if anything did by now."""
        if self._under_way is not None and (wait or self._under_way.done()):
            under_way, self._under_way = self._under_way, None
            under_way.result()

    @torch.no_grad()
    def _write(self, pass_on: OnePass, number: int, buckets: Iterator[Tensor] | None = None) -> WeightVersion:
        """`buckets`: of the pass, if it was gone through."""
        self._shelf.forget_from(number)
        base = self.last.version if self.last is not None and self._kept else None
        if base is not None and base.number >= number:
            base = None
        is_full = base is None or self._since_full + 1 >= self.full_every
        if buckets is None:
            buckets = cut(pass_on, self._bucket_values)
        done = self._send(buckets, pass_on, number, base, is_full=is_full)
        self._since_full = 0 if is_full else self._since_full + 1
        if is_full:
            self._shelf.forget_old()
        return done

    @torch.no_grad()
    def repeat(self) -> WeightVersion:
        """The last version once more, in full and no other way: for workers that refused it."""
        self.look(wait=True)
        if self.last is None or not self._kept:
            raise ValueError("there is no version in memory to repeat; publish it again")
        version = self.last.version
        with ThreadPoolExecutor(1, "weights") as thread:
            line = _Line(self._channels, version.number, None, thread)
            try:
                for bits in self._kept:
                    line.put("full", encode(bits, None).payload)
                line.end(version, self._dtype_name, self._bucket_values, self._tensors)
            except BaseException:
                line.give_up()
                raise
        self._shelf.forget_changes(version.number)
        return version

    def _send(
        self, buckets: Iterator[Tensor], pass_on: OnePass, number: int, base: WeightVersion | None, *, is_full: bool
    ) -> WeightVersion:
        started = time.perf_counter()
        kept, self._kept = self._kept, []  # no base until all has gone well
        keep = self.full_every > 1
        new: list[Tensor] = []
        num_changed = 0
        bases = [one for one, wanted in ((base, base is not None), (None, is_full)) if wanted]
        with ThreadPoolExecutor(1, "weights") as thread:
            lines = [_Line(self._channels, number, one, thread) for one in bases]
            try:
                for index, bits in enumerate(buckets):
                    for line in lines:
                        old = None
                        if line.base is not None:
                            pass_on.check_against(self._tensors)
                            old = kept[index]
                            if len(old) != len(bits):  # the weights have ended, too early
                                pass_on.check_against(self._tensors, whole=True)
                        coded = encode(bits, old)
                        num_changed += coded.num_changed if line is lines[0] else 0
                        line.put(coded.coding, coded.payload)
                    if keep:
                        new.append(bits)
                if base is not None:
                    pass_on.check_against(self._tensors, whole=True)
                version = WeightVersion(number, combined_digest(pass_on.digests))
                for line in lines:
                    line.finish()  # before one ends, since a channel does one thing at a time
                editions = [line.end(version, self._dtype_name, self._bucket_values, pass_on.tensors) for line in lines]
            except BaseException:
                for line in lines:
                    line.give_up()
                raise
        self._kept, self._tensors = new, pass_on.tensors
        delta = [edition.num_bytes for edition in editions if edition.base is not None]
        full = [edition.num_bytes for edition in editions if edition.base is None]
        seconds = time.perf_counter() - started
        num_values = editions[0].num_values
        self.last = Published(
            version, num_values, num_changed, delta[0] if delta else None, full[0] if full else None, seconds
        )
        return version


class _Line:
    """One edition on its way into every channel, from a thread of its own."""

    def __init__(
        self, channels: Sequence[Channel], number: int, base: WeightVersion | None, thread: ThreadPoolExecutor
    ) -> None:
        self.base = base
        self._thread = thread
        self._waiting: deque[Future[None]] = deque()
        self._buckets: list[Bucket] = []
        self._sendings: list[Sending] = []
        try:
            for channel in channels:
                self._sendings.append(channel.begin(number, None if base is None else base.number))
        except BaseException:
            self.give_up()
            raise

    def put(self, coding: str, payload: bytes) -> None:
        bucket = Bucket(coding, len(payload), checksum(payload))
        self._buckets.append(bucket)
        self._waiting.append(self._thread.submit(self._put, bucket, payload))
        while len(self._waiting) > WAITING:
            self._waiting.popleft().result()

    def finish(self) -> None:
        """Until all that was put is written and sent."""
        while self._waiting:
            self._waiting.popleft().result()

    def end(
        self, version: WeightVersion, dtype: str, bucket_values: int, tensors: tuple[tuple[str, tuple[int, ...]], ...]
    ) -> Edition:
        self.finish()
        edition = Edition(version, self.base, dtype, bucket_values, tensors, tuple(self._buckets))
        for sending in self._sendings:
            sending.end(edition)
        return edition

    def give_up(self) -> None:
        for waiting in self._waiting:
            waiting.cancel()
        for waiting in self._waiting:
            if not waiting.cancelled():
                waiting.exception()
        for sending in self._sendings:
            sending.give_up()

    def _put(self, bucket: Bucket, payload: bytes) -> None:
        for sending in self._sendings:
            sending.put(bucket, payload)
