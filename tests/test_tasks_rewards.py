from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import Reward, RewardFunction, TaskSet
from slipstream.tasks import verifiers
from slipstream.tasks.rewards import (
    CallLog,
    Sample,
    TrainerState,
    check_rewards,
    portable,
    resolve_reward,
    reward_names,
)
from slipstream.tasks.sources import load_problems
from slipstream.tasks.verifiers import extract_answer, score_gsm8k, score_math, score_task
from slipstream.types import Problem

FUNCTIONS = Path(__file__).parent / "data" / "reward_functions.py"


def named(name: str) -> str:
    return f"{FUNCTIONS}:{name}"


def samples(texts: list[str], **columns: Any) -> list[Sample]:
    problem = Problem("train/0", 0, ({"role": "system", "content": "s"}, {"role": "user", "content": "ask"}), columns)
    return [Sample(problem, text, tuple(range(len(text)))) for text in texts]


def score(function: str, texts: list[str], **columns: Any) -> list[Any]:
    call, group = resolve_reward(function), samples(texts, **columns)
    if call.score_one is not None:
        return [call.score_one(sample) for sample in group]
    assert call.score_group is not None
    return list(call.score_group(group, TrainerState(0, 1), CallLog(len(group))))


def test_trl_functions() -> None:
    assert score(named("length"), ["a", "abc"], answer="x", unused=3) == [1.0, 3.0]
    assert score(named("everything"), ["a", "abc"], answer="10", task="collatz") == [14.0, 16.0]
    assert score(named("slow_is_fine"), ["a", "b"], answer="b", unused=3) == [0.0, 1.0]
    assert score(named("only_b"), ["a", "b"]) == [None, 1.0]


def test_verl_functions() -> None:
    assert score(named("compute_score"), ["2", "3"], data_source="mine", ground_truth="2") == [True, False]
    assert score(named("compute_score"), ["2"], data_source="mine", answer="2") == [True]
    assert score(named("plain_score"), ["2", "3"], answer="2") == [0.5, 0.0]


