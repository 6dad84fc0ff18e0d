"""Grading processes as the run sees them: calls in, answers out, within a time limit.

Each grader has a thread here, a guardian (`guardian.py`), and a channel that nobody shares: what happens to one, also
in the middle of an answer, holds up no other. Invariants:
- a call is answered, or its fault known, when its time limit has passed, whatever the grader does;
- a grader that timed out or died is replaced alone, and all that it had started is killed;
- a call whose grader died before the call began is given to the next one; a grader's start is not on the call's clock.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from slipstream.tasks import guardian
from slipstream.tasks.grader_process import Answer, Fault, as_answer
from slipstream.tasks.rewards import Sample, TrainerState

MAX_STARTS = 3
"""Graders that are started for one call; if none of them lives until the call begins, the workers cannot live."""
START_S = 600.0
"""Longest time for a grader's imports, which may load a model."""
END_S = guardian.KILL_S + guardian.FLUSH_S + 2
"""Longest time for a guardian to kill its grader and exit."""
CALL_OUTPUT_BYTES = 4096
"""Printed in one call and shown on our stderr; the rest is counted."""
OUTPUT_BYTES = 65536
"""The same for one grader and its replacements in a whole run."""
_CHUNK_BYTES = 1 << 16


class Died(Exception):
    """The grading process has ended; `code` is its exit code, None if it is not known."""

    def __init__(self, code: int | None) -> None:
        super().__init__()
        self.code = code


class Closed(Exception):
    """The pool is closed."""


@dataclass(slots=True)
class _Call:
    function: int
    samples: list[Sample]
    state: TrainerState
    future: Future[Answer | Fault] = field(default_factory=Future)


