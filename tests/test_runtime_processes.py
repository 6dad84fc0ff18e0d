"""Links to processes that die or hang at bad moments: nobody else is held up, and nothing they said is lost."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from slipstream.runtime.processes import Doorbell, Link, Pipe

LIMIT_S = 60.0


def say_half(pipe: Pipe, ends: bool) -> None:
    """A whole message, and the beginning of one that is said to be longer."""
    pipe.say("hello")
    os.write(pipe._connection.fileno(), struct.pack("!i", 1000) + b"x")
    if ends:
        os._exit(3)
    time.sleep(LIMIT_S)


def listen(pipe: Pipe) -> None:
    while True:
        for message in pipe.hear(LIMIT_S):
            pipe.say(message)


def heard(link: Link, bell: Doorbell) -> list[object]:
    """The first that it says."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        bell.wait(1.0)
        messages = link.receive()
        if messages:
            return messages
    raise AssertionError("it says nothing")


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_that_dies_or_hangs_within_a_message_holds_up_nobody(tmp_path: Path, ends: bool) -> None:
    bell = Doorbell()
    link = Link("half", tmp_path / "half.log", 1, say_half, ends, bell=bell)
    assert heard(link, bell) == ["hello"]
    began_s = time.monotonic()
    assert link.receive() == [] and time.monotonic() - began_s < 5, "reading what is not there yet does not wait"
    if not ends:
        link.kill()
    until_s = time.monotonic() + LIMIT_S
    while not link.is_gone:
        assert time.monotonic() < until_s
        bell.wait(0.1)
    assert link.receive() == []
    assert ("ended with 3" if ends else "SIGKILL") in link.how_it_ended()
    link.close()


def test_signals_of_a_batch_system_are_for_the_run_and_a_closed_link_ends_the_process(tmp_path: Path) -> None:
    bell = Doorbell()
    link = Link("echo", tmp_path / "echo.log", 1, listen, bell=bell)
    link.send(1)
    assert heard(link, bell) == [1]
    os.kill(link.pid, signal.SIGTERM)
    link.send(2)
    assert heard(link, bell) == [2], "it goes on: the run will tell it what to do"
    link.close()
    assert link.is_gone and "ended with 0" in link.how_it_ended()


def test_of_many_who_ask_how_it_ended_each_is_told(tmp_path: Path) -> None:
    """Whoever closes a link and the thread that reads from it see the end at the same moment."""
    bell = Doorbell()
    for attempt in range(8):
        link = Link("echo", tmp_path / f"echo-{attempt}.log", 1, listen, bell=bell)
        link.send(attempt)
        assert heard(link, bell) == [attempt]
        link.close()
        assert "ended with 0" in link.how_it_ended()


def test_a_process_whose_connection_is_lost_ends_and_is_told_of(tmp_path: Path) -> None:
    bell = Doorbell()
    link = Link("echo", tmp_path / "echo.log", 1, listen, bell=bell)
    link.send(1)
    assert heard(link, bell) == [1]
    socket.socket(fileno=os.dup(link._connection.fileno())).shutdown(socket.SHUT_RDWR)
    until_s = time.monotonic() + LIMIT_S
    while not link.is_gone:
        assert time.monotonic() < until_s
        bell.wait(0.1)
    link.close()
    words = link.how_it_ended()
    assert "lost its connection to the run, and ended. Its log: " in words and "the pipe is closed" in words


def test_what_cannot_travel_is_told(tmp_path: Path) -> None:
    bell = Doorbell()
    link = Link("echo", tmp_path / "echo.log", 1, listen, bell=bell)
    link.send(lambda: 1)
    with pytest.raises(Exception, match=r"pickle|lambda"):
        heard(link, bell)
    link.close()


def tell_threads(pipe: Pipe) -> None:
    import numba
    import torch

    pipe.say((torch.get_num_threads(), numba.get_num_threads()))
    listen(pipe)


def test_a_process_has_the_threads_it_was_given_for_torch_and_for_the_engines_own_kernels(tmp_path: Path) -> None:
    bell = Doorbell()
    link = Link("threads", tmp_path / "threads.log", 1, tell_threads, bell=bell)
    assert heard(link, bell) == [(1, 1)]
    link.close()
