"""Reward functions: from the name in the recipe to something that can be called on a group of samples.

Owns name resolution, the two foreign signatures, and the check of functions against problems before a run starts.
- TRL:  f(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns) -> list[float | None],
  sync or async, naming any of these and any column. Lists have one entry per sample. Where the data has a prompt as
  messages, `prompts` and `completions` are lists of messages; where it has a string, they are strings (the last user
  message and the response). None: the function does not apply to that sample.
- verl: compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | {"score": float}, one sample.
Nothing here catches what a function raises: `grading.py` calls them, in another process.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import Reward
from slipstream.tasks import verifiers
from slipstream.types import Problem

TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
TRL_BY_NAME_ONLY = ("completions_ids",)
"""As older pages of TRL's documentation write `completion_ids`."""
MAX_EXTRA_CHARACTERS = 1000
"""Of a value that is given to `log_extra`; a longer one is cut, which it says."""
MAX_LOGGED = 64
"""Names that one call may log, of metrics and of columns each."""
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
WHAT_TO_WRITE = (
    "write `task`, `math_verify`, `exact_match`, a dotted path `package.module.name`, or `file.py:name`, of a function "
    "f(completions, **columns) -> list[float] (TRL) or compute_score(data_source, solution_str, ground_truth, "
    "extra_info=None) -> float (verl)"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to judge."""

    problem: Problem
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """TRL's `trainer_state`, with the attributes that exist here."""

    global_step: int
    """Steps of training before the one that the samples are for; in an evaluation, before that."""
    max_steps: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has global_step and max_steps here, not {name!r}")


class CallLog:
    """What a function logs in one call, by TRL's `log_metric(name, value)` and `log_extra(column, values)`."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._values: dict[str, list[float]] = {}
        self.extras: dict[str, list[Any]] = {}
        """By column, one value per sample: numbers, and texts of bounded length."""

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of what was given for each name. What is not finite is left out."""
        finite = {name: [value for value in values if math.isfinite(value)] for name, values in self._values.items()}
        return {name: math.fsum(values) / len(values) for name, values in finite.items() if values}

    def log_metric(self, name: str, value: Any) -> None:
        _check_name("log_metric", name, self._values)
        try:
            self._values.setdefault(name, []).append(float(value))
        except (TypeError, ValueError):
            raise ValueError(f"log_metric({name!r}, ...) takes a number, not {value!r:.200}") from None

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        _check_name("log_extra", column, self.extras)
        given = list(values)
        if len(given) != self._num_samples:
            raise ValueError(
                f"log_extra({column!r}, ...) takes a list with one value per completion, {self._num_samples}, "
                f"not {len(given)}"
            )
        self.extras[column] = [_plain_extra(value) for value in given]


def _check_name(function: str, name: Any, known: Mapping[str, Any]) -> None:
    if not isinstance(name, str) or not name or len(name) > 100:
        raise ValueError(f"{function} takes a name of at most 100 characters first, not {name!r:.200}")
    if name not in known and len(known) >= MAX_LOGGED:
        raise ValueError(f"{function} takes at most {MAX_LOGGED} different names in a call")


def _plain_extra(value: Any) -> Any:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) < 2**53:
        return value
    return shortened(str(value), MAX_EXTRA_CHARACTERS)


def shortened(text: str, most: int) -> str:
    """The text's beginning and end, with a sentence about how much was cut between them."""
    if len(text) <= most:
        return text
    head, tail = most // 2, most - most // 2
    return f"{text[:head]}\n[... {len(text) - most:,} of {len(text):,} characters are cut here ...]\n{text[-tail:]}"


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A resolved reward function. Exactly one of `score_one` and `score_group` is there."""

    score_one: Callable[[Sample], Any] | None
    score_group: Callable[[Sequence[Sample], TrainerState, CallLog], Any] | None
    check: Callable[[Problem], str | None]
    """What a problem lacks for this function, in words, or None."""


def resolve_reward(function: str) -> RewardCall:
    """The callable behind a recipe's `function`; ValueError says what to write instead."""
    if function in BUILT_INS:
        return BUILT_INS[function]()
    found = _load(function)
    if inspect.isclass(found):
        raise ValueError(f"reward {function!r} is a class; give a function, or an instance that can be called")
    if not callable(found):
        raise ValueError(f"reward {function!r} is {type(found).__name__}, not a function; {WHAT_TO_WRITE}")
    return _adapt(function, found)


