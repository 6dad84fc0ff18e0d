"""Grading in other processes, with a wall-clock limit on every call.

Owns groups between their rollouts and their rewards, and the translation of outcomes into Scored or Unscored.
The processes are `grader_pool.py`'s. Invariants:
- a fault (raised, timeout, not_a_number, died, no_score) becomes Unscored, never a number, and hits only the samples of
  its call: one call is one reward function on one group;
- a call on several samples that raised or died is repeated once for each sample alone, so that one bad sample does not
  take its siblings (not after a timeout, which would multiply the wait);
- graders import `slipstream.tasks` and the user's reward only; imports do not count against the time limit;
- no grader outlives this process, and whatever a grader starts is killed with it.
Graders are started as multiprocessing's spawn does it, for the parent has torch threads: each runs the parent's main
script up to its `if __name__ == "__main__"`, so entry points import torch late.
"""

from __future__ import annotations

import multiprocessing.spawn
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.config import Reward
from slipstream.tasks import verifiers
from slipstream.tasks.grader_pool import GraderPool
from slipstream.tasks.grader_process import Answer, Fault, Outcome
from slipstream.tasks.rewards import Sample, TrainerState, check_rewards, portable, reward_names
from slipstream.types import Problem, Rollout, Scored, Unscored


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
    future: Future[Answer | Fault]


@dataclass(slots=True)
class _Group:
    token: Any
    rollouts: list[Rollout]
    samples: list[Sample]
    outcomes: list[list[Outcome]]
    """By function, then by sample."""
    state: TrainerState
    answers: list[list[tuple[Answer, int] | None]]
    """By function, then by sample: the call's answer and the sample's place in it, if it was answered."""
    calls: list[_Call] = field(default_factory=list)


class Grader:
    """Scores groups of rollouts in `reward.workers` processes, which start with it.

    `problems`, all that may come, are gone through once and not kept: they are checked against the reward, and what
    they need is imported before any clock runs. A problem reaches a worker with the samples that it is graded for.
    """

    def __init__(self, reward: Reward, problems: Iterable[Problem] = (), num_steps: int = 0) -> None:
        """`num_steps`: of the run, for functions that take TRL's `trainer_state`."""
        preparation = _preparation()
        tasks: set[tuple[str, str]] = set()
        check_rewards(reward, verifiers.noting_tasks(problems, tasks))
        self._reward, self._num_steps = reward, num_steps
        self._names = reward_names(reward)
        functions = tuple(portable(spec.function) for spec in reward.functions)
        warm = tuple(sorted(tasks)) if "task" in functions else ()
        self._groups: list[_Group] = []
        self._closed = False
        self.on_answer: Callable[[], None] | None = None
        """Is called, from another thread, when a call has ended: `poll` may have something."""
        start = {"preparation": preparation, "functions": functions, "warm": warm}
        self._pool = GraderPool(reward.workers, start, reward.timeout_s, self._ring)

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the grading processes that have begun a call and live."""
        return self._pool.pids

    @property
    def num_pending(self) -> int:
        """Groups submitted and not yet returned by poll."""
        return len(self._groups)

    def submit(self, token: Any, items: Sequence[tuple[Problem, Rollout, str]], num_trained: int = 0) -> None:
        """Schedule one group; `token` comes back with its results. `num_trained`: steps of training before the one
        that it is for."""
        assert not self._closed, "submit to a closed grader"
        samples = [Sample(problem, text, rollout.token_ids) for problem, rollout, text in items]
        outcomes: list[list[Outcome]] = [[None] * len(samples) for _ in self._names]
        answers: list[list[tuple[Answer, int] | None]] = [[None] * len(samples) for _ in self._names]
        state = TrainerState(num_trained, self._num_steps)
        group = _Group(token, [rollout for _, rollout, _ in items], samples, outcomes, state, answers)
        self._groups.append(group)
        for function in range(len(self._names) if samples else 0):
            self._start_call(group, function, list(range(len(samples))))

    def poll(self, wait_s: float = 0) -> list[tuple[Any, list[Scored | Unscored]]]:
        """Groups whose grading has ended, in the order of completion (those of one poll in the order of submission).

        Returns at once with what there is, or waits up to `wait_s` for the first. Results keep the order of the items.
        """
        until_s = time.monotonic() + wait_s
        while True:
            for group in self._groups:
                self._collect(group)
            ended = [group for group in self._groups if not group.calls]
            left_s = until_s - time.monotonic()
            if ended or not self._groups or left_s <= 0:
                self._groups = [group for group in self._groups if group.calls]
                return [(group.token, self._results(group)) for group in ended]
            futures = [call.future for group in self._groups for call in group.calls]
            wait(futures, timeout=left_s, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Kill the graders and all that they started; groups not yet returned are dropped."""
        self._groups = []
        self._closed = True
        self._pool.close()

    def _ring(self) -> None:
        if self.on_answer is not None:
            self.on_answer()

    def _start_call(self, group: _Group, function: int, positions: list[int]) -> None:
        samples = [group.samples[position] for position in positions]
        group.calls.append(_Call(function, positions, self._pool.schedule(function, samples, group.state)))

    def _collect(self, group: _Group) -> None:
        for call in [call for call in group.calls if call.future.done()]:
            group.calls.remove(call)
            answer = call.future.result()
            if isinstance(answer, Answer):
                for place, (position, outcome) in enumerate(zip(call.positions, answer.outcomes, strict=True)):
                    group.outcomes[call.function][position] = outcome
                    group.answers[call.function][position] = answer, place
            elif answer.kind in ("raised", "died") and len(call.positions) > 1:
                for position in call.positions:
                    self._start_call(group, call.function, [position])
            else:
                for position in call.positions:
                    group.outcomes[call.function][position] = answer

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
                detail = f"{name}: {fault.detail}"
                results.append(Unscored(rollout, sample.text, fault.kind, detail, *self._logged(group, position)))
                continue
            weights = {name: spec.weight for name, spec in zip(self._names, self._reward.functions, strict=True)}
            reward = sum(weights[name] * value for name, value in parts.items())
            results.append(Scored(rollout, sample.text, reward, parts, *self._logged(group, position)))
        return results

    def _logged(self, group: _Group, position: int) -> tuple[dict[str, float], dict[str, Any]]:
        """(metrics, columns) that functions logged for a sample."""
        metrics: dict[str, float] = {}
        extras: dict[str, Any] = {}
        for name, answers in zip(self._names, group.answers, strict=True):
            if (found := answers[position]) is not None:
                answer, place = found
                metrics |= {f"{name}/{metric}": value for metric, value in answer.metrics.items()}
                for column, values in answer.extras.items():
                    extras[f"{name}/{column}" if column in extras else column] = values[place]
        return metrics, extras


def _preparation() -> dict[str, Any]:
    """How a grader becomes a spawned process of this one; ValueError where it could not run the main script."""
    try:
        given = multiprocessing.spawn.get_preparation_data("grader")
    except RuntimeError:  # this process is itself a grader, and still runs that script
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
    del given["authkey"]  # a grader has nothing to say to this run's multiprocessing, and it cannot be pickled
    return given
