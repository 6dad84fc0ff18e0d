"""Questions to the simulator: how systems compare on the same GPUs and workload, each with its best split. Pure.

Every system is given the split between generation and training that is best for it, found by search: a comparison in
which one has too few trainers says nothing. With too few trainers steps wait for training, with too many for
generation; in between the longest rollouts decide and step times go up and down a little, so a few splits all over are
tried first, and then those beside the best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from slipstream.simulate.outcome import Outcome, least_steps
from slipstream.simulate.system import Costs, System
from slipstream.simulate.workloads import SimulatedStep
from slipstream.simulate.world import simulate

COARSE, FINE = 8, 64
"""Splits that are tried at first, and how finely in the end, as a part of the workers."""
SEARCH_TURNS = 2
"""Of steady steps, simulated for each split that is tried."""


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    train_gpus: int
    """0 if all GPUs do both."""
    outcome: Outcome

    @property
    def step_s(self) -> float:
        return self.outcome.step_s

    def as_dict(self) -> dict[str, Any]:
        return {
            "system": self.name,
            "step_s": self.step_s,
            "train_gpus": self.train_gpus,
            "gpu_s": self.outcome.gpu_s,
            "idle_share": self.outcome.idle_share,
            "lent_share": self.outcome.lent_share,
            "moved": self.outcome.num_moved,
            "workers": self.outcome.steps[-1].num_workers,
            **self.outcome.forecast_metrics(),
        }


def best_result(name: str, system: System, costs: Costs, steps: Sequence[SimulatedStep], num_gpus: int) -> Result:
    """With the split that is best for it."""
    if system.colocated:
        return Result(name, 0, simulate(system, costs, steps, num_gpus=num_gpus))
    unit = costs.gpus_a_worker
    most_workers = (num_gpus - 1) // unit
    if most_workers < 1:
        raise ValueError(
            f"{num_gpus} GPUs are too few for a worker of {unit} and a trainer of its own: give {unit + 1} or more"
        )

    @cache
    def step_s(num_workers: int) -> float:
        few = steps[: least_steps(system.rules.staleness, SEARCH_TURNS)]
        return simulate(system, costs, few, num_gpus=num_gpus, train_gpus=num_gpus - num_workers * unit).step_s

    spacing = max(1, most_workers // COARSE)
    tried = {*range(spacing, most_workers + 1, spacing), most_workers}
    while True:
        num_workers = min(tried, key=step_s)
        if spacing <= max(1, most_workers // FINE):
            break
        spacing = -(-spacing // 2)
        tried |= {min(max(1, num_workers + shift), most_workers) for shift in (-spacing, spacing)}
    train_gpus = num_gpus - num_workers * unit
    return Result(name, train_gpus, simulate(system, costs, steps, num_gpus=num_gpus, train_gpus=train_gpus))


def renting(
    fixed: Result, system: System, costs: Costs, steps: Sequence[SimulatedStep], num_gpus: int, most_gpus: int
) -> Result:
    """The same from the same start, with workers that are rented and given back as steps need, up to `most_gpus`."""
    most_workers = (most_gpus - fixed.train_gpus) // costs.gpus_a_worker
    outcome = simulate(system, costs, steps, num_gpus=num_gpus, train_gpus=fixed.train_gpus, most_workers=most_workers)
    return Result(f"{fixed.name}, renting", fixed.train_gpus, outcome)


def compare(
    systems: Mapping[str, System],
    costs: Costs,
    steps: Sequence[SimulatedStep],
    num_gpus: int,
    on_done: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Each at its best, in the order given."""
    results = []
    for name, system in systems.items():
        results.append(best_result(name, system, costs, steps, num_gpus))
        on_done(results[-1])
    return results
