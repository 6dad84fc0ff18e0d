"""What a person sees while a run goes on: bars on a terminal, one plain line a step everywhere.

Owns the wording of those lines and the estimate of the time left; reads metrics, computes none.
Invariants: in a pipe (or a dumb terminal) there are no bars and no control codes, a line is never wrapped, and every
line is flushed; a metric that is missing leaves its words out; `quiet` prints nothing at all. A picture is plain text
too; where the terminal or the pipe cannot show its characters it is drawn in ASCII.
Time left = median of the last 15 step times x steps to go: one slow evaluation does not move it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

_WINDOW_STEPS = 15
PIPE_COLUMNS = 72
_TERMS_WITHOUT_BRAILLE = ("dumb", "linux")
"""The Linux console has 512 glyphs, and braille is not among them."""


class Advance(Protocol):
    """Report progress: n more units. `more_total` raises the phase's total, where one is known: advance(0,
    more_total=8) when there is more to do than was said. `tokens` adds up to a rate; other facts show their latest
    value."""

    def __call__(self, n: int = 1, *, more_total: int = 0, **facts: float) -> None: ...


class Console:
    def __init__(
        self,
        total_steps: int,
        quiet: bool = False,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._quiet = quiet
        self._file = sys.stdout if file is None else file
        self._clock = clock
        self._step_times_s: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self._last_step_at_s: float | None = None
        self._bars: Progress | None = None
        self._overall: TaskID | None = None
        if not quiet and self._file.isatty():
            rich = RichConsole(file=self._file)
            if not rich.is_dumb_terminal:
                self._bars = _make_bars(rich)

    def start_run(self, lines: Iterable[str]) -> None:
        """Print the head of a run, and start the clock and the bars."""
        for line in lines:
            self._print(line)
        self._last_step_at_s = self._clock()
        if self._bars:
            self._overall = self._bars.add_task("steps", total=self._total_steps, facts="")
            self._bars.start()

    @contextmanager
    def phase(self, name: str, total: int | None) -> Iterator[Advance]:
        """A bar while the phase lasts, also before `start_run`, e.g. phase("rollout", 128); `total` None when it is not
        known. The total may grow: see Advance."""
        if self._bars is None:
            yield _ignore
            return
        bars, started_s = self._bars, self._clock()
        is_first = not bars.live.is_started
        task = bars.add_task(name, total=total, facts="")
        bars.start()
        tokens, units = 0.0, total
        shown: dict[str, float] = {}

        def advance(n: int = 1, *, more_total: int = 0, **facts: float) -> None:
            nonlocal tokens, units
            units = None if units is None else units + more_total
            tokens += facts.pop("tokens", 0.0)
            shown.update(facts)
            words = [f"{key} {value:.3g}" for key, value in shown.items()]
            elapsed_s = self._clock() - started_s
            if tokens and elapsed_s > 0:
                words.insert(0, f"{tokens / elapsed_s:,.0f} tok/s")
            bars.update(task, advance=n, total=units, facts="  ".join(words))

        try:
            yield advance
        finally:
            bars.remove_task(task)
            if is_first:
                bars.stop()

    def step_line(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line for a finished step; `timing_s/step` feeds the estimate, else the time between calls does."""
        now_s = self._clock()
        measured_s = metrics.get("timing_s/step")
        if measured_s is None and self._last_step_at_s is not None:
            measured_s = now_s - self._last_step_at_s
        self._last_step_at_s = now_s
        if measured_s is not None:
            self._step_times_s.append(measured_s)
        left_s = self.time_left_s(step)
        self._print(format_step(step, self._total_steps, metrics, left_s))
        if self._bars and self._overall is not None:
            self._bars.update(self._overall, completed=step, facts=format_overall(metrics, left_s))

    def time_left_s(self, step: int) -> float | None:
        """Estimate after `step` steps; None before the first one is timed."""
        if not self._step_times_s:
            return None
        return statistics.median(self._step_times_s) * max(0, self._total_steps - step)

    def eval_line(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line for an evaluation; only the eval/ names of `metrics` are read."""
        self._print(format_evaluation(step, metrics))

    def note(self, text: str) -> None:
        """A line of its own, e.g. "checkpoint step_10 saved"."""
        self._print(text)

    def picture(self, draw: Callable[..., list[str]]) -> None:
        """Lines of draw(width, ascii_only=...), as wide as the terminal; in a pipe `PIPE_COLUMNS`."""
        if self._quiet:
            return
        is_terminal = self._file.isatty()
        try:
            "⠿●│└─→".encode(getattr(self._file, "encoding", None) or "utf-8")
            ascii_only = is_terminal and os.environ.get("TERM") in _TERMS_WITHOUT_BRAILLE
        except UnicodeEncodeError:
            ascii_only = True
        width = shutil.get_terminal_size().columns if is_terminal else PIPE_COLUMNS
        for line in draw(width, ascii_only=ascii_only):
            self._print(line)

    def close(self) -> None:
        """Take the bars off the terminal; lines may still be printed afterwards."""
        if self._bars:
            self._bars.stop()
            self._bars = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, line: str) -> None:
        if self._quiet:
            return
        if self._bars:
            # No markup: a prompt or an error may hold [brackets] that rich would read as style.
            self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self._file, flush=True)


def format_step(step: int, total_steps: int, metrics: Mapping[str, float], left_s: float | None) -> str:
    """`step 12/80  reward 0.530  len 87 (p99 210)  1,234 tok/s  gen 3.1s  train 2.0s  left 2m10s`.

    tok/s is the speed of generation (rollout/tokens_per_s), or of the whole step where that is not measured.
    """
    width = len(str(total_steps))
    words = [f"step {step:>{width}}/{total_steps}"]
    if "reward/mean" in metrics:
        words.append(f"reward {metrics['reward/mean']:.3f}")
    if metrics.get("reward/unscored"):
        words.append(f"unscored {metrics['reward/unscored']:.0f}")
    if "response_length/mean" in metrics:
        p99 = metrics.get("response_length/p99")
        words.append(f"len {metrics['response_length/mean']:.0f}" + (f" (p99 {p99:.0f})" if p99 is not None else ""))
    speed = metrics.get("rollout/tokens_per_s", metrics.get("perf/throughput"))
    if speed is not None:
        words.append(f"{speed:,.0f} tok/s")
    for label, name in (("gen", "timing_s/gen"), ("train", "timing_s/update_actor")):
        if name in metrics:
            words.append(f"{label} {metrics[name]:.1f}s")
    if left_s is not None and step < total_steps:
        words.append(f"left {format_duration(left_s)}")
    return "  ".join(words)


def format_overall(metrics: Mapping[str, float], left_s: float | None) -> str:
    """Beside the bar of all steps: `reward 0.530  980 tok/s  left 2m10s`; tok/s is of the whole step."""
    words = []
    if "reward/mean" in metrics:
        words.append(f"reward {metrics['reward/mean']:.3f}")
    if "perf/throughput" in metrics:
        words.append(f"{metrics['perf/throughput']:,.0f} tok/s")
    if left_s:
        words.append(f"left {format_duration(left_s)}")
    return "  ".join(words)


def format_evaluation(step: int, metrics: Mapping[str, float]) -> str:
    """`eval at step 10  heldout: avg@4 0.530  pass@4 0.800  len 87`; several sets are joined by " | "."""
    sets: dict[str, list[str]] = {}
    for name, value in metrics.items():
        if not name.startswith("eval/") or "/logged/" in name:
            continue
        set_name, _, measure = name.removeprefix("eval/").rpartition("/")
        words = sets.setdefault(set_name, [])
        if measure.startswith(("avg@", "pass@")):
            words.append(f"{measure} {value:.3f}")
        elif measure == "response_length":
            words.append(f"len {value:.0f}")
        elif measure == "unscored" and value:
            words.append(f"unscored {value:.0f}")
    return f"eval at step {step}  " + " | ".join(f"{name}: {'  '.join(words)}" for name, words in sets.items())


def format_duration(seconds: float) -> str:
    """`8s`, `2m10s`, `3h05m`, `2d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _make_bars(rich: RichConsole) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        console=rich,
        transient=True,
        refresh_per_second=4,  # drawing must not take time from a CPU run
    )


def _ignore(n: int = 1, *, more_total: int = 0, **facts: float) -> None:
    """Progress that nobody is shown."""
