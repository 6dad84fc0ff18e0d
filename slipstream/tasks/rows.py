"""Rows of a table (file or hub dataset) as problems, other frameworks' columns read as they are.

Owns the meaning of columns: `prompt` (string or messages), `solution`, the answer column, and what verl
(`reward_model.ground_truth`) and SkyRL (`reward_spec.ground_truth`) write. Invariants: every column but the prompt
reaches the reward functions unchanged; `answer` and `ground_truth` are added where they can be known; the recipe's
`template` and `system` are applied here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from slipstream.config import TaskSet
from slipstream.files import parse_json, read_lines, read_text
from slipstream.types import Message, Problem

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
INSTEAD = "give a .jsonl file (a JSON object on each line), a .json file (a list of objects) or a .parquet file"
GROUND_TRUTH_HOLDERS = ("reward_model", "reward_spec")


def read_file(path: Path) -> list[dict[str, Any]]:
    """All rows of a .jsonl, .json (a list of objects) or .parquet file."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: a string that is not UTF-8
            raise ValueError(f"{path}: not a readable parquet file: {' '.join(str(error).split())}") from None
        return list(rows)
    if path.suffix == ".json":
        tree = parse_json(read_text(path, INSTEAD), str(path))
        if not isinstance(tree, list):
            raise ValueError(f"{path}: a .json file must hold a list of objects; one object per line is .jsonl")
        rows = tree
    else:
        rows = [parse_json(line, f"{path}:{n}") for n, line in read_lines(path, INSTEAD) if line.strip()]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} is {type(row).__name__}; every row must be an object with columns")
    return rows


def problems_of(rows: Iterable[Mapping[str, Any]], task_set: TaskSet, name: str, where: str) -> list[Problem]:
    """One problem per row, at most task_set.size of them."""
    kept = list(islice(rows, task_set.size))
    if not kept:
        raise ValueError(f"{where} has no rows")
    return [_problem(row, index, task_set, name, where) for index, row in enumerate(kept)]


def render(prompt: Any, task_set: TaskSet, where: str) -> tuple[Message, ...]:
    """A prompt, string or messages, with the recipe's template and system message."""
    if "{prompt}" not in task_set.template:
        raise ValueError(f"template {task_set.template!r} has no {{prompt}}: the question would be lost")
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
    columns = {key: value for key, value in row.items() if key != column}
    truth = columns.get("ground_truth")
    for holder in GROUND_TRUTH_HOLDERS:
        held = row.get(holder)
        if truth is None and isinstance(held, Mapping):
            truth = held.get("ground_truth")
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
        messages=render(row[column], task_set, here),
        columns=columns,
        solution=solution if isinstance(solution, str) else None,
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
