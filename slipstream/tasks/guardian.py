"""The process between a run and one of its graders: whatever the grader starts ends with the grader.

`grader_pool.py` runs this file as a script, with the standard library alone; the guardian forks the grader and runs
none of the user's code. Invariants:
- the grader and all its descendants are killed when the run closes its end of `control`, when the run's process ends
  in any way, and when the grader itself ends; the guardian exits after the last of them;
- on Linux the guardian is a subreaper: a descendant whose parent has ended becomes its child, so double forks and
  sessions of their own do not lead out. Elsewhere descendants are found by parent, process group and environment;
- if the guardian itself is killed, the kernel kills the grader (Linux), and the run kills the rest (`end_marked`);
- it reads all that the grader prints, so that printing never blocks, and passes on a bounded part.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MARKER = "SLIPSTREAM_GRADER"
"""Environment variable that a guardian and its descendants have; its value is different for each grader."""
LOOK_S = 1.0
"""Interval at which a guardian checks that the run's process is alive, beside the end of `control`."""
KILL_S = 10.0
"""Longest time that killing may take: one in uninterruptible sleep, or of another user, cannot be killed."""
FLUSH_S = 1.0
_CHUNK_BYTES = 1 << 16
_WRITE_BYTES = 512
"""Bytes that a pipe takes without blocking whenever it is writable (POSIX)."""
_HEADER = struct.Struct("!Q")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37


def containment() -> str:
    """How the processes that graders start are kept from outliving them on this machine, in words."""
    if _has_subreaper():
        return "each under a guardian (a subreaper): all that one starts ends with it"
    return (
        "each under a guardian that finds what it started by parent, process group and environment (no subreaper "
        "on this system: a system binary in a session of its own may be missed)"
    )


def send_frame(channel: socket.socket, content: bytes) -> None:
    channel.sendall(_HEADER.pack(len(content)) + content)


def receive_frame(channel: socket.socket) -> bytes:
    """The next frame, waiting for it; EOFError when the other end is closed."""
    return _receive(channel, _HEADER.unpack(_receive(channel, _HEADER.size))[0])


def take_frame(buffer: bytearray) -> bytes | None:
    """Remove a whole frame from the head of the buffer; None if there is none yet."""
    if len(buffer) < _HEADER.size:
        return None
    end = _HEADER.size + _HEADER.unpack_from(buffer)[0]
    if len(buffer) < end:
        return None
    frame = bytes(buffer[_HEADER.size : end])
    del buffer[:end]
    return frame


def end_marked(marker: str) -> int:
    """Kill all processes that have this value of MARKER, for a guardian that was killed; how many could not be."""

    def find() -> list[int]:
        return [one.pid for one in _processes(marker) if one.is_marked and one.pid != os.getpid()]

    return _kill_until_none(find)


def _receive(channel: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        chunk = channel.recv(min(num_bytes - len(received), _CHUNK_BYTES))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)


class _Process(NamedTuple):
    pid: int
    parent: int
    group: int
    is_marked: bool


def _processes(marker: str) -> list[_Process]:
    """All processes of this machine but zombies."""
    entry = f"{MARKER}={marker}".encode()
    return _from_proc(entry) if Path("/proc/self/stat").exists() else _from_ps(entry)


def _from_proc(entry: bytes) -> list[_Process]:
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, parent, group = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:3]
        except (OSError, ValueError):  # it has ended
            continue
        try:
            is_marked = entry in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's
            is_marked = False
        if state != b"Z":
            found.append(_Process(int(folder.name), int(parent), int(group), is_marked))
    return found


def _from_ps(entry: bytes) -> list[_Process]:
    show_environment = "-axwwEo" if sys.platform == "darwin" else "axwweo"
    command = ["ps", show_environment, "pid=,ppid=,pgid=,stat=,command="]
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as ps:
        lines = ps.communicate()[0].splitlines()
    for line in lines:
        pid, parent, group, state, *words = line.split()
        if int(pid) != ps.pid and not state.startswith(b"Z"):
            found.append(_Process(int(pid), int(parent), int(group), entry in words))
    return found


def _family(root: int, group: int, marker: str) -> list[int]:
    """Without a subreaper: the descendants of `root`, the members of the grader's group, all that are marked, and the
    descendants of these."""
    processes = _processes(marker)
    found = {root}
    while True:
        more = {
            one.pid
            for one in processes
            if one.pid not in found and (one.parent in found or one.group == group or one.is_marked)
        }
        if not more:
            return sorted(found - {root})
        found |= more


def _children(pid: int) -> list[int]:
    """Direct children, from a file that costs microseconds; where the kernel has none, by reading all processes."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    except (FileNotFoundError, ProcessLookupError):
        if pid == os.getpid():
            return [one.pid for one in _processes("") if one.parent == pid]
    return found


def _descendants(root: int) -> list[int]:
    found = _children(root)
    for pid in found:  # grows while it is read
        found += _children(pid)
    return found


def _kill_until_none(find: Callable[[], list[int]]) -> int:
    """Kill what `find` gives until it gives nothing: a killed process's children may turn up a moment later."""
    until_s = time.monotonic() + KILL_S
    while found := find():
        if time.monotonic() > until_s:
            return len(found)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.001)
    return 0


def _prctl(option: int, argument: Any) -> bool:
    """False where the system does not know it."""
    unused = ctypes.c_ulong(0)
    try:
        return bool(ctypes.CDLL(None).prctl(option, argument, unused, unused, unused) == 0)
    except (OSError, AttributeError):
        return False


def _has_subreaper() -> bool:
    return _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(ctypes.c_int()))