def check_rewards(reward: Reward, problems: Iterable[Problem]) -> None:
    """Raise ValueError for whatever can be known before the run: names, signatures, columns that are missing.

    The problems are gone through once, after all functions are found."""
    checks = [(spec.function, resolve_reward(spec.function).check) for spec in reward.functions]
    for problem in problems:
        for function, check in checks:
            lack = check(problem)
            if lack:
                raise ValueError(
                    f"reward {function!r} cannot judge problem {problem.index} of {problem.source}: {lack} "
                    f"(its columns: {', '.join(problem.columns) or 'none'})"
                )


def reward_names(reward: Reward) -> list[str]:
    """A short name for each function, unique in the run; Scored.parts uses them."""
    short = [spec.function.rpartition(":")[2].rpartition(".")[2] for spec in reward.functions]
    names: list[str] = []
    for spec, name in zip(reward.functions, short, strict=True):
        unique = name if short.count(name) == 1 else spec.function
        names.append(unique if unique not in names else f"{unique}#{len(names)}")
    return names


def portable(function: str) -> str:
    """The same function for a process with another working folder."""
    path, colon, name = function.rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{name}" if colon else function


def _built_in_task() -> RewardCall:
    def check(problem: Problem) -> str | None:
        task: Any = problem.columns.get("task")
        if not verifiers.is_known_task(task):
            return (
                f"`task` needs a built-in or reasoning_gym source, this problem has task {task!r}; set "
                "reward.functions to math_verify or to a function of your own"
            )
        column = "entry" if task.startswith(verifiers.REASONING_GYM) else "answer"
        return None if _has(problem.columns, column) else f"task {task} needs the column {column!r}"

    return RewardCall(lambda sample: verifiers.score_task(sample.problem.columns, sample.text), None, check)


def _built_in_math_verify() -> RewardCall:
    def check(problem: Problem) -> str | None:
        known = any(_has(problem.columns, column) for column in ("answer", "ground_truth"))
        return None if known else "math_verify needs a reference answer; set answer_column to the column that has it"

    return RewardCall(lambda sample: verifiers.score_math(sample.problem.columns, sample.text), None, check)


def _built_in_exact_match() -> RewardCall:
    def check(problem: Problem) -> str | None:
        known = any(problem.columns.get(column) is not None for column in ("answer", "ground_truth"))
        return None if known else "exact_match needs a reference answer; set answer_column to the column that has it"

    return RewardCall(lambda sample: verifiers.score_exact(sample.problem.columns, sample.text), None, check)


BUILT_INS: dict[str, Callable[[], RewardCall]] = {
    "task": _built_in_task,
    "math_verify": _built_in_math_verify,
    "exact_match": _built_in_exact_match,
}


def _load(function: str) -> Any:
    where, colon, name = function.rpartition(":")
    if not colon:
        where, dot, name = function.rpartition(".")
        if not dot or not where or not name:
            near = difflib.get_close_matches(function, BUILT_INS, n=1)
            raise ValueError(f"no reward {function!r};{f' did you mean {near[0]!r}?' if near else ''} {WHAT_TO_WRITE}")
    module = _import_file(Path(where).expanduser(), function) if colon else _import_dotted(where, function)
    if not hasattr(module, name):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, public, n=1)
        has = f"nearest: {near[0]}" if near else f"it has {', '.join(public) or 'no function'}"
        raise ValueError(f"reward {function!r}: {where} has no {name!r}; {has}")
    return getattr(module, name)


def _import_file(path: Path, function: str) -> Any:
    if not path.is_file():
        raise ValueError(f"reward {function!r}: no file {path.absolute()}; {WHAT_TO_WRITE}")
    # Named by its path, so that two files with one name do not shadow each other.
    module_name = f"slipstream_reward_{path.stem}_{abs(hash(str(path.absolute())))}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward {function!r}: {path} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    folder = str(path.absolute().parent)
    if folder not in sys.path:  # for the file's neighbours, now and in its functions; last, to shadow nothing of ours
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ValueError(f"reward {function!r}: importing {path} failed: {type(error).__name__}: {error}") from error
    return module


def _import_dotted(module_name: str, function: str) -> Any:
    # A console script does not have the working folder on its path, where users keep their own modules.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"reward {function!r}: importing {module_name} failed: {type(error).__name__}: {error}; {WHAT_TO_WRITE}"
        ) from error


