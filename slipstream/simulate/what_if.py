"""What another setting would save: a recorded run's own rollouts, with what its steps took, led otherwise. Pure.

Decoding and training cost what they did on the device of the run (`against.py` fits them to its steps); further devices
are taken to be like it, and drafts to give what they gave.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from slipstream.schedule.rules import MODES, Rules
from slipstream.schedule.speeds import SpeedCurve
from slipstream.simulate.against import one_after_the_other
from slipstream.simulate.system import System
from slipstream.simulate.world import simulate

COLOCATED = System(Rules(), colocated=True)
WORKERS = (1, 2, 4)
LEAST_S = 1e-6
NEWEST = 32, 6_000
"""Steps and rollouts that are simulated at most: eleven settings of these take about two seconds."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    settings: list[Setting]
    first_step: int
    last_step: int
    """Simulated were these steps, and those between them."""


@dataclass(frozen=True, slots=True)
class Setting:
    mode: str
    rollout_devices: int
    """Beside one that trains; in mode colocated the one that does both."""
    step_s: float
    idle_share: float
    """Of the devices' time."""


def what_if(run: Path) -> WhatIf:
    """The newest steps of the run as they would be colocated, and in each mode with a few more devices; ValueError if
    it has too few steps to say."""
    recorded = one_after_the_other(run, NEWEST)
    steps = [recorded.rollouts[step] for step in recorded.steps]
    step_s, sequence_s = recorded.decoding(recorded.steps)
    curve = SpeedCurve(tuple((batch, max(LEAST_S, step_s + batch * sequence_s)) for batch in (1, 2)))
    weights_s = max(0.0, statistics.fmean(recorded.rest[step] for step in recorded.steps))
    costs = recorded.costs(curve, recorded.slots, weights_s, recorded.steps)
    alone = simulate(COLOCATED, costs, steps, num_gpus=1)
    found = [Setting("colocated", 1, alone.step_s, alone.idle_share)]
    for mode, rules in MODES.items():
        system = System(rules, streams=True)
        for workers in WORKERS:
            if mode == "rhyme" and workers < 2:
                continue  # there is nobody to share out to
            outcome = simulate(system, costs, steps, num_gpus=workers + 1, train_gpus=1)
            found.append(Setting(mode, workers, outcome.step_s, outcome.idle_share))
    return WhatIf(found, recorded.steps[0], recorded.steps[-1])
