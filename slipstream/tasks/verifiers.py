"""The built-in verifiers: what one response to a problem of a known task is worth.

Owns how a final answer is found in free text, reasoning-gym's scorers and math-verify. Each verifier scores one sample
from (problem columns, response text); it has no time limit of its own, since the process that runs it is killed
(`grading.py`), and it lets errors rise: a verifier that failed is a fault, never a zero.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from slipstream.tasks import procedural
from slipstream.types import Problem

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
ANSWER_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
REASONING_GYM = "reasoning_gym/"
LONGEST_FORMULA = 300
"""Characters of a reference answer that is taken for one."""


def is_known_task(task: Any) -> bool:
    return isinstance(task, str) and (task in procedural.TASKS or task == "gsm8k" or task.startswith(REASONING_GYM))


def score_task(columns: Mapping[str, Any], text: str) -> float:
    """The value that the problem's own task gives to the response."""
    task = columns["task"]
    if task in procedural.TASKS:
        return procedural.verify(text, columns["answer"])
    if task == "gsm8k":
        return score_gsm8k(columns, text)
    dataset = _reasoning_gym_dataset(task.removeprefix(REASONING_GYM), _frozen(columns.get("task_params")))
    entry = columns["entry"]
    return float(dataset.score_answer(extract_answer(text, entry["answer"]), entry))


def score_gsm8k(columns: Mapping[str, Any], text: str) -> float:
    """1.0 for the right number after the last ####; without that mark, the last number of the text counts."""
    marked = procedural.final_answer(text)
    numbers = _numbers(text if marked is None else marked)
    if not numbers or (marked is not None and len(numbers) != 1):
        return 0.0
    return float(numbers[-1] == _numbers(str(columns["answer"]))[0])


def extract_answer(text: str, reference: Any) -> str:
    """<answer> tags, else what follows the last ####, else the last number for a numeric reference, else the text."""
    tagged = ANSWER_TAGS.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    marked = procedural.final_answer(text)
    if marked is not None:
        return marked
    if isinstance(reference, str) and NUMBER.fullmatch(reference.strip()):
        found = NUMBER.findall(text)
        if found:
            return str(found[-1]).replace(",", "")
    return text.strip()


def score_math(columns: Mapping[str, Any], text: str) -> float:
    """math-verify: 1.0 if the response's mathematical answer equals the reference."""
    # math-verify's own limits use SIGALRM and turn a timeout into "wrong"; ours is the killed process.
    from math_verify import parse, verify

    answer = columns.get("answer")
    reference = str(columns.get("ground_truth") if answer is None else answer)
    gold = parse(_as_latex(reference), parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"math_verify cannot read the reference answer {reference!r}")
    found = parse(text, parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None, raise_on_error=True))


def is_math(reference: str) -> bool:
    """Whether math-verify can judge by this reference answer: a formula or a number, not words."""
    from math_verify import parse

    if not re.search(r"[0-9\\]", reference) or len(reference) > LONGEST_FORMULA:
        return False
    return bool(parse(_as_latex(reference), parsing_timeout=None))


def score_exact(columns: Mapping[str, Any], text: str) -> float:
    """1.0 if the response's answer is the reference: numbers by value, words whatever their case and blanks."""
    answer = columns.get("answer")
    given = str(columns.get("ground_truth") if answer is None else answer)
    marked = procedural.final_answer(given)
    reference = given.strip() if marked is None else marked
    return float(_plain(extract_answer(text, reference)) == _plain(reference))


def _plain(text: str) -> Decimal | str:
    """A number by its value, other text without differences in case, blanks and a final stop."""
    found = text.strip().removesuffix(".")
    if NUMBER.fullmatch(found):
        return Decimal(found.replace(",", ""))
    return " ".join(found.casefold().split())


def warm_math() -> None:
    """Pay for sympy's import and math-verify's grammars before a clock runs."""
    for name in ("math_verify.parser", "math_verify.grader"):
        # Both warn once per process that their timeouts are off, which is what we want.
        logging.getLogger(name).setLevel(logging.ERROR)
    score_math({"answer": "\\frac{1}{2}"}, "$0.5$")


def noting_tasks(problems: Iterable[Problem], tasks: set[tuple[str, str]]) -> Iterator[Problem]:
    """The same problems; adds (reasoning-gym dataset, its parameters as JSON) of every kind among them to `tasks`."""
    for problem in problems:
        task = problem.columns.get("task")
        if isinstance(task, str) and task.startswith(REASONING_GYM):
            tasks.add((task.removeprefix(REASONING_GYM), _frozen(problem.columns.get("task_params"))))
        yield problem


def warm_tasks(tasks: Iterable[tuple[str, str]]) -> None:
    for dataset_name, params_json in tasks:
        _reasoning_gym_dataset(dataset_name, params_json)


@functools.cache
def _reasoning_gym_dataset(dataset_name: str, params_json: str) -> Any:
    from slipstream.tasks.gym import create_dataset

    # Some scorers read the config, so the dataset is made with the parameters of its problems.
    return create_dataset(dataset_name, size=1, seed=0, **json.loads(params_json))


def _frozen(params: Any) -> str:
    return json.dumps(params or {}, sort_keys=True)


def _as_latex(reference: str) -> str:
    """Bare LaTeX gets dollar signs: without them math-verify reads \\frac{1}{2} as the number 2."""
    return f"${reference}$" if "\\" in reference and "$" not in reference and "\\boxed" not in reference else reference


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(found.replace(",", "")) for found in NUMBER.findall(text)]
