"""Modes side by side on one machine: seconds of a step, measured and simulated, and where the time of devices went.

    python benchmarks/modes.py --steps 12 --out benchmarks/results/modes.json
    python benchmarks/modes.py --recipe smollm2-reasoner.yaml --modes colocated,async --workers 4 train.steps=20

One run of the recipe for each mode, one after the other, on the same prompts. The simulation of a mode knows what its
run knew before its first step, which is how fast its workers decode by the number of sequences, and of the run itself
how long rollouts came to be and what training took a token; when steps are done is what it has to find out. The first
steps, in which pipelines fill, do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from slipstream.models.precision import resolve_precision
from slipstream.observe.ledger import balance, shares
from slipstream.observe.store import RunStore
from slipstream.runtime.benches import describe_machine
from slipstream.schedule.rules import MODES
from slipstream.schedule.speeds import SpeedCurve
from slipstream.simulate.against import GENERATION, TRAINING, WHOLE, read_recorded
from slipstream.simulate.outcome import FILLING
from slipstream.simulate.system import System
from slipstream.simulate.what_if import what_if
from slipstream.simulate.world import simulate

RECIPES = Path(__file__).parent.parent / "recipes"


def train(recipe: Path, folder: Path, mode: str, workers: int, overrides: list[str]) -> None:
    command = [sys.executable, "-c", "from slipstream.cli import main; main()", "train", str(recipe)]
    settings = [f"run.dir={folder}", f"mode={mode}", "eval.every=0", "eval.before_train=false", "run.save_every=1000"]
    if mode != "colocated":
        settings.append(f"rollout.workers={workers}")
    subprocess.run([*command, *settings, "tasks.eval={}", *overrides], check=True)


def simulated_s(folder: Path, mode: str, workers: int) -> float:
    """Of a step, as the simulator has it."""
    if mode == "colocated":
        return what_if(folder)[0].step_s
    recorded = read_recorded(folder)
    with RunStore(folder, read_only=True) as store:
        joined = store.events("WorkerJoined")[0].payload
    steps = [recorded.rollouts[step] for step in recorded.steps]
    curve = SpeedCurve(tuple((int(batch), float(seconds)) for batch, seconds in joined["points"]))
    weights_s = statistics.fmean(recorded.metrics["timing_s/update_weights"].values())
    costs = recorded.costs(curve, joined["slots"], weights_s)
    return simulate(System(MODES[mode], streams=True), costs, steps, num_gpus=workers + 1, train_gpus=1).step_s


def measure(folder: Path, mode: str, workers: int) -> dict[str, Any]:
    recorded = read_recorded(folder)
    counted = recorded.steps[FILLING:]
    times = [recorded.metrics[WHOLE][step] for step in counted]
    with RunStore(folder, read_only=True) as store:
        ledger, rewards = store.ledger(), store.metrics_by_name()["reward/mean"]
        wall_s = store.events("Record")[-1].at_s - store.events("RunBegan")[0].at_s
    measured_s, told_s = statistics.fmean(times), simulated_s(folder, mode, workers)
    by_device = shares(ledger)
    return {
        "mode": mode,
        "step_s": measured_s,
        "step_s_spread": statistics.stdev(times),
        "simulated_s": told_s,
        "error": told_s / measured_s - 1,
        "gen_s": statistics.fmean(recorded.metrics[GENERATION][step] for step in counted),
        "train_s": statistics.fmean(recorded.metrics[TRAINING][step] for step in counted),
        "last_reward": statistics.fmean([rewards[step] for step in recorded.steps[-3:]]),
        "ledger": by_device,
        "ledger_of_wall": {
            device: balance([one for one in ledger if one.device == device], wall_s) for device in by_device
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart.yaml")
    parser.add_argument("--modes", default="colocated,sync,async")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--keep", type=Path, help="a new folder for the runs; without it they are removed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="of the recipe, for all runs")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = describe_machine(device, resolve_precision("auto", device)) | {"what": "benchmarks/modes.py", "rows": []}
    record |= {"recipe": arguments.recipe, "workers": arguments.workers, "overrides": arguments.overrides}
    with tempfile.TemporaryDirectory() as temporary:
        parent = arguments.keep or Path(temporary)
        for mode in arguments.modes.split(","):
            folder = parent / mode
            overrides = [f"train.steps={arguments.steps}", *arguments.overrides]
            train(RECIPES / arguments.recipe, folder, mode, arguments.workers, overrides)
            row = measure(folder, mode, arguments.workers)
            record["rows"].append(row)
            print(
                f"{mode}: {row['step_s']:.2f} s a step (+-{row['step_s_spread']:.2f}), "
                f"simulated {row['simulated_s']:.2f} ({row['error']:+.0%}); reward at the end {row['last_reward']:.2f}",
                flush=True,
            )
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
