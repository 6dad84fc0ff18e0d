"""Weights for processes on the trainer's own device, out of memory that both see: CUDA IPC on a GPU, an anonymous file
in memory on a CPU.

The lender keeps the last version's bits, and shows them to whoever asks for that version; nothing is encoded. Who wants
another version or lives on another device is told so at once, and takes it from the shelf. So does one whose lender
does not answer in time, or that finds another content hash than the version's once it has copied them (`receiver.py`).

A question and its answer have a connection of their own, with a time limit on every part, and a thread of their own at
the lender: who stops or dies in the middle of it holds up nobody. On a GPU one who dies while it copies leaves the
lender the memory of that version for as long as it lives, which is CUDA's doing.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing  # teaches the pickler about memory of a GPU
from torch import Tensor

from slipstream.stream.values import BITS
from slipstream.types import WeightVersion

ANSWER_S = 10.0
"""How long any part of a question or an answer may take: a lender only looks."""
AGAIN_S = 0.1
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Loan:
    """A version as it lies in memory."""

    version: WeightVersion
    dtype: str
    bucket_values: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes, in the order in which the values lie."""
    buckets: tuple[Tensor, ...]
    """Bits as integers, `bucket_values` in each, the last may have fewer."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a lender has at the moment."""

    loan: Loan
    place: str
    file: int | None = None
    """All buckets one after the other, if they are not on a GPU."""


class Lender:
    def __init__(self, address: Path) -> None:
        """`address`: of a socket that it makes there, in a folder that only this user sees. OSError if it cannot."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(address))
        self._socket.listen(128)
        self._shown: _Shown | None = None
        self._lock = threading.Lock()
        self._is_closed = self._has_warned = False
        threading.Thread(target=self._answer_all, name="lender", daemon=True).start()

    def lend(self, loan: Loan) -> Loan | None:
        """From now on; whoever copies the version before goes on with that. Where it lies now, which must not be
        written to; None if this machine has no such memory."""
        if not loan.buckets:
            return None
        device = loan.buckets[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # who is shown them does not wait for this process's work
        shown = _Shown(loan, place_of(device)) if device.type == "cuda" else _in_memory_file(loan)
        self._show(shown)
        if shown is None and not self._has_warned:
            self._has_warned = True
            num_mb = sum(bucket.nbytes for bucket in loan.buckets) / 1e6
            warnings.warn(f"no memory to lend {num_mb:.0f} MB of weights from: workers read files", stacklevel=2)
        return None if shown is None else shown.loan

    def close(self) -> None:
        self._is_closed = True
        self._show(None)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _show(self, shown: _Shown | None) -> None:
        with self._lock:
            before, self._shown = self._shown, shown
            if before is not None and before.file is not None:
                os.close(before.file)

    def _answer_all(self) -> None:
        while not self._is_closed:
            try:
                asker, _ = self._socket.accept()
            except OSError:  # closed, or for the moment too many files are open
                time.sleep(AGAIN_S)
                continue
            threading.Thread(target=self._answer, args=(asker,), name="lender", daemon=True).start()

    def _answer(self, asker: socket.socket) -> None:
        with asker, suppress(OSError, EOFError):
            asker.settimeout(ANSWER_S)
            number, place = pickle.loads(_receive(asker)[0])
            with self._lock:
                shown = self._shown
                if shown is None or (shown.loan.version.number, shown.place) != (number, place):
                    shown = None
                file = None if shown is None or shown.file is None else os.dup(shown.file)
            try:
                loan = None if shown is None else shown.loan
                if loan is not None and file is not None:
                    loan = replace(loan, buckets=())  # which lie in the file
                _send(asker, bytes(ForkingPickler.dumps(loan)), file)
            finally:
                if file is not None:
                    os.close(file)


class Borrower:
    def __init__(self, address: Path) -> None:
        self._address = address

    def ask(self, number: int, device: torch.device) -> Loan | None:
        """To copy from, and let go of; None if this version is not to be had here."""
        # RuntimeError is what torch makes of memory that it cannot open.
        with suppress(OSError, EOFError, RuntimeError), socket.socket(socket.AF_UNIX) as lender:
            lender.settimeout(ANSWER_S)
            lender.connect(str(self._address))
            _send(lender, pickle.dumps((number, place_of(device))))
            payload, file = _receive(lender)
            loan: Loan | None = pickle.loads(payload)
            if loan is None or file is None:
                return loan
            try:
                memory = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
            finally:
                os.close(file)
            return _with_buckets(loan, memory)
        return None


def place_of(device: torch.device) -> str:
    """The same for two processes if and only if they can see each other's memory of this device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def _in_memory_file(loan: Loan) -> _Shown | None:
    """A copy; None where there are no such files (on Linux there are), or there is no room."""
    if not hasattr(os, "memfd_create"):
        return None
    num_bytes = sum(bucket.nbytes for bucket in loan.buckets)
    file = os.memfd_create("weights")
    try:
        os.posix_fallocate(file, 0, num_bytes)  # to write where there is no room would end the process
        memory = mmap.mmap(file, num_bytes)
    except OSError:
        os.close(file)
        return None
    copy = _with_buckets(loan, memory)
    for bucket, theirs in zip(loan.buckets, copy.buckets, strict=True):
        theirs.copy_(bucket)
    return _Shown(copy, place_of(loan.buckets[0].device), file)


def _with_buckets(loan: Loan, memory: mmap.mmap) -> Loan:
    bits = torch.frombuffer(memory, dtype=BITS[loan.dtype])
    return replace(loan, buckets=bits.split(loan.bucket_values))


def _send(to: socket.socket, payload: bytes, file: int | None = None) -> None:
    socket.send_fds(to, [_SIZE.pack(len(payload))], [] if file is None else [file])
    to.sendall(payload)


def _receive(source: socket.socket) -> tuple[bytes, int | None]:
    head, files, _, _ = socket.recv_fds(source, _SIZE.size, 1)
    file = files[0] if files else None
    try:
        if len(head) < _SIZE.size:
            raise EOFError
        payload = bytearray()
        (size,) = _SIZE.unpack(head)
        while len(payload) < size:
            part = source.recv(min(1 << 20, size - len(payload)))
            if not part:
                raise EOFError
            payload += part
    except BaseException:
        if file is not None:
            os.close(file)
        raise
    return bytes(payload), file