def test_dotted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FUNCTIONS.parent))
    monkeypatch.delitem(sys.modules, "reward_functions", raising=False)
    assert score("reward_functions.length", ["abc"]) == [3.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("tsak", "did you mean 'task'?"),
        ("nonsense", "write `task`, `math_verify`"),
        ("/nowhere/file.py:f", "no file /nowhere/file.py"),
        ("no_such_package.f", "importing no_such_package failed"),
        (named("lenght"), "nearest: length"),
        (named("NOT_A_FUNCTION"), "is int, not a function"),
        (named("NotAFunction"), "is a class"),
        (named("strange"), "signature we do not know, (x, y)"),
    ],
)
def test_resolution_errors_say_what_to_write(function: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_reward(function)
    assert words in str(caught.value)


def test_a_file_that_fails_to_import(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import no_such_thing\n")
    with pytest.raises(ValueError, match=r"importing .*bad\.py failed: ModuleNotFoundError"):
        resolve_reward(f"{tmp_path}/bad.py:f")


def test_a_module_that_exits_on_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_script_that_exits.py").write_text("import sys\nsys.exit(2)\n")
    for function in (f"{tmp_path}/a_script_that_exits.py:f", "a_script_that_exits.f"):
        with pytest.raises(ValueError, match=r"importing .*a_script_that_exits.* failed: SystemExit: 2"):
            resolve_reward(function)


def test_a_file_imports_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_a.py").write_text("def value(text):\n    return 2.0 * len(text)\n")
    (tmp_path / "neighbour_b.py").write_text("ONE = 1.0\n")
    (tmp_path / "mine.py").write_text(
        "import neighbour_a\n"
        "def f(completions):\n"
        "    from neighbour_b import ONE\n"
        "    return [neighbour_a.value(text) + ONE for text in completions]\n"
    )
    assert score(f"{tmp_path}/mine.py:f", ["abc"]) == [7.0]
    assert sys.path[-1] == str(tmp_path), "the folder must come last: its names shadow nothing"


@pytest.mark.parametrize(
    ("function", "columns", "words"),
    [
        ("task", {"answer": "2"}, "this problem has task None"),
        ("task", {"task": "sudoku?", "answer": "2"}, "task 'sudoku?'"),
        ("task", {"task": "gcd"}, "needs the column 'answer'"),
        ("task", {"task": "reasoning_gym/chain_sum", "answer": "2"}, "needs the column 'entry'"),
        ("math_verify", {"level": 3}, "set answer_column"),
        (named("everything"), {"task": "gcd"}, "wants the column 'answer' (its columns: task)"),
        (named("compute_score"), {"level": 3}, "wants ground_truth"),
    ],
)
def test_rewards_are_checked_against_problems(function: str, columns: dict[str, Any], words: str) -> None:
    reward = Reward(functions=(RewardFunction(function=function),))
    problem = Problem("eval/x", 4, ({"role": "user", "content": "ask"},), columns)
    with pytest.raises(ValueError, match="problem 4 of eval/x") as caught:
        check_rewards(reward, [problem])
    assert words in str(caught.value)


def test_good_rewards_pass_the_check() -> None:
    problems = load_problems(TaskSet(source="collatz", size=2), "train/0")
    functions = ["task", "math_verify", named("everything"), named("compute_score"), named("length")]
    check_rewards(Reward(functions=tuple(RewardFunction(function=function) for function in functions)), problems)


def test_names_are_short_and_unique() -> None:
    functions = ("task", "a.b.length", named("length"), "task", "a.c.other")
    reward = Reward(functions=tuple(RewardFunction(function=function) for function in functions))
    assert reward_names(reward) == ["task", "a.b.length", named("length"), "task#3", "other"]
    assert portable("x.py:f") == f"{Path.cwd()}/x.py:f" and portable("a.b.f") == "a.b.f"


def test_extract_answer() -> None:
    assert extract_answer("so <answer>1</answer> no, <answer> 2 </answer>. #### 9", "2") == "2"
    assert extract_answer("#### 1 then #### 2 \n", "2") == "2"
    assert extract_answer("we get 3, then -1,234.", "7") == "-1234"
    assert extract_answer(" north 3 east ", "north") == "north 3 east"
    assert extract_answer(" text ", None) == "text"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so #### 1,200", 1.0),
        ("so #### $1200.00", 1.0),
        ("so #### 1200 eggs", 1.0),
        ("it is 7, no 1200.", 1.0),
        ("1200 #### 7", 0.0),
        ("#### 1200 or 7", 0.0),
        ("#### none, 1200 was wrong ####", 0.0),
        ("#### -1200", 0.0),
        ("no idea", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k(text: str, value: float) -> None:
    assert score_gsm8k({"answer": "1200"}, text) == value
    assert score_task({"task": "gsm8k", "answer": "1200"}, text) == value


def test_reasoning_gym_scorers_judge_their_own_answers() -> None:
    for source, params in (("chain_sum", {"max_terms": 3}), ("word_sorting", {}), ("knights_knaves", {})):
        for problem in load_problems(TaskSet(source=f"reasoning_gym/{source}", size=3, params=params), "t"):
            answer = problem.columns["answer"]
            assert score_task(problem.columns, f"well <answer>{answer}</answer>") == 1.0
            assert score_task(problem.columns, f"thinking #### {answer}") == 1.0
            assert score_task(problem.columns, "<answer>17171717</answer>") < 0.5
    chain = load_problems(TaskSet(source="reasoning_gym/chain_sum", size=1), "t")[0]
    assert score_task(chain.columns, f"1 and 2 make {chain.columns['answer']}.") == 1.0


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [
        ("\\frac{1}{2}", "The answer is $0.5$", 1.0),
        ("\\frac{1}{2}", "The answer is $2$", 0.0),
        ("$x^2+2x+1$", "so \\boxed{(x+1)^2}", 1.0),
        ("1200", "it is 1,200", 1.0),
        (1200, "it is \\boxed{1201}", 0.0),
        ("3", "no number", 0.0),
    ],
)
def test_math_verify(answer: Any, text: str, value: float) -> None:
    assert score_math({"answer": answer}, text) == value
    assert score_math({"ground_truth": answer}, text) == value


def test_problems_are_gone_through_once_for_all_functions_and_their_kinds_are_noted(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "def first(completions, **columns): ...\n\n\ndef second(completions, source, **columns): ...\n"
    )
    functions = tuple(RewardFunction(function=f"{tmp_path / 'two.py'}:{name}") for name in ("first", "second"))
    gone_through, kinds = list[int](), set[tuple[str, str]]()

    def problems() -> Iterator[Problem]:
        for index in range(5):
            gone_through.append(index)
            columns = {"task": "reasoning_gym/chain_sum", "task_params": {"min_terms": index % 2}, "source": 1}
            yield Problem("train/0", index, ({"role": "user", "content": "?"},), columns if index < 4 else {})

    with pytest.raises(ValueError, match="second' cannot judge problem 4 of train/0: it wants the column 'source'"):
        check_rewards(Reward(functions=functions), verifiers.noting_tasks(problems(), kinds))
    assert gone_through == [0, 1, 2, 3, 4]
    assert kinds == {("chain_sum", '{"min_terms": 0}'), ("chain_sum", '{"min_terms": 1}')}
