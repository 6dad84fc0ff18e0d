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

from slipstream.config import Config, load_config
from slipstream.observe.store import RunStore
from slipstream.schedule.dispatch import WorkerSpec
from slipstream.schedule.speeds import SpeedCurve
from slipstream.simulate.system import Costs
from slipstream.simulate.worker import run_to_end
from slipstream.simulate.workloads import SimulatedStep

GENERATION, TRAINING, WHOLE = "timing_s/gen", "timing_s/update_actor", "timing_s/step"
GRADING = "timing_s/reward"
"""From the last rollout to its grades, where nothing else was to be done."""
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


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run's store tells of its steps, without the first, which prepares the others."""

    slots: int
    mode: str
    micro_batch_tokens: int
    metrics: Mapping[str, Mapping[int, float]]
    steps: list[int]
    rollouts: dict[int, SimulatedStep]
    teaching: dict[int, float]
    """Tokens with a gradient."""
    rest: dict[int, float]
    """Seconds of a step that are neither generation nor training nor evaluation."""

    def decoding(self, steps: Sequence[int]) -> tuple[float, float]:
        """Seconds of a decoding step, and more for each of its sequences, by these steps of the run."""
        return _fit({step: self._decoding(step) for step in steps}, self.metrics[GENERATION])

    def training(self, steps: Sequence[int]) -> tuple[float, float]:
        """Seconds of training, and more for each token with a gradient."""
        return _fit({step: (1.0, self.teaching[step]) for step in steps}, self.metrics[TRAINING])

    def gen_s(self, step: int, costs: tuple[float, float]) -> float:
        return sum(cost * part for cost, part in zip(costs, self._decoding(step), strict=True))

    def train_s(self, step: int, costs: tuple[float, float]) -> float:
        return costs[0] + costs[1] * self.teaching[step]

    def costs(self, curve: SpeedCurve, slots: int, weights_s: float, steps: Sequence[int]) -> Costs:
        """Of devices that train as this run's did in these steps, and decode so."""
        update_s, token_s = self.training(steps)
        graded = [self.metrics.get(GRADING, {}).get(step, 0.0) for step in steps]
        return Costs(
            curve,
            slots,
            gpus_a_worker=1,
            train_gpu_s=token_s,
            weights_s=weights_s,
            update_s=update_s,
            micro_batch_tokens=float(self.micro_batch_tokens),
            grading_s=statistics.fmean(graded),
        )

    def _decoding(self, step: int) -> tuple[float, float]:
        lengths = list(self.rollouts[step].lengths.values())
        return float(num_steps(lengths, self.slots)), sum(lengths)


def read_config(run: Path) -> Config:
    """ValueError if it is no run's folder."""
    if not (run / "config.yaml").exists():
        raise ValueError(f"{run} is no run's folder: it has no config.yaml. Give one that `slipstream train` wrote")
    return load_config(run / "config.yaml")


def read_recorded(run: Path, newest: tuple[int, int] | None = None) -> Recorded:
    """ValueError if it is no run's folder, or has too few steps. `newest`: the most steps and, as long as enough
    steps are left to say something, the most rollouts to read."""
    config = read_config(run)
    with RunStore(run, read_only=True) as store:
        first_step = 0 if newest is None else _first_of(store, *newest)
        metrics = store.metrics_by_name(first_step)
        found = sorted(
            store.rollout_facts(first_step=first_step),
            key=lambda one: (one.step, [*map(_number, one.uid.split("/"))]),
        )
    rollouts: dict[int, SimulatedStep] = {}
    rewards: dict[tuple[int, str], set[float | None]] = {}
    for one in found:
        step = rollouts.setdefault(one.step, SimulatedStep({}, {}))
        step.lengths[one.uid], step.prompts[one.uid] = float(max(1, one.length)), one.prompt_key
        rewards.setdefault((one.step, one.group), set()).add(one.reward)
    teaching = dict.fromkeys(rollouts, 0.0)
    for one in found:
        # The trainer leaves out what has no gradient, unless a penalty keeps it near another model.
        teaches = len(rewards[one.step, one.group]) > 1 or config.algorithm.kl_coef > 0
        rollouts[one.step].trained[one.uid] = float(one.length) if teaches else 0.0
        teaching[one.step] += one.length if teaches else 0.0
    timed = (metrics.get(name, {}) for name in (GENERATION, TRAINING, WHOLE))
    steps = sorted(set(rollouts).intersection(*timed))[1:]
    if len(steps) < LEAST_STEPS:
        raise ValueError(f"{run} has {len(steps)} steps to compare, beside its first: {LEAST_STEPS} are needed")
    rest = {
        step: metrics[WHOLE][step]
        - metrics.get(EVALUATION, {}).get(step, 0.0)
        - metrics[GENERATION][step]
        - metrics[TRAINING][step]
        for step in steps
    }
    slots, packed = config.engine.max_sequences, config.train.micro_batch_tokens
    return Recorded(slots, config.mode, packed, metrics, steps, rollouts, teaching, rest)


