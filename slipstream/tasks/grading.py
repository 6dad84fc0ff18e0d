"""Grading in other processes, with a wall-clock limit on every call.

Owns the worker processes and the translation of what happens to them into Scored or Unscored. Invariants:
- a fault (raised, timeout, not_a_number, died, no_score) becomes Unscored, never a number, and hits only the samples of
  its call: one call is one reward function on one group;
- a call on several samples that raised or died is repeated once for each sample alone, so that one bad sample does not
  take its siblings (not after a timeout, which would multiply the wait);
- workers import `slipstream.tasks` and the user's reward only; imports do not count against the time limit;
- no worker outlives its parent, and its subprocesses are killed with it (not those of one that died by itself or was
  stuck in C code: these are the reward author's business).
Workers are spawned, not forked, for the parent has torch threads: each runs the parent's main script up to its
`if __name__ == "__main__"`, so entry points import torch late.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import multiprocessing
import multiprocessing.spawn
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as CallTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pebble import ProcessExpired, ProcessPool

from slipstream.config import Reward
from slipstream.tasks import verifiers
from slipstream.tasks.rewards import RewardCall, Sample, check_rewards, portable, resolve_reward, reward_names
from slipstream.types import Problem, Rollout, Scored, Unscored

Kind = Literal["raised", "timeout", "not_a_number", "died", "no_score"]
MAX_STARTS = 3
"""Times a call is handed to a pool; a pool that broke under it this often means that the workers cannot live."""
LOOK_S = 0.25
"""While waiting, look this often whether the pool itself broke."""
GRACE_S = 30.0
"""A worker ends itself when a call is this much past its limit: then nobody is left who would kill it."""
MEMORY_BYTES = 4 * 2**30
"""What a worker may take on top of its imports. Model output reaches sympy, where a few characters (9^9^9^9) ask for
any amount; without a limit the machine's OOM killer might choose the trainer."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    detail: str


Outcome = float | None | Fault


class TooManyFaults(RuntimeError):
    """More samples could not be scored than the recipe allows."""


def check_faults(results: Sequence[Scored | Unscored], max_share: float) -> None:
    """Raise TooManyFaults if more than `max_share` of the samples are unscored."""
    faults = [result for result in results if isinstance(result, Unscored)]
    if not faults or len(faults) <= max_share * len(results):
        return
    kinds = {kind: sum(fault.kind == kind for fault in faults) for kind in dict.fromkeys(f.kind for f in faults)}
    raise TooManyFaults(
        f"{len(faults)} of {len(results)} samples ({len(faults) / len(results):.0%}) could not be scored, "
        f"reward.max_fault_share allows {max_share:.0%}: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        + f". The first ({faults[0].kind}): {faults[0].detail}"
    )


@dataclass(slots=True)
class _Call:
    function: int
    positions: list[int]
    future: Future[list[Outcome] | Fault]
    num_starts: int = 1


@dataclass(slots=True)
class _Group:
    token: Any
    rollouts: list[Rollout]
    samples: list[Sample]
    outcomes: list[list[Outcome]]
    """By function, then by sample."""
    calls: list[_Call] = field(default_factory=list)


