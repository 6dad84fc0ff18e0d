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
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

PRELOADED = ["slipstream.runtime.coats"]
LAST_LINES = 5
"""Of a log file that are shown when its process is lost."""
GRACE_S = 3.0
"""How long one may take that is to end by itself."""
LOST = 255
"""What is said of the end of a process whose end nobody saw."""
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
        except (EOFError, OSError) as error:
            raise PipeClosed from error
        return heard


class Doorbell:
    """Wakes whoever waits for several processes to say something."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self) -> None:
        self._rung.set()

    def wait(self, wait_s: float) -> None:
        """Until somebody has rung since the last time, or so long."""
        self._rung.wait(wait_s)
        self._rung.clear()


class Link:
    def __init__(
        self,
        name: str,
        log_file: Path,
        num_threads: int,
        work: Work,
        *arguments: Any,
        bell: Doorbell,
        gpu: str | None = None,
    ) -> None:
        """`bell`: is rung when it has said something, and when it is gone. `gpu`: the only one that it sees, as
        CUDA_VISIBLE_DEVICES names it; None: all that this process does."""
        self.name, self.log_file, self._bell = name, log_file, bell
        log_file.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_live, args=(theirs, log_file, num_threads, gpu, work, arguments), name=name, daemon=True
        )
        self._process.start()
        theirs.close()
        _ask_one_at_a_time(self._process)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._fault: Exception | None = None
        self._is_closed = False
        """It was told to end."""
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, daemon=True)
        self._sender.start()
        self._receiver.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: object) -> None:
        """Sooner or later, in order; to nobody if the process is gone, which `is_gone` tells."""
        self._outbox.put(message)

    def receive(self) -> list[Any]:
        """All that it has said, also before it ended."""
        if self._fault is not None:
            raise self._fault
        received: list[Any] = []
        with suppress(queue.Empty):
            while True:
                received.append(self._inbox.get_nowait())
        return received

    @property
    def is_gone(self) -> bool:
        """Then all that it ever said is there."""
        return self._exit_code() is not None and not self._receiver.is_alive()

    def how_it_ended(self) -> str:
        """For an error: what became of it, its log file, and the end of that."""
        code = self._exit_code(GRACE_S)  # one that has told why it ends may be about to
        ended = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
        if code == 0 and not self._is_closed:
            ended = "lost its connection to the run, and ended"
        return f"{self.name} (process {self.pid}) {ended}. {log_in_words(self.log_file)}"

    def kill(self) -> None:
        """At once, whatever it does; it is gone when this returns."""
        # By number: if the server that forks processes was killed, all of its processes look as if they had ended.
        if self._exit_code() in (None, LOST):
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._exit_code(JOIN_S)
        self._receiver.join(JOIN_S)

    def close(self) -> None:
        """The process ends when it sees that the pipe is closed; if it does not look, it is killed."""
        self._is_closed |= not self.is_gone
        self._outbox.put(None)
        self._sender.join(GRACE_S)
        with suppress(OSError):  # both threads may be using it: they see the end, and so does the process
            socket.socket(fileno=os.dup(self._connection.fileno())).shutdown(socket.SHUT_RDWR)
        self._exit_code(GRACE_S)
        if not self.is_gone:
            self.kill()

    def _exit_code(self, wait_s: float = 0.0) -> int | None:
        """As soon as it has ended; None: it still lives after so long."""
        wait([self._process.sentinel], wait_s)
        return self._process.exitcode

    def _send_all(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._connection.send(message)
        except OSError:
            return  # it is gone, or the link is closed
        except Exception as error:  # a message that cannot travel: whoever looks next is told
            self._fault = error
            self._bell.ring()

    def _receive_all(self) -> None:
        """In a thread: a process that hangs or dies in the middle of a message must hold up nobody else."""
        try:
            while True:
                self._inbox.put(self._connection.recv())
                self._bell.ring()
        except (EOFError, OSError):
            self._exit_code(JOIN_S)  # so that who is woken finds it gone
        except Exception as error:
            self._fault = error
        self._bell.ring()


def _ask_one_at_a_time(process: multiprocessing.process.BaseProcess) -> None:
    """The server says once how a process ended: of two threads that ask at the same moment the second would be told
    LOST. Who asks are not only we: whoever starts a process looks after all others."""
    popen, lock = process._popen, threading.Lock()  # type: ignore[attr-defined]
    poll = popen.poll

    def poll_alone(*arguments: Any) -> int | None:
        with lock:
            code: int | None = poll(*arguments)
            return code

    popen.poll = poll_alone


def _live(
    connection: Connection,
    log_file: Path,
    num_threads: int,
    gpu: str | None,
    work: Work,
    arguments: tuple[Any, ...],
) -> None:
    """The whole life of the process."""
    if gpu is not None:  # torch is imported by now, but has not looked at GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    # Ctrl-C and what batch systems send, to the group or to every process, are the parent's to hear.
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # With "forkserver" numba makes a semaphore. That of a process that is killed stays, and Python complains of it on
    # the user's console when the run ends.
    multiprocessing.set_start_method("spawn", force=True)
    with log_file.open("a", buffering=1) as log:
        print_into(log)
        from slipstream.models.threads import use_threads

        use_threads(num_threads)
        try:
            work(Pipe(connection), *arguments)
        except PipeClosed:
            print("the pipe is closed: the run has ended, or the connection to it was lost")


def print_into(log: TextIO) -> None:
    """All that this process prints, its libraries and its last words included."""
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)


def log_in_words(log_file: Path) -> str:
    """Which it is, and its end."""
    try:
        lines = log_file.read_text(errors="replace").splitlines()[-LAST_LINES:]
    except OSError as error:
        lines = [f"(it cannot be read: {error})"]
    words = "; its last lines:\n" + "\n".join(lines) if lines else ", which is empty"
    return f"Its log: {log_file}{words}"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process without a parent"
    parent.join()
    os._exit(1)