def _first_of(store: RunStore, most_steps: int, most_rollouts: int) -> int:
    """The first of the newest steps to read. The first step that is read is left out of what is compared."""
    first, num_rollouts = 0, 0
    for number, step in enumerate(reversed(store.newest_steps(most_steps + 1)), 1):
        num_rollouts += store.num_rollouts(step)
        if number > LEAST_STEPS + 1 and num_rollouts > most_rollouts:
            break
        first = step
    return first


def one_after_the_other(run: Path, newest: tuple[int, int] | None = None) -> Recorded:
    """A run whose phases are; ValueError if it has others. `newest`: as in `read_recorded`."""
    recorded = read_recorded(run, newest)
    if recorded.mode != "colocated":
        raise ValueError(
            f"{run} sampled and trained at the same time (mode={recorded.mode}): give one of mode=colocated"
        )
    return recorded


def foretell(run: Path) -> tuple[list[Phase], int]:
    """Of the second half of a run, phase by phase, and how many steps that is; ValueError if it has too few."""
    recorded = one_after_the_other(run)
    metrics, steps, rest = recorded.metrics, recorded.steps, recorded.rest
    if any(metrics.get(DRAFTED, {}).values()):
        raise ValueError(
            f"{run} sampled with drafts, whose tokens a step are not foretold: give a run with draft.source=off"
        )
    known, told = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    decoding, training = recorded.decoding(known), recorded.training(known)
    usual_s = statistics.fmean(rest[step] for step in known)
    gen_s, train_s = metrics[GENERATION], metrics[TRAINING]
    whole = {step: gen_s[step] + train_s[step] + rest[step] for step in steps}

    def whole_s(step: int) -> float:
        return recorded.gen_s(step, decoding) + recorded.train_s(step, training) + usual_s

    phases = [
        _compared("rollout", gen_s, lambda step: recorded.gen_s(step, decoding), told),
        _compared("training", train_s, lambda step: recorded.train_s(step, training), told),
        _compared("the rest", rest, lambda step: usual_s, told),
        _compared("step", whole, whole_s, told),
    ]
    return phases, len(told)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1


def num_steps(lengths: Sequence[float], slots: int) -> int:
    """Decoding steps until all have ended, if they are taken up in this order as slots are free."""
    by_uid = {str(place): length for place, length in enumerate(lengths)}
    return round(run_to_end(WorkerSpec("only", _ONE_S, slots), list(by_uid), by_uid)[-1][0])


def _fit(parts: Mapping[int, tuple[float, float]], seconds: Mapping[int, float]) -> tuple[float, float]:
    """Seconds of a unit of each part, by least squares; neither takes negative time."""
    products = [(x * x, x * y, y * y, x * seconds[step], y * seconds[step]) for step, (x, y) in parts.items()]
    xx, xy, yy, xt, yt = (sum(column) for column in zip(*products, strict=True))
    determinant = xx * yy - xy * xy
    first = second = -1.0
    if determinant > 1e-9 * xx * yy:
        first, second = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
    if second < 0 or not yy:
        first, second = xt / xx, 0.0
    if first < 0:
        first, second = 0.0, yt / yy
    return first, second


def _compared(
    name: str, measured: Mapping[int, float], foretold: Callable[[int], float], steps: Sequence[int]
) -> Phase:
    error = statistics.fmean(abs(foretold(step) - measured[step]) for step in steps)
    mean_s = statistics.fmean(measured[step] for step in steps)
    return Phase(name, mean_s, statistics.fmean(foretold(step) for step in steps), error / mean_s if mean_s else 0.0)
