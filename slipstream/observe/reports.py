"""A run's report and trace while it goes on: written at checkpoints, beside the run, and once more when it ends.

They take some seconds and memory of their own: so a process of its own writes them, not more often than REFRESH_S, and
the run neither waits nor grows.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from slipstream.observe.report import write_report
from slipstream.observe.timeline import write_trace

REFRESH_S = 30.0


class Reports:
    def __init__(self, run_dir: Path, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir, self._say, self._clock = run_dir, say, clock
        self._writer: subprocess.Popen[str] | None = None
        self._refreshed_s = clock()
        self._is_stale = False

    def refresh(self) -> None:
        """There is a new checkpoint. Does not wait."""
        self._is_stale = True
        is_writing = self._writer is not None and self._writer.poll() is None
        if is_writing or self._clock() - self._refreshed_s < REFRESH_S:
            return
        self._reap()
        command = [sys.executable, "-m", "slipstream.observe.reports", str(self._run_dir)]
        self._writer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._refreshed_s, self._is_stale = self._clock(), False

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The last report; a disk that is full costs it, and hides nothing else that went wrong."""
        self._reap()
        if self._is_stale:
            try:
                write_both(self._run_dir)
            except OSError as fault:
                self._say(f"the report could not be written: {fault}")

    def _reap(self) -> None:
        """Wait for the writer, and say what went wrong with it."""
        if self._writer is None:
            return
        _, words = self._writer.communicate()
        if self._writer.returncode:
            last = words.strip().splitlines()[-1:] or [f"its process ended with {self._writer.returncode}"]
            self._say(f"the report could not be written: {last[0]}")
            self._is_stale = True
        self._writer = None


def write_both(run_dir: Path) -> None:
    write_report(run_dir)
    write_trace(run_dir)


if __name__ == "__main__":
    write_both(Path(sys.argv[1]))
