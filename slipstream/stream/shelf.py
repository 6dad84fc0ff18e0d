"""A folder of editions, in shared memory or on a disk that several machines see: written by one, read by many.

An edition is a folder: buckets appear in it one by one, each under its name only once it is complete and flushed, and
the manifest comes last. Without a manifest there is no version, but who waits for it can look at buckets before. What
is replaced or forgotten disappears in one renaming; whoever has its buckets open can go on reading them. Pure.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slipstream.files import TEMPORARY, flush, replacing
from slipstream.stream.editions import Bucket, Edition, checksum, edition_name

MANIFEST = "manifest.json"
GONE = ".gone-"
FULL_KEPT = 2
_HEAD = struct.Struct("<4sQI16sQ")
_MAGIC = b"SLPB"


class DamagedBucket(ValueError):
    """A bucket is not what was written."""

    def __init__(self, edition: str, index: int, expected: str, found: str) -> None:
        super().__init__(f"bucket {index} of {edition} should have checksum {expected} and has {found}")
        self.edition, self.index, self.expected, self.found = edition, index, expected, found


class Shelf:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Of the editions, complete or under way, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path.name for path in self.folder.iterdir() if path.name.partition(".")[0].isdigit())

    def has(self, number: int) -> bool:
        """Whether an edition of this version is complete."""
        return any(_number_of(name) == number and (self.folder / name / MANIFEST).is_file() for name in self.names())

    def edition(self, name: str) -> Edition | None:
        """None if it is under way or gone. ValueError if its manifest is damaged."""
        try:
            text = (self.folder / name / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        edition = Edition.from_json(text)
        if edition.name != name:
            raise ValueError(f"{name} has the manifest of {edition.name}")
        return edition

    def begin(self, number: int, base: int | None) -> WritingEdition:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.remove(edition_name(number, base))
        return WritingEdition(self, number, base)

    def bucket(self, name: str, number: int, index: int) -> tuple[str, memoryview] | None:
        """Checksum and bytes, which agree, mapped into memory; None if it is not there. DamagedBucket if they do not
        agree or it is the bucket of something else."""
        try:
            with _bucket_path(self.folder / name, index).open("rb") as file:
                if os.fstat(file.fileno()).st_size <= _HEAD.size:
                    raise DamagedBucket(name, index, "", "no bytes")
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            return None
        magic, told_number, told_index, told, num_bytes = _HEAD.unpack(view[: _HEAD.size])
        payload, expected = view[_HEAD.size :], told.hex()
        if (magic, told_number, told_index, num_bytes) != (_MAGIC, number, index, len(payload)):
            what = f"bucket {told_index} of version {told_number} with {len(payload)} of {num_bytes} bytes"
            raise DamagedBucket(name, index, expected, what)
        found = checksum(payload)
        if found != expected:
            raise DamagedBucket(name, index, expected, f"{found} (its head tells {expected})")
        return expected, payload

    def remove(self, name: str) -> None:
        """At once for new readers."""
        gone = self.folder / f"{GONE}{name}"
        with suppress(FileNotFoundError):
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(self.folder / name, gone)
            shutil.rmtree(gone, ignore_errors=True)

    def forget_before(self, number: int) -> None:
        for name in self.names():
            if _number_of(name) < number:
                self.remove(name)

    def forget_from(self, number: int) -> None:
        """Versions of a run that went back before them, and what a writer who died left behind."""
        for name in self.names():
            if _number_of(name) >= number or not (self.folder / name / MANIFEST).is_file():
                self.remove(name)
        for path in self._hidden():
            shutil.rmtree(path, ignore_errors=True)

    def forget_changes(self, number: int) -> None:
        """Of a version that is there in full."""
        for name in self.names():
            if _number_of(name) == number and name != edition_name(number, None):
                self.remove(name)

    def full_numbers(self) -> list[int]:
        """Versions that are there in full, oldest first."""
        complete = (name for name in self.names() if (self.folder / name / MANIFEST).is_file())
        return [_number_of(name) for name in complete if name.endswith(".full")]

    def forget_old(self) -> None:
        """All but the last FULL_KEPT full versions (a slow reader may be at the last but one) and what changed since
        the one before these."""
        for old in self.full_numbers()[:-FULL_KEPT][-1:]:
            self.forget_before(old + 1)

    @contextmanager
    def only_writer(self) -> Iterator[None]:
        """Where several processes of a machine may write: one after the other."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with (self.folder.parent / f".{self.folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _hidden(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from (path for path in self.folder.iterdir() if path.name.startswith((GONE, TEMPORARY)))


class WritingEdition:
    """A `Sending` into a folder."""

    def __init__(self, shelf: Shelf, number: int, base: int | None) -> None:
        self._shelf, self._number, self._name = shelf, number, edition_name(number, base)
        self._path = shelf.folder / self._name
        self._num_buckets = 0
        self._path.mkdir()

    def put(self, bucket: Bucket, payload: bytes | memoryview) -> None:
        index, told = self._num_buckets, bytes.fromhex(bucket.checksum)
        head = _HEAD.pack(_MAGIC, self._number, index, told, len(payload))
        _write(_bucket_path(self._path, index), head, payload)
        self._num_buckets += 1

    def end(self, edition: Edition) -> None:
        assert len(edition.buckets) == self._num_buckets and edition.name == self._name
        flush(self._path)
        _write(self._path / MANIFEST, edition.to_json().encode())
        flush(self._path)
        flush(self._shelf.folder)

    def give_up(self) -> None:
        self._shelf.remove(self._name)


def _bucket_path(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.bucket"


def _number_of(name: str) -> int:
    return int(name.partition(".")[0])


def _write(path: Path, *parts: bytes | memoryview) -> None:
    """Complete under its name or not there."""
    try:
        with replacing(path, flush_name=False) as partial, partial.open("wb") as file:
            for part in parts:
                file.write(part)
    except OSError as error:
        free_mb = shutil.disk_usage(path.parent).free / 1e6
        raise OSError(
            error.errno,
            f"weights for rollout workers could not be written ({error.strerror}; without them {free_mb:,.1f} MB are "
            "free): make some room or move run.dir to a larger disk, then resume the run",
            str(path),
        ) from error
