"""How well the simulator foretells a real run: fitted to its first half, it says how long each step of the other took.

A decoding step takes so long and so much more for each sequence; the number of steps of a rollout phase comes from
simulating its batch with the slots the run had, so two numbers are fitted. Training takes so long and so much more for
each token that has a gradient, which those of a group of equal rewards have not. What is left of a step, evaluation
aside, is taken to last as long as it did in the first half. Only runs whose phases follow one another, as on one
machine, can be told so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import load_config
from slipstream.observe.store import RunStore
from slipstream.schedule.dispatch import WorkerSpec
from slipstream.schedule.speeds import SpeedCurve
from slipstream.simulate.worker import run_to_end

GENERATION, TRAINING, WHOLE = "timing_s/gen", "timing_s/update_actor", "timing_s/step"
EVALUATION, DRAFTED = "timing_s/eval", "rollout/spec_drafted"
LEAST_STEPS = 6
_ONE_S = SpeedCurve(((1, 1.0),))


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    measured_s: float
    """A step, on average over those foretold."""
    foretold_s: float
    error: float
    """Of a step's time, on average over the steps, whichever way."""


def foretell(run: Path) -> tuple[list[Phase], int]:
    """Of the second half of a run, phase by phase, and how many steps that is; ValueError if it has too few."""
    if not (run / "config.yaml").exists():
        raise ValueError(f"{run} is no run's folder: it has no config.yaml. Give one that `slipstream train` wrote")
    slots = load_config(run / "config.yaml").engine.max_sequences
    with RunStore(run, read_only=True) as store:
        metrics = store.metrics_by_name()
        rollouts = sorted(store.rollouts(kind="train"), key=lambda one: (one.step, [*map(_number, one.uid.split("/"))]))
    if any(metrics.get(DRAFTED, {}).values()):
        raise ValueError(f"{run} sampled with drafts, whose tokens a step are not foretold: give one without")
    lengths: dict[int, list[float]] = {}
    rewards: dict[tuple[int, str], set[float | None]] = {}
    for rollout in rollouts:
        lengths.setdefault(rollout.step, []).append(float(max(1, rollout.length)))
        rewards.setdefault((rollout.step, rollout.group), set()).add(rollout.reward)
    teaching = dict.fromkeys(lengths, 0.0)
    for rollout in rollouts:
        if len(rewards[rollout.step, rollout.group]) > 1:
            teaching[rollout.step] += rollout.length
    steps = sorted(set(lengths) & set(metrics.get(GENERATION, {})) & set(metrics.get(TRAINING, {})))
    steps = steps[1:]  # the first prepares the others
    if len(steps) < LEAST_STEPS:
        raise ValueError(f"{run} has {len(steps)} steps to compare, beside its first: {LEAST_STEPS} are needed")
    known, told = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    decoding = {step: (float(num_steps(lengths[step], slots)), sum(lengths[step])) for step in steps}
    training = {step: (1.0, teaching[step]) for step in steps}
    generation = _fitted(decoding, metrics[GENERATION], known)
    updating = _fitted(training, metrics[TRAINING], known)
    whole = {step: metrics[WHOLE][step] - metrics.get(EVALUATION, {}).get(step, 0.0) for step in steps}
    rest = {step: whole[step] - metrics[GENERATION][step] - metrics[TRAINING][step] for step in steps}
    usual_s = statistics.fmean(rest[step] for step in known)
    phases = [
        _compared("rollout", metrics[GENERATION], generation, told),
        _compared("training", metrics[TRAINING], updating, told),
        _compared("the rest", rest, lambda step: usual_s, told),
        _compared("step", whole, lambda step: generation(step) + updating(step) + usual_s, told),
    ]
    return phases, len(told)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1


def num_steps(lengths: Sequence[float], slots: int) -> int:
    """Decoding steps until all have ended, if they are taken up in this order as slots are free."""
    by_uid = {str(place): length for place, length in enumerate(lengths)}
    return round(run_to_end(WorkerSpec("only", _ONE_S, slots), list(by_uid), by_uid)[-1][0])


def _fitted(
    parts: Mapping[int, tuple[float, float]], seconds: Mapping[int, float], known: Sequence[int]
) -> Callable[[int], float]:
    """By least squares of two parts, neither of which takes negative time."""
    products = [
        (x * x, x * y, y * y, x * seconds[step], y * seconds[step]) for step in known for x, y in (parts[step],)
    ]
    xx, xy, yy, xt, yt = (sum(column) for column in zip(*products, strict=True))
    determinant = xx * yy - xy * xy
    first = second = -1.0
    if determinant > 1e-9 * xx * yy:
        first, second = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
    if second < 0 or not yy:
        first, second = xt / xx, 0.0
    if first < 0:
        first, second = 0.0, yt / yy
    return lambda step: first * parts[step][0] + second * parts[step][1]


def _compared(
    name: str, measured: Mapping[int, float], foretold: Callable[[int], float], steps: Sequence[int]
) -> Phase:
    error = statistics.fmean(abs(foretold(step) - measured[step]) for step in steps)
    mean_s = statistics.fmean(measured[step] for step in steps)
    return Phase(name, mean_s, statistics.fmean(foretold(step) for step in steps), error / mean_s if mean_s else 0.0)