def _adapt(function: str, found: Callable[..., Any]) -> RewardCall:
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(f"reward {function!r} has no readable signature; wrap it in a Python function") from None
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise ValueError(f"reward {function!r} has positional-only parameters; {WHAT_TO_WRITE}")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    required = [name for name, p in named.items() if p.default is p.empty]
    if "solution_str" in named:
        extra = [name for name in required if name not in VERL_ARGUMENTS]
        if extra:
            raise ValueError(
                f"reward {function!r} reads as verl's compute_score but wants {extra[0]!r}; {WHAT_TO_WRITE}"
            )
        accepted = VERL_ARGUMENTS if takes_all else tuple(name for name in VERL_ARGUMENTS if name in named)
        return _verl(found, accepted, needs_truth="ground_truth" in required)
    given = (*TRL_ARGUMENTS, *TRL_BY_NAME_ONLY)
    if any(name in named for name in given) or (takes_all and not required):
        columns = [name for name in required if name not in given]
        return _trl(found, frozenset(named), takes_all, columns)
    raise ValueError(f"reward {function!r} has a signature we do not know, ({', '.join(named)}); {WHAT_TO_WRITE}")


def _trl(found: Callable[..., Any], named: frozenset[str], takes_all: bool, needed: Sequence[str]) -> RewardCall:
    def score_group(samples: Sequence[Sample], state: TrainerState, log: CallLog) -> Any:
        keys = dict.fromkeys(key for sample in samples for key in sample.problem.columns)
        arguments: dict[str, Any] = {key: [sample.problem.columns.get(key) for sample in samples] for key in keys}
        arguments["prompts"] = [_trl_prompt(sample.problem) for sample in samples]
        arguments["completions"] = [_trl_completion(sample) for sample in samples]
        arguments["completion_ids"] = [list(sample.token_ids) for sample in samples]
        arguments |= {"trainer_state": state, "log_metric": log.log_metric, "log_extra": log.log_extra}
        if not takes_all:
            arguments = {key: value for key, value in arguments.items() if key in named}
        if "completions_ids" in named:
            arguments["completions_ids"] = [list(sample.token_ids) for sample in samples]
        return _awaited(found(**arguments))

    def check(problem: Problem) -> str | None:
        lack = [column for column in needed if not _has(problem.columns, column)]
        is_null = ", which is null here" if lack and lack[0] in problem.columns else ""
        return f"it wants the column {lack[0]!r}{is_null}" if lack else None

    return RewardCall(None, score_group, check)


def _verl(found: Callable[..., Any], accepted: Sequence[str], needs_truth: bool) -> RewardCall:
    def score_one(sample: Sample) -> Any:
        columns = sample.problem.columns
        arguments = {
            "data_source": columns.get("data_source", columns.get("task", sample.problem.source)),
            "solution_str": sample.text,
            "ground_truth": _ground_truth(columns),
            "extra_info": columns.get("extra_info"),
        }
        value = _awaited(found(**{name: arguments[name] for name in accepted}))
        if not isinstance(value, Mapping):
            return value
        if "score" not in value:
            raise ValueError(f"compute_score returned a dict without 'score': {dict(value)!r:.200}")
        return value["score"]

    def check(problem: Problem) -> str | None:
        lacks = needs_truth and not any(_has(problem.columns, column) for column in ("ground_truth", "answer"))
        return "compute_score wants ground_truth; set answer_column to the column that has it" if lacks else None

    return RewardCall(score_one, None, check)


def _has(columns: Mapping[str, Any], column: str) -> bool:
    """Null and NaN are how tables write that a value is missing."""
    value = columns.get(column)
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _ground_truth(columns: Mapping[str, Any]) -> Any:
    truth = columns.get("ground_truth")
    return columns.get("answer") if truth is None else truth


def _trl_prompt(problem: Problem) -> str | list[dict[str, str]]:
    if problem.is_conversational:
        return [dict(message) for message in problem.messages]
    return next(message["content"] for message in reversed(problem.messages) if message["role"] == "user")


def _trl_completion(sample: Sample) -> str | list[dict[str, str]]:
    if sample.problem.is_conversational:
        return [{"role": "assistant", "content": sample.text}]
    return sample.text


@functools.cache
def _event_loop() -> asyncio.Runner:
    """One for the life of a process: sessions and locks that a function keeps between calls belong to it."""
    return asyncio.Runner()


def _awaited(value: Any) -> Any:
    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    return _event_loop().run(wait(value)) if inspect.isawaitable(value) else value
