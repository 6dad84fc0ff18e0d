"""Published results of RhymeRL, StreamRL and TLT against our simulator, and all of our mechanisms together.

    python benchmarks/ablations.py --out benchmarks/results/ablations.json

What is assumed, where the papers leave it open: lengths as drawn by the presets (the median about a quarter of the
limit), decoding reckoned from data sheets, StreamRL's PPO with actor and critic of one size, GRPO elsewhere, drafts as
in `slipstream/simulate/systems.py`, and every system with its best split. Lengths are forecast from a prompt's past;
StreamRL's ranker sees new prompts, so its dispatch is simulated with lengths known, its upper bound.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.schedule.rules import TAILS, Rules
from slipstream.simulate.costs import GPUS, costs_of
from slipstream.simulate.pace import Pace
from slipstream.simulate.study import Result, best_result
from slipstream.simulate.system import Costs, System
from slipstream.simulate.systems import OUR_DRAFTS, RHYME_DRAFTS, SYSTEMS, TLT_DRAFTS
from slipstream.simulate.workloads import PRESETS, LongTail, SimulatedStep
from slipstream.simulate.world import simulate

STEPS = 9
MOST_SEARCHED = 512
"""GPUs up to which the best split is looked for."""
STREAMRL_RATES = {
    ("5k", 7): (13.0, 16.1, 21.3),
    ("5k", 32): (6.0, 6.7, 7.7),
    ("5k", 72): (4.2, 5.8, 7.3),
    ("10k", 7): (8.0, 8.8, 10.7),
    ("10k", 32): (2.9, 3.3, 3.8),
    ("10k", 72): (2.4, 3.1, 3.7),
    ("20k", 7): (4.8, 5.1, 5.7),
    ("20k", 32): (1.85, 2.15, 2.45),
    ("20k", 72): (1.5, 1.87, 2.25),
}
"""Samples a second of the colocated system, in step and one step behind, read off a figure."""
GPUS_FOR = {7: 32, 32: 64, 72: 128}
IN_STEP, ONE_BEHIND = SYSTEMS["StreamRL, in step"], SYSTEMS["StreamRL"]


def draw(preset: LongTail, prompts: int, samples: int) -> list[SimulatedStep]:
    return preset.draw(num_prompts=4 * prompts, prompts_per_step=prompts, samples=samples, steps=STEPS, seed=0)


def step_times(
    systems: Mapping[str, System], costs: Costs, steps: Sequence[SimulatedStep], num_gpus: int
) -> dict[str, float]:
    return {name: best_result(name, system, costs, steps, num_gpus).step_s for name, system in systems.items()}


def streamrl_rates() -> list[dict[str, Any]]:
    rows = []
    for (lengths, billions), published in STREAMRL_RATES.items():
        steps = draw(PRESETS[lengths], 1024, 1)
        costs = costs_of(billions, GPUS["h800"], steps, training="ppo")
        systems = {"colocated": SYSTEMS["colocated"], "in step": IN_STEP, "one step behind": ONE_BEHIND}
        times = step_times(systems, costs, steps, GPUS_FOR[billions])
        ours = tuple(1024 / seconds for seconds in times.values())
        rows.append({"lengths": lengths, "billions": billions, "published": published, "ours": ours})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def ladder(what: str, published: Sequence[float], times: Mapping[str, float]) -> dict[str, Any]:
    """Speed-ups over the first, one rung after the other."""
    first, *others = times.values()
    ours = [first / seconds for seconds in others]
    differences = [own / other - 1 for own, other in zip(ours, published, strict=True)]
    row = {"what": what, "rungs": list(times)[1:], "published": list(published), "ours": ours, "differ": differences}
    print(json.dumps(row), flush=True)
    return row


def ablations() -> list[dict[str, Any]]:
    rows = []
    steps = draw(PRESETS["20k"], 1024, 1)
    costs = costs_of(72, GPUS["h800"], steps, training="ppo")
    systems = {
        "colocated": SYSTEMS["colocated"],
        "dispatch": System(Rules("skewness split"), colocated=True, foresees=True),
        "and streamed": IN_STEP,
        "and one step behind": ONE_BEHIND,
    }
    rows.append(ladder("StreamRL, 72B, 20K, 128 GPUs", (1.08, 1.23, 1.48), step_times(systems, costs, steps, 128)))

    steps = draw(LongTail(median=4_200, limit=16_000), 256, 8)
    costs = costs_of(14, GPUS["h100"], steps)
    behind = {"staleness": 1, "mixes_steps": False}
    systems = {
        "in step": System(Rules("round robin")),
        "pipeline": System(Rules("ranking groups", "move", **behind)),
        "two tiers": System(Rules("two tiers", "move", **behind)),
        "and drafts": System(Rules("two tiers", "move", **behind), drafts=RHYME_DRAFTS),
    }
    rows.append(ladder("RhymeRL, 14B, 16K, 128 GPUs", (1.43, 1.56, 2.34), step_times(systems, costs, steps, 128)))

    steps = draw(PRESETS["32k"], 128, 8)
    costs = costs_of(32, GPUS["h100"], steps)
    systems = {"colocated": SYSTEMS["colocated"], "drafts in the tail": SYSTEMS["TLT"]}
    rows.append(ladder("TLT, 32B, 32K, 64 GPUs", (1.7,), step_times(systems, costs, steps, 64)))
    return rows


def together() -> list[dict[str, Any]]:
    rows = []
    for lengths, billions, num_gpus, prompts in (("20k", 7, 32, 128), ("20k", 32, 128, 256), ("32k", 32, 128, 256)):
        steps = draw(PRESETS[lengths], prompts, 8)
        costs = costs_of(billions, GPUS["h100"], steps)
        found = {name: best_result(name, system, costs, steps, num_gpus) for name, system in SYSTEMS.items()}
        base = found["colocated"].step_s
        row = {
            "lengths": lengths,
            "billions": billions,
            "gpus": num_gpus,
            "speedup": {name: base / one.step_s for name, one in found.items()},
            "idle": {name: one.outcome.idle_share for name, one in found.items()},
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def tails() -> list[dict[str, Any]]:
    """What to do with a step's last rollouts, with rules that are ours otherwise, by staleness."""
    steps = draw(PRESETS["20k"], 128, 8)
    costs = costs_of(7, GPUS["h100"], steps)
    rows = []
    for staleness in (1, 2):
        for tail in TAILS:
            system = System(Rules(tail=tail, staleness=staleness), streams=True, drafts=OUR_DRAFTS)
            found = best_result(tail, system, costs, steps, 32)
            rows.append({"staleness": staleness} | found.as_dict())
            print(json.dumps(rows[-1]), flush=True)
    return rows


