"""Training prompts that are also in an evaluation set: how many may be left out, and which seed has fewer.

Owns the bound and the sentence; which prompts are the same is found by `prompts.py`. Seeds are found by trying
them: the problems of an evaluation set are generated with each, and compared with those of the training sets.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.config import Config, TaskSet
from slipstream.tasks.procedural import TASKS
from slipstream.tasks.sources import REASONING_GYM, load_problems
from slipstream.types import Problem

Text = tuple[tuple[str, str], ...]
"""Role and content of each message of a prompt."""
LEAST_SHARE = 0.5
"""Share of the training prompts that must be left: with less, the sets are not what their sizes say."""
FAR_SEEDS = (101, 1009, 10007, 100003)
"""Tried after the seeds that follow the training sets."""


def describe_left_out(config: Config, num_kept: int, num_prompts: int) -> str | None:
    """A sentence on the training prompts that are left out since evaluation sets have them; None if there are none.

    ValueError if too few remain: fewer than a step draws, or less than LEAST_SHARE.
    """
    num_left_out = num_prompts - num_kept
    if not num_left_out:
        return None
    said = f"{num_left_out} of {num_prompts} training prompts ({num_left_out / num_prompts:.0%}) are in evaluation sets"
    least = min(config.train.prompts_per_step, num_prompts)
    if num_kept >= max(least, LEAST_SHARE * num_prompts):
        return f"{said}: left out"
    raise ValueError(
        f"{said} and would be left out: {num_kept} would remain, where at least half of them and no "
        f"fewer than train.prompts_per_step={config.train.prompts_per_step} have to. {_what_to_write(config)}"
    )


def _what_to_write(config: Config) -> str:
    """Seeds of evaluation sets that were tried and share fewer problems with the training sets."""
    seen = {_text(problem) for one in config.tasks.train for problem in load_problems(one, "train")}
    better: list[str] = []
    is_gym = was_tried = False
    for name, evaluated in config.tasks.eval.items():
        if not _is_generated(evaluated):
            continue
        shared = _num_shared(evaluated, seen)
        if not shared:
            continue
        found, was_tried = _best_seed(config, evaluated, seen), True
        if found is not None and found[1] < shared:
            seed, still_shared = found
            better.append(f"tasks.eval.{name}.seed={seed} (tried: it shares {still_shared}, not {shared})")
            is_gym |= evaluated.source.startswith(REASONING_GYM)
    if not better:
        tried = "; other seeds were tried and share as many problems" if was_tried else ""
        return f"Make the training set larger or more varied, or evaluate on other problems{tried}"
    why = "; reasoning_gym draws problem i with seed + i, so seeds have to be further apart than sets are long"
    return f"Write {' '.join(better)}{why if is_gym else ''}"


def _best_seed(config: Config, evaluated: TaskSet, seen: set[Text]) -> tuple[int, int] | None:
    """The first seed that shares no problem with the training sets, else the one that shares fewest; and how many."""
    best: tuple[int, int] | None = None
    for seed in _seeds_to_try(config, evaluated):
        shared = _num_shared(evaluated.model_copy(update={"seed": seed}), seen)
        if best is None or shared < best[1]:
            best = seed, shared
        if not shared:
            break
    return best


def _seeds_to_try(config: Config, evaluated: TaskSet) -> Iterator[int]:
    """Those that follow the training sets of the same source, and some far away."""
    ends = {one.seed + (one.size or 0) for one in config.tasks.train if one.source == evaluated.source}
    yield from dict.fromkeys([*([max(ends)] if ends else []), *sorted(ends), *FAR_SEEDS])


def _num_shared(task_set: TaskSet, seen: set[Text]) -> int:
    return sum(_text(problem) in seen for problem in load_problems(task_set, "eval"))


def _text(problem: Problem) -> Text:
    return tuple((message["role"], message["content"]) for message in problem.messages)


def _is_generated(task_set: TaskSet) -> bool:
    return task_set.source in TASKS or task_set.source.startswith(REASONING_GYM)
