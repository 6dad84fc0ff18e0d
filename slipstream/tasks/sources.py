"""Where problems come from: `open_problems` turns a task set of the recipe into a sequence of problems, each made when
it is asked for; `load_problems` makes them all.

Owns the order in which a source is understood: built-in name, `reasoning_gym/<dataset>`, file, hub id. Invariants: the
same task set gives the same problems in the same order; problems of a generated or built-in source carry `task` and all
that its verifier needs in their columns; whatever the user can fix is a ValueError that says what to write.
Heavy libraries are imported by the source that needs them, so grading workers and the CLI start without them.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.config import TaskSet
from slipstream.tasks.procedural import ANSWER_MARK, TASKS, make_exercise, resolve_params
from slipstream.tasks.rows import problems_of, render
from slipstream.tasks.tables import FILE_SUFFIXES, Computed, read_file
from slipstream.types import Problem

REASONING_GYM = "reasoning_gym/"
GSM8K_HUB = ("openai/gsm8k", "main")
CALCULATOR_MARK = re.compile(r"<<.*?>>")


def load_problems(task_set: TaskSet, name: str) -> list[Problem]:
    """All problems of one task set; `name` becomes their source, e.g. "train/0"."""
    return list(open_problems(task_set, name))


def open_problems(task_set: TaskSet, name: str, on_rows: Callable[[int], object] | None = None) -> Computed[Problem]:
    """The problems of one task set. What is wrong with a row is raised when its problem is asked for, and what is wrong
    with the task set at once. `on_rows`: see `read_file`."""
    source = task_set.source
    if source in TASKS:
        return _procedural(task_set, name)
    if source == "gsm8k":
        return _gsm8k(task_set, name)
    if source.startswith(REASONING_GYM):
        return _reasoning_gym(task_set, name)
    path = Path(source).expanduser()
    if path.suffix in FILE_SUFFIXES or path.is_file():
        return _file(path, task_set, name, on_rows)
    return _hub(task_set, name)


def _procedural(task_set: TaskSet, name: str) -> Computed[Problem]:
    task, size = task_set.source, _size(task_set)
    params, wording = resolve_params(task, task_set.params)

    def problem(index: int) -> Problem:
        exercise = make_exercise(task, params, task_set.seed, index)
        return Problem(
            source=name,
            index=index,
            messages=render(getattr(exercise, wording), task_set, f"{task}: problem {index}"),
            columns={"task": task, "answer": exercise.answer},
            solution=exercise.solution,
        )

    return Computed(size, problem)


def _reasoning_gym(task_set: TaskSet, name: str) -> Computed[Problem]:
    from slipstream.tasks.gym import DATASETS, create_dataset

    dataset_name, size = task_set.source.removeprefix(REASONING_GYM), _size(task_set)
    if dataset_name not in DATASETS:
        near = difflib.get_close_matches(dataset_name, DATASETS, n=3)
        known = f"nearest: {', '.join(near)}" if near else f"it has {', '.join(sorted(DATASETS))}"
        raise ValueError(f"reasoning_gym has no dataset {dataset_name!r:.80}; {known}")
    taken = sorted({"size", "seed"} & set(task_set.params))
    if taken:
        raise ValueError(f"{task_set.source}: write {' and '.join(taken)} beside source, not under params")
    try:
        dataset = create_dataset(dataset_name, size=size, seed=task_set.seed, **task_set.params)
    except (TypeError, ValueError, AssertionError, KeyError, AttributeError) as error:
        fields = [field for field in DATASETS[dataset_name][1].__dataclass_fields__ if field not in ("size", "seed")]
        raise ValueError(
            f"{task_set.source} refuses params {task_set.params}: {error}; it takes {', '.join(fields)}"
        ) from None

    @functools.cache  # some of its problems take long to make
    def problem(index: int) -> Problem:
        entry = _plain(dataset[index])
        columns = {"task": task_set.source, "task_params": dict(task_set.params), "entry": entry}
        columns["answer"] = entry["answer"]
        messages = render(entry["question"], task_set, f"{task_set.source}: problem {index}")
        return Problem(source=name, index=index, messages=messages, columns=columns)

    return Computed(size, problem)


def _gsm8k(task_set: TaskSet, name: str) -> Computed[Problem]:
    unknown = sorted(set(task_set.params) - {"path"})
    if unknown:
        raise ValueError(f"gsm8k has no parameter {unknown[0]!r}; did you mean 'path'? It takes path")
    folder = task_set.params.get("path")
    if folder is None:
        where = f"{GSM8K_HUB[0]}[{task_set.split}]"
        rows = _from_hub(
            *GSM8K_HUB, split=task_set.split, hint="without the network, set params.path to a folder with train.jsonl"
        )
    else:
        path = Path(folder).expanduser() / f"{task_set.split}.jsonl"
        where = str(path)
        if not path.is_file():
            raise ValueError(f"gsm8k: no file {path}; params.path is a folder with train.jsonl and test.jsonl")
        rows = read_file(path)
    # The data has its own column names; the recipe's prompt_column does not apply to a built-in task.
    columns = task_set.model_copy(update={"prompt_column": "question", "answer_column": "answer"})
    problems = problems_of(rows, columns, name, where)
    return Computed(len(problems), lambda index: _gsm8k_problem(problems.item(index), where))


def _gsm8k_problem(problem: Problem, where: str) -> Problem:
    worked, mark, answer = str(problem.columns.get("answer")).rpartition(ANSWER_MARK)
    if not mark:
        raise ValueError(f"{where}: row {problem.index} has no {ANSWER_MARK} in its answer: is this gsm8k?")
    answer = answer.strip().replace(",", "")
    solution = f"{CALCULATOR_MARK.sub('', worked).strip()}\n{ANSWER_MARK} {answer}".lstrip()
    columns = {"task": "gsm8k", "answer": answer}
    return Problem(problem.source, problem.index, problem.messages, columns, solution)


def _file(path: Path, task_set: TaskSet, name: str, on_rows: Callable[[int], object] | None) -> Computed[Problem]:
    if path.suffix not in FILE_SUFFIXES:
        raise ValueError(
            f"{path}: cannot read {path.suffix or 'a file without suffix'}; write {_listed(FILE_SUFFIXES)}"
        )
    if not path.is_file():
        raise ValueError(f"source {task_set.source!r} reads as a file, but {path.absolute()} does not exist")
    if task_set.params:
        raise ValueError(f"{path}: a file takes no params, got {_listed(task_set.params)}")
    _no_split(task_set)
    return problems_of(read_file(path, on_rows), task_set, name, str(path))


def _hub(task_set: TaskSet, name: str) -> Computed[Problem]:
    near = difflib.get_close_matches(task_set.source, [*TASKS, "gsm8k"], n=1, cutoff=0.75)
    hint = (
        f"A source is also a built-in task ({_listed([*TASKS, 'gsm8k'])}), {REASONING_GYM}<dataset>, "
        f"or a file ending in {_listed(FILE_SUFFIXES)}"
    )
    if near:
        # Asking the hub for a misspelt task would take half a minute of retries where there is no network.
        raise ValueError(f"no source {task_set.source!r}; did you mean {near[0]!r}? {hint}. A hub id is owner/name")
    rows = _from_hub(task_set.source, split=task_set.split, hint=hint, params=task_set.params)
    return problems_of(rows, task_set, name, f"{task_set.source}[{task_set.split}]")


def _from_hub(*where: str, split: str, hint: str, params: Mapping[str, Any] | None = None) -> Any:
    import datasets

    load: Callable[..., Any] = datasets.load_dataset
    try:
        return load(*where, split=split, **(params or {}))
    except Exception as error:  # datasets and the hub client raise dozens of types; all mean "not loaded"
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"source {where[0]!r} was taken for a hub id and could not be loaded (split {split!r}): "
            f"{type(error).__name__}: {reason}. {hint}"
        ) from error


def _size(task_set: TaskSet) -> int:
    _no_split(task_set)
    if task_set.size is None:
        raise ValueError(f"{task_set.source} is generated: set size, the number of problems, e.g. size: 1000")
    return task_set.size


def _no_split(task_set: TaskSet) -> None:
    if task_set.split != "train":
        raise ValueError(
            f"{task_set.source} has no split {task_set.split!r}: leave split out, and use another seed or file"
        )


def _plain(value: Any) -> Any:
    """Built-in types only, so that the entry travels between processes; tuples and integer keys stay themselves."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value)) if type(value) in (tuple, list) else list(map(_plain, value))
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=repr)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    return _plain(value.item()) if hasattr(value, "item") else str(value)


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))
