"""Modes side by side on one machine: seconds of a step, measured and foretold, and where the time of devices went.

    python benchmarks/modes.py --out benchmarks/results/modes.json

On two cores: sampling and training each have one where they have processes of their own; in one process they have both,
or, to compare the same core's work, one. The task has a long tail and a warm start that gets some of it right, which is
made once for all. `sync` also runs with its groups trained in the order of their prompts (train.deterministic), and
what that costs is the price of the canonical order.

Two things are foretold, and neither has seen the time it tells. "From its stages": how long engine steps, training,
grading and weights took in the run's first half, as they ran beside each other, and when the steps of its second half
are then done (`slipstream simulate --against`). "From one process": the same of the colocated run on one core, taken
for devices of their own (the table of `slipstream report`); it knows nothing of what processes cost each other.
Steps count from the third on, when pipelines are full.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from slipstream.models.loading import width_of
from slipstream.models.precision import resolve_precision
from slipstream.observe.ledger import shares
from slipstream.observe.store import RunStore
from slipstream.runtime.benches import describe_machine
from slipstream.simulate.against import foretell, read_recorded
from slipstream.simulate.outcome import FILLING
from slipstream.simulate.streamed import foretell_streamed
from slipstream.simulate.what_if import what_if

WORKLOAD = [
    "tasks.train.0.params.min_length=3",
    "tasks.train.0.params.max_length=9",
    "sampling.max_new_tokens=256",
    "train.micro_batch_tokens=2048",
    *("eval.every=0", "eval.before_train=false", "tasks.eval={}", "run.save_every=1000"),
]
"""Of the quickstart: short lists and a few long ones."""
APART = ["train.threads=1", "rollout.threads=1", "rollout.workers=1"]
ONE_CORE = "colocated, one core"
CASES = {
    "colocated": ["mode=colocated"],
    ONE_CORE: ["mode=colocated", "train.threads=1"],
    "sync": ["mode=sync", *APART],
    "sync, canonical order": ["mode=sync", *APART, "train.deterministic=true"],
    "async": ["mode=async", *APART],
}


def train(folder: Path, settings: list[str]) -> float:
    """CPU-seconds that it took."""
    command = [sys.executable, "-c", "from slipstream.cli import main; main()", "train"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "quickstart", f"run.dir={folder}", *settings], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(folder: Path, case: str) -> dict[str, Any]:
    recorded = read_recorded(folder)
    with RunStore(folder, read_only=True) as store:
        ledger, rewards = store.ledger(), store.metrics_by_name()["reward/mean"]
        trained_s = [event.at_s for event in store.events("StepTrained")]
    times = [later - earlier for earlier, later in pairwise(trained_s)][FILLING - 1 :]
    counted = sorted(recorded.rollouts)[FILLING:]
    num_tokens = sum(sum(recorded.rollouts[step].lengths.values()) for step in counted)
    lengths = sorted(length for step in counted for length in recorded.rollouts[step].lengths.values())
    if recorded.mode == "colocated":
        phases, num_steps = foretell(folder)
        told = {"measured_s": phases[-1].measured_s, "foretold_s": phases[-1].foretold_s, "steps": num_steps}
    else:
        streamed = foretell_streamed(folder)
        told = {"measured_s": streamed.measured_s, "foretold_s": streamed.foretold_s, "steps": streamed.num_steps}
    return {
        "case": case,
        "step_s": statistics.fmean(times),
        "step_s_spread": statistics.stdev(times),
        "step_s_error": statistics.stdev(times) / len(times) ** 0.5,
        "ms_a_token": 1e3 * sum(times) / num_tokens,
        "steps_s": times,
        "median_length": statistics.median(lengths),
        "p99_length": lengths[int(0.99 * len(lengths))],
        "reward": statistics.fmean(rewards[step] for step in counted),
        "from_its_stages": told | {"error": told["foretold_s"] / told["measured_s"] - 1},
        "ledger": shares(entry for entry in ledger if entry.step > FILLING),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=";".join(CASES), help="some of the cases, with ; between")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--keep", type=Path, help="a folder for the runs; without it they are removed")
    parser.add_argument("--model", help="a checkpoint to start from instead of making one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="of the recipe, for all runs")
    arguments = parser.parse_args()
    device, started_s = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.time()
    record: dict[str, Any] = {"what": "benchmarks/modes.py", "overrides": arguments.overrides}
    record["load_at_start"] = os.getloadavg()[0]
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        parent, settings = arguments.keep or Path(temporary), [*WORKLOAD, *arguments.overrides]
        model = arguments.model
        if model is None:
            train(parent / "warm", [*settings, "train.steps=0"])
            model = parent / "warm" / "checkpoints" / "step_0"
        record |= describe_machine(device, resolve_precision("auto", device, width_of(str(model))))
        settings += [f"model={model}", "warmup=null", f"train.steps={arguments.steps}"]
        for case in arguments.cases.split(";"):
            folder = parent / case.replace(", ", "-").replace(" ", "-")
            cpu_s = train(folder, [*settings, *CASES[case]])
            row = rows[case] = measure(folder, case) | {"cpu_s_a_step": cpu_s / arguments.steps}
            if ONE_CORE in rows and row["ledger"].keys() != {"local"}:
                alone = {(one.mode, one.rollout_devices): one for one in what_if(parent / "colocated-one-core")}
                foretold_s = alone[case.partition(",")[0], 1].step_s
                row["from_one_process"] = {"foretold_s": foretold_s, "error": foretold_s / row["step_s"] - 1}
            record |= {"rows": list(rows.values()), "load_at_end": os.getloadavg()[0]}
            if {"sync", "sync, canonical order"} <= rows.keys():
                plain, ordered = (rows[name]["ms_a_token"] for name in ("sync", "sync, canonical order"))
                record["price_of_canonical_order"] = ordered / plain - 1
            record["wall_s"] = time.time() - started_s
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
            print(describe(row), flush=True)
    if "price_of_canonical_order" in record:
        print(f"price of the canonical order: {record['price_of_canonical_order']:+.1%} of a token's time")


def describe(row: dict[str, Any]) -> str:
    stages = row["from_its_stages"]
    line = f"{row['case']}: {row['step_s']:.2f} s a step (+-{row['step_s_spread']:.2f} from step to step), "
    line += f"{row['ms_a_token']:.3f} ms a token; second half {stages['measured_s']:.2f} s, "
    line += f"from its stages {stages['foretold_s']:.2f} ({stages['error']:+.0%})"
    if "from_one_process" in row:
        line += f", from one process {row['from_one_process']['foretold_s']:.2f}"
        line += f" ({row['from_one_process']['error']:+.0%} of all steps)"
    return line


if __name__ == "__main__":
    main()
