"""Seconds of a step on a quiet machine and beside processes that keep a core busy, by OpenMP's wait policy.

    python benchmarks/busy_machine.py --json busy.json            # on two cores: --cores 0,1
    python benchmarks/busy_machine.py --mode sync --policies "as shipped;GOMP_SPINCOUNT=0"

Every policy runs a short quickstart beside 0, 1 and 2 busy loops, pinned to the same cores; the median over steps after
the first three counts. Policies take turns in each repetition, so that drift of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

AS_SHIPPED = "as shipped"
SETTINGS = ("OMP_WAIT_POLICY=PASSIVE", *(f"GOMP_SPINCOUNT={count}" for count in (0, 1_000, 10_000, 100_000, 300_000)))
POLICIES = ";".join((AS_SHIPPED, *SETTINGS))
UNCOUNTED_STEPS = 3


def step_seconds(policy: str, num_loops: int, cores: list[int], mode: str, num_steps: int) -> list[float]:
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    if policy != AS_SHIPPED:
        name, _, value = policy.partition("=")
        environment[name] = value
    arguments = [
        *("train", "quickstart", f"mode={mode}", f"train.steps={num_steps}", "warmup.steps=20", "device=cpu"),
        *("warmup.until_reward=null", "eval.before_train=false", "eval.every=1000", "run.save_every=1000", "--quiet"),
    ]
    if mode != "colocated":
        arguments.append("rollout.workers=2")

    def pin() -> None:
        os.sched_setaffinity(0, cores)

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for _ in range(num_loops):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=pin)
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        command = [sys.executable, "-c", "from slipstream.cli import main; main()", *arguments, f"run.dir={folder}/run"]
        subprocess.run(command, env=environment, preexec_fn=pin, check=True)
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["timing_s/step"] for row in rows if row["step"] > UNCOUNTED_STEPS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", default="0,1", help="the cores that all processes share")
    parser.add_argument("--policies", default=POLICIES, help="separated by semicolons")
    parser.add_argument("--loops", default="0,1,2", help="numbers of busy loops")
    parser.add_argument("--mode", default="colocated", choices=("colocated", "sync", "async", "rhyme"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores = [int(core) for core in args.cores.split(",")]
    loops = [int(count) for count in args.loops.split(",")]
    medians: dict[str, dict[int, list[float]]] = {}
    for _ in range(args.repeats):
        for num_loops in loops:
            for policy in args.policies.split(";"):
                seconds = statistics.median(step_seconds(policy, num_loops, cores, args.mode, args.steps))
                medians.setdefault(policy, {}).setdefault(num_loops, []).append(seconds)
                print(f"{policy:28} beside {num_loops} loops: {seconds:.3f} s a step", flush=True)
    for policy, by_loops in medians.items():
        print(f"{policy:28}" + "".join(f"  {min(values):.2f}-{max(values):.2f}" for values in by_loops.values()))
    if args.json:
        args.json.write_text(json.dumps({"mode": args.mode, "seconds_a_step": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()
