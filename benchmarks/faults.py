"""Whatever can happen to a process of a run is done to it, at a moment by chance: what does it cost, and is it felt?

    python benchmarks/faults.py --drills 10 --seed 0 --out faults.json
    python benchmarks/faults.py --kinds "trainer hangs,disk full" --drills 4

A small model is trained with mode=sync and train.deterministic=true, undisturbed and then with one fault in each run:
a rollout worker killed, hanging (SIGSTOP), slow (running a fifth of the time) or cut off (its sockets are shut down);
the process that grades killed; the one that trains killed, hanging, cut off, or out of disk (RLIMIT_FSIZE; the run ends
and is resumed); the run itself killed and resumed. It begins with a model that is right now and then, so that every
step has a gradient. Each run must end with the same weights to the bit and the same rollouts, none lost and none there
twice, and must have said what happened to whom. Recovery is counted from the fault until a worker has joined again, a
group was graded again, or the step that was under way is trained. Exits with 1 if a drill was felt or not told of.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drills import KINDS, RECIPE, Run, strike, wait_for_step, warm_start

STEPS = 6


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
    was_told: bool
    """By the run, with the name of the process, its log and what happened."""

    @property
    def was_felt(self) -> bool:
        return not self.same_weights or not self.was_told or self.num_lost + self.num_twice + self.num_changed > 0


def drill(
    folder: Path, number: int, kind: str, chance: random.Random, step_s: float, undisturbed: Run, model: Path
) -> Drill:
    run, started_s = Run(folder, f"drill-{number}", begin_with(model)), time.time()
    process = run.start()
    after_step, wait_s = chance.randrange(STEPS - 1), chance.random() * step_s
    wait_for_step(run, process, after_step)
    time.sleep(wait_s)
    fault = strike(run, process, kind, chance)
    if KINDS[kind].ends_run:
        process = run.start("--resume")
    if process.wait(timeout=600) != 0:
        raise RuntimeError(f"{kind} after step {after_step} ended the run; see {run.log.name}")
    recovered_s = run.recovered_s(fault)  # None: the run ended before it was needed again
    wanted, found = set(undisturbed.rollouts()), run.rollouts()
    num_lost, num_twice = run.astray(STEPS)
    return Drill(
        kind=kind,
        after_step=after_step,
        wait_s=round(wait_s, 2),
        recovery_s=round((recovered_s or float("nan")) - fault.at_s, 2),
        run_s=round(time.time() - started_s, 1),
        same_weights=weights(run) == weights(undisturbed),
        num_lost=num_lost,
        num_twice=num_twice,
        num_changed=sum(row not in wanted for row in found),
        was_told=run.tells_of(fault),
    )


def begin_with(model: Path) -> dict[str, Any]:
    return {"model": str(model), "train": RECIPE["train"] | {"steps": STEPS}}


def weights(run: Run) -> bytes:
    return (run.dir / "checkpoints" / f"step_{STEPS}" / "model.safetensors").read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--drills", type=int, default=10)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults, in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the JSON, beside stdout")
    parser.add_argument("--keep", type=Path, help="a folder for the runs; without it they are removed")
    options = parser.parse_args()
    chance, kinds = random.Random(options.seed), options.kinds.split(",")
    if set(kinds) - set(KINDS):
        parser.error(f"unknown kinds {sorted(set(kinds) - set(KINDS))}; known: {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = warm_start(folder)
        undisturbed = Run(folder, "undisturbed", begin_with(model))
        started_s = time.time()
        if undisturbed.start("--overwrite").wait() != 0:
            raise RuntimeError(f"the undisturbed run failed; see {undisturbed.log.name}")
        run_s = time.time() - started_s
        rows = [json.loads(line) for line in (undisturbed.dir / "metrics.jsonl").read_text().splitlines()]
        step_s = statistics.median(row["timing_s/step"] for row in rows if "timing_s/step" in row)
        drills = []
        for number in range(options.drills):
            drills.append(drill(folder, number, kinds[number % len(kinds)], chance, step_s, undisturbed, model))
            print(drills[-1], file=sys.stderr, flush=True)
    recovery = {kind: [one.recovery_s for one in drills if one.kind == kind] for kind in kinds}
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
