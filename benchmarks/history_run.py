"""A real RL run with and without drafts: the same tokens, how much sooner, what was accepted, by epoch.

    python benchmarks/history_run.py --out benchmarks/results/history_run.json
    python benchmarks/history_run.py --recipe quickstart --max-new-tokens 128 --out quickstart.json
    python benchmarks/history_run.py --sources off,history,drafter,both --keep runs/drafts --out draft_run.json
    python benchmarks/history_run.py --sources off,both --way 'both: 4 drafts, 8+ or model 4' --out ways.json

The recipe's warm start comes first, on its own prompts, with responses as long as it has them; then, from the same
weights, a run for each source of drafts over a few prompts of the same tasks that come up again in every epoch, trained
so that the same rollouts give the same weights. Rollout seconds are those of the step's generation phase.
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

from slipstream.models.loading import width_of
from slipstream.models.precision import resolve_precision
from slipstream.observe.store import RunStore
from slipstream.recipe import find_recipe
from slipstream.runtime.benches import describe_machine

KEPT = (
    *("timing_s/gen", "timing_s/step", "actor/grad_norm", "reward/mean"),
    *("response_length/mean", "response_length/max", "rollout/tokens"),
)
SPEC = "rollout/spec_"
NO_DRAFTS = {f"{SPEC}accept_length": 1.0, f"{SPEC}accepted": 0.0}
PREFIXES = (SPEC, "drafter/", "timing_s/")


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
    """A hash of the policy's weights in the last checkpoint, beside which the drafter's may lie."""
    last = max((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name.partition("_")[2]))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(last.glob("model*.safetensors")))).hexdigest()


def kept(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name in KEPT or name.startswith(PREFIXES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-reasoner")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompts-per-step", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--warmup-steps", type=int, default=160)
    parser.add_argument("--model", type=Path, help="a checkpoint to start from, instead of the recipe's warm start")
    parser.add_argument("--max-new-tokens", type=int, default=2048)
    parser.add_argument("--sources", default="off,history", help="of draft.source; the first is what others compare to")
    parser.add_argument(
        "--way", action="append", default=[], metavar="'SOURCE: WAY'", help="then a run that never drafts otherwise"
    )
    parser.add_argument("--keep", type=Path, help="a new folder for the runs; without it they are removed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="of the recipe, for both runs")
    arguments = parser.parse_args()
    recipe = find_recipe(arguments.recipe)
    steps_an_epoch = arguments.prompts // arguments.prompts_per_step
    shared = [
        f"train.samples_per_prompt={arguments.samples}",
        f"train.prompts_per_step={arguments.prompts_per_step}",
        f"engine.max_sequences={arguments.prompts_per_step * arguments.samples}",
        "engine.kv_tokens=null",
        "run.save_every=1",
        "train.deterministic=true",
        *arguments.overrides,
    ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = {"what": "benchmarks/history_run.py", **vars(arguments)}
    record["out"], record["keep"] = arguments.out.name, arguments.keep is not None
    record["model"] = arguments.model is not None
    sources = [*arguments.sources.split(","), *arguments.way]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        model = arguments.model
        if model is None:
            warm = Path(folder, "warm")
            train(recipe, warm, f"warmup.steps={arguments.warmup_steps}", *shared, "train.steps=1", "draft.source=off")
            model = warm / "checkpoints" / "step_1"
        record |= describe_machine(device, resolve_precision("auto", device, width_of(str(model))))
        runs: dict[str, list[dict[str, Any]]] = {}
        for source in sources:
            of, _, way = source.partition(": ")
            run = Path(folder, source.replace(": ", "-").replace(", ", "-").replace(" ", "_"))
            runs[source] = train(
                recipe,
                run,
                f"model={model}",
                "warmup=null",
                f"tasks.train={few_prompts(recipe, arguments.prompts)}",
                *shared,
                f"sampling.max_new_tokens={arguments.max_new_tokens}",
                "run.save_every=1000",
                f"train.steps={arguments.epochs * steps_an_epoch}",
                f"draft.source={of}",
                *([f"draft.way={way}"] if way else []),
            )[-arguments.epochs * steps_an_epoch :]
            tokens, weights = tokens_of(run), weights_of(run)
            if source == sources[0]:
                plain, plain_weights = tokens, weights
                record |= {"rollouts": len(plain), "identical": {}, "same_weights": {}}
                if not any(row.get("actor/grad_norm") for row in runs[source]):
                    raise SystemExit(
                        "no step had a gradient, so the same weights would say nothing: give more --warmup-steps"
                    )
            else:
                record["identical"][source] = sum(plain[uid] == tokens.get(uid) for uid in plain)
                record["same_weights"][source] = weights == plain_weights
            record["steps"] = {source: [kept(row) for row in rows] for source, rows in runs.items()}
            record["epochs"] = [epoch_of(runs, epoch, steps_an_epoch) for epoch in range(arguments.epochs)]
            # After each of them: whoever is cut off keeps what there is.
            arguments.out.write_text(json.dumps(record, indent=1, default=str) + "\n")
    for line in record["epochs"]:
        print(json.dumps(line), flush=True)
    for source in sources[1:]:
        same = "the same" if record["same_weights"][source] else "NOT the same"
        print(f"{source}: {record['identical'][source]} of {len(plain)} rollouts identical, the last weights {same}")


def epoch_of(runs: dict[str, list[dict[str, Any]]], epoch: int, num_steps: int) -> dict[str, Any]:
    """Seconds of the runs so far, and what they gained over the first."""
    part = slice(epoch * num_steps, (epoch + 1) * num_steps)
    seconds = {source: statistics.fmean(row["timing_s/gen"] for row in rows[part]) for source, rows in runs.items()}
    first, *others = runs
    line: dict[str, Any] = {
        "epoch": epoch,
        "gen_s": seconds,
        "reward": statistics.fmean(row["reward/mean"] for row in runs[first][part]),
        "length": statistics.fmean(row["response_length/mean"] for row in runs[first][part]),
    }
    for source in others:
        rows = [NO_DRAFTS | row if source == "off" else row for row in runs[source][part]]
        line[source] = {
            "gain": seconds[first] / seconds[source],
            "tokens_a_step": statistics.fmean(row[f"{SPEC}accept_length"] for row in rows),
            "accepted_share": sum(row[f"{SPEC}accepted"] for row in rows) / sum(row["rollout/tokens"] for row in rows),
        }
    return line


if __name__ == "__main__":
    main()