class GraderPool:
    def __init__(
        self, num_graders: int, start: dict[str, Any], timeout_s: float, on_answer: Callable[[], None] = lambda: None
    ) -> None:
        """`start`: what a grader is told first, see `guardian.py`. `on_answer`: callback when a future is done, in
        another thread."""
        self._start_frame, self._timeout_s, self._on_answer = pickle.dumps(start), timeout_s, on_answer
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._graders: dict[int, _Grader] = {}
        self._ending: dict[int, _Grader] = {}
        self._output_bytes = [OUTPUT_BYTES] * num_graders
        """That each may still print."""
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"grader {number}", daemon=True)
            for number in range(num_graders)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Of the grading processes that have begun a call and live."""
        with self._lock:
            return [grader.pid for grader in self._graders.values() if grader.pid is not None]

    def schedule(self, function: int, samples: list[Sample], state: TrainerState) -> Future[Answer | Fault]:
        call = _Call(function, samples, state)
        call.future.add_done_callback(lambda _: self._on_answer())
        self._queue.put(call)
        return call.future

    def close(self) -> None:
        """Kill the graders and all that they started; futures that are not done will never be."""
        with self._lock:
            self._is_closed = True
            graders = list(self._graders.values())
        for grader in graders:
            grader.hang_up()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, number: int) -> None:
        """The life of a thread: one call after the other, with a grader that is replaced when it ends."""
        try:
            self._start_early(number)
            while (call := self._queue.get()) is not None:
                try:
                    answer = self._answer(number, call)
                except Closed:
                    return
                except BaseException as error:  # our bug: raised again where the call's result is read
                    call.future.set_exception(error)
                    continue
                call.future.set_result(answer)
                if isinstance(answer, Fault):
                    self._start_early(number)
        finally:
            self._end(number)

    def _answer(self, number: int, call: _Call) -> Answer | Fault:
        try:
            frame = pickle.dumps((call.function, call.samples, call.state))
        except Exception as error:
            return Fault("raised", f"the call could not be sent to the worker: {error!r:.1000}")
        problem = "see stderr"
        for _ in range(MAX_STARTS):
            try:
                grader = self._graders.get(number) or self._start(number)
            except OSError as error:
                problem = repr(error)
                continue
            try:
                grader.wait_until_ready()
                return grader.call(frame, self._timeout_s)
            except TimeoutError:
                self._drop(number)
                if grader.pid is None:
                    return Fault("died", f"the worker process was not ready within {START_S:g} s; worker killed")
                limit = f"reward.timeout_s = {self._timeout_s:g} s"
                return Fault("timeout", f"no answer within {limit}; worker killed")
            except Died as death:
                self._drop(number)
                if grader.has_begun:
                    code = "unknown" if death.code is None else death.code
                    return Fault("died", f"the worker process ended during the call: exit code {code}")
        return Fault("died", f"the grading workers die again and again; {problem}")

    def _start(self, number: int) -> _Grader:
        """A grader, after the end of the one before."""
        self._end(number)
        with self._lock:
            if self._is_closed:
                raise Closed
            self._graders[number] = _Grader(f"grader {number}", self._start_frame, self._output_bytes[number])
            return self._graders[number]

    def _start_early(self, number: int) -> None:
        """Have a grader import the reward before there is a call for it."""
        if number not in self._graders:
            with contextlib.suppress(OSError, Closed):  # said by the call that finds none
                self._start(number)

    def _drop(self, number: int) -> None:
        """Begin the end of a grader; `_end` waits for it, when the call has its answer."""
        with self._lock:
            grader = self._graders.pop(number)
        grader.hang_up()
        self._ending[number] = grader

    def _end(self, number: int) -> None:
        with self._lock:
            grader = self._graders.pop(number, None)
        for one in (self._ending.pop(number, None), grader):
            if one is not None:
                self._output_bytes[number] -= one.end()


class _Grader:
    """One grading process with its guardian. For one thread, but for `hang_up`."""

    def __init__(self, name: str, start_frame: bytes, output_bytes: int) -> None:
        self.name = name
        self.pid: int | None = None
        """Known when it is ready."""
        self.has_begun = False
        """The last call, which is then its fault if it dies."""
        self._marker = uuid.uuid4().hex
        self._ready_by_s = time.monotonic() + START_S
        self._control, control = socket.socketpair()
        self._work, work = socket.socketpair()
        self._heard, self._facts = bytearray(), bytearray()
        self._code: int | None = None
        self._num_shown = 0
        arguments = [control.fileno(), work.fileno(), os.getpid(), name, CALL_OUTPUT_BYTES, output_bytes]
        self._process = subprocess.Popen(
            [
                multiprocessing.spawn.get_executable(),
                *multiprocessing.util._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                guardian.__file__,
                *map(str, arguments),
            ],
            env={**os.environ, guardian.MARKER: self._marker},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(control.fileno(), work.fileno()),
            start_new_session=True,  # Ctrl-C is the run's to hear
        )
        control.close()
        work.close()
        with contextlib.suppress(OSError):  # it has ended: wait_until_ready raises Died
            guardian.send_frame(self._work, start_frame)

    def wait_until_ready(self) -> None:
        """Until the reward is imported. Died; TimeoutError."""
        if self.pid is None:
            self.pid = self._hear(self._ready_by_s)["ready"]

    def call(self, frame: bytes, timeout_s: float) -> Answer | Fault:
        """One call's answer. Died; TimeoutError."""
        until_s = time.monotonic() + timeout_s
        self.has_begun = False
        try:
            self._control.send(b"c")
            self._work.settimeout(timeout_s)
            guardian.send_frame(self._work, frame)
            self._work.settimeout(None)
        except (BrokenPipeError, ConnectionError):
            pass  # it has ended: so says the guardian
        self._hear(until_s)
        self.has_begun = True
        return as_answer(self._hear(until_s))

    def hang_up(self) -> None:
        """Tell the guardian to kill its grader and to exit. From any thread."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def end(self) -> int:
        """Kill the grader and all that it started; the bytes that were shown of what it printed."""
        self.hang_up()
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code != 0:
            num_left = guardian.end_marked(self._marker)
            if num_left:
                print(f"{self.name}: {num_left} processes that it started cannot be killed", file=sys.stderr)
        with contextlib.suppress(OSError):
            while facts := self._control.recv(_CHUNK_BYTES):
                self._note(facts)
        self._control.close()
        self._work.close()
        return self._num_shown

    def _hear(self, until_s: float) -> dict[str, Any]:
        """The grader's next message."""
        sources = [self._work, self._control]
        while True:
            frame = guardian.take_frame(self._heard)
            if frame is not None:
                try:
                    message = json.loads(frame)
                except ValueError:  # somebody else wrote into its channel
                    raise Died(None) from None
                assert isinstance(message, dict), f"{self.name} said {message!r}"
                return message
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            ready = wait(sources, left_s)
            if self._work in ready:
                if not self._read_work():
                    sources.remove(self._work)
            elif self._control in ready:
                facts = b""
                with contextlib.suppress(ConnectionError):
                    facts = self._control.recv(_CHUNK_BYTES)
                self._note(facts)
                if not facts or self._code is not None:
                    raise Died(self._code)

    def _read_work(self) -> bool:
        """False when nobody can write any more."""
        try:
            chunk = self._work.recv(_CHUNK_BYTES)
        except ConnectionError:
            chunk = b""
        self._heard += chunk
        return bool(chunk)

    def _note(self, facts: bytes) -> None:
        self._facts += facts
        *lines, rest = bytes(self._facts).split(b"\n")
        self._facts = bytearray(rest)
        for line in lines:
            fact = json.loads(line)
            self._code = fact.get("code", self._code)
            self._num_shown = fact.get("shown", self._num_shown)
