"""Thousands of bad inputs: each is taken, or refused in one sentence. The long run of it is `benchmarks/fuzz.py`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzz_inputs import GCD, NO_FILES, WRONG, base_tree, damage, draw_words, settings, values_for, with_value
from simulated_runs import write_run

from slipstream.cli import main
from slipstream.config import TaskSet, build_config, dump_config, load_config
from slipstream.observe.loggers import MetricLog
from slipstream.observe.report import write_report
from slipstream.observe.store import RunStoreError
from slipstream.runtime.capacity import check_start
from slipstream.runtime.traces import read_trace
from slipstream.simulate.against import read_recorded
from slipstream.simulate.show import read_curve, what_if_rows
from slipstream.tasks.sources import load_problems
from slipstream.train.checkpoint import find_damage, latest_checkpoint

NUM_WRONG = 24
"""Values of no type in particular that a setting is given, beside those of its own; other ones for each."""
ROWS = b'{"prompt": "1+1", "answer": "2"}\n{"prompt": [{"role": "user", "content": "2+2"}], "answer": 4}\n'


def take(call: Callable[[], Any]) -> Any:
    """The value of a call, or None where it refused in one sentence; anything else fails the test."""
    try:
        return call()
    except (ValueError, RunStoreError) as error:
        said = str(error)
        assert said and "\n" not in said and len(said) < 3000, said
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        assert trace is not None and trace.tb_frame.f_globals["__name__"].startswith("slipstream"), repr(error)
        return None


@pytest.mark.parametrize("path", [path for path, _ in settings()])
def test_every_setting_takes_or_refuses_what_it_is_given(path: str, tmp_path: Path) -> None:
    base = base_tree(tmp_path / "run")
    (info,) = (info for name, info in settings() if name == path)
    own, chance = values_for(info)[len(WRONG) :], random.Random(path)
    values = [*own, *chance.sample(WRONG, NUM_WRONG)]
    built = [take(lambda value=value: build_config(with_value(base, path, value))) for value in values]
    accepted = list({repr(config): config for config in built if config is not None}.values())
    assert len(built) > len(accepted)
    for config in accepted:
        take(lambda config=config: check_start(config))
        assert all(config.arithmetic().values())
    for config in chance.sample(accepted, min(2, len(accepted))):
        (tmp_path / "x.yaml").write_text(dump_config(config))
        assert load_config(tmp_path / "x.yaml") == config


def test_pairs_of_settings_in_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance, every = random.Random("pairs"), list(settings())
    for _ in range(40):
        tree = base_tree(tmp_path / "run")
        for path, info in chance.sample(every, 2):
            try:
                tree = with_value(tree, path, chance.choice(values_for(info)))
            except (TypeError, ValueError, IndexError, KeyError, AttributeError):
                continue  # the first has taken away what the second is in
        (tmp_path / "x.yaml").write_text(yaml.dump(tree))
        with pytest.raises(SystemExit) as caught:
            main(["train", str(tmp_path / "x.yaml"), "--dry-run"])
        error = capsys.readouterr().err
        assert caught.value.code == 0 or (caught.value.code == 2 and error.count("\n") == 1), error


def test_damaged_recipes(tmp_path: Path) -> None:
    chance, whole = random.Random("recipe"), yaml.safe_dump(base_tree(tmp_path)).encode()
    for _ in range(40):
        (tmp_path / "x.yaml").write_bytes(damage(whole, chance))
        take(lambda: load_config(tmp_path / "x.yaml"))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
def test_damaged_data(name: str, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in ROWS.splitlines()][:1]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    contents = {
        "x.jsonl": ROWS,
        "x.json": json.dumps(rows).encode(),
        "x.parquet": (tmp_path / "x.parquet").read_bytes(),
    }
    chance = random.Random(name)
    for _ in range(100):
        (tmp_path / name).write_bytes(damage(contents[name], chance))
        take(lambda: list(load_problems(TaskSet(source=str(tmp_path / name)), "train/0")))


READERS: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
    "recipe.yaml": (yaml.safe_dump({"seed": 1}).encode(), load_config),
    "rows.jsonl": (ROWS, lambda path: list(load_problems(TaskSet(source=str(path)), "train/0"))),
    "curve.json": (
        b'{"rows": [{"shape": "x", "batch": 1, "step_ms": 2.0}, {"shape": "x", "batch": 2, "step_ms": 3.0}]}',
        lambda path: read_curve(path, "x"),
    ),
    "rollouts.jsonl": (b'{"p": "0", "ep": 0, "t": [1, 2]}\n{"p": "0", "ep": 1, "t": [1, 3]}\n', read_trace),
    "latest": (b"checkpoints/step_1\n", lambda path: latest_checkpoint(path.parent)),
    "manifest.json": (
        b'{"step": 1, "files": {"config.yaml": {"bytes": 3, "blake2b": "00"}}}',
        lambda path: find_damage(path.parent),
    ),
    "metrics.jsonl": (b'{"step": 1, "x": 2.0}\n{"step": 2, "x": 3.0}\n', lambda path: resume_metrics(path.parent)),
}


def resume_metrics(folder: Path) -> None:
    with MetricLog(folder) as log:
        log.resume_after(1)


@pytest.mark.parametrize("name", READERS)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    whole, read = READERS[name]
    chance = random.Random(name)
    for _ in range(150):
        (tmp_path / name).write_bytes(damage(whole, chance))
        take(lambda: read(tmp_path / name))


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", [name for name in READERS if name != "metrics.jsonl"])
def test_what_is_no_file_is_never_waited_for(name: str, kind: str, tmp_path: Path) -> None:
    NO_FILES[kind](tmp_path / name)
    take(lambda: READERS[name][1](tmp_path / name))


def test_damaged_stores(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, 4)
    whole, chance = (run / "run.db").read_bytes(), random.Random("store")
    for _ in range(60):
        (run / "run.db").write_bytes(damage(whole, chance))
        take(lambda: write_report(run, what_if_rows(run)))
        take(lambda: read_recorded(run))
        take(lambda: read_trace(run))


def test_wrong_words_for_every_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that would work for long once they accept are left to the long run."""
    monkeypatch.chdir(tmp_path)
    chance = random.Random("options")
    long = {("bench", "engine"), ("bench", "history"), ("check",), ("simulate",), ("plan",)}
    for _ in range(40):
        words = draw_words(chance, long)
        with pytest.raises(SystemExit) as caught:
            main(words)
        error = capsys.readouterr().err
        assert caught.value.code in (0, 1, 2) and "Traceback" not in error, (words, error)


def test_the_fuzz_finds_what_is_planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reader that lets a library's error through is found by the same cases."""
    monkeypatch.setattr("slipstream.tasks.tables.parse_json", lambda text, where: json.loads(text))
    chance = random.Random("x.jsonl")
    with pytest.raises(AssertionError):
        for _ in range(200):
            (tmp_path / "x.jsonl").write_bytes(damage(ROWS, chance))
            take(lambda: list(load_problems(TaskSet(source=str(tmp_path / "x.jsonl")), "train/0")))
    assert GCD["source"] == "gcd"
