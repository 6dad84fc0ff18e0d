"""Reward functions as TRL's documentation has them, in other words; loaded as `file.py:name`."""

from __future__ import annotations

import asyncio
import re
from typing import Any


def long_in_tokens(completion_ids, **kwargs):  # type: ignore[no-untyped-def]
    return [float(len(ids)) for ids in completion_ids]


def long_in_tokens_by_the_older_name(completions_ids, **kwargs):  # type: ignore[no-untyped-def]
    return [float(len(ids)) for ids in completions_ids]


def long_in_characters(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [float(len(completion)) for completion in completions]


def well_formed(completions, **kwargs):  # type: ignore[no-untyped-def]
    """For conversations."""
    texts = [completion[0]["content"] for completion in completions]
    assert all(completion[0]["role"] == "assistant" and len(completion) == 1 for completion in completions)
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", text) else 0.0 for text in texts]


def boxed(completions, ground_truth, **kwargs):  # type: ignore[no-untyped-def]
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    answers = [match.group(1) if match else "" for match in found]
    return [1.0 if answer == truth else 0.0 for answer, truth in zip(answers, ground_truth, strict=True)]


def only_math(prompts, completions, task, **kwargs):  # type: ignore[no-untyped-def]
    return [
        (1.0 if completion.endswith("4") and "2+2" in prompt else -1.0) if kind == "math" else None
        for prompt, completion, kind in zip(prompts, completions, task, strict=True)
    ]


def only_code(prompts, completions, task, **kwargs):  # type: ignore[no-untyped-def]
    return [0.25 if kind == "code" else None for kind in task]


async def slow(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]


_lock: list[asyncio.Lock] = []


async def keeps_something_of_its_loop(completions, **kwargs):  # type: ignore[no-untyped-def]
    """Waits for a lock that the call before made: both belong to one event loop."""
    if not _lock:
        _lock.append(asyncio.Lock())

    async def hold() -> None:
        async with _lock[0]:
            await asyncio.sleep(0.01)

    await asyncio.gather(hold(), hold())
    return [1.0] * len(completions)


def logs(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):  # type: ignore[no-untyped-def]
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    answers = [match.group(1) if match else None for match in found]
    rewards = [1.0 if answer == truth else 0.0 for answer, truth in zip(answers, ground_truth, strict=True)]
    if log_extra:
        log_extra("golden_answer", list(ground_truth))
        log_extra("extracted_answer", [answer or "[none]" for answer in answers])
    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))
    return rewards


def logs_by_kwargs(completions, **kwargs):  # type: ignore[no-untyped-def]
    kwargs["log_metric"]("accuracy", 0.5)
    kwargs["log_metric"]("accuracy", 1.0)
    kwargs["log_metric"]("no_number", float("nan"))
    kwargs["log_extra"]("golden_answer", [None if text == "none" else {"a": 1} for text in completions])
    kwargs["log_extra"]("long", ["x" * 1_000_000] * len(completions))
    if "raise" in completions:
        raise RuntimeError("after it has logged")
    return [0.0] * len(completions)


def harder_with_time(completions, trainer_state):  # type: ignore[no-untyped-def]
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


def wants_more_of_the_state(completions, trainer_state):  # type: ignore[no-untyped-def]
    return [trainer_state.best_metric] * len(completions)


def logs_too_many(completions, log_extra):  # type: ignore[no-untyped-def]
    log_extra("column", ["one", "two", "three"])
    return [0.0] * len(completions)


def logs_a_word(completions, log_metric):  # type: ignore[no-untyped-def]
    log_metric("accuracy", "high")
    return [0.0] * len(completions)


def sees_messages(prompts: list[Any], completions: list[Any], log_metric: Any, log_extra: Any) -> list[float]:
    """For a run: prompts and completions are conversations; the reward is what is logged."""
    assert all([message["role"] for message in prompt] == ["system", "user"] for prompt in prompts)
    lengths = [float(len(completion[0]["content"])) for completion in completions]
    log_metric("mean_length", sum(lengths) / len(lengths))
    log_extra("length", lengths)
    log_extra("asked", [prompt[-1]["content"] for prompt in prompts])
    return lengths
