"""How large a fleet the scheduler and the simulator can take: time of a decision, of a whole simulation, and memory.

    python benchmarks/fleet_scale.py --out benchmarks/results/fleet_scale.json

A decision is one event told to the fleet while 100,000 rollouts wait. The simulation has a million rollouts of up to
20,000 tokens on 4,096 GPUs, in workers of four, one step behind.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from slipstream.schedule.events import CloseStep, RolloutEnded, RolloutsAsked, Sample, WeightsLive, WorkerJoined
from slipstream.schedule.fleet import Fleet
from slipstream.schedule.rules import Rules
from slipstream.simulate.costs import GPUS, costs_of
from slipstream.simulate.systems import SYSTEMS
from slipstream.simulate.workloads import PRESETS
from slipstream.simulate.world import simulate

POINTS = ((1, 0.0084), (64, 0.0117), (512, 0.0369))


def decisions(num_pending: int, num_workers: int, slots: int) -> dict[str, Any]:
    """Rollouts end one after another, each replaced by one that waits."""
    fleet = Fleet(Rules(tail="move", staleness=1))
    for number in range(num_workers):
        fleet.on_event(WorkerJoined(f"w{number}", slots, POINTS), 0.0)
    fleet.on_event(WeightsLive(0), 0.0)
    num_rollouts = num_pending + num_workers * slots
    rollouts = tuple((f"1/{number // 16}/{number % 16}", f"p{number // 16}") for number in range(num_rollouts))
    started = time.perf_counter()
    running = [one.rollout for one in fleet.on_event(RolloutsAsked(1, rollouts), 0.0) if isinstance(one, Sample)]
    opened_s = time.perf_counter() - started
    times_us = []
    for uid in running[:20_000]:
        started = time.perf_counter()
        actions = fleet.on_event(RolloutEnded(uid, 100), 1.0)
        times_us.append((time.perf_counter() - started) * 1e6)
        assert len(actions) == 1 and not isinstance(actions[0], CloseStep)
    return {
        "pending": num_pending,
        "workers": num_workers,
        "open_s": opened_s,
        "decision_us": statistics.median(times_us),
        "decision_p99_us": statistics.quantiles(times_us, n=100)[98],
    }


def whole(num_rollouts: int, num_gpus: int) -> dict[str, Any]:
    per_step = num_rollouts // 8
    steps = PRESETS["20k"].draw(num_prompts=per_step // 8, prompts_per_step=per_step // 16, samples=16, steps=8, seed=0)
    costs = costs_of(72, GPUS["h100"], steps)
    started = time.perf_counter()
    outcome = simulate(SYSTEMS["Slipstream"], costs, steps, num_gpus=num_gpus, train_gpus=num_gpus // 2)
    return {
        "rollouts": sum(len(step.lengths) for step in steps),
        "gpus": num_gpus,
        "simulated_in_s": time.perf_counter() - started,
        "events": outcome.num_events,
        "step_s": outcome.step_s,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    record: dict[str, Any] = {"what": "benchmarks/fleet_scale.py", "machine": platform.machine()}
    record["decisions"] = [decisions(100_000, workers, 64) for workers in (64, 512)]
    print(json.dumps(record["decisions"]), flush=True)
    record["simulation"] = whole(arguments.rollouts, 4096)
    print(json.dumps(record["simulation"]))
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
