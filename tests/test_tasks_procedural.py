from __future__ import annotations

import itertools

import pytest

from slipstream.tasks.procedural import TASKS, Exercise, make_exercise, resolve_params, verify


def exercises(task: str, count: int, seed: int = 0, **params: object) -> list[Exercise]:
    values, _ = resolve_params(task, params)
    return [make_exercise(task, values, seed, index) for index in range(count)]


@pytest.mark.parametrize(
    ("task", "params", "terse", "solution"),
    [
        ("collatz", {"min_value": 6, "max_value": 6}, "collatz 6", "1:3 2:10 3:5 4:16 5:8 6:4 7:2 8:1 #### 8"),
        ("collatz", {"min_value": 1, "max_value": 1}, "collatz 1", "#### 0"),
        ("sorting", {"min_length": 1, "max_length": 1, "min_value": 7, "max_value": 7}, "sort 7", "7 #### 7"),
    ],
)
def test_hand_checked_exercises(task: str, params: dict[str, int], terse: str, solution: str) -> None:
    (exercise,) = exercises(task, 1, **params)
    assert (exercise.terse, exercise.solution) == (terse, solution)


def test_gcd_steps_are_euclids() -> None:
    for exercise in exercises("gcd", 50, min_digits=2):
        first, second = map(int, exercise.terse.split()[1:])
        large, small = max(first, second), min(first, second)
        for step in exercise.steps.split():
            assert step == f"{large}%{small}={large % small}"
            large, small = small, large % small
        assert small == 0 and exercise.answer == str(large)


def test_multiplication_steps_are_true_and_use_only_one_digit_factors() -> None:
    for exercise in exercises("multiplication", 50, min_digits=2):
        first, second = map(int, exercise.terse.split("*"))
        assert exercise.answer == str(first * second)
        for step in exercise.steps.split():
            left, right = step.split("=")
            operator = "*" if "*" in left else "+"
            a, b = map(int, left.split(operator))
            assert int(right) == (a * b if operator == "*" else a + b)
            assert operator == "+" or len(str(b).rstrip("0")) == 1


def test_sorting_swaps_one_pair_at_a_time() -> None:
    for exercise in exercises("sorting", 50, min_length=4):
        states = [list(map(int, state.split())) for state in exercise.steps.split(" > ")]
        assert states[0] == list(map(int, exercise.terse.split()[1:]))
        assert states[-1] == sorted(states[0])
        for before, after in itertools.pairwise(states):
            assert sum(a != b for a, b in zip(before, after, strict=True)) == 2


@pytest.mark.parametrize("task", TASKS)
def test_worked_solutions_pass_their_verifier_and_others_fail(task: str) -> None:
    for exercise in exercises(task, 200):
        assert exercise.solution.isascii() and exercise.terse.isascii() and exercise.plain.isascii()
        assert exercise.solution.endswith(f"#### {exercise.answer}")
        assert verify(exercise.solution, exercise.answer) == 1.0
        assert verify(exercise.solution + " \n", exercise.answer) == 1.0
        for wrong in ("0" + exercise.answer, exercise.answer + "0", "-" + exercise.answer, exercise.answer + " 1", ""):
            assert verify(f"{exercise.steps} #### {wrong}", exercise.answer) == 0.0
        for garbage in (" and more", ".", "\nSo it is.", " ####", f" #### {exercise.answer}1"):
            assert verify(exercise.solution + garbage, exercise.answer) == 0.0
        assert verify(exercise.steps, exercise.answer) == 0.0
        assert verify(exercise.answer, exercise.answer) == 0.0


def test_verifier_forgives_only_the_spelling_of_numbers() -> None:
    assert verify("#### 5 #### 1,234", "1234") == 1.0
    assert verify("####+1,234", "1234") == 1.0
    for wrong in ("1,23", "12,34", "1234.0", "1 234", "1234#", "$1234", "1,234,", "++1234"):
        assert verify(f"#### {wrong}", "1234") == 0.0, wrong
    assert verify("#### 1,2", "1 2") == verify("#### 1  2", "1 2") == 0.0


@pytest.mark.parametrize("task", TASKS)
def test_length_has_a_heavy_tail(task: str) -> None:
    lengths = sorted(len(exercise.solution) for exercise in exercises(task, 2000))
    median, p99 = lengths[1000], lengths[1980]
    assert p99 >= 4 * median, (median, p99)


@pytest.mark.parametrize("task", TASKS)
def test_an_exercise_depends_on_its_index_alone(task: str) -> None:
    some = exercises(task, 20)
    values, _ = resolve_params(task, {})
    assert [make_exercise(task, values, 0, index) for index in reversed(range(20))] == some[::-1]
    assert exercises(task, 20) == some
    assert exercises(task, 20, seed=1) != some
    assert len({exercise.terse for exercise in some}) > 10


@pytest.mark.parametrize(
    ("task", "params", "words"),
    [
        ("gcd", {"max_digit": 3}, "did you mean 'max_digits'? It takes min_digits, max_digits, wording"),
        ("gcd", {"max_digits": "3"}, "whole number"),
        ("gcd", {"max_digits": True}, "whole number"),
        ("gcd", {"max_digits": 2.0}, "whole number"),
        ("gcd", {"min_digits": 0}, "at least 1"),
        ("collatz", {"min_value": 0}, "at least 1"),
        ("collatz", {"min_value": 1000}, "larger than max_value 999"),
        ("collatz", {"wording": "verbose"}, "plain, terse"),
        ("sorting", {"max_value": 5}, "raise max_value"),
    ],
)
def test_bad_parameters_are_explained(task: str, params: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=task) as caught:
        resolve_params(task, params)
    assert words in str(caught.value)
