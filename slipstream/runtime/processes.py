"""Processes of a run: joined by a pipe, each with a log file of its own.

They are forked from a server that has imported PRELOADED and done nothing else: a fork of the run itself would have its
threads' locks and its CUDA context, and a process started from nothing takes seconds to import torch.

`Link` is the end of whoever started one: sending never waits, since another thread does that, so that a process that
hangs cannot hold up the others. A process ends when its parent does, however that ends, and does not hear Ctrl-C: its
parent does, and tells it what to do.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = ["slipstream.runtime.coats"]
LAST_LINES = 5
"""Of a log file that are shown when its process is lost."""
GRACE_S = 3.0
"""How long one may take that is to end by itself."""
JOIN_S = 10.0
"""How long a process that was killed may take to be gone."""

Work = Callable[..., None]
"""What a process does: work(connection, *arguments), until the pipe is closed."""


class PipeClosed(Exception):
    """Whoever started this process is gone."""


class Pipe:
    """A worker's end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, message: object) -> None:
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionError) as error:
            raise PipeClosed from error

    def hear(self, wait_s: float = 0.0) -> list[Any]:
        """All that was said by now; waits for the first."""
        heard: list[Any] = []
        try:
            while self._connection.poll(0 if heard else wait_s):
                heard.append(self._connection.recv())
        except (EOFError, ConnectionError) as error:
            raise PipeClosed from error
        return heard


class Link:
    def __init__(self, name: str, log_file: Path, num_threads: int, work: Work, *arguments: Any) -> None:
        self.name, self.log_file = name, log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_live, args=(theirs, log_file, num_threads, work, arguments), name=name, daemon=True
        )
        self._process.start()
        theirs.close()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._sender.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: object) -> None:
        """Sooner or later, in order; to nobody if the process is gone, which `is_gone` tells."""
        self._outbox.put(message)

    def receive(self) -> list[Any]:
        """All that it has said, also before it ended."""
        received: list[Any] = []
        try:
            while self.connection.poll(0):
                received.append(self.connection.recv())
        except (EOFError, ConnectionError):
            self._process.join(JOIN_S)
        return received

    @property
    def is_gone(self) -> bool:
        return not self._process.is_alive()

    def how_it_ended(self) -> str:
        """For an error: what became of it, its log file, and the end of that."""
        code = self._process.exitcode
        ended = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
        try:
            lines = self.log_file.read_text(errors="replace").splitlines()[-LAST_LINES:]
        except OSError as error:
            lines = [f"(it cannot be read: {error})"]
        words = "; its last lines:\n" + "\n".join(lines) if lines else ", which is empty"
        return f"{self.name} (process {self.pid}) {ended}. Its log: {self.log_file}{words}"

    def kill(self) -> None:
        """At once, whatever it does; it is gone when this returns."""
        self._process.kill()
        self._process.join(JOIN_S)

    def close(self) -> None:
        """The process ends when it sees that the pipe is closed; if it does not look, it is killed."""
        self._outbox.put(None)
        self._sender.join(GRACE_S)
        self.connection.close()
        self._process.join(GRACE_S)
        if not self.is_gone:
            self.kill()

    def _send_all(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self.connection.send(message)
        except OSError:
            return  # it is gone, or the link is closed


def _live(connection: Connection, log_file: Path, num_threads: int, work: Work, arguments: tuple[Any, ...]) -> None:
    """The whole life of the process."""
    os.setsid()  # Ctrl-C and the signals of batch systems go to the whole group: they are the parent's to hear
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with log_file.open("a", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        faulthandler.enable(log)
        import torch

        torch.set_num_threads(num_threads)
        try:
            work(Pipe(connection), *arguments)
        except PipeClosed:
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process without a parent"
    parent.join()
    os._exit(1)