class Grader:
    """Scores groups of rollouts in `reward.workers` processes, which start with it.

    `problems`, all that may come, are gone through once and not kept: they are checked against the reward, and what
    they need is imported before any clock runs. A problem reaches a worker with the samples that it is graded for.
    """

    def __init__(self, reward: Reward, problems: Iterable[Problem] = ()) -> None:
        _check_main()
        tasks: set[tuple[str, str]] = set()
        check_rewards(reward, verifiers.noting_tasks(problems, tasks))
        self._reward = reward
        self._names = reward_names(reward)
        self._functions = tuple(portable(spec.function) for spec in reward.functions)
        self._warm = tuple(sorted(tasks)) if "task" in self._functions else ()
        self._groups: list[_Group] = []
        self._closed = False
        self.on_answer: Callable[[], None] | None = None
        """Is called, from another thread, when a call has ended: `poll` may have something."""
        self._pool = self._start_pool()

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_pending(self) -> int:
        """Groups submitted and not yet returned by poll."""
        return len(self._groups)

    def submit(self, token: Any, items: Sequence[tuple[Problem, Rollout, str]]) -> None:
        """Schedule one group; `token` comes back with its results."""
        assert not self._closed, "submit to a closed grader"
        samples = [Sample(problem, text, rollout.token_ids) for problem, rollout, text in items]
        outcomes: list[list[Outcome]] = [[None] * len(samples) for _ in self._functions]
        group = _Group(token, [rollout for _, rollout, _ in items], samples, outcomes)
        self._groups.append(group)
        self._revive()
        for function in range(len(self._functions) if samples else 0):
            self._start_call(group, function, list(range(len(samples))))

    def poll(self, wait_s: float = 0) -> list[tuple[Any, list[Scored | Unscored]]]:
        """Groups whose grading has ended, in the order of completion (those of one poll in the order of submission).

        Returns at once with what there is, or waits up to `wait_s` for the first. Results keep the order of the items.
        """
        until_s = time.monotonic() + wait_s
        while True:
            self._revive()
            for group in self._groups:
                self._collect(group)
            ended = [group for group in self._groups if not group.calls]
            left_s = until_s - time.monotonic()
            if ended or not self._groups or left_s <= 0:
                self._groups = [group for group in self._groups if group.calls]
                return [(group.token, self._results(group)) for group in ended]
            futures = [call.future for group in self._groups for call in group.calls]
            wait(futures, timeout=min(left_s, LOOK_S), return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Kill the workers; groups not yet returned are dropped."""
        self._groups = []
        self._closed = True
        self._pool.stop()
        self._pool.join()

    def _start_pool(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=self._reward.workers,
            initializer=_start_worker,
            initargs=(self._functions, self._warm, self._reward.timeout_s + GRACE_S),
            context=multiprocessing.get_context("spawn"),
        )
        pool.schedule(os.getpid)  # a pool starts its processes with its first call; let them import meanwhile
        return pool

    def _schedule(self, group: _Group, function: int, positions: list[int]) -> Future[list[Outcome] | Fault]:
        samples = [group.samples[position] for position in positions]
        future: Future[list[Outcome] | Fault]
        try:
            future = self._pool.schedule(_grade, args=(function, samples), timeout=self._reward.timeout_s)
        except RuntimeError as error:  # the pool broke since we looked; _revive will find this call
            future = Future()
            future.set_exception(BrokenProcessPool(str(error)))
        if self.on_answer is not None:
            ring = self.on_answer
            future.add_done_callback(lambda _: ring())
        return future

    def _start_call(self, group: _Group, function: int, positions: list[int]) -> None:
        group.calls.append(_Call(function, positions, self._schedule(group, function, positions)))

    def _revive(self) -> None:
        """Replace a broken pool (a worker was killed while idle, or cannot start) and hand its calls to the new one."""
        if self._closed or self._pool.active:
            return
        with contextlib.suppress(Exception):  # it is broken already; what matters is that its processes are gone
            self._pool.stop()
            self._pool.join()
        self._pool = self._start_pool()
        for group in self._groups:
            for call in group.calls:
                lost = not call.future.done() or isinstance(call.future.exception(), BrokenProcessPool)
                if lost and call.num_starts < MAX_STARTS:
                    call.future = self._schedule(group, call.function, call.positions)
                    call.num_starts += 1
                elif not call.future.done():
                    call.future.set_result(Fault("died", "the grading workers die again and again; see stderr"))

    def _collect(self, group: _Group) -> None:
        for call in [call for call in group.calls if call.future.done()]:
            error = call.future.exception()
            if isinstance(error, BrokenProcessPool) and call.num_starts < MAX_STARTS:
                continue  # the pool broke since we looked: _revive hands this call to the next one
            group.calls.remove(call)
            answer = call.future.result() if error is None else self._fault(error)
            if isinstance(answer, list):
                for position, outcome in zip(call.positions, answer, strict=True):
                    group.outcomes[call.function][position] = outcome
            elif answer.kind in ("raised", "died") and len(call.positions) > 1:
                for position in call.positions:
                    self._start_call(group, call.function, [position])
            else:
                for position in call.positions:
                    group.outcomes[call.function][position] = answer

    def _fault(self, error: BaseException) -> Fault:
        if isinstance(error, CallTimeout):
            return Fault("timeout", f"no answer within reward.timeout_s = {self._reward.timeout_s:g} s; worker killed")
        if isinstance(error, ProcessExpired | BrokenProcessPool):
            return Fault("died", f"the worker process ended during the call: {error!r}, exit code {_code(error)}")
        return Fault("raised", f"the call could not be sent to the worker: {error!r}")

    def _results(self, group: _Group) -> list[Scored | Unscored]:
        results: list[Scored | Unscored] = []
        for position, (rollout, sample) in enumerate(zip(group.rollouts, group.samples, strict=True)):
            outcomes = {name: row[position] for name, row in zip(self._names, group.outcomes, strict=True)}
            parts = {name: value for name, value in outcomes.items() if isinstance(value, float)}
            faults = [(name, value) for name, value in outcomes.items() if isinstance(value, Fault)]
            if not faults and not parts:
                faults = [(", ".join(outcomes), Fault("no_score", "no reward function applies to this sample"))]
            if faults:
                name, fault = faults[0]
                results.append(Unscored(rollout, sample.text, fault.kind, f"{name}: {fault.detail}"))
                continue
            weights = {name: spec.weight for name, spec in zip(self._names, self._reward.functions, strict=True)}
            reward = sum(weights[name] * value for name, value in parts.items())
            results.append(Scored(rollout, sample.text, reward, parts))
        return results


def _code(error: BaseException) -> Any:
    return getattr(error, "exitcode", "unknown")


def _check_main() -> None:
    """Raise ValueError where a spawned worker could not run the parent's main script."""
    try:
        given = multiprocessing.spawn.get_preparation_data("worker")
    except RuntimeError:  # this process is itself a worker, and still runs that script
        raise ValueError(
            "this script starts grading workers, and each of them runs it again. Put what it does into a function and "
            'call that at the end of the file under a guard:\n\nif __name__ == "__main__":\n    main()\n'
        ) from None
    path = given.get("init_main_from_path")
    if path is not None and not Path(path).exists() and Path(path).stem != "ipython":
        raise ValueError(
            f"grading workers run the main script again, and it cannot be read from {path}. Save the script to a file "
            "and run that: python script.py (not python < script.py)"
        )


# From here on: what runs in the worker process.

_calls: list[RewardCall | Fault] = []
_longest_call_s = math.inf


def _start_worker(functions: Sequence[str], warm: Sequence[tuple[str, str]], longest_call_s: float) -> None:
    """Import all that the reward needs. Must not raise: pebble would start workers in a circle."""
    global _longest_call_s
    _longest_call_s = longest_call_s
    os.setsid()
    signal.signal(signal.SIGTERM, _kill_group)  # pebble sends it on a timeout and at the end
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):  # stderr is closed
        os.dup2(2, 1)  # our stdout is for results (`--json`), not for what a reward prints
    sys.stdout = sys.stderr
    real_exit: Callable[[int], Any] = os._exit
    # pebble takes exit code 0 for a worker that has finished and would leave its call waiting for the time limit.
    os._exit = lambda status: real_exit(status or 1)  # type: ignore[assignment]
    for function in functions:
        try:
            call = resolve_reward(function)
            if function == "math_verify":
                verifiers.warm_math()
            if function == "task":
                verifiers.warm_tasks(warm)
            _calls.append(call)
        except Exception:
            _calls.append(Fault("raised", traceback.format_exc()))
    _limit_memory()


