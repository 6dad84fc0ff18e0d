"""Ctrl-C and SIGTERM as a wish that the run looks at, not as an interruption."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(slots=True)
class StopFlag:
    """Set by a signal; the warm start and the world look at it."""

    reason: str | None = None


@contextmanager
def stop_on_signals(flag: StopFlag | None = None) -> Iterator[StopFlag]:
    """The first Ctrl-C (or SIGTERM) asks for a checkpoint and an end; the second one ends at once.

    A second signal within a second is still the first: `timeout` and batch systems signal the process and its group.
    The handler only sets a flag: printing in it could break into a print under way.
    """
    flag = flag or StopFlag()
    first_s = 0.0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if flag.reason is None:
            flag.reason, first_s = "interrupted", time.monotonic()
        elif time.monotonic() - first_s > 1:
            raise KeyboardInterrupt

    previous: dict[int, Callable[..., Any] | int | None] = {}
    for wanted in (signal.SIGINT, signal.SIGTERM):
        try:
            previous[wanted] = signal.signal(wanted, on_signal)
        except ValueError:  # not in the main thread: the host program owns the signals
            break
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
