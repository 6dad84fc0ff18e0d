"""Weights for processes on the trainer's own device, out of memory that both see: CUDA IPC on a GPU, shared memory on
a CPU.

The lender keeps the last version's bits where they were cut, and shows them to whoever asks for that version; nothing
is encoded or written. Who wants another version or lives on another device is told so at once, and takes it from the
shelf. So does one whose lender does not answer, or that finds another content hash than the version's once it has
copied them (`receiver.py`).
"""

from __future__ import annotations

import multiprocessing
import resource
import shutil
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch
import torch.multiprocessing  # makes connections carry tensors
from torch import Tensor

from slipstream.types import WeightVersion

ANSWER_S = 10.0
"""How long a lender may take to show what it has: it only looks."""
SHARED_MEMORY = Path("/dev/shm")
FILES_LEFT = 256
"""A block of shared memory is an open file; so many more may be opened beside."""


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


class Lender:
    def __init__(self, address: Path) -> None:
        """`address`: a socket that it makes there. Below a folder that only this user sees."""
        self._listener = Listener(str(address), "AF_UNIX", authkey=_key())
        self._loan: Loan | None = None
        self._place = ""
        self._has_warned = False
        threading.Thread(target=self._accept_all, name="lender", daemon=True).start()

    def lend(self, loan: Loan) -> None:
        """From now on; whoever copies the version before goes on with that. The buckets must not be changed."""
        self._loan = None
        if not loan.buckets:
            return
        device = loan.buckets[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # who is shown them does not wait for this process's work
        elif not self._can_share(loan.buckets):
            return
        else:
            for bucket in loan.buckets:
                bucket.share_memory_()
        self._place, self._loan = place_of(device), loan

    def close(self) -> None:
        self._loan = None
        self._listener.close()

    def _can_share(self, buckets: tuple[Tensor, ...]) -> bool:
        """Writing where there is no room would end the process."""
        num_bytes = sum(bucket.nbytes for bucket in buckets)
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Those of the version before are still open.
        can = num_bytes < free_bytes and 2 * len(buckets) + FILES_LEFT < files
        if not can and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{num_bytes / 1e6:.0f} MB of weights are not lent ({SHARED_MEMORY} has {free_bytes / 1e6:.0f} left, "
                f"and {files} files may be open): workers take them from files",
                stacklevel=3,
            )
        return can

    def _accept_all(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # closed
            except (EOFError, multiprocessing.AuthenticationError):
                continue  # somebody who went away, or has no business here
            threading.Thread(target=self._serve, args=(connection,), name="lender", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError):
            while True:
                number, place = connection.recv()
                loan = self._loan
                fits = loan is not None and (loan.version.number, self._place) == (number, place)
                connection.send(loan if fits else None)
                connection.recv()  # it has copied them, and lets go; until then they are kept
                del loan


class Borrower:
    def __init__(self, address: Path) -> None:
        self._address = address
        self._connection: Connection | None = None

    @contextmanager
    def borrowed(self, number: int, device: torch.device) -> Iterator[Loan | None]:
        """While it is copied from; None if this version is not to be had here. The work of a GPU must be done before
        the end of this."""
        loan = self._ask(number, place_of(device))
        try:
            yield loan
        finally:
            del loan
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.send(None)

    def _ask(self, number: int, place: str) -> Loan | None:
        try:
            if self._connection is None:
                self._connection = Client(str(self._address), "AF_UNIX", authkey=_key())
            self._connection.send((number, place))
            if self._connection.poll(ANSWER_S):
                loan: Loan | None = self._connection.recv()
                return loan
        except (EOFError, OSError, multiprocessing.AuthenticationError):
            pass
        if self._connection is not None:  # an answer that comes too late is not for the next question
            self._connection.close()
            self._connection = None
        return None


def place_of(device: torch.device) -> str:
    """The same for two processes if and only if they can see each other's memory of this device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def _key() -> bytes:
    """What the processes of one run have in common."""
    return bytes(multiprocessing.current_process().authkey)
