"""A real RL run with and without drafts from history: the same tokens, how much sooner, what was accepted, by epoch.

    python benchmarks/history_run.py --out benchmarks/results/history_run.json
    python benchmarks/history_run.py --recipe quickstart.yaml --max-new-tokens 128 --out quickstart.json

The recipe's warm start comes first, on its own prompts; then, from the same weights, two runs over a few prompts of the
same tasks that come up again in every epoch, trained so that the same rollouts give the same weights. Rollout seconds
are those of the step's generation phase.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from slipstream.models.precision import resolve_precision
from slipstream.observe.store import RunStore
from slipstream.runtime.benches import describe_machine

RECIPES = Path(__file__).parent.parent / "recipes"
KEPT = (
    *("timing_s/gen", "timing_s/step", "actor/grad_norm", "reward/mean"),
    *("response_length/mean", "response_length/max", "rollout/tokens"),
)
SPEC = "rollout/spec_"


def train(recipe: Path, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of each step."""
    command = [sys.executable, "-c", "from slipstream.cli import main; main()", "train", str(recipe)]
    subprocess.run([*command, f"run.dir={folder}", "eval.every=0", "tasks.eval={}", *overrides], check=True)
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def few_prompts(recipe: Path, prompts: int) -> str:
    """The recipe's tasks with as many prompts in all, none of which the warm start has seen."""
    tasks = yaml.safe_load(recipe.read_text())["tasks"]["train"]
    sizes = [prompts // len(tasks) + (number < prompts % len(tasks)) for number in range(len(tasks))]
    return json.dumps([task | {"size": size, "seed": 97} for task, size in zip(tasks, sizes, strict=True)])


def tokens_of(folder: Path) -> dict[str, tuple[int, ...]]:
    with RunStore(folder, read_only=True) as store:
        return {rollout.uid: rollout.token_ids for rollout in store.rollouts(kind="train")}


def weights_of(folder: Path) -> str:
    """A hash of the weights of the last checkpoint."""
    last = max((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name.partition("_")[2]))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(last.glob("*.safetensors")))).hexdigest()


def kept(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name in KEPT or name.startswith(SPEC)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-reasoner.yaml")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompts-per-step", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--warmup-steps", type=int, default=160)
    parser.add_argument("--max-new-tokens", type=int, default=2048)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="of the recipe, for both runs")
    arguments = parser.parse_args()
    recipe = RECIPES / arguments.recipe
    steps_an_epoch = arguments.prompts // arguments.prompts_per_step
    shared = [
        f"train.samples_per_prompt={arguments.samples}",
        f"train.prompts_per_step={arguments.prompts_per_step}",
        f"sampling.max_new_tokens={arguments.max_new_tokens}",
        f"engine.max_sequences={arguments.prompts_per_step * arguments.samples}",
        "engine.kv_tokens=null",
        "run.save_every=1",
        "train.deterministic=true",
        *arguments.overrides,
    ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = resolve_precision("auto", device)
    record = describe_machine(device, precision) | {"what": "benchmarks/history_run.py", **vars(arguments)}
    record["out"] = arguments.out.name
    with tempfile.TemporaryDirectory() as folder:
        warm = Path(folder, "warm")
        train(recipe, warm, f"warmup.steps={arguments.warmup_steps}", *shared, "train.steps=1", "draft.source=off")
        model = warm / "checkpoints" / "step_1"
        runs: dict[str, list[dict[str, Any]]] = {}
        for source in ("off", "history"):
            runs[source] = train(
                recipe,
                Path(folder, source),
                f"model={model}",
                "warmup=null",
                f"tasks.train={few_prompts(recipe, arguments.prompts)}",
                *shared,
                "run.save_every=1000",
                f"train.steps={arguments.epochs * steps_an_epoch}",
                f"draft.source={source}",
            )[-arguments.epochs * steps_an_epoch :]
        off, on = (tokens_of(Path(folder, source)) for source in ("off", "history"))
        weights = [weights_of(Path(folder, source)) for source in ("off", "history")]
    record["rollouts"], record["identical"] = len(off), sum(off[uid] == on.get(uid) for uid in off)
    if not any(row.get("actor/grad_norm") for row in runs["off"]):
        raise SystemExit("no step had a gradient, so the same weights would say nothing: give more --warmup-steps")
    record["same_weights"] = weights[0] == weights[1]
    record["steps"] = {source: [kept(row) for row in rows] for source, rows in runs.items()}
    record["epochs"] = []
    for epoch in range(arguments.epochs):
        part = slice(epoch * steps_an_epoch, (epoch + 1) * steps_an_epoch)
        seconds = {source: statistics.fmean(row["timing_s/gen"] for row in rows[part]) for source, rows in runs.items()}
        rows = runs["history"][part]
        record["epochs"].append(
            {
                "epoch": epoch,
                "gen_s_off": seconds["off"],
                "gen_s_history": seconds["history"],
                "gain": seconds["off"] / seconds["history"],
                "tokens_a_step": statistics.fmean(row[f"{SPEC}accept_length"] for row in rows),
                "accepted_share": sum(row[f"{SPEC}accepted"] for row in rows)
                / sum(row["rollout/tokens"] for row in rows),
                "reward": statistics.fmean(row["reward/mean"] for row in rows),
                "length": statistics.fmean(row["response_length/mean"] for row in rows),
            }
        )
        print(json.dumps(record["epochs"][-1]), flush=True)
    same = "the same" if record["same_weights"] else "NOT the same"
    print(f"{record['identical']} of {record['rollouts']} rollouts are identical, the last weights are {same}")
    arguments.out.write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
