"""Files that users give, damaged in every way we know: a sentence that names the file and the place, exit code 2."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.cli import main
from slipstream.config import Reward, RewardFunction, TaskSet, load_config
from slipstream.files import shown
from slipstream.observe.loggers import MetricLog
from slipstream.runtime.traces import read_trace
from slipstream.simulate.show import read_curve
from slipstream.tasks.rewards import check_rewards
from slipstream.tasks.sources import load_problems
from slipstream.tasks.tables import read_file
from slipstream.train.checkpoint import find_damage, latest_checkpoint, load_checkpoint

ROW = {"prompt": "1+1", "answer": "2"}
ROLLOUT = {"p": "0", "ep": 0, "t": [1, 2]}
CURVE = {"rows": [{"shape": "tiny", "batch": 1, "step_ms": 2.0}, {"shape": "tiny", "batch": 2, "step_ms": 3.0}]}
LATIN = "caf\u00e9".encode("latin-1")
DEEP = b"[" * 5000 + b"]" * 5000
LONE = rb'"\ud800"'
ALIASES = b"".join(b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1) if n else b"1"] * 10)) for n in range(9))
"""A billion values when each alias is written out."""
MARK = b"\xef\xbb\xbf"


def tree(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "run": {"dir": "runs/x"}, "tasks": {"train": [{"source": "gcd", "size": 9}]}} | changes


def recipe_of(content: bytes) -> bytes:
    return yaml.safe_dump(tree()).encode() + content


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence with which the command line refuses."""
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith("slipstream: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            recipe_of(b"seed: " + LATIN),
            "line 8: byte 0xe9 is not UTF-8: save the file as UTF-8 text, or give the .yaml file",
        ),
        (bytes(range(256)), "is not UTF-8"),
        ("model: tiny".encode("utf-16"), "line 1: byte 0xff is not UTF-8"),
        (recipe_of(b"seed: " + DEEP), "nested more than 100 levels deep"),
        (recipe_of(b"seed: " + b"[" * 200 + b"]" * 200), "nested more than 100 levels deep"),
        (recipe_of(b"seed: &a [*a]"), "nested more than 100 levels deep"),
        (ALIASES, "more than 1,000,000 values"),
        (recipe_of(b"seed: " + LONE), "half of a surrogate pair"),
        (recipe_of(b"seed: 2020-13-45"), "not valid YAML: month must be in 1..12"),
        (recipe_of(b"seed: " + b"9" * 5000), "not valid YAML: Exceeds the limit"),
        (recipe_of(b"seed: \x00"), "not valid YAML"),
        (recipe_of(b"? [1]\n: 2"), "not valid YAML: found unhashable key"),
        (recipe_of(b"defaults: 5"), "`defaults:` is 5; write the file of the recipe that this one changes"),
        (recipe_of(b"defaults:"), "`defaults:` is None; write the file"),
        (recipe_of(b"defaults: [5]"), "`defaults:` is [5]; write the file"),
        (recipe_of(b"defaults: {a: 1}"), "`defaults:` is {'a': 1}; write the file"),
        (recipe_of(b'defaults: ""'), "`defaults:` is ''; write the file"),
        (recipe_of(b'defaults: "\\0"'), "no recipe at"),
        (b"0", "a recipe is a mapping"),
        (b"false", "a recipe is a mapping"),
        (b"- 1\n" * 300_000, "has 1,200,000 bytes, and at most 1,000,000 are read here: give the .yaml file"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_named(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    said = refused(capsys, "train", str(tmp_path / "x.yaml"), "--dry-run")
    assert message in said and str(tmp_path) in said


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is a pipe, not a file: give the .yaml file of a recipe"),
        (os.mkdir, "is a folder, not a file: give the .yaml file of a recipe"),
        (lambda path: os.symlink("/dev/zero", path), "is a device, not a file: give the .yaml file of a recipe"),
        (lambda path: os.symlink(path, path), "no recipe at"),
    ],
)
def test_a_recipe_that_is_no_file_is_refused_at_once(
    make: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "x.yaml")
    assert message in refused(capsys, "train", str(tmp_path / "x.yaml"), "--dry-run")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(MARK + recipe_of(b""))
    assert load_config(tmp_path / "x.yaml").model == "tiny"
    (tmp_path / "x.jsonl").write_bytes(MARK + json.dumps(ROW).encode())
    (tmp_path / "x.json").write_bytes(MARK + json.dumps([ROW]).encode())
    assert list(read_file(tmp_path / "x.jsonl")) == list(read_file(tmp_path / "x.json")) == [ROW]
    (tmp_path / "rollouts.jsonl").write_bytes(MARK + json.dumps(ROLLOUT).encode())
    assert read_trace(tmp_path / "rollouts.jsonl")[0].token_ids == (1, 2)
    (tmp_path / "curve.json").write_bytes(MARK + json.dumps(CURVE).encode())
    assert read_curve(tmp_path / "curve.json", "tiny").points == ((1, 0.002), (2, 0.003))


