"""`slipstream eval`: evaluation of a checkpoint or a model outside a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from slipstream.config import Config, load_config
from slipstream.models.loading import check_model, load_model, load_tokenizer
from slipstream.models.rendering import render_prompts, stop_token_ids
from slipstream.observe.console import Console
from slipstream.recipe import find_recipe
from slipstream.runtime.drafting import without_learning
from slipstream.runtime.engines import build_engine, choose_device
from slipstream.runtime.evaluation import evaluate_sets
from slipstream.runtime.prompts import check_length, load_eval_problems
from slipstream.runtime.rollouts import RolloutDesk
from slipstream.tasks.grading import Grader
from slipstream.train.checkpoint import find_damage, latest_checkpoint, step_of


def evaluate_target(target: Path, overrides: Sequence[str], *, quiet: bool = False) -> dict[str, float]:
    """Metrics of all evaluation sets for a run's latest checkpoint, a given checkpoint, or a recipe's own model.

    With the settings of the run they are those that it wrote down at that step. With `model` among the overrides: that
    model's, on the sets of the run."""
    config, model_name, step = _resolve(target, overrides)
    if not config.tasks.eval:
        raise ValueError(
            "there is no evaluation set: add one, e.g. tasks.eval.heldout={source: gcd, size: 100, seed: 2}"
        )
    config = without_learning(config)
    device = choose_device(config.device)
    check_model(model_name)
    tokenizer = load_tokenizer(model_name)
    problems = load_eval_problems(config)
    sets = {name: render_prompts(tokenizer, items, config.engine.max_prompt_tokens) for name, items in problems.items()}
    with (
        Grader(config.reward, [one for items in problems.values() for one in items], config.train.steps) as grader,
        Console(1, quiet=quiet) as console,
    ):
        model = load_model(model_name, dtype=torch.float32, device=device, seed=config.seed)
        check_length(config, model)
        console.start_run([f"evaluating {model_name} on {', '.join(sets)} ({device})"])
        evaluated = evaluate_sets(
            config,
            RolloutDesk(build_engine(config, model, tokenizer, device), grader, tokenizer, config.seed),
            sets,
            step=step,
            stop_token_ids=stop_token_ids(model, tokenizer),
            console=console,
            should_stop=lambda: False,
        )
    return {name: value for one in evaluated for name, value in one.metrics.items()}


def _resolve(target: Path, overrides: Sequence[str]) -> tuple[Config, str, int]:
    """With the model, and after how many steps."""
    if not target.is_dir():
        if not find_recipe(target).is_file():
            raise ValueError(f"no run, checkpoint or recipe at {target}")
        config = load_config(target, overrides)
        return config, config.model, 0
    names_model = any(override.partition("=")[0] == "model" for override in overrides)
    if (target / "config.yaml").is_file():
        if names_model:
            config = load_config(target / "config.yaml", overrides)
            return config, config.model, 0
        checkpoint = latest_checkpoint(target)
        if checkpoint is None:
            raise ValueError(f"{target} has no checkpoint yet")
        run_dir = target
    else:
        checkpoint, run_dir = target, target.parent.parent
        if not (run_dir / "config.yaml").is_file():
            raise ValueError(
                f"{target} is neither a run folder (with config.yaml) nor a checkpoint of one; to evaluate a model "
                f"folder give a recipe: slipstream eval quickstart model={target}"
            )
        if names_model:
            raise ValueError(f"{target} and model=... are two models: leave one out (its run: {run_dir})")
    damage = find_damage(checkpoint)
    if damage is not None:
        raise ValueError(f"checkpoint {checkpoint} cannot be used: {damage}")
    return load_config(run_dir / "config.yaml", overrides), str(checkpoint), step_of(checkpoint)
