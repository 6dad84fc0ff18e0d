"""Rows of a table (file or hub dataset) as problems, other frameworks' columns read as they are.

Owns the meaning of columns: `prompt` (string or messages), `solution`, the answer column, and what verl
(`reward_model.ground_truth`) and SkyRL (`reward_spec.ground_truth`) write. Invariants: every column but the prompt
reaches the reward functions unchanged; `answer` and `ground_truth` are added where they can be known; whether a prompt
was a string or messages is kept; the recipe's `template` and `system` are applied here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slipstream.config import TaskSet
from slipstream.tasks.tables import Computed, rows_of
from slipstream.types import Message, Problem

GROUND_TRUTH_HOLDERS = ("reward_model", "reward_spec")


def problems_of(rows: Iterable[Mapping[str, Any]], task_set: TaskSet, name: str, where: str) -> Computed[Problem]:
    """One problem per row, at most task_set.size of them, each made when it is asked for."""
    table = rows_of(rows, task_set.size)
    count = len(table) if task_set.size is None else min(len(table), task_set.size)
    if not count:
        raise ValueError(f"{where} has no rows")
    return Computed(count, lambda index: _problem(table.item(index), index, task_set, name, where))


def render(prompt: Any, task_set: TaskSet, where: str) -> tuple[Message, ...]:
    """A prompt, string or messages, with the recipe's template and system message."""
    if "{prompt}" not in task_set.template:
        raise ValueError(f"template {task_set.template!r} has no {{prompt}}: the question would be lost")
    if isinstance(prompt, str) and task_set.system is None and prompt.strip():  # what most rows of large sets are
        return ({"role": "user", "content": task_set.template.replace("{prompt}", prompt)},)
    messages = _messages(prompt, where)
    last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise ValueError(f"{where}: the prompt has no user message")
    # replace, not format: prompts and templates may hold braces of their own.
    content = task_set.template.replace("{prompt}", messages[last]["content"])
    messages[last] = {"role": "user", "content": content}
    if task_set.system is not None:
        # Chat templates refuse two system messages; the recipe's own wish wins over the row's.
        messages = [{"role": "system", "content": task_set.system}, *(m for m in messages if m["role"] != "system")]
    return tuple(messages)


def _problem(row: Mapping[str, Any], index: int, task_set: TaskSet, name: str, where: str) -> Problem:
    column, here = task_set.prompt_column, f"{where}: row {index}"
    if column not in row:
        raise ValueError(
            f"{here} has no column {column!r}; it has {', '.join(map(str, row)) or 'none'}. "
            "Set prompt_column to the one with the question"
        )
    columns = dict(row)
    prompt = columns.pop(column)
    truth = columns.get("ground_truth")
    for holder in GROUND_TRUTH_HOLDERS:
        if truth is None and holder in row and isinstance(row[holder], Mapping):
            truth = row[holder].get("ground_truth")
    if truth is not None:
        columns["ground_truth"] = truth
    answer = row.get(task_set.answer_column)
    if answer is None:
        answer = truth
    if answer is not None:
        columns["answer"] = answer
    solution = row.get("solution")
    return Problem(
        source=name,
        index=index,
        messages=render(prompt, task_set, here),
        columns=columns,
        solution=solution if isinstance(solution, str) else None,
        is_conversational=not isinstance(row[column], str),
    )


def _messages(prompt: Any, where: str) -> list[Message]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"{where}: the prompt is empty")
        return [{"role": "user", "content": prompt}]
    if prompt is None:
        raise ValueError(f"{where}: the prompt is null")
    if not isinstance(prompt, Sequence) or not all(isinstance(message, Mapping) for message in prompt):
        raise ValueError(f"{where}: the prompt must be a string or a list of {{role, content}}, not {prompt!r:.80}")
    if not prompt:
        raise ValueError(f"{where}: the prompt is an empty list of messages")
    messages: list[Message] = []
    for message in prompt:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"{where}: a message needs the strings role and content, got {dict(message)!r:.80}")
        if role == "user" and not content.strip():
            raise ValueError(f"{where}: a user message of the prompt is empty")
        messages.append({"role": role, "content": content})
    return messages
