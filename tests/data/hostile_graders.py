"""Reward functions that start processes, print, and end in the middle of something, for tests of slipstream.tasks."""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path


def starts_processes(completions: list[str]) -> list[float]:
    """Each completion is `WORD THEN`: start processes that have WORD in their command line, then do THEN."""
    for completion in completions:
        word, then = completion.split()
        child = [sys.executable, "-c", "import time; time.sleep(7771)", word]
        subprocess.Popen(child)
        subprocess.Popen(child, start_new_session=True)
        if os.fork() == 0:  # a daemon: two forks, a session of its own
            os.setsid()
            if os.fork() == 0:
                os.execv(child[0], child)
            os._exit(0)
        # a shell that leaves two of its own behind, and one that leaves a tree
        subprocess.run(["sh", "-c", '"$@" & "$@" &', "sh", *child])
        subprocess.Popen(["sh", "-c", 'sh -c \'"$@" & wait\' sh "$@" & wait', "sh", *child], start_new_session=True)
        time.sleep(0.2)
        Path(f"{word}.begun").write_text(str(os.getppid()))
        if then == "hang":
            time.sleep(60)
        if then == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(completions)


def never_stands_still(completions: list[str]) -> list[float]:
    """Starts a process that goes on in a new child and ends, again and again, and leaves a byte in a file each time."""
    path = completions[0]
    code = (
        "import os, sys\n"
        "file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_APPEND)\n"
        "for _ in range(20_000):\n"  # it ends some day, also if nobody catches it
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    os.setsid()\n"
        "    os.write(file, b'.')\n"
    )
    subprocess.run([sys.executable, "-c", code, path])
    return [1.0]


def prints(completions: list[str]) -> list[float]:
    """As many bytes as the completion says, in Python and from a child."""
    for completion in completions:
        num_bytes = int(completion)
        print("p" * (num_bytes // 2))
        os.write(2, b"c" * (num_bytes // 2))
    return [1.0] * len(completions)


def raises_much(completions: list[str]) -> list[float]:
    raise RuntimeError("it begins " + "x" * int(completions[0]) + " and it ends")


def is_killed_after(completions: list[str]) -> list[float]:
    """The completion is a delay in milliseconds: killed that long after the answer has been begun, with a long one."""

    def kill(delay_s: float) -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, args=(float(completions[0]) / 1000,), daemon=True).start()
    raise RuntimeError("x" * 50_000_000)


def is_killed_soon(completions: list[str]) -> list[float]:
    """The same with a short answer."""

    def kill(delay_s: float) -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    if completions[0] != "fine":
        threading.Thread(target=kill, args=(float(completions[0]) / 1000,), daemon=True).start()
    return [1.0] * len(completions)


def breaks_its_channel(completions: list[str]) -> list[float]:
    """Writes into its own connection to the run: half an answer, or something else."""
    channels = [one for one in gc.get_objects() if isinstance(one, socket.socket)]
    for channel in channels:
        if completions[0] == "half":
            channel.send(struct.pack("!Q", 1000) + b'{"outcomes": [')
        elif completions[0] == "nonsense":
            channel.send(struct.pack("!Q", 4) + b"\xff\xfe{{")
        elif completions[0] == "closed":
            channel.close()
    if completions[0] == "half":
        os.kill(os.getpid(), signal.SIGKILL)
    if completions[0] == "fork":
        os.fork()
    return [1.0]