def late_drafts() -> list[dict[str, Any]]:
    """If drafts are worth less beyond the median length than was measured on average."""
    steps = draw(PRESETS["20k"], 128, 8)
    costs = costs_of(7, GPUS["h100"], steps)
    rows = []
    for late in (1.0, 0.8, 0.6):
        pace = Pace(((0, 1.0), (PRESETS["20k"].median, late)))
        found = best_result(f"late {late}", replace(SYSTEMS["Slipstream"], pace=pace), costs, steps, 32)
        rows.append(found.as_dict())
        print(json.dumps(rows[-1]), flush=True)
    return rows


def sizes() -> list[dict[str, Any]]:
    """From 8 to 4,096 GPUs, 32 rollouts for each; the largest split as the one before, since a search takes hours."""
    rows: list[dict[str, Any]] = []
    for num_gpus in (8, 32, 128, 512, 4096):
        steps = draw(PRESETS["20k"], 4 * num_gpus, 8)
        costs = costs_of(7, GPUS["h100"], steps)
        row = {"gpus": num_gpus, "rollouts": sum(len(step.lengths) for step in steps)}
        for name in ("colocated", "RhymeRL", "Slipstream"):
            system = SYSTEMS[name]
            if num_gpus <= MOST_SEARCHED:
                found = best_result(name, system, costs, steps, num_gpus)
            else:
                train_gpus = rows[-1][name]["train_gpus"] * num_gpus // rows[-1]["gpus"]
                outcome = simulate(system, costs, steps, num_gpus=num_gpus, train_gpus=train_gpus)
                found = Result(name, train_gpus, outcome)
            row[name] = found.as_dict()
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "ablations": ablations,
    "together": together,
    "tails": tails,
    "late_drafts": late_drafts,
    "sizes": sizes,
    "streamrl_rates": streamrl_rates,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas; others stay as they are")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"what": "benchmarks/ablations.py", "tlt_drafts": TLT_DRAFTS, "our_drafts": OUR_DRAFTS}
    if arguments.out.exists():
        record = json.loads(arguments.out.read_text()) | record
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {unknown.pop()}; known: {', '.join(PARTS)}")
    for name in parts:
        record[name] = PARTS[name]()
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
