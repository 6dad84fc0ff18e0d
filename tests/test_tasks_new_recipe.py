"""`slipstream init`: what it finds in a file of rows, and that what it writes trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from data_files import write_rows

from slipstream.cli import main
from slipstream.config import load_config
from slipstream.tasks.columns import TEMPLATE_TOKENS, estimate_tokens, look_at
from slipstream.tasks.new_recipe import write_recipe
from slipstream.tasks.rewards import CallLog, Sample, TrainerState, resolve_reward
from slipstream.tasks.sources import load_problems

QUICK = ["train.steps=1", "train.prompts_per_step=2", "train.samples_per_prompt=2", "sampling.max_new_tokens=4",
         "engine.max_sequences=4", "eval.before_train=false"]  # fmt: skip


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def rows_of(kind: str, count: int = 30) -> list[dict[str, Any]]:
    make: dict[str, Any] = {
        "numbers": lambda n: {"prompt": f"{n} + {n}?", "answer": 2 * n},
        "columns of other names": lambda n: {"id": n, "question": f"{n} + 1?", "target": f"{n + 1}"},
        "worked solutions": lambda n: {"problem": f"{n}?", "answer": f"\\frac{{{n}}}{{{n + 1}}}", "solution": "x"},
        "boxed solutions": lambda n: {"problem": f"halve {n}", "solution": f"So \\boxed{{\\frac{{{n}}}{{2}}}}."},
        "gsm8k": lambda n: {"question": f"{n} apples and 2?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2:,}"},
        "words": lambda n: {"prompt": f"City {n}?", "answer": f"Saint {chr(97 + n % 26)}"},
        "verl": lambda n: {"data_source": "d", "prompt": asked(f"{n}?"), "reward_model": {"ground_truth": str(n)}},
        "skyrl": lambda n: {"env_class": "e", "prompt": asked(f"{n}?"), "reward_spec": {"ground_truth": str(n)}},
        "no answers": lambda n: {"prompt": asked(f"A story of {n} cats"), "style": "brief"},
        "long answers": lambda n: {"prompt": f"Story {n}", "answer": "Once upon a time\n" * 9},
        "objects": lambda n: {"prompt": f"Which {n}?", "answer": {"tool": "search", "n": n}},
    }  # fmt: skip
    return [make[kind](n) for n in range(1, count + 1)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return int(caught.value.code or 0)


# kind of rows, columns of prompt and answer, reward, a right response to the third row, and a wrong one
CASES = [
    ("numbers", "prompt", "answer", "math_verify", "So it is \\boxed{6}.", "\\boxed{7}"),
    ("columns of other names", "question", "target", "math_verify", "4", "5"),
    ("worked solutions", "problem", "answer", "math_verify", "\\boxed{\\frac{3}{4}}", "\\boxed{\\frac{4}{3}}"),
    ("boxed solutions", "problem", "solution", "math_verify", "$\\frac{3}{2}$", "$\\frac{2}{3}$"),
    ("gsm8k", "question", "answer", "exact_match", "3 + 2 makes 5\n#### 5", "#### 3"),
    ("words", "prompt", "answer", "exact_match", "I think #### saint  D.", "#### Saint c"),
    ("verl", "prompt", "answer", "math_verify", "\\boxed{3}", "\\boxed{4}"),
    ("skyrl", "prompt", "answer", "math_verify", "\\boxed{3}", "\\boxed{4}"),
]


@pytest.mark.parametrize(
    ("kind", "prompt", "answer", "reward", "right", "wrong"), CASES, ids=[case[0] for case in CASES]
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_columns_are_found_and_the_reward_judges_by_them(
    kind: str, prompt: str, answer: str, reward: str, right: str, wrong: str, suffix: str, here: Path
) -> None:
    data = write_rows(here / f"data{suffix}", rows_of(kind))
    look = look_at(data)
    assert (look.prompt_column, look.answer_column, look.reward) == (prompt, answer, reward)
    written = write_recipe(Path(data.name), model="tiny")
    assert written.path == Path("data.yaml") and written.reward_file is None
    config = load_config("data.yaml")
    (spec,) = config.reward.functions
    problem = load_problems(config.tasks.train[0], "train/0")[2]
    score = resolve_reward(spec.function).score_one
    assert score is not None
    assert [score(Sample(problem, text, ())) for text in (right, wrong)] == [1.0, 0.0]
    assert config.tasks.eval["heldout"].size == 3
    assert config.tasks.eval["heldout"].template == config.tasks.train[0].template


@pytest.mark.parametrize("kind", ["no answers", "long answers", "objects"])
def test_where_no_reward_fits_an_example_is_written_that_runs(
    kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(here / "data.jsonl", rows_of(kind))
    assert call("init", "data.jsonl", "--model", "tiny") == 0
    assert "data_reward.py holds an example: write what an answer is worth to you" in capsys.readouterr().out
    (spec,) = load_config("data.yaml").reward.functions
    problem = load_problems(load_config("data.yaml").tasks.train[0], "train/0")[0]
    score = resolve_reward(spec.function).score_group
    assert spec.function == "data_reward.py:score" and score is not None
    samples = [Sample(problem, "word " * count, ()) for count in (0, 25, 50)]
    assert score(samples, TrainerState(0, 1), CallLog(3)) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("kind", ["verl", "no answers"])
def test_what_is_written_passes_a_dry_run_and_trains(kind: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(here / "mine.json", rows_of(kind))
    assert call("init", "mine.json", "--model", "tiny", "--out", "first.yaml") == 0
    commands = re.findall(r"slipstream (train .*)", capsys.readouterr().out)
    assert commands == ["train first.yaml --dry-run", "train first.yaml"]
    assert call(*commands[0].split()) == 0
    assert call(*commands[1].split(), *QUICK) == 0
    assert (here / "runs" / "first" / "report.html").is_file()


def test_the_commented_example_can_be_used_as_it_stands(here: Path) -> None:
    write_rows(here / "data.jsonl", rows_of("numbers"))
    text = write_recipe(Path("data.jsonl"), model="tiny").path.read_text()
    (entry,) = re.findall(r"^    # (- .*rewards\.py.*)$", text, re.MULTILINE)
    (body,) = re.findall(r"^    #   (def .*)$", text, re.MULTILINE)
    (here / "rewards.py").write_text(body + "\n")
    (here / "data.yaml").write_text(text.replace(f"    # {entry}", f"    {entry}"))
    config = load_config("data.yaml")
    assert [spec.function for spec in config.reward.functions] == ["math_verify", "rewards.py:brief"]
    problem = load_problems(config.tasks.train[0], "train/0")[0]
    score = resolve_reward("rewards.py:brief").score_group
    samples = [Sample(problem, "x", ()), Sample(problem, "x" * 600, ())]
    assert score is not None and score(samples, TrainerState(0, 1), CallLog(2)) == [1.0, 0.0]


def test_a_prompt_that_says_the_format_gets_no_template(here: Path) -> None:
    rows = [{"prompt": f"{n}? End with \\boxed{{}}", "answer": n} for n in range(20)]
    write_rows(here / "says.jsonl", rows)
    write_rows(here / "silent.jsonl", rows_of("numbers"))
    templates = {}
    for name in ("says", "silent"):
        write_recipe(Path(f"{name}.jsonl"))
        templates[name] = load_config(f"{name}.yaml").tasks.train[0].template
    assert templates == {"says": "{prompt}", "silent": "{prompt}\nPut the final answer in \\boxed{}."}


def test_nothing_is_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(here / "data.jsonl", rows_of("no answers"))
    (here / "data.yaml").write_text("mine")
    assert call("init", "data.jsonl") == 2
    assert "data.yaml is already there" in capsys.readouterr().err
    (here / "other_reward.py").write_text("mine")
    assert call("init", "data.jsonl", "--out", "other.yaml") == 2
    assert "other_reward.py is already there" in capsys.readouterr().err
    assert sorted(path.name for path in here.iterdir()) == ["data.jsonl", "data.yaml", "other_reward.py"]
    assert (here / "data.yaml").read_text() == (here / "other_reward.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("rows", "words", "says"),
    [
        ([], [], "has no rows"),
        ([{"id": 1, "comment": 2}], [], "name the one with the question: --prompt COLUMN"),
        ([{"messages": [*asked("2?"), {"role": "assistant", "content": "2"}]}], [], "do not end with the user's"),
        ([{"prompt": "a"}], ["--prompt", "q"], "has no column 'q'; it has prompt"),
        ([{"prompt": "a", "answer": 1}], ["--answer", "b"], "has no column 'b'; it has prompt, answer"),
        ([{"prompt": "a", "answer": n if n != 3 else None} for n in range(9)], [], "1 of 9 rows have no answer"),
        ([{"prompt": "a" if n != 3 else " ", "answer": n} for n in range(9)], ["--prompt", "prompt"], "row 3"),
        ([{"prompt": "a", "answer": 1}], ["--out", "x.txt"], "a recipe ends in .yaml"),
        ([{"prompt": "a", "answer": 1}], ["--out", "no/x.yaml"], "there is no folder no"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_and_nothing_written(
    rows: list[dict[str, Any]], words: list[str], says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(here / "data.jsonl", rows)
    assert call("init", "data.jsonl", *words) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert [path.name for path in here.iterdir()] == ["data.jsonl"]
    assert call("init", "nowhere.jsonl") == 2


@pytest.mark.parametrize(("count", "same"), [(1, False), (5, False), (40, True)])
def test_a_file_that_cannot_spare_rows_has_no_evaluation_set(count: int, same: bool, here: Path) -> None:
    write_rows(here / "data.jsonl", [{"prompt": "one?" if same else f"{n}?", "answer": n} for n in range(count)])
    write_recipe(Path("data.jsonl"))
    config = load_config("data.yaml")
    assert config.tasks.eval == {} and "evaluate on a file of its own" in (here / "data.yaml").read_text()
    assert config.train.prompts_per_step == min(16, count)


# Text, and how many tokens SmolLM2 makes of it.
TOKENS = [
    ("The quick brown fox jumps over the lazy dog while internationalization committees deliberate. " * 10, 151),
    ("Let $x^2 + \\frac{3}{4}y = \\sqrt{17}$, where $x, y \\in \\mathbb{R}$. Find all $n \\ge 2$ such that "
     "$\\sum_{k=1}^{n} k^3 = 12345$.\n" * 6, 408),
    ("THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG AND XKCDQZ WVBNMP " * 5, 146),
    ("Съешь ещё этих мягких французских булок да выпей чаю. " * 5, 252),
    ("敏捷的棕色狐狸跳过了懒狗,然后回家睡觉。" * 8, 344),
    ("1234567890 98765 3.14159 " * 10, 250),
    ("Szczebrzeszyn Krzyzewski Mpumalanga Nguyen Schwarzenegger Xochitl " * 5, 132),
]  # fmt: skip


@pytest.mark.parametrize(("text", "num_tokens"), TOKENS, ids=[text[:12] for text, _ in TOKENS])
def test_lengths_are_estimated_on_the_high_side(text: str, num_tokens: int) -> None:
    assert num_tokens <= estimate_tokens(text) <= 3 * num_tokens
    assert estimate_tokens(text, by_character=True) == len(text)


def test_names_may_have_anything_in_them(here: Path) -> None:
    name, column = 'a "b" #é😀.jsonl', "what\nis: asked? # {\x07"
    write_rows(here / name, [{column: f"{n}?", "answer": n} for n in range(20)])
    write_recipe(Path(name), Path("out.yaml"), prompt=column)
    task = load_config("out.yaml").tasks.train[0]
    assert (task.source, task.prompt_column) == (name, column) and len(load_problems(task, "train/0")) == 20


def test_a_file_of_another_kind_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "data.csv").write_text("prompt,answer\n1+1,2\n")
    assert call("init", "data.csv") == 2
    assert "give a file ending in .jsonl, .json, .parquet" in capsys.readouterr().err


def test_the_longest_prompt_fits(here: Path) -> None:
    write_rows(here / "data.jsonl", [{"prompt": "short?", "answer": 1}] * 9 + [{"prompt": "7 " * 900, "answer": 2}])
    write_recipe(Path("data.jsonl"), model="tiny")
    longest = 1800 + len("\nPut the final answer in \\boxed{}.") + TEMPLATE_TOKENS
    assert longest <= yaml.safe_load((here / "data.yaml").read_text())["engine"]["max_prompt_tokens"] < longest + 128
