"""Seconds of each phase of colocated training, with the engine awake and asleep while the trainer works.

    python benchmarks/phases.py --out benchmarks/results/phases.json

SmolLM2 on two tasks of smollm2-reasoner, 64 prompts x 8 samples x at most 512 tokens, after a short warm
start; `--task arithmetic` has short answers, for a CPU. Medians over all steps but the first, which compiles. Also the
difference between the log-probabilities of engine and trainer, and what the GPU holds at most while training.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

# Worked solutions of at most 512 tokens, so that the warm start can teach them.
SHORT = "[{source: gcd, size: 3000, params: {max_digits: 4}}, {source: sorting, size: 3000, params: {max_length: 9}}]"
TASKS = {
    "reasoner": (
        "smollm2-reasoner",
        ["warmup.steps=20", "engine.kv_tokens=null", f"tasks.train={SHORT}", "tasks.eval={}"],
    ),
    "arithmetic": ("smollm2-arithmetic", ["engine.max_sequences=128", "engine.kv_tokens=60000"]),
}
SHOWN = (
    "timing_s/gen", "timing_s/reward", "timing_s/sleep", "timing_s/update_actor", "timing_s/update_weights",
    "timing_s/step", "rollout/tokens", "rollout/tokens_per_s", "response_length/mean", "response_length/max",
    "mismatch_kl", "mismatch/logprob_diff_max", "perf/max_memory_allocated_gb",
)  # fmt: skip


def measure(task: str, sleep: str, prompts: int, steps: int) -> dict[str, Any]:
    recipe, overrides = TASKS[task]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-c", "from slipstream.cli import main; main()", "train", recipe,
            f"run.dir={folder}/run", f"train.prompts_per_step={prompts}", "train.samples_per_prompt=8",
            "sampling.max_new_tokens=512", f"engine.max_sequences={min(512, 8 * prompts)}", f"train.steps={steps}",
            "eval.every=0", "run.save_every=1000", f"engine.sleep={sleep}", *overrides,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["step"] > (1 if steps > 1 else 0)]
    return {"task": task, "sleep": sleep, "prompts": prompts, "steps": len(trained)} | {
        name: statistics.median(row[name] for row in trained) for name in SHOWN if all(name in row for row in trained)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="reasoner")
    parser.add_argument("--sleep", default="off,kv,all")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    rows = []
    for sleep in arguments.sleep.split(","):
        rows.append(measure(arguments.task, sleep, arguments.prompts, arguments.steps))
        print(json.dumps(rows[-1]), flush=True)
        arguments.out.write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
