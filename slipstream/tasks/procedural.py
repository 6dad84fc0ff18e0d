"""Built-in tasks made by a program: collatz, gcd, multiplication, sorting, each with worked solution and verifier.

Pure. Owns the questions, the difficulty defaults (one table, `TASKS`) and what counts as a right final answer.
Invariants: problem i of a set depends only on (seed, task, parameters, i); worked solutions are ASCII, one short and
locally computable step after another, end with ` #### <answer>` and pass their own verifier; their length has a heavy
tail (p99 >= 4 x median), which is what a rollout engine has to live with. Sizes are drawn so that each larger one is
half as likely (digits, list lengths) or log-uniformly (values): many short problems, a few long ones.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from slipstream.rng import keyed_random

ANSWER_MARK = "####"
WORDINGS = ("plain", "terse")
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+")


@dataclass(frozen=True, slots=True)
class Exercise:
    """One generated question in both wordings, with its worked solution."""

    plain: str
    terse: str
    steps: str
    answer: str

    @property
    def solution(self) -> str:
        return f"{self.steps} {ANSWER_MARK} {self.answer}".lstrip()


@dataclass(frozen=True, slots=True)
class ProceduralTask:
    """A way to make exercises. `defaults` is the only place where the difficulty is written down."""

    generate: Callable[[Random, Mapping[str, int]], Exercise]
    defaults: Mapping[str, int]
    smallest: Mapping[str, int]
    """The least value that each parameter may have."""


def final_answer(text: str) -> str | None:
    """The text after the last `####`, stripped; None without the mark."""
    _, mark, answer = text.rpartition(ANSWER_MARK)
    return answer.strip() if mark else None


def verify(text: str, answer: str) -> float:
    """1.0 if the response ends with `#### <answer>` and nothing after it, else 0.0."""
    found = final_answer(text)
    return float(found is not None and _normal(found) == _normal(answer))


def resolve_params(task: str, params: Mapping[str, Any]) -> tuple[dict[str, int], str]:
    """The complete difficulty parameters and the wording; ValueError names the nearest parameter and the allowed."""
    spec = TASKS[task]
    allowed = [*spec.defaults, "wording"]
    values, wording = dict(spec.defaults), "plain"
    for name, value in params.items():
        if name not in allowed:
            near = difflib.get_close_matches(str(name), allowed, n=1)
            hint = f"did you mean {near[0]!r}? It takes" if near else "it takes"
            raise ValueError(f"{task} has no parameter {name!r:.80}; {hint} {', '.join(allowed)}")
        if name == "wording":
            if value not in WORDINGS:
                raise ValueError(f"{task}: wording is {value!r}; write one of {', '.join(WORDINGS)}")
            wording = value
        elif isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{task}: {name} is {value!r}; write a whole number, e.g. {spec.defaults[name]}")
        else:
            values[name] = value
    for name, smallest in spec.smallest.items():
        if values[name] < smallest:
            raise ValueError(f"{task}: {name} is {values[name]}; it must be at least {smallest}")
    for name in (name for name in values if name.startswith("min_")):
        upper = name.replace("min_", "max_")
        if values[name] > values[upper]:
            raise ValueError(f"{task}: {name} {values[name]} is larger than {upper} {values[upper]}")
    if task == "sorting" and values["max_value"] - values["min_value"] + 1 < values["max_length"]:
        raise ValueError(
            f"sorting draws different numbers: {values['min_value']}..{values['max_value']} has too few for "
            f"max_length {values['max_length']}; raise max_value or lower max_length"
        )
    return values, wording


def make_exercise(task: str, params: Mapping[str, int], seed: int, index: int) -> Exercise:
    """Exercise `index` of the set (seed, task, params); `params` as resolve_params returns them."""
    random = keyed_random("procedural", seed, task, json.dumps(dict(params), sort_keys=True), index)
    return TASKS[task].generate(random, params)


def _normal(answer: str) -> str:
    """Leave out what does not change a number: a leading plus and thousands commas. Lists stay as they are."""
    answer = answer.strip()
    if re.fullmatch(r"\+\d[\d,]*", answer):
        answer = answer[1:]
    return answer.replace(",", "") if THOUSANDS.fullmatch(answer) else answer


def _instructions(answer: str) -> str:
    return f"Work it out step by step and end with `{ANSWER_MARK} <answer>`, where <answer> is {answer}."


def _log_uniform(random: Random, low: int, high: int) -> int:
    return min(high, int(math.exp(random.uniform(math.log(low), math.log(high + 1)))))


def _halving(random: Random, low: int, high: int) -> int:
    """low..high, each value half as likely as the one before (the last takes the rest)."""
    value = low
    while value < high and random.random() < 0.5:
        value += 1
    return value


def _number(random: Random, num_digits: int) -> int:
    return random.randint(10 ** (num_digits - 1), 10**num_digits - 1)


def _collatz(random: Random, params: Mapping[str, int]) -> Exercise:
    start = value = _log_uniform(random, params["min_value"], params["max_value"])
    steps: list[str] = []
    while value != 1:
        value = value // 2 if value % 2 == 0 else 3 * value + 1
        # Each step carries its number, so that counting is copying and adding one.
        steps.append(f"{len(steps) + 1}:{value}")
    return Exercise(
        plain=f"Start with {start}. In each step halve the number if it is even, or multiply it by 3 and add 1 if it "
        f"is odd. How many steps does it take to reach 1? {_instructions('the number of steps')}",
        terse=f"collatz {start}",
        steps=" ".join(steps),
        answer=str(len(steps)),
    )


def _gcd(random: Random, params: Mapping[str, int]) -> Exercise:
    num_digits = _halving(random, params["min_digits"], params["max_digits"])
    # Two random numbers have no common divisor in six cases of ten, and a model soon learns to answer 1: draw the
    # divisor first, so that no answer is worth guessing.
    divisor = _log_uniform(random, 2 if num_digits > 1 else 1, 10**num_digits // 4)
    most = (10**num_digits - 1) // divisor
    factors = random.randint(1, most), random.randint(1, most)
    while math.gcd(*factors) != 1:
        factors = random.randint(1, most), random.randint(1, most)
    first, second = divisor * factors[0], divisor * factors[1]
    large, small = max(first, second), min(first, second)
    steps = []
    while small:
        steps.append(f"{large}%{small}={large % small}")
        large, small = small, large % small
    return Exercise(
        plain=f"What is the greatest common divisor of {first} and {second}? Use Euclid's algorithm. "
        f"{_instructions('the greatest common divisor')}",
        terse=f"gcd {first} {second}",
        steps=" ".join(steps),
        answer=str(large),
    )


def _multiplication(random: Random, params: Mapping[str, int]) -> Exercise:
    first, second = (_number(random, _halving(random, params["min_digits"], params["max_digits"])) for _ in range(2))
    steps, total = [], 0
    for place, digit in enumerate(reversed(str(second))):
        if digit == "0":
            continue
        factor = int(digit) * 10**place
        steps.append(f"{first}*{factor}={first * factor}")
        if total:
            steps.append(f"{total}+{first * factor}={total + first * factor}")
        total += first * factor
    return Exercise(
        plain=f"What is {first} times {second}? Multiply by one digit at a time and add up the partial products. "
        f"{_instructions('the product')}",
        terse=f"{first}*{second}",
        steps=" ".join(steps),
        answer=str(total),
    )


def _sorting(random: Random, params: Mapping[str, int]) -> Exercise:
    length = _halving(random, params["min_length"], params["max_length"])
    numbers = random.sample(range(params["min_value"], params["max_value"] + 1), length)
    question, state = " ".join(map(str, numbers)), list(numbers)
    steps = [question]
    for place in range(length):
        smallest = state.index(min(state[place:]))
        if smallest != place:
            state[place], state[smallest] = state[smallest], state[place]
            steps.append(" ".join(map(str, state)))
    return Exercise(
        plain=f"Sort these numbers from smallest to largest: {question}. Swap two numbers at a time and write the "
        f"whole list after each swap. {_instructions('the sorted list, separated by single spaces')}",
        terse=f"sort {question}",
        steps=" > ".join(steps),
        answer=steps[-1],
    )


TASKS: dict[str, ProceduralTask] = {
    "collatz": ProceduralTask(
        generate=_collatz, defaults={"min_value": 2, "max_value": 999}, smallest={"min_value": 1}
    ),
    "gcd": ProceduralTask(generate=_gcd, defaults={"min_digits": 2, "max_digits": 7}, smallest={"min_digits": 1}),
    "multiplication": ProceduralTask(
        generate=_multiplication, defaults={"min_digits": 1, "max_digits": 5}, smallest={"min_digits": 1}
    ),
    "sorting": ProceduralTask(
        generate=_sorting,
        defaults={"min_length": 2, "max_length": 10, "min_value": 0, "max_value": 99},
        smallest={"min_length": 1, "min_value": 0},
    ),
}
