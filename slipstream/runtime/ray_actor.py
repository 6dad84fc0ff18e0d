"""The coat of a process on a Ray cluster: an actor that does the work of `coats.py` in one thread, while messages for
it come in by a second and go out by a third.

Owns no part of the work. What the work prints goes into the run's log file if this node sees the run's folder, else
into a file of this node. Whoever waits for what it says (`said`) is answered at once or after POLL_S.
"""

from __future__ import annotations

import os
import pickle
import queue
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from slipstream.models.threads import use_threads
from slipstream.runtime.processes import Pipe, PipeClosed, print_into
from slipstream.runtime.ray_weights import Parcel, take_in, way_to
from slipstream.stream.shelf import Shelf

POLL_S = 5.0
LOOK_S = 0.02
GROUPS = {"work": 1, "inbox": 1, "outbox": 1}
"""Threads, of which each does its calls one after the other: what is sent stays in order."""


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """The run's folder, as the driver sees it. A node sees the same one if it finds the token in the marker."""

    path: Path
    marker: Path
    token: str
    weights: Path

    @property
    def is_here(self) -> bool:
        try:
            return self.marker.read_text() == self.token
        except OSError:
            return False

    @property
    def elsewhere(self) -> Path:
        """What a node that does not see it has instead: for this run only."""
        return Path(tempfile.gettempdir()) / f"slipstream-{self.token}"

    @property
    def weights_elsewhere(self) -> Path:
        return self.elsewhere / self.weights.name


@dataclass(frozen=True, slots=True)
class Whereabouts:
    pid: int
    node_id: str
    address: str
    log_file: Path
    sees_folder: bool


@dataclass(frozen=True, slots=True)
class Closed:
    """The driver has nothing more to say."""


class Mailbox(Pipe):
    """The worker's end, as `processes.Pipe` is that of a pipe."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_closed = False

    def say(self, message: object) -> None:
        if self._is_closed:
            raise PipeClosed
        self.outbox.put(message)

    def hear(self, wait_s: float = 0.0) -> list[Any]:
        heard = _all_in(self.inbox, wait_s)
        if any(isinstance(message, Closed) for message in heard):
            self._is_closed = True
        if self._is_closed:
            raise PipeClosed
        return heard


@dataclass(frozen=True, slots=True)
class _Ended:
    how: str


class Coat:
    def __init__(self, name: str, log_file: Path, folder: SharedFolder, working_dir: Path) -> None:
        self._name, self._folder, self._mailbox = name, folder, Mailbox()
        self._sees = folder.is_here
        if self._sees and working_dir.is_dir():
            os.chdir(working_dir)  # recipes name files from there
        self._log_file = log_file if self._sees else folder.elsewhere / log_file.name
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log = self._log_file.open("a", buffering=1)
        print_into(self._log)

    @ray.method(concurrency_group="inbox")
    def whereabouts(self) -> Whereabouts:
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        return Whereabouts(os.getpid(), context.get_node_id(), address, self._log_file, self._sees)

    @ray.method(concurrency_group="work")
    def live(self, num_threads: int, packed: bytes) -> None:
        """The whole life of the process. `packed`: the work and its arguments; if they cannot be unpacked, that is told
        like any other error."""
        code: object = 0
        try:
            use_threads(num_threads)  # in this thread: OpenMP counts threads for each thread that asks
            work, arguments = pickle.loads(packed)
            work(self._mailbox, *(self._as_seen_here(one) for one in arguments))
        except PipeClosed:
            pass
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
            code = 1
        self._log.flush()
        self._mailbox.outbox.put(_Ended(f"ended with {code or 0}"))

    @ray.method(concurrency_group="inbox")
    def tell(self, messages: list[Any]) -> None:
        for message in messages:
            self._mailbox.inbox.put(message)

    @ray.method(concurrency_group="inbox")
    def take_parcel(self, parcel: Parcel) -> None:
        """Weights, for a node that does not see where they lie."""
        take_in(parcel, self._folder.weights_elsewhere)

    @ray.method(concurrency_group="inbox")
    def finds_weights(self, number: int, held: int | None, wait_s: float) -> bool:
        """Whether they came to this node by another way, if not now then in so long."""
        shelf, until_s = Shelf(self._folder.weights_elsewhere), time.monotonic() + wait_s
        while way_to(shelf, number, held) is None:
            if time.monotonic() > until_s:
                return False
            time.sleep(LOOK_S)
        return True

    @ray.method(concurrency_group="outbox")
    def said(self) -> tuple[list[Any], str | None]:
        """What was said since, and how it ended if it has."""
        heard = _all_in(self._mailbox.outbox, POLL_S)
        ended = next((one.how for one in heard if isinstance(one, _Ended)), None)
        return [one for one in heard if not isinstance(one, _Ended)], ended

    def _as_seen_here(self, argument: Any) -> Any:
        if not self._sees and argument == self._folder.weights:
            return self._folder.weights_elsewhere
        return argument


def _all_in(box: queue.SimpleQueue[Any], wait_s: float) -> list[Any]:
    """All that is there; waits for the first."""
    found = []
    try:
        found.append(box.get(timeout=wait_s) if wait_s > 0 else box.get_nowait())
        while True:
            found.append(box.get_nowait())
    except queue.Empty:
        return found