def _kill_group(*_: Any) -> None:
    os.killpg(os.getpid(), signal.SIGKILL)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker without a parent"
    parent.join()
    _kill_group()


def _limit_memory() -> None:
    # Not RLIMIT_AS: it counts address space that is only reserved, of which CUDA and threads take a lot.
    with contextlib.suppress(OSError, ValueError):  # no /proc (macOS), or a lower hard limit is there already
        used = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if used:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (int(used[1]) * 1024 + MEMORY_BYTES, hard))


def _grade(function: int, samples: Sequence[Sample]) -> list[Outcome] | Fault:
    # The last resort if the parent is gone: unlike a Python thread, this also ends C code that keeps the GIL (a regex).
    faulthandler.dump_traceback_later(_longest_call_s, exit=True, file=2)
    try:
        return _grade_now(function, samples)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _grade_now(function: int, samples: Sequence[Sample]) -> list[Outcome] | Fault:
    """One call: an outcome for each sample, or one fault for all. Everything returned is made of built-in types."""
    call = _calls[function]
    if isinstance(call, Fault):
        return [call] * len(samples)
    if call.score_one is not None:
        return [_outcome(_guarded(call.score_one, sample)) for sample in samples]
    assert call.score_group is not None
    values = _guarded(call.score_group, samples)
    if isinstance(values, Fault):
        return values
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or tensor
    if not isinstance(values, list | tuple) or len(values) != len(samples):
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        detail = f"returned {got} for {len(samples)} samples; a reward function returns a list, one value per sample"
        return [Fault("raised", detail)] * len(samples)
    return [_outcome(value) for value in values]


def _guarded(score: Callable[[Any], Any], given: Any) -> Any:
    try:
        return score(given)
    except MemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold what filled the memory
        gc.collect()
        advice = f"a call may take {MEMORY_BYTES / 2**30:g} GiB; load what is large when the reward is imported"
        return Fault("raised", f"{traceback.format_exc()}{advice}")
    except BaseException:  # also SystemExit of a reward that calls sys.exit
        return Fault("raised", traceback.format_exc())


def _outcome(value: Any) -> Outcome:
    if value is None or isinstance(value, Fault):
        return value
    if not isinstance(value, str | bytes):
        with contextlib.suppress(Exception):  # whatever cannot be made a float is not a number, said below
            number = float(value)
            if math.isfinite(number):
                return number
    return Fault("not_a_number", f"returned {value!r:.200}; write a finite number, or None where it does not apply")
