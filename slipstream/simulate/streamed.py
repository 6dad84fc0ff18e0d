"""How well the simulator foretells a run whose sampling and training have processes of their own. Pure.

Measured, in the first half of the run: how long an engine's steps took by the number of sequences, training by the
tokens with a gradient, grading and new weights, each as it ran beside the others. Known: how long the rollouts of all
steps came to be, and which taught something. Foretold: when each step of the second half is done, so who waits for
whom, what overlaps, and what the tail costs. No time of a step is used.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from slipstream.observe.store import RunStore
from slipstream.schedule.rules import MODES
from slipstream.schedule.speeds import curve_of_paces, sum_paces
from slipstream.simulate.against import DRAFTED, EVALUATION, Recorded, read_config, read_recorded
from slipstream.simulate.system import Costs, System
from slipstream.simulate.world import simulate

WEIGHTS = "timing_s/update_weights"


@dataclass(frozen=True, slots=True)
class Foretold:
    num_steps: int
    """In the second half."""
    measured_s: float
    """From the end of one step's training to the end of the next, on average over these."""
    foretold_s: float
    costs: Costs
    """As measured in the first half."""

    @property
    def error(self) -> float:
        return self.foretold_s / self.measured_s - 1


def foretell_streamed(run: Path) -> Foretold:
    """ValueError if the run has something that is not foretold."""
    recorded, config = read_recorded(run), read_config(run)
    if recorded.mode not in MODES:
        raise ValueError(f"{run} sampled and trained in turns (mode={recorded.mode})")
    if any(recorded.metrics.get(DRAFTED, {}).values()) or any(recorded.metrics.get(EVALUATION, {}).values()):
        raise ValueError(
            f"{run} has drafts or evaluations, which are not foretold here: give a run with draft.source=off and "
            "eval.every=0, without tasks.eval"
        )
    with RunStore(run, read_only=True) as store:
        trained_s = {int(event.payload["step"]): event.at_s for event in store.events("StepTrained")}
        num_changes = len(store.events("WorkerLeft")) + len(store.events("WorkersWanted"))
    if num_changes or sorted(trained_s) != sorted(recorded.rollouts):
        raise ValueError(f"workers of {run} came and went, or it was resumed: give one that was left alone")
    half = recorded.steps[: len(recorded.steps) // 2]
    costs = measured_costs(run, recorded, half)
    steps = [recorded.rollouts[step] for step in sorted(recorded.rollouts)]
    system = System(MODES[recorded.mode], streams=True, in_order=config.train.deterministic)
    outcome = simulate(system, costs, steps, num_gpus=config.rollout.workers + 1, train_gpus=1)
    first, last = half[-1], recorded.steps[-1]
    return Foretold(
        num_steps=last - first,
        measured_s=(trained_s[last] - trained_s[first]) / (last - first),
        foretold_s=(outcome.steps[last - 1].trained_s - outcome.steps[first - 1].trained_s) / (last - first),
        costs=costs,
    )


def measured_costs(run: Path, recorded: Recorded, steps: list[int]) -> Costs:
    """What the stages of these steps took, as they ran beside each other."""
    with RunStore(run, read_only=True) as store:
        paced = [event.payload for event in store.events("WorkersPaced") if event.payload["step"] in steps]
    if not paced:
        raise ValueError(f"{run} has not recorded how fast its workers were: it is of an older version")
    paces = sum_paces(tuple((int(a), int(b), float(c)) for a, b, c in one["paces"]) for one in paced)
    weights_s = statistics.fmean(recorded.metrics[WEIGHTS][step] for step in steps)
    return recorded.costs(curve_of_paces(paces), recorded.slots, weights_s, steps)
