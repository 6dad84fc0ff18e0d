"""A worker process that speaks as `drafter_worker.py` does and computes nothing: it starts in a blink."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from slipstream.runtime.drafter_messages import (
    Average,
    Averaged,
    Failed,
    Here,
    Result,
    Stop,
    Stopped,
    Take,
    Taken,
    Train,
    Trained,
    Work,
)


def fake_worker(connection: Connection, name: str, folder: Path, habits: Mapping[str, str] = {}) -> None:
    """`habits`: what it does about "train" and "average" instead of answering: die, sleep, fail, linger (until it is
    told to stop) or idle (no updates); "die after" gives its answer first."""
    if habits.get("start") == "sleep":
        time.sleep(1000)
    connection.send(Here(newest(folder), 1))
    while True:
        try:
            message = connection.recv()
        except (EOFError, ConnectionError):
            return
        match message:
            case Train():
                answer: object = Trained(message.round, 0 if habits.get("train") == "idle" else message.num_updates)
                behave(connection, habits.get("train", ""), message.round, answer)
            case Average():
                version = newest(folder) + 1
                (folder / f"{version:06d}").mkdir()
                shares = " ".join(f"{path.name}:{updates}" for path, updates in message.shares)
                (folder / f"{version:06d}" / "about").write_text(f"{name} averaged {shares}")
                behave(connection, habits.get("average", ""), message.round, Averaged(message.round, version))
            case Stop():
                connection.send(Stopped(0))
            case Take():
                connection.send(Taken(message.version))
            case Work():
                connection.send(Result((name, message.work)))


def newest(folder: Path) -> int:
    return max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0)


def behave(connection: Connection, habit: str, number: int, answer: object) -> None:
    if habit == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif habit == "sleep":
        time.sleep(1000)
    elif habit == "fail":
        connection.send(Failed(number, "the device is out of memory"))
    elif habit == "linger":
        assert isinstance(connection.recv(), Stop)
        connection.send(Stopped(3))
    else:
        connection.send(answer)
        if habit == "die after":
            os.kill(os.getpid(), signal.SIGKILL)
