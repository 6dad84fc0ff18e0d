"""Which problems a run trains on and is evaluated on, and that they fit its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from slipstream.config import Config
from slipstream.observe.console import Console
from slipstream.runtime.overlap import describe_left_out
from slipstream.tasks.sources import load_problems
from slipstream.types import Problem, Prompt


def load_training_problems(config: Config) -> list[Problem]:
    return [
        problem
        for number, task_set in enumerate(config.tasks.train)
        for problem in load_problems(task_set, f"train/{number}")
    ]


def load_eval_problems(config: Config) -> dict[str, list[Problem]]:
    return {name: load_problems(task_set, f"eval/{name}") for name, task_set in config.tasks.eval.items()}


def check_length(config: Config, model: PreTrainedModel) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.max_length > limit:
        raise ValueError(
            f"engine.max_prompt_tokens={config.engine.max_prompt_tokens} + sampling.max_new_tokens="
            f"{config.sampling.max_new_tokens} = {config.max_length} tokens, but {config.model} takes {limit}"
        )


def hold_out(
    config: Config, prompts: Sequence[Prompt], eval_sets: Mapping[str, Sequence[Prompt]], console: Console
) -> list[Prompt]:
    """Training prompts that no evaluation set has, so that evaluation measures what was learned, not remembered."""
    held_out = {prompt.key for evaluated in eval_sets.values() for prompt in evaluated}
    kept = [prompt for prompt in prompts if prompt.key not in held_out]
    left_out = describe_left_out(config, len(kept), len(prompts))
    if left_out is not None:
        console.note(left_out)
    return kept