def test_what_looks_like_a_surrogate_pair_or_a_line_end_is_text(tmp_path: Path) -> None:
    rows = [{"prompt": "\U0001f600 \u2028 \\\\ud800", "answer": "2"}] * 2
    lines = [json.dumps(row, ensure_ascii=number == 0) + "\r\n" for number, row in enumerate(rows)]
    (tmp_path / "x.jsonl").write_text("".join(lines))
    assert list(read_file(tmp_path / "x.jsonl")) == rows


GOOD_ROW = json.dumps(ROW).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", GOOD_ROW + b'{"prompt": "' + LATIN + b'"}', "x.jsonl, line 2: byte 0xe9 is not UTF-8"),
        ("x.jsonl", GOOD_ROW + b'{"prompt": ' + LONE + b"}", "x.jsonl:2: '\\ud800' holds half of a surrogate pair"),
        ("x.jsonl", GOOD_ROW + b'{"prompt": ' + DEEP + b"}", "x.jsonl:2: nested more than 100 levels deep"),
        ("x.jsonl", GOOD_ROW + b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", "x.jsonl:2: nested more than 100"),
        ("x.jsonl", GOOD_ROW + b'{"answer": ' + b"9" * 5000 + b"}", "x.jsonl:2: not valid JSON: Exceeds the limit"),
        ("x.jsonl", "{}".encode("utf-16"), "x.jsonl, line 1: byte 0xff is not UTF-8"),
        ("x.json", b"[" + GOOD_ROW + b', "' + LATIN + b'"]', "x.json, line 2: byte 0xe9 is not UTF-8"),
        ("x.json", DEEP, "x.json: nested more than 100 levels deep"),
        ("x.json", b"[" + LONE + b"]", "x.json: row 0: '\\ud800' holds half"),
        ("x.parquet", b"PAR1" + bytes(range(256)) + b"PAR1", "x.parquet: not a readable parquet file"),
        ("x.parquet", b"", "x.parquet: not a readable parquet file"),
    ],
)
def test_a_data_file_that_cannot_be_read_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="x") as caught:
        list(read_file(tmp_path / name))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_parquet_string_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    bad = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([LATIN], pyarrow.binary()).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": bad}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet: not a readable parquet file: .*utf-8"):
        list(read_file(tmp_path / "x.parquet"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "line 1: byte 0xff is not UTF-8"),
        (DEEP, "line 1: nested more than 100 levels deep; a line of JSON with p, ep, t was expected"),
        (b'{"p": ' + LONE + b', "ep": 0, "t": [1]}', "half of a surrogate pair"),
        (b'{"p": 0, "ep": 0, "t": [99999999999]}', "line 1: a line of JSON with p, ep, t was expected"),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_trace_that_cannot_be_read_is_named(content: bytes, message: str, is_packed: bool, tmp_path: Path) -> None:
    import gzip

    path = tmp_path / ("rollouts.jsonl.gz" if is_packed else "rollouts.jsonl")
    path.write_bytes(gzip.compress(content) if is_packed else content)
    with pytest.raises(ValueError, match="rollouts") as caught:
        read_trace(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"no gzip", b"\x1f\x8b\x08\x00\x00", b"\x1f\x8b" + bytes(40)])
