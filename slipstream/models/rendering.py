"""From problems to token ids and back: the model's chat template, stop tokens, and the warm start's pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slipstream.types import Problem, Prompt


def render_prompts(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], max_prompt_tokens: int
) -> list[Prompt]:
    """All prompts of a set; ValueError names the first that is too long."""
    return [render_short_prompt(tokenizer, problem, max_prompt_tokens) for problem in problems]


def render_short_prompt(tokenizer: PreTrainedTokenizerBase, problem: Problem, max_prompt_tokens: int) -> Prompt:
    """ValueError if it is too long."""
    prompt = render_prompt(tokenizer, problem)
    if len(prompt.token_ids) > max_prompt_tokens:
        raise ValueError(
            f"problem {problem.index} of {problem.source} has a prompt of {len(prompt.token_ids)} tokens, "
            f"more than engine.max_prompt_tokens={max_prompt_tokens}; raise that, or leave the problem out"
        )
    return prompt


def render_prompt(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> Prompt:
    messages = [dict(message) for message in problem.messages]
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = "\n".join(message["content"] for message in messages)
    token_ids = tuple(tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"])
    if not token_ids:
        raise ValueError(f"problem {problem.index} of {problem.source} has an empty prompt")
    return Prompt(problem, token_ids, prompt_key(token_ids))


def prompt_key(token_ids: Sequence[int]) -> str:
    return hashlib.blake2b(np.asarray(token_ids, "<i4").tobytes(), digest_size=8).hexdigest()


def render_solution(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, max_new_tokens: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prompt ids, response ids) of a worked solution, with the token that ends it."""
    return prompt.token_ids, solution_ids(tokenizer, prompt.problem, max_new_tokens)


def solution_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem, max_new_tokens: int) -> tuple[int, ...]:
    solution = worked_solution(problem)
    response = (*tokenizer(solution, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
    if len(response) > max_new_tokens:
        raise ValueError(
            f"problem {problem.index} of {problem.source} has a worked solution of {len(response)} "
            f"tokens, more than sampling.max_new_tokens={max_new_tokens}: the warm start would teach answers that are "
            "always cut; raise that, or make the task easier"
        )
    return response


def worked_solution(problem: Problem) -> str:
    """ValueError if it has none."""
    if problem.solution is None:
        raise ValueError(
            f"problem {problem.index} of {problem.source} has no worked solution, which the warm start "
            "learns from; give the data a `solution` column, use a built-in task, or leave `warmup:` out"
        )
    return problem.solution


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a response, by the model's generation config and the tokenizer."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = set(declared if isinstance(declared, list) else [declared]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ValueError("neither the model nor its tokenizer says which token ends a response (eos_token_id)")
    return tuple(sorted(ids))
