"""TRL's contract for reward functions, by the examples of its documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_tasks_grading import item, summary

from slipstream.config import Reward, RewardFunction, TaskSet
from slipstream.observe.metrics import evaluation_metrics, rollout_metrics
from slipstream.tasks.grading import Grader
from slipstream.tasks.sources import load_problems
from slipstream.types import Problem, Scored, Unscored

FUNCTIONS = Path(__file__).parent / "data" / "trl_rewards.py"


def rewarded_by(*names: str) -> Reward:
    return Reward(functions=tuple(RewardFunction(function=f"{FUNCTIONS}:{name}") for name in names))


def results_of(
    grader: Grader, texts: list[str], columns: Mapping[str, Any], messages: bool = False, num_trained: int = 0
) -> list[Scored | Unscored]:
    question = ({"role": "user", "content": columns.get("question", "ask")},)
    problem = Problem("train/0", 0, question, columns, is_conversational=messages)
    grader.submit(0, [item(text, problem) for text in texts], num_trained)
    ((_, results),) = grader.poll(wait_s=40)
    return results


@pytest.mark.parametrize(
    ("functions", "texts", "columns", "messages", "expected"),
    [
        (["long_in_tokens"], [" blue.", " in the sky."], {}, False, [6.0, 12.0]),
        (["long_in_tokens_by_the_older_name"], [" blue.", " in the sky."], {}, False, [6.0, 12.0]),
        (["long_in_characters"], [" blue.", " in the sky."], {}, False, [6.0, 12.0]),
        (["well_formed"], ["<think>1</think><answer>2</answer>", "it is 2"], {}, True, [1.0, 0.0]),
        (["boxed"], ["so \\boxed{2}.", "so \\boxed{6}."], {"ground_truth": "2"}, False, [1.0, 0.0]),
        (["only_math", "only_code"], ["is 4", "is 5"], {"task": "math", "question": "2+2?"}, False, [1.0, -1.0]),
        (["only_math", "only_code"], ["def"], {"task": "code"}, False, [0.25]),
        (["only_math", "only_code"], ["def"], {"task": "art"}, False, ["no_score"]),
        (["slow"], ["a", ""], {}, False, [1.0, 0.0]),
    ],
)
def test_the_documented_examples(
    functions: list[str], texts: list[str], columns: dict[str, Any], messages: bool, expected: list[float | str]
) -> None:
    with Grader(rewarded_by(*functions)) as grader:
        assert summary(results_of(grader, texts, columns, messages)) == expected


def test_what_async_functions_keep_between_calls_lives_in_one_event_loop() -> None:
    with Grader(rewarded_by("keeps_something_of_its_loop")) as grader:
        for _ in range(3):
            assert summary(results_of(grader, ["a"], {})) == [1.0]


def test_the_data_says_whether_prompts_are_strings_or_messages(tmp_path: Path) -> None:
    rows = [{"prompt": "as text"}, {"prompt": [{"role": "user", "content": "as a message"}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task_set = TaskSet(source=str(tmp_path / "rows.jsonl"), system="be brief", template="Q: {prompt}")
    first, second = load_problems(task_set, "train/0")
    assert not first.is_conversational and second.is_conversational
    assert not load_problems(TaskSet(source="gcd", size=1), "train/0")[0].is_conversational


def test_metrics_and_columns_that_functions_log_come_with_the_samples() -> None:
    with Grader(rewarded_by("logs", "logs_by_kwargs")) as grader:
        results = results_of(grader, ["\\boxed{2}", "none"], {"ground_truth": "2"})
    for result in results:
        assert result.logged == {"logs/accuracy": 0.5, "logs_by_kwargs/accuracy": 0.75}
    right, wrong = results
    assert (right.extras["golden_answer"], right.extras["extracted_answer"]) == ("2", "2")
    assert wrong.extras["extracted_answer"] == "[none]"
    assert right.extras["logs_by_kwargs/golden_answer"] == "{'a': 1}"
    assert wrong.extras["logs_by_kwargs/golden_answer"] is None
    assert len(right.extras["long"]) < 1200 and "characters are cut here" in right.extras["long"]
    scored = [result for result in results if isinstance(result, Scored)]
    assert rollout_metrics(scored, [], 2)["logged/logs/accuracy"] == 0.5
    assert evaluation_metrics("test", scored, [], 2)["eval/test/logged/logs_by_kwargs/accuracy"] == 0.75


def test_what_a_call_logged_before_it_failed_does_not_count() -> None:
    with Grader(rewarded_by("logs", "logs_by_kwargs")) as grader:
        good, bad = results_of(grader, ["none", "raise"], {"ground_truth": "2"})
    assert good.logged == {"logs/accuracy": 0.0, "logs_by_kwargs/accuracy": 0.75}
    assert isinstance(bad, Unscored) and bad.logged == {"logs/accuracy": 0.0}
    assert bad.extras["golden_answer"] == "2" and "logs_by_kwargs/golden_answer" not in bad.extras


def test_the_trainer_state_says_how_far_the_run_is() -> None:
    with Grader(rewarded_by("harder_with_time"), num_steps=10) as grader:
        assert summary(results_of(grader, ["a"], {}, num_trained=4)) == [0.4]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("wants_more_of_the_state", "trainer_state has global_step and max_steps here, not 'best_metric'"),
        ("logs_too_many", r"log_extra\('column', ...\) takes a list with one value per completion, 1, not 3"),
        ("logs_a_word", r"log_metric\('accuracy', ...\) takes a number, not 'high'"),
    ],
)
def test_misuse_is_a_fault_that_says_what_to_write(function: str, words: str) -> None:
    with Grader(rewarded_by(function)) as grader:
        results = results_of(grader, ["a", "b"], {})
    assert all(isinstance(result, Unscored) and re.search(words, result.detail) for result in results)
