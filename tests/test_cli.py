"""The command line as a newcomer meets it: wrong input gets a sentence that says what to write, and a non-zero exit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from slipstream.cli import main

REWARDS = Path(__file__).parent / "data" / "reward_functions.py"
GCD = {"source": "gcd", "size": 8, "seed": 1, "params": {"wording": "terse"}}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "run": {"dir": str(folder / "run"), "save_every": 1},
        "tasks": {"train": [GCD]},
        "sampling": {"max_new_tokens": 8},
        "engine": {"max_sequences": 8, "max_prompt_tokens": 32},
        "train": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2},
    } | changes


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return int(caught.value.code or 0)


def train(folder: Path, tree: dict[str, Any], *words: str) -> int:
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    return call("train", str(recipe), *words)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_help_loads_no_torch() -> None:
    """What makes --help slow is importing torch; a clock in a test would only measure the machine."""
    code = (
        "import sys, slipstream.cli\n"
        "try: slipstream.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("train", "eval", "check", "report", "bench"))


def test_dry_run_prints_settings_and_arithmetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, settings(tmp_path), "--dry-run", "train.prompts_per_step=5", "--train.steps", "7") == 0
    printed = capsys.readouterr().out
    assert (
        "prompts_per_step: 5" in printed and "5 prompts x 2 samples = 10" in printed and "7 steps x 10 = 70" in printed
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"trian": {}}, [], "unknown key 'trian'; did you mean 'train'?"),
        ({}, ["train.stesp=3"], "did you mean 'train.steps'?"),
        ({}, ["train.steps=many"], "'train.steps' is 'many'"),
        ({}, ["train.steps"], "write key=value"),
        ({}, ["model=./nowhere"], "no model folder at './nowhere'"),
        ({"tasks": {"train": [{"source": "gcd"}]}}, [], "size"),
        ({"tasks": {"train": [{**GCD, "params": {"max_digit": 3}}]}}, [], "did you mean 'max_digits'?"),
        ({"reward": {"functions": [{"function": "nothing.py:f"}]}}, [], "nothing.py"),
        ({"reward": {"functions": [{"function": f"{REWARDS}:no_such"}]}}, [], "no_such"),
        ({"engine": {"max_prompt_tokens": 4}}, [], "raise that, or leave the problem out"),
        ({"engine": {"max_prompt_tokens": 5000}}, [], "takes 4096"),
        ({"train": {"samples_per_prompt": 1}}, [], "set train.samples_per_prompt >= 2"),
        ({"sampling": {"temperature": 0.0}}, [], "set sampling.temperature above 0"),
        ({"run": {"dir": "unused", "loggers": ["wandbb"]}}, [], "'wandb'"),
    ],
)
def test_wrong_settings_say_what_to_write(
    change: dict[str, Any], words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, settings(tmp_path, **change), *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists(), "a run that never began leaves nothing behind"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export-drafter"], "Missing argument"),
        (["train-drafter", "run", "--updates", "many"], "Invalid value for '--updates'"),
        (["train-drafter", "run", "--updates", "0"], "Invalid value for '--updates'"),
        (["bench", "engine", "--shape", "tiny"], "No such option: --shape"),
        (["tarin"], "No such command 'tarin'"),
    ],
)
def test_wrong_words_say_how_to_call_it(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 2
    printed = capsys.readouterr().err
    assert message in printed and "Usage: " in printed and "Traceback" not in printed


def test_a_missing_column_names_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "data.jsonl", [{"question": "1+1", "answer": "2"}])
    assert train(tmp_path, settings(tmp_path, tasks={"train": [{"source": data}]})) == 2
    error = capsys.readouterr().err
    assert "question" in error and "prompt_column" in error


def test_an_empty_data_set_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "data.jsonl", [])
    assert train(tmp_path, settings(tmp_path, tasks={"train": [{"source": data}]})) == 2
    assert "data.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "message"),
    [("raises", "Traceback"), ("hangs", "timeout"), ("returns_nan", "nan")],
)
def test_a_broken_reward_stops_the_run_with_its_first_fault(
    function: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = {"functions": [{"function": f"{REWARDS}:{function}"}], "timeout_s": 1.0}
    assert train(tmp_path, settings(tmp_path, reward=reward)) == 1
    error = capsys.readouterr().err
    assert "4 of 4 samples" in error and message in error.lower() + error
    # Nothing is lost: what was generated is in the store, as faults and not as zeros, and the run can be resumed.
    import sqlite3

    with sqlite3.connect(tmp_path / "run" / "run.db") as connection:
        rows = connection.execute("SELECT reward, fault FROM rollouts").fetchall()
    assert len(rows) == 4 and all(reward is None and fault for reward, fault in rows)
    assert train(tmp_path, settings(tmp_path), "--resume") == 0


def test_an_earlier_run_is_not_overwritten_by_accident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, settings(tmp_path), "--quiet") == 0
    assert capsys.readouterr().out == ""
    assert train(tmp_path, settings(tmp_path)) == 2
    assert "--resume" in capsys.readouterr().err
    assert train(tmp_path, settings(tmp_path), "--overwrite") == 0


def test_a_corrupt_checkpoint_is_named_with_the_intact_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, settings(tmp_path)) == 0
    weights = tmp_path / "run" / "checkpoints" / "step_1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert train(tmp_path, settings(tmp_path), "--resume") == 2
    error = capsys.readouterr().err
    assert "model.safetensors" in error and "--resume-from" in error and "--overwrite" in error
    intact = tmp_path / "run" / "checkpoints" / "step_0"
    assert train(tmp_path, settings(tmp_path), "--resume-from", str(intact)) == 2
    assert "holds 4 rollouts of steps 1 to 1 and checkpoint step_1" in capsys.readouterr().err
    assert train(tmp_path, settings(tmp_path), "--resume-from", str(intact), "--overwrite") == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs root to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_is_a_sentence(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = {"steps": 3, "prompts_per_step": 2, "samples_per_prompt": 2}
    assert train(tmp_path, settings(small_disk, train=several)) == 1
    error = capsys.readouterr().err
    assert "free" in error and str(small_disk) in error and "Traceback" not in error


def test_eval_and_report_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = settings(tmp_path, tasks={"train": [GCD], "eval": {"held": {**GCD, "seed": 2, "size": 3}}})
    assert train(tmp_path, tree, "--quiet") == 0
    assert call("eval", str(tmp_path / "run"), "--json", "eval.samples_per_prompt=2") == 0
    metrics = json.loads(capsys.readouterr().out)
    assert {"eval/held/avg@2", "eval/held/pass@2"} <= metrics.keys()
    assert call("eval", str(tmp_path / "run" / "checkpoints" / "step_0")) == 0
    capsys.readouterr()
    assert call("eval", str(tmp_path / "run"), "--json") == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] > 0 and json.loads(capsys.readouterr().out).items() <= rows[-1].items()
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "run" / "checkpoints" / "step_0", other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 0.05 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    greedy = ["--json", "eval.temperature=0"]
    assert call("eval", str(tmp_path / "run"), *greedy, f"model={other}") == 0
    of_other = json.loads(capsys.readouterr().out)
    assert call("eval", str(tmp_path / "recipe.yaml"), *greedy, f"model={other}") == 0
    assert json.loads(capsys.readouterr().out) == of_other, "the model that was named, not the run's last checkpoint"
    assert call("eval", str(tmp_path / "run"), *greedy) == 0
    assert json.loads(capsys.readouterr().out) != of_other
    checkpoint = tmp_path / "run" / "checkpoints" / "step_0"
    assert call("eval", str(checkpoint), f"model={other}") == 2
    assert "are two models: leave one out" in capsys.readouterr().err
    assert call("report", str(tmp_path / "run")) == 0
    assert call("report", str(tmp_path)) != 0
    assert call("eval", str(tmp_path / "nowhere")) == 2


def nothing_is_right(folder: Path) -> dict[str, Any]:
    (folder / "rewards.py").write_text("def nothing(completions, **columns):\n    return [0.0] * len(completions)\n")
    return {"functions": [{"function": f"{folder / 'rewards.py'}:nothing"}]}


def test_a_run_that_learns_nothing_says_so_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = settings(tmp_path, reward=nothing_is_right(tmp_path), sampling={"max_new_tokens": 64})
    assert train(tmp_path, tree, "train.steps=4") == 0
    lines = capsys.readouterr().out.splitlines()
    (hint,) = [place for place, line in enumerate(lines) if "hint after step 3: no group had a reward signal" in line]
    assert "every sample got reward 0" in lines[hint] and "warm start (warmup)" in lines[hint]
    assert "prompt: " in lines[hint + 1] and "completion (" in lines[hint + 2] and "reward 0)" in lines[hint + 2]
    assert lines[-1].startswith("warning: nothing was learned") and any("done after 4 steps" in one for one in lines)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Over the whole run: nothing was learned" in page and "Hint after step 3: no group had a reward" in page
    assert "completion (" in page
    assert train(tmp_path, tree, "train.steps=7", "--resume") == 0
    assert "hint after" not in capsys.readouterr().out, "step 3 was told of; step 9 would be next"


def test_a_run_with_a_signal_ends_with_its_curve_and_no_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = [{"function": f"{REWARDS}:shorter_is_better"}]
    tree = settings(tmp_path, reward={"functions": functions}, sampling={"max_new_tokens": 64})
    assert train(tmp_path, tree, "train.steps=4", "train.samples_per_prompt=4", "sampling.top_p=0.9") == 0
    out = capsys.readouterr().out
    assert "sampling.top_p=0.9 cuts the distribution" in out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0.85 < row["rollout/kept_mass"] < 1 for row in rows[1:])
    assert all(
        row["rollout/importance_weight"] == pytest.approx(row["rollout/kept_mass"], abs=1e-3) for row in rows[1:]
    )
    assert "step 1" in out and "reward" in out.splitlines()[-4] and "│" in out
    assert "hint" not in out and "warning" not in out and out.splitlines()[-1].startswith("evaluate it again")
    assert "<h2>Hints</h2>" not in (tmp_path / "run" / "report.html").read_text()
    assert train(tmp_path, tree, "train.steps=4", "--overwrite", "--quiet") == 0
    assert capsys.readouterr().out == ""


def test_check_says_what_this_machine_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", "tiny", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["usable"] and report["model"].startswith("tiny: llama") and "torch" in report["facts"]
    assert report["fusion"] == "3 of 3 layers fused (llama)"
    assert call("check", "tiny") == 0
    printed = capsys.readouterr().out
    assert "\nfusion         3 of 3 layers fused (llama)\n" in printed
    command = printed.splitlines()[-1].removeprefix("ready: slipstream ")
    assert call(*command.split(), "--dry-run") == 0, "what it says to do can be done from any folder"


@pytest.mark.parametrize("has_it", [True, False])
def test_check_says_what_auto_means_for_the_number_format(has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.models import precision
    from slipstream.runtime.machine import check_machine

    monkeypatch.setattr(precision, "has_native_bfloat16", lambda device: has_it)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = check_machine().facts["bfloat16"]
    assert ("auto means it for hidden states of 256 and more" if has_it else "auto mean float32") in said


def test_check_says_why_a_model_is_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", "./nowhere") == 2
    printed = capsys.readouterr().out
    assert "no model folder at './nowhere'" in printed and "fusion" not in printed


def test_check_lists_an_extra_without_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on the path is importable, but nobody knows its version."""
    from slipstream.runtime.machine import EXTRAS, check_machine

    (tmp_path / "loose_extra.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(EXTRAS, "loose_extra", ("nothing", "pip install nothing"))
    report = check_machine()
    assert report.extras["loose_extra"] == "unknown version"
    assert "loose_extra    unknown version  (nothing)\n" in report.as_text()


BENCH = ("bench", "engine", "--shapes", "tiny", "--batches", "1,2", "--new-tokens", "16")


@pytest.mark.parametrize("words", [[], ["--plain", "--dtype", "float32"]])
def test_the_engine_bench_writes_what_it_prints(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.json"
    assert call(*BENCH, *words, "--json", str(file)) == 0
    printed = capsys.readouterr().out
    assert "tok/s" in printed and "tiny" in printed and file.name in "".join(printed.split())
    record = json.loads(file.read_text())
    assert record["what"] == "slipstream bench engine" and record["exact"] and record["plain"] == bool(words)
    assert record["copy_bytes_per_s"] > 0 and {"slipstream", "torch", "device", "dtype"} <= record.keys()
    assert record["dtype"] == "float32", "as a run computes with this narrow model, whatever the processor has"
    assert [(row["shape"], row["batch"], row["new_tokens"]) for row in record["rows"]] == [
        ("tiny", 1, 16),
        ("tiny", 2, 16),
    ]
    for row in record["rows"]:
        assert row["tokens_per_s"] > 0 and row["step_ms"] > 0 and row["bandwidth_share"] > 0 and row["kv_bytes"] > 0


@pytest.mark.parametrize(
    "command",
    [
        "bench engine --shapes tiny --json",
        "bench history --shape tiny --json",
        "simulate --json",
        "simulate --html",
        "simulate --against nowhere --json",
    ],
)
def test_results_of_another_time_are_kept(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results"
    file.write_text("of another time")
    assert call(*command.split(), str(file)) == 2
    assert f"{file} is there already: add --overwrite" in capsys.readouterr().err
    assert file.read_text() == "of another time"


def test_results_of_another_time_are_replaced_with_overwrite(tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.write_text("of another time")
    assert call("simulate", "--gpus", "2", "--prompts", "2", "--steps", "8", "--json", str(file), "--overwrite") == 0
    assert json.loads(file.read_text())["results"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "tiny,smolm2-135m"], "unknown shape 'smolm2-135m'; known: smollm2-135m, "),
        (["--shapes", "./nowhere"], "no model folder at './nowhere'"),
        (["--batches", "1,many"], "--batches takes whole numbers from 1 on separated by commas, not 'many'"),
        (["--batches", "0"], "--batches takes whole numbers"),
        (["--batches", ""], "--batches takes whole numbers"),
        (["--dtype", "float8"], "--dtype is auto, float32 or bfloat16, not 'float8'"),
    ],
)
def test_a_wrong_bench_is_refused_in_a_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.json"
    assert call(*BENCH, *words, "--json", str(file)) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert not captured.out and not file.exists(), "nothing is measured before everything was read"
