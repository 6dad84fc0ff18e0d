"""Steps of generation and training, one after another or overlapping, on so many GPUs: when each was done. Pure.

A rollout of step s is sampled with weights of at least version s - 1 - staleness; version s is there when the training
of step s is done and the weights have arrived. A worker takes up its share of a step as soon as it has ended the one
before and those weights are there; the trainer takes up a step when it has ended the one before, and then sample by
sample as they come (`streams`) or once all are there. So with staleness 0 nobody begins a step before the one before is
trained, and with 1 the generation of a step runs beside the training of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.schedule.dispatch import DISPATCHES, WorkerSpec
from slipstream.schedule.lengths import LengthForecaster
from slipstream.schedule.speeds import SpeedCurve
from slipstream.simulate.worker import run_to_end
from slipstream.simulate.workloads import SimulatedStep


@dataclass(frozen=True, slots=True)
class System:
    """Who does what when."""

    colocated: bool
    """Generation and training take turns on all GPUs; else each has its own."""
    dispatch: str = "round robin"
    streams: bool = False
    staleness: int = 0

    def __post_init__(self) -> None:
        if self.dispatch not in DISPATCHES:
            raise ValueError(f"unknown dispatch '{self.dispatch}'; known: {', '.join(DISPATCHES)}")
        if self.colocated and (self.streams or self.staleness):
            raise ValueError("what shares its GPUs can neither stream nor overlap: leave out streams and staleness")


@dataclass(frozen=True, slots=True)
class Costs:
    curve: SpeedCurve
    """Of one worker."""
    slots: int
    gpus_a_worker: int
    train_gpu_s: float
    """GPU-seconds of training a token."""
    weights_s: float = 0.0
    """From the end of training until all workers have the weights."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    sampled_s: float
    """When its last rollout ended."""
    trained_s: float
    ready_s: float
    """When its weights were on the workers."""
    busy_gpu_s: float
    """Of workers with something to decode, and of the trainer."""


def simulate(
    system: System, costs: Costs, steps: Sequence[SimulatedStep], *, num_gpus: int, train_gpus: int = 0
) -> list[StepTimes]:
    """`train_gpus` of `num_gpus` train, if they are not shared."""
    sampling_gpus = num_gpus if system.colocated else num_gpus - train_gpus
    num_workers = sampling_gpus // costs.gpus_a_worker
    if num_workers < 1 or (not system.colocated and train_gpus < 1):
        raise ValueError(
            f"{num_gpus} GPUs with {train_gpus} for training leave no worker of {costs.gpus_a_worker}: give more GPUs"
            if num_workers < 1
            else "training needs GPUs of its own: give train_gpus"
        )
    trainers = num_gpus if system.colocated else train_gpus
    token_s = costs.train_gpu_s / trainers
    specs = [WorkerSpec(f"w{number}", costs.curve, costs.slots) for number in range(num_workers)]
    dispatch = DISPATCHES[system.dispatch]
    forecaster = LengthForecaster()
    free_s = dict.fromkeys((spec.name for spec in specs), 0.0)
    done: list[StepTimes] = []
    for number, step in enumerate(steps):
        expected = {uid: forecaster.forecast(prompt) for uid, prompt in step.prompts.items()}
        plan = dispatch(expected, specs)
        needed = number - 1 - system.staleness
        weights_at_s = done[needed].ready_s if needed >= 0 else 0.0
        trainer_free_s = done[-1].trained_s if done else 0.0
        arrivals: list[tuple[float, str]] = []
        busy_gpu_s = 0.0
        for spec in specs:
            start_s = max(free_s[spec.name], weights_at_s)
            ends = run_to_end(spec, plan[spec.name], step.lengths, start_s)
            if ends:
                free_s[spec.name] = ends[-1][0]
                busy_gpu_s += (ends[-1][0] - start_s) * costs.gpus_a_worker
            arrivals += ends
        arrivals.sort()
        sampled_s = arrivals[-1][0] if arrivals else weights_at_s
        now_s = trainer_free_s
        for arrived_s, uid in arrivals:
            now_s = max(now_s, arrived_s if system.streams else sampled_s) + step.lengths[uid] * token_s
        busy_gpu_s += sum(step.lengths.values()) * costs.train_gpu_s
        done.append(StepTimes(sampled_s, now_s, now_s + costs.weights_s, busy_gpu_s))
        by_prompt: dict[str, list[float]] = {}
        for uid, length in step.lengths.items():
            by_prompt.setdefault(step.prompts[uid], []).append(length)
        forecaster.learn_step(by_prompt)
    return done


def step_s(times: Sequence[StepTimes], skip: int = 2) -> float:
    """Seconds from one step to the next, past the first `skip`, in which pipelines fill."""
    if len(times) <= skip + 1:
        raise ValueError(f"at least {skip + 2} steps are needed to tell the time of one")
    return (times[-1].trained_s - times[skip].trained_s) / (len(times) - 1 - skip)


def bubble_share(times: Sequence[StepTimes], num_gpus: int) -> float:
    """GPU-time in which nothing was decoded or trained, of all until the last step was trained."""
    return 1 - sum(step.busy_gpu_s for step in times) / (times[-1].trained_s * num_gpus)
