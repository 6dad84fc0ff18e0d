"""This loop against TRL's GRPOTrainer (Hugging Face generate): same model, task, rewards, batch, steps and machine.

    pip install -c constraints.txt trl
    python benchmarks/loop.py --out benchmarks/results/loop.json

Both start from the same checkpoint (the quickstart's warm start), see the same prompts in the same order, sample as
many responses at temperature 1, and take one AdamW update a step with the same learning rate and clipping. The first
step of each is left out of the timing (compilation, caches). They draw other noise, so rewards are compared as
curves, and times as a ratio of medians within this one run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from slipstream.config import Config, load_config
from slipstream.models.loading import load_tokenizer
from slipstream.models.rendering import render_prompts
from slipstream.runtime.local import run_training
from slipstream.runtime.prompts import load_training_problems
from slipstream.schedule.order import PromptOrder
from slipstream.tasks.verifiers import score_task

RECIPE = "quickstart"


def warm_start(folder: Path) -> Path:
    """The checkpoint both loops start from."""
    run_training(load_config(RECIPE, [f"run.dir={folder}", "train.steps=0", "eval.before_train=false"]), quiet=True)
    return folder / "checkpoints" / "step_0"


def run_slipstream(checkpoint: Path, folder: Path, steps: int, prompts: int, samples: int) -> list[dict[str, float]]:
    changes = [f"run.dir={folder}", f"model={checkpoint}", "warmup=null", "tasks.eval={}", f"train.steps={steps}"]
    changes += [f"train.prompts_per_step={prompts}", f"train.samples_per_prompt={samples}", "run.save_every=100000"]
    run_training(load_config(RECIPE, changes), quiet=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            "step_s": row["timing_s/step"],
            "reward": row["reward/mean"],
            "mean_length": row["response_length/mean"],
        }
        for row in rows
        if row["step"] > 0
    ]


def run_trl(
    checkpoint: Path, folder: Path, config: Config, steps: int, prompts: int, samples: int
) -> list[dict[str, Any]]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = load_tokenizer(str(checkpoint))
    problems = load_training_problems(config)
    order = PromptOrder(len(problems), config.seed)
    chosen = [problems[order.at(position)] for position in range(steps * prompts)]
    rendered = render_prompts(tokenizer, chosen, config.engine.max_prompt_tokens)
    data = Dataset.from_list(
        [
            {"prompt": tokenizer.decode(prompt.token_ids), "columns": json.dumps(dict(prompt.problem.columns))}
            for prompt in rendered
        ]
    )

    def reward(completions: list[str], columns: list[str], **_: Any) -> list[float]:
        return [score_task(json.loads(c), text) for c, text in zip(columns, completions, strict=True)]

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

    train = config.train
    arguments = GRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=prompts * samples,
        num_generations=samples,
        max_completion_length=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        learning_rate=train.lr,
        lr_scheduler_type=train.lr_schedule,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        beta=0.0,
        loss_type="grpo",
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=config.seed,
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    return [
        {"step_s": end - begin, "reward": entry["reward"], "mean_length": entry["completions/mean_length"]}
        for begin, end, entry in zip(marks[::2], marks[1::2], log, strict=True)
    ]


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    times = sorted(row["step_s"] for row in rows[1:])
    tokens = [row["mean_length"] for row in rows[1:]]
    return {
        "median_step_s": statistics.median(times),
        "fastest_step_s": times[0],
        "slowest_step_s": times[-1],
        "mean_length": statistics.fmean(tokens),
        "first_rewards": statistics.fmean(row["reward"] for row in rows[:3]),
        "last_rewards": statistics.fmean(row["reward"] for row in rows[-3:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/loop.json"))
    options = parser.parse_args()

    import transformers
    import trl

    shape = options.steps, options.prompts, options.samples
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint = warm_start(folder / "warm")
        ours = run_slipstream(checkpoint, folder / "ours", *shape)
        theirs = run_trl(checkpoint, folder / "trl", load_config(RECIPE), *shape)
    result = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
        "steps": options.steps,
        "prompts_per_step": options.prompts,
        "samples_per_prompt": options.samples,
        "slipstream": summary(ours) | {"rows": ours},
        "trl": summary(theirs) | {"rows": theirs},
    }
    result["trl_step_over_slipstream_step"] = summary(theirs)["median_step_s"] / summary(ours)["median_step_s"]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in ("slipstream", "trl"):
        print(name, {key: round(value, 3) for key, value in result[name].items() if key != "rows"})
    print(f"a TRL step takes {result['trl_step_over_slipstream_step']:.2f} times as long")


if __name__ == "__main__":
    main()