def test_a_packed_trace_that_is_damaged_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"rollouts\.jsonl\.gz cannot be unpacked"):
        read_trace(tmp_path / "rollouts.jsonl.gz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2]", "this is no record of `slipstream bench engine`"),
        (b"5", "this is no record of `slipstream bench engine`"),
        (b'"rows"', "this is no record of `slipstream bench engine`"),
        (b'{"rows": 5}', "this is no record of `slipstream bench engine`"),
        (b'{"rows": [{"step_ms": 1}]}', "this is no record of `slipstream bench engine`"),
        (b'{"rows": [{"shape": "tiny", "batch": "many", "step_ms": 1}]}', "this is no record of"),
        (b'{"rows": [{"shape": "tiny", "batch": 1, "step_ms": NaN}]}', "this is no record of"),
        (b'{"rows": [{"shape": 1, "batch": 1, "step_ms": 1}]}', "this is no record of"),
        (b'{"rows": []}', "the record has no shape 'tiny'"),
        (b'{"rows": "' + LATIN + b'"}', "line 1: byte 0xe9 is not UTF-8"),
        (DEEP, "nested more than 100 levels deep: write one with `slipstream bench engine --json"),
    ],
)
def test_a_curve_that_cannot_be_read_is_named(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "curve.json").write_bytes(content)
    said = refused(capsys, "simulate", "--curve", str(tmp_path / "curve.json"), "--shape", "tiny")
    assert message in said and "curve.json" in said


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a\x00b", b"a\nb", b"a" * 5000])
def test_a_damaged_pointer_to_the_latest_checkpoint_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(ValueError, match=r"latest.*e\.g\. checkpoints/step_20"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"\xff", DEEP, b"5", b"[]", b'{"step": 1}', b'{"step": 1, "files": 5}', b'{"step": 1, "files": {"a": 5}}',
     b'{"step": "1", "files": {}}', b'{"step": -1, "files": {}}'],
)  # fmt: skip
def test_a_damaged_manifest_is_told(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    assert "manifest.json" in (find_damage(tmp_path) or "")
    with pytest.raises(ValueError, match=r"cannot be used: .*manifest\.json"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [bytes(range(256)), b"\xff\n", DEEP + b"\n", b'{"step": Infinity}\n', b"5\n"])
def test_metrics_that_are_none_are_named_and_kept(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: not a metrics line"), MetricLog(tmp_path) as log:
        log.resume_after(3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


@pytest.mark.parametrize("half", [b"{", b'{"step": 2, "x": 1', bytes(7)])
def test_the_half_line_of_a_killed_writer_is_cut(half: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "x": 2}\n' + half)
    with MetricLog(tmp_path) as log:
        log.write(2, {"x": 3.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "x": 2}\n{"step": 2, "x": 3.0}\n'


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "history", "--json"],
        ["bench", "engine", "--json"],
        ["simulate", "--json"],
        ["simulate", "--html"],
        ["simulate", "--against", "RUN", "--json"],
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model is loaded and nothing is simulated: what would do it is taken away."""
    for name in ("benches.load_shape", "bench_history.load_shape"):
        monkeypatch.setattr(f"slipstream.runtime.{name}", None)
    monkeypatch.setattr("slipstream.simulate.show.compare", None)
    monkeypatch.setattr("slipstream.simulate.show.foretell", None)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree()))
    words = [str(tmp_path) if word == "RUN" else word for word in words]
    for path, message in (
        (tmp_path, "is a folder: write the name of a file"),
        (tmp_path / "none" / "x", "there is no folder"),
        (tmp_path / "config.yaml" / "x", "there is no folder"),
        (tmp_path / ("x" * 300), "cannot be written (File name too long)"),
        (Path("/proc/nothing"), "cannot be written"),
    ):
        said = refused(capsys, *words, str(path))
        assert f"{words[-1]} {shown(path)}" in said and message in said


def test_a_drafter_that_cannot_be_written_is_refused_before_it_is_taught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree()))
    out = tmp_path / "config.yaml" / "drafter"
    assert "is not a folder" in refused(capsys, "train-drafter", str(tmp_path), "--out", str(out))
    assert "is not a folder" in refused(capsys, "export-drafter", str(tmp_path), str(out))


@pytest.mark.parametrize("content", ['{"prompt": "1+1", "answer": null}', '{"prompt": "1+1", "answer": NaN}'])
@pytest.mark.parametrize("function", ["math_verify", "rewards.py:by_answer", "rewards.py:score"])
def test_an_answer_that_is_null_is_refused_as_a_missing_one_is(content: str, function: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    (tmp_path / "rewards.py").write_text(
        "def by_answer(completions, answer): return [0.0] * len(completions)\n"
        "def score(solution_str, ground_truth): return 0.0\n"
    )
    problems = load_problems(TaskSet(source=str(tmp_path / "x.jsonl")), "train/0")
    where = function if function == "math_verify" else f"{tmp_path}/{function}"
    reward = Reward(functions=(RewardFunction(function=where),))
    with pytest.raises(ValueError, match="cannot judge problem 0 of train/0"):
        check_rewards(reward, problems)
    (tmp_path / "x.jsonl").write_text(content.replace("null", "2").replace("NaN", "2"))
    check_rewards(reward, load_problems(TaskSet(source=str(tmp_path / "x.jsonl")), "train/0"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("simulate --gpus 100000000", "--gpus: 100,000,000 GPUs are more than the 65,536"),
        ("simulate --rent 100000000", "--rent: 100,000,000 GPUs are more than the 65,536"),
        ("simulate --scaling 8,99999999999", "--scaling: 99,999,999,999 GPUs are more than the 65,536"),
        ("simulate --steps 1000000", "1,000,000 steps of 128 prompts x 8 samples are more than the 5,000,000 rollouts"),
        ("simulate --prompts 100000000", "rollouts that are simulated at most"),
        ("simulate --size 1e308", "a model of 1e+308 billion weights cannot be"),
        ("plan --gpus h100:99999999", "'h100:99999999': 99,999,999 GPUs are more than the 65,536"),
        ("plan --gpus h100:8 --samples 100000000", "rollouts that are simulated at most"),
        ("simulate --scaling \u00b2", "--scaling takes whole numbers from 1 on separated by commas, not '\u00b2'"),
        (f"simulate --scaling {'9' * 5000}", "--scaling takes whole numbers from 1 on"),
        ("bench engine --shapes tiny --batches 99999999999", "--batches and --new-tokens: 99,999,999,999 sequences of"),
        ("bench history --shape tiny --new-tokens 99999999999", "--batches and --new-tokens: 32 sequences of"),
    ],
)
def test_what_takes_days_or_more_memory_than_there_is_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *words.split())


def test_more_workers_than_the_machine_has_room_for_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree(mode="sync")))
    said = refused(capsys, "scale", str(tmp_path), "--rollout", "100000")
    assert "train.ranks + rollout.workers = 100,001 processes" in said
