from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from data_files import write_rows

from slipstream.config import TaskSet
from slipstream.tasks.sources import load_problems
from slipstream.types import Problem


def load(source: str | Path, **settings: Any) -> list[Problem]:
    return load_problems(TaskSet(source=str(source), **settings), "train/0")


def test_procedural_problems() -> None:
    problems = load("collatz", size=3, params={"min_value": 6, "max_value": 6, "wording": "terse"})
    assert [problem.index for problem in problems] == [0, 1, 2]
    assert problems[0].source == "train/0"
    assert problems[0].messages == ({"role": "user", "content": "collatz 6"},)
    assert problems[0].columns == {"task": "collatz", "answer": "8"}
    assert problems[0].solution == "1:3 2:10 3:5 4:16 5:8 6:4 7:2 8:1 #### 8"
    assert "#### <answer>" in load("collatz", size=1)[0].messages[0]["content"]


def test_a_problem_does_not_depend_on_the_size_of_its_set() -> None:
    assert load("gcd", size=5, seed=3) == load("gcd", size=9, seed=3)[:5]
    assert load("gcd", size=5, seed=3) != load("gcd", size=5, seed=4)


def test_reasoning_gym_problems_carry_their_entry() -> None:
    problems = load("reasoning_gym/chain_sum", size=3, seed=1, params={"min_terms": 2, "max_terms": 2})
    entry = problems[0].columns["entry"]
    assert problems[0].columns["task"] == "reasoning_gym/chain_sum"
    assert problems[0].messages[0]["content"] == entry["question"]
    assert problems[0].columns["answer"] == entry["answer"] == str(eval(entry["metadata"]["expression"]))
    json.dumps(problems[0].columns)
    assert pickle.loads(pickle.dumps(problems)) == problems
    names = load("reasoning_gym/knights_knaves", size=1)[0].columns["entry"]["metadata"]["names"]
    assert {type(name) for name in names} == {str}, "numpy strings must not travel"


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        ("gcd", {}, "set size"),
        ("gcd", {"size": 2, "split": "test"}, "leave split out"),
        ("gcd", {"size": 2, "params": {"digits": 3}}, "did you mean"),
        ("gcd", {"size": 2, "template": "Solve it"}, "no {prompt}"),
        ("reasoning_gym/chain_sums", {"size": 2}, "nearest: chain_sum"),
        ("reasoning_gym/chain_sum", {"size": 2, "params": {"max_term": 3}}, "max_terms"),
        ("reasoning_gym/chain_sum", {"size": 2, "params": {"min_terms": 9, "max_terms": 3}}, "min_terms"),
        ("reasoning_gym/chain_sum", {"size": 2, "params": {"seed": 3}}, "beside source"),
        ("gsm8k", {"params": {"folder": "x"}}, "did you mean 'path'"),
        ("gsm8k", {"params": {"path": "/nowhere"}}, "train.jsonl"),
        ("colatz", {"size": 2}, "did you mean 'collatz'?"),
        ("nowhere/data.jsonl", {}, "does not exist"),
        ("nowhere/data.parquet", {}, "does not exist"),
    ],
)
def test_bad_sources_are_explained(source: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(source, **settings)
    assert words in str(caught.value)


def test_gsm8k_from_a_folder(tmp_path: Path) -> None:
    worked = "He has 2*600=<<2*600=1200>>1200 eggs.\n#### 1,200"
    write_rows(tmp_path / "test.jsonl", [{"question": "How many eggs?", "answer": worked}])
    (problem,) = load("gsm8k", split="test", params={"path": str(tmp_path)}, template="{prompt} Think.")
    assert problem.messages[0]["content"] == "How many eggs? Think."
    assert problem.columns == {"task": "gsm8k", "answer": "1200"}
    assert problem.solution == "He has 2*600=1200 eggs.\n#### 1200"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_files(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": f"What is {n}+{n}?", "answer": 2 * n, "solution": "Add.", "level": n} for n in range(4)]
    problems = load(write_rows(tmp_path / f"data{suffix}", rows), size=3)
    assert len(problems) == 3
    assert problems[2].messages == ({"role": "user", "content": "What is 2+2?"},)
    assert problems[2].columns == {"answer": 4, "solution": "Add.", "level": 2}
    assert problems[2].solution == "Add."


def test_line_separators_inside_json_strings(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\n', encoding="utf-8")
    assert [problem.messages[0]["content"] for problem in load(path)] == ["a\u2028b", "c"]


@pytest.mark.parametrize("holder", ["reward_model", "reward_spec"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_verl_and_skyrl_columns(tmp_path: Path, holder: str, suffix: str) -> None:
    row = {
        "data_source": "mine",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
        holder: {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7},
    }
    path = write_rows(tmp_path / f"data{suffix}", [row])
    (problem,) = load(path, template="Q: {prompt}")
    assert [dict(message) for message in problem.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: 1+1?"},
    ]
    assert problem.columns == {
        "data_source": "mine",
        holder: row[holder],
        "extra_info": {"index": 7},
        "ground_truth": "2",
        "answer": "2",
    }
    assert load(path, system="Think.")[0].messages[0]["content"] == "Think."
    assert len(load(path, system="Think.")[0].messages) == 2


def test_other_column_names(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", [{"problem": "1+1? {x}", "final": "2"}])
    (problem,) = load(path, prompt_column="problem", answer_column="final", template="{prompt} {y}")
    assert problem.messages[0]["content"] == "1+1? {x} {y}"
    assert problem.columns == {"final": "2", "answer": "2"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        ([{"question": "a", "answer": "b"}], "it has question, answer. Set prompt_column"),
        ([{"prompt": "a"}, {"prompt": None}], "row 1: the prompt is null"),
        ([{"prompt": "a"}, {"prompt": "  "}], "row 1: the prompt is empty"),
        ([{"prompt": []}], "row 0: the prompt is an empty list"),
        ([{"prompt": [{"role": "user", "content": ""}]}], "row 0: a user message"),
        ([{"prompt": [{"role": "assistant", "content": "x"}]}], "no user message"),
        ([{"prompt": [{"role": "user"}]}], "role and content"),
        ([{"prompt": 3}], "a string or a list"),
        ([3], "row 0 is int"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(write_rows(tmp_path / "data.jsonl", rows))
    assert words in str(caught.value)


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt":\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not valid JSON"):
        load(tmp_path / "a.jsonl")
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="not a readable parquet"):
        load(tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("prompt\na\n")
    with pytest.raises(ValueError, match=r"cannot read \.csv"):
        load(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="takes no params"):
        load(write_rows(tmp_path / "b.jsonl", [{"prompt": "a"}]), params={"x": 1})


def test_hub_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls: list[Any] = []

    def fake(*where: str, **settings: Any) -> list[dict[str, str]]:
        calls.append((where, settings))
        if where[0] == "nobody/nothing":
            raise FileNotFoundError("no such dataset")
        return [{"prompt": "1+1?", "question": "1+1?", "answer": "#### 2"}]

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert load("someone/data", split="test", params={"name": "main"})[0].columns["answer"] == "#### 2"
    assert load("gsm8k", split="test")[0].columns == {"task": "gsm8k", "answer": "2"}
    assert calls == [
        (("someone/data",), {"split": "test", "name": "main"}),
        (("openai/gsm8k", "main"), {"split": "test"}),
    ]
    with pytest.raises(ValueError, match="taken for a hub id") as caught:
        load("nobody/nothing", size=2)
    for words in ("collatz", "no such dataset", "reasoning_gym/<dataset>", ".jsonl"):
        assert words in str(caught.value)