class _Output:
    """What the grader prints, on its way to our stderr: a bounded part of each call, and of all calls.

    Every byte is either shown or counted in a sentence. The boundary between two calls is where the guardian hears of
    the second: on a busy machine calls may share an allowance."""

    def __init__(self, name: str, call_bytes: int, life_bytes: int) -> None:
        self._name, self._call_bytes, self._life_bytes = name, call_bytes, life_bytes
        self._left_of_call = call_bytes
        self._num_untold = 0
        """Bytes that are not shown, and in no sentence yet."""
        self._unsent = bytearray()
        self.num_shown = 0

    @property
    def has_more(self) -> bool:
        return bool(self._unsent)

    def take(self, chunk: bytes) -> None:
        left = self._life_bytes - self.num_shown
        num_bytes = min(len(chunk), self._left_of_call, left)
        self._unsent += chunk[:num_bytes]
        self.num_shown += num_bytes
        self._left_of_call -= num_bytes
        self._num_untold += len(chunk) - num_bytes
        if left and num_bytes == left:
            self._say(f"has printed {self._life_bytes:,} bytes; what it prints from here on is not shown")

    def end_call(self) -> None:
        if self.num_shown < self._life_bytes:
            self._tell()
        self._left_of_call = self._call_bytes

    def end(self) -> None:
        self._tell()

    def _tell(self) -> None:
        if self._num_untold:
            self._say(f"{self._num_untold:,} bytes that it printed are not shown")
        self._num_untold = 0

    def send(self) -> None:
        """Some of what waits; stderr is writable."""
        try:
            del self._unsent[: os.write(2, self._unsent[:_WRITE_BYTES])]
        except OSError:  # nobody reads it
            self._unsent.clear()

    def _say(self, words: str) -> None:
        self._unsent += f"\n[{self._name}: {words}]\n".encode()


class _Guardian:
    def __init__(self, control: int, grader: int, output: int, run_pid: int, marker: str, shown: _Output) -> None:
        self._control, self._grader, self._output = control, grader, output
        self._run_pid, self._marker, self._shown = run_pid, marker, shown
        self._is_subreaper = _has_subreaper()

    def watch(self) -> int:
        """Until the grader or the run has ended; how many processes could not be killed."""
        self._hear_of_children()
        os.set_blocking(self._output, False)
        inputs = [self._control, self._woken, self._output]
        while True:
            readable, writable, _ = select.select(inputs, [2] if self._shown.has_more else [], [], LOOK_S)
            if self._output in readable and not self._read_output():
                inputs.remove(self._output)
            if writable:
                self._shown.send()
            if self._woken in readable:
                os.read(self._woken, _CHUNK_BYTES)
                code = self._reap()
                if code is not None:
                    self._report({"code": code})
                    break
            if self._control in readable:
                if not os.read(self._control, _CHUNK_BYTES):
                    break
                self._read_output()
                self._shown.end_call()
            if os.getppid() != self._run_pid:  # a process that the run forked may still hold `control` open
                break
        num_left = _kill_until_none(self._find)
        self._read_output()
        self._shown.end()
        self._flush()
        self._report({"shown": self._shown.num_shown})
        return num_left

    def _hear_of_children(self) -> None:
        self._woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        os.kill(os.getpid(), signal.SIGCHLD)  # for one that ended before
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # batch systems signal every process: the run decides

    def _find(self) -> list[int]:
        self._reap()
        if self._is_subreaper:
            return _descendants(os.getpid())
        return _family(os.getpid(), self._grader, self._marker)

    def _reap(self) -> int | None:
        """Take note of all children that have ended; the grader's exit code if it is among them."""
        code = None
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._grader:
                    code = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            pass
        return code

    def _read_output(self) -> bool:
        """False when everybody who could print has ended."""
        try:
            for _ in range(64):  # one that never stops printing must not keep us from looking elsewhere
                chunk = os.read(self._output, _CHUNK_BYTES)
                if not chunk:
                    return False
                self._shown.take(chunk)
        except BlockingIOError:
            pass
        return True

    def _flush(self) -> None:
        until_s = time.monotonic() + FLUSH_S
        while self._shown.has_more and (left_s := until_s - time.monotonic()) > 0:
            if select.select([], [2], [], left_s)[1]:
                self._shown.send()

    def _report(self, fact: dict[str, int]) -> None:
        with contextlib.suppress(OSError):  # the run has ended
            os.write(self._control, json.dumps(fact).encode() + b"\n")


def _end_with(parent: int) -> None:
    """The kernel kills this process when its parent ends."""
    if _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) and os.getppid() != parent:
        os._exit(1)


def _be_grader(work: int) -> None:
    """Become what multiprocessing's spawn makes: a process with the run's path, arguments and main module."""
    channel = socket.socket(fileno=work)
    start = pickle.loads(receive_frame(channel))
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # which is how a main module without a guard is recognised
    try:
        multiprocessing.spawn.prepare(start["preparation"])
    finally:
        del process._inheriting
    from slipstream.tasks.grader_process import serve

    serve(channel, start["functions"], start["warm"])


def main(control: int, work: int, run_pid: int, name: str, call_bytes: int, life_bytes: int) -> int:
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    output, printed = os.pipe()
    own_pid = os.getpid()
    grader = os.fork()
    if grader == 0:
        os.setsid()
        _end_with(own_pid)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        for descriptor in (control, output, printed):
            os.close(descriptor)
        _be_grader(work)
        return 0
    os.close(work)
    os.close(printed)
    shown = _Output(name, call_bytes, life_bytes)
    return _Guardian(control, grader, output, run_pid, os.environ[MARKER], shown).watch()


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules must not hide others of the same name
    numbers = [int(word) for word in sys.argv[1:4]]
    num_left = main(numbers[0], numbers[1], numbers[2], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    sys.exit(1 if num_left else 0)
