"""Ten times a process of a run is killed or made to hang, at a moment by chance: what does it cost, and is it felt?

    python benchmarks/faults.py --drills 10 --seed 0 --out faults.json

A small model is trained with mode=sync and train.deterministic=true, undisturbed and then with one fault in each run:
a rollout worker killed, a rollout worker that hangs (SIGSTOP), the process that grades killed, the one that trains
killed, the run itself killed and resumed. Each run must end with the same weights to the bit and the same rollouts,
none lost and none there twice. Recovery is counted from the fault until a worker has joined again, a group was graded
again, or the step that was under way is trained. Exits with 1 if a drill was felt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

KINDS = ("worker killed", "worker hangs", "grader killed", "trainer killed", "run killed")
STEPS = 6
WORDS = {"wording": "terse", "min_length": 3, "max_length": 4, "max_value": 9}
RECIPE: dict[str, Any] = {
    "model": "tiny",
    "mode": "sync",
    "rollout": {"workers": 2, "silence_s": 5},
    "tasks": {
        "train": [{"source": "sorting", "size": 400, "seed": 1, "params": WORDS}],
        "eval": {"heldout": {"source": "sorting", "size": 8, "seed": 2, "params": WORDS}},
    },
    "warmup": {"steps": 30, "sequences_per_step": 16, "lr": 4e-3},
    "sampling": {"max_new_tokens": 96},
    "engine": {"max_sequences": 32, "max_prompt_tokens": 32},
    "train": {"steps": STEPS, "prompts_per_step": 8, "samples_per_prompt": 8, "lr": 4e-4, "deterministic": True},
    "eval": {"every": 0},
}


@dataclass(frozen=True, slots=True)
class Drill:
    kind: str
    after_step: int
    """That was recorded before the fault."""
    wait_s: float
    """From then on, by chance."""
    recovery_s: float
    run_s: float
    same_weights: bool
    num_lost: int
    num_twice: int
    num_changed: int
    """Rollouts with other tokens, log-probabilities or rewards than in the undisturbed run."""

    @property
    def was_felt(self) -> bool:
        return not self.same_weights or self.num_lost + self.num_twice + self.num_changed > 0


class Run:
    """One in a folder of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.dir = folder / name
        self.recipe = folder / f"{name}.yaml"
        self.recipe.write_text(yaml.safe_dump(RECIPE | {"run": {"dir": str(self.dir), "save_every": 2}}))
        self.log = (folder / f"{name}.log").open("a")

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "slipstream.cli", "train", str(self.recipe), *options]
        return subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def recorded(self) -> int:
        """The last step, or -1."""
        file = self.dir / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=-1)

    def pids(self, kind: str) -> list[int]:
        """Of the processes that a fault of this kind may hit."""
        pids = json.loads((self.dir / "processes.json").read_text())
        if kind.startswith("worker"):
            return [pid for name, pid in pids.items() if name.startswith("rollout-")]
        if kind == "grader killed":
            return [pid for pid in children_of(pids["driver"]) if "spawn_main" in command_of(pid)]
        return [pids["trainer" if kind == "trainer killed" else "driver"]]

    def weights(self) -> bytes:
        return (self.dir / "checkpoints" / f"step_{STEPS}" / "model.safetensors").read_bytes()

    def rollouts(self) -> list[tuple[Any, ...]]:
        with sqlite3.connect(self.dir / "run.db") as connection:
            return connection.execute("SELECT uid, token_ids, logprobs, reward FROM rollouts ORDER BY uid").fetchall()

    def recovered_s(self, kind: str, since_s: float, step: int) -> float:
        """When what the fault interrupted was there again."""
        name = {"worker": "WorkerJoined", "grader": "GroupScored"}.get(kind.split()[0], "StepTrained")
        with sqlite3.connect(self.dir / "run.db") as connection:
            rows = connection.execute("SELECT at_s, payload FROM events WHERE name = ? ORDER BY id", (name,)).fetchall()
        for at_s, payload in rows:
            if at_s > since_s and (name != "StepTrained" or json.loads(payload)["step"] > step):
                return float(at_s)
        return float("nan")  # the run ended before it was needed again


def children_of(pid: int) -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and stat_of(entry).rpartition(")")[2].split()[1:2] == [str(pid)]
    ]


def stat_of(entry: Path) -> str:
    try:
        return (entry / "stat").read_text()
    except OSError:
        return ""  # it has ended meanwhile


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def drill(folder: Path, number: int, kind: str, chance: random.Random, step_s: float, undisturbed: Run) -> Drill:
    run, started_s = Run(folder, f"drill-{number}"), time.time()
    process = run.start()
    after_step, wait_s = chance.randrange(STEPS - 1), chance.random() * step_s
    while run.recorded() < after_step:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended by itself; see {run.log.name}")
        time.sleep(0.02)
    time.sleep(wait_s)
    victims = run.pids(kind)
    step, fault_s = run.recorded(), time.time()
    os.kill(chance.choice(victims), signal.SIGSTOP if kind == "worker hangs" else signal.SIGKILL)
    if kind == "run killed":
        process.wait()
        process = run.start("--resume")
    if process.wait(timeout=600) != 0:
        raise RuntimeError(f"{kind} after step {after_step} ended the run; see {run.log.name}")
    wanted, found = undisturbed.rollouts(), run.rollouts()
    uids, found_uids = {row[0] for row in wanted}, [row[0] for row in found]
    return Drill(
        kind=kind,
        after_step=after_step,
        wait_s=round(wait_s, 2),
        recovery_s=round(run.recovered_s(kind, fault_s, step) - fault_s, 2),
        run_s=round(time.time() - started_s, 1),
        same_weights=run.weights() == undisturbed.weights(),
        num_lost=len(uids - set(found_uids)),
        num_twice=len(found_uids) - len(set(found_uids)),
        num_changed=sum(row not in set(wanted) for row in found),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--drills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the JSON, beside stdout")
    parser.add_argument("--keep", type=Path, help="a folder for the runs; without it they are removed")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        undisturbed = Run(folder, "undisturbed")
        started_s = time.time()
        if undisturbed.start("--overwrite").wait() != 0:
            raise RuntimeError(f"the undisturbed run failed; see {undisturbed.log.name}")
        run_s = time.time() - started_s
        rows = [json.loads(line) for line in (undisturbed.dir / "metrics.jsonl").read_text().splitlines()]
        step_s = statistics.median(row["timing_s/step"] for row in rows if "timing_s/step" in row)
        drills = []
        for number in range(options.drills):
            drills.append(drill(folder, number, KINDS[number % len(KINDS)], chance, step_s, undisturbed))
            print(drills[-1], file=sys.stderr, flush=True)
    recovery = {kind: [one.recovery_s for one in drills if one.kind == kind] for kind in KINDS}
    result = {
        "steps": STEPS,
        "rollouts": sum(row.get("train/groups", 0) for row in rows) * RECIPE["train"]["samples_per_prompt"],
        "undisturbed_s": round(run_s, 1),
        "step_s": round(step_s, 2),
        "recovery_s": {kind: seconds for kind, seconds in recovery.items() if seconds},
        "felt": sum(one.was_felt for one in drills),
        "drills": [asdict(one) for one in drills],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    sys.exit(1 if result["felt"] else 0)


if __name__ == "__main__":
    main()
