"""The whole loop in small: it runs, resumes bit for bit after kill -9 and Ctrl-C, and its events replay."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from slipstream.config import build_config, load_config
from slipstream.engine.engine import Engine
from slipstream.models.loading import load_model, load_tokenizer
from slipstream.models.precision import has_native_bfloat16
from slipstream.observe.store import RunStore
from slipstream.runtime.engines import build_engine
from slipstream.runtime.folder import RunFolder
from slipstream.runtime.local import run_training
from slipstream.runtime.rollouts import RolloutDesk
from slipstream.schedule.events import BY_NAME, Event, RunBegan, from_record
from slipstream.schedule.scheduler import Scheduler
from slipstream.train.trainer import Trainer
from slipstream.types import Request, Rollout, SamplingParams

PAIRS = {"wording": "terse", "min_length": 2, "max_length": 2, "max_value": 9}
SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "tasks": {
        "train": [{"source": "sorting", "size": 40, "seed": 1, "params": PAIRS}],
        "eval": {"heldout": {"source": "sorting", "size": 6, "seed": 2, "params": PAIRS}},
    },
    # Most answers of an untrained model are wrong; the length gives every group a signal to train on.
    "reward": {
        "functions": [{"function": f"{Path(__file__).parent / 'data' / 'reward_functions.py'}:shorter_is_better"}]
    },
    "warmup": {"steps": 3, "sequences_per_step": 4},
    "sampling": {"max_new_tokens": 20},
    "engine": {"max_sequences": 8, "max_prompt_tokens": 32},
    "train": {"steps": 6, "prompts_per_step": 3, "samples_per_prompt": 3, "lr": 1e-3},
    "eval": {"every": 3},
}


TINY_ON_CPU = load_tokenizer("tiny"), torch.device("cpu")


def write_recipe(folder: Path, name: str, **run: Any) -> Path:
    recipe = folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump(SETTINGS | {"run": {"dir": str(folder / name), "save_every": 2, **run}}))
    return recipe


def start(recipe: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "slipstream.cli", "train", str(recipe), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def measured(run_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl without what a clock says; how much is drafted depends on what was measured."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing_s/", "perf/", "rollout/tokens_per_s", "rollout/spec_")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]


def rollouts(run_dir: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(run_dir / "run.db") as connection:
        return connection.execute("SELECT uid, step, token_ids, logprobs, reward FROM rollouts ORDER BY uid").fetchall()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    outcome = run_training(load_config(write_recipe(folder, "run")), quiet=True)
    assert (outcome.reason, outcome.step) == ("done", 6)
    return folder / "run"


def test_a_run_leaves_what_the_design_says(unbroken: Path) -> None:
    assert {"config.yaml", "run.db", "metrics.jsonl", "report.html", "trace.json", "checkpoints", "latest"} <= {
        path.name for path in unbroken.iterdir()
    }
    rows = measured(unbroken)
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["step"] for row in rows if "eval/heldout/avg@1" in row] == [0, 3, 6]
    names = {"reward/mean", "response_length/mean", "actor/entropy", "actor/grad_norm", "mismatch_kl", "actor/clipfrac"}
    assert all(names <= row.keys() for row in rows[1:])
    assert len(rollouts(unbroken)) == 6 * 9 + 3 * 6
    assert sorted(path.name for path in (unbroken / "checkpoints").iterdir()) == ["step_4", "step_6"]
    assert load_config(unbroken / "config.yaml").train.steps == 6


def test_checkpoints_load_with_from_pretrained(unbroken: Path) -> None:
    folder = unbroken / "checkpoints" / "step_6"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("<q>gcd 8 6<a>", return_tensors="pt", add_special_tokens=False)
    assert model.generate(**inputs, max_new_tokens=3).shape[1] > inputs["input_ids"].shape[1]


def test_the_engine_and_the_trainer_agree_on_logprobs(unbroken: Path) -> None:
    assert all(row["mismatch_kl"] < 1e-9 for row in measured(unbroken)[1:])


@pytest.mark.skipif(not has_native_bfloat16(torch.device("cpu")), reason="slow where it is emulated")
def test_in_bfloat16_they_agree_but_for_rounding(tmp_path: Path) -> None:
    changes = {"engine": SETTINGS["engine"] | {"dtype": "bfloat16"}, "run": {"dir": tmp_path}, "eval": {"every": 0}}
    changes["train"] = SETTINGS["train"] | {"precision": "bfloat16", "steps": 3}
    run_training(build_config(SETTINGS | changes), quiet=True)
    mismatches = [row["mismatch_kl"] for row in measured(tmp_path)[1:]]
    assert len(mismatches) == 3 and all(1e-9 < one < 1e-3 for one in mismatches)


FACTS = {"RunBegan", "GroupScored", "StepTrained", "WeightsLive", "Evaluated", "Saved", "StopAsked"}


def assert_replays(run_dir: Path) -> int:
    """Told the recorded facts again, a scheduler gives the recorded actions; the number of records checked."""
    config = load_config(run_dir / "config.yaml")
    with RunStore(run_dir, read_only=True) as store:
        records = [(event.at_s, from_record(event.name, event.payload)) for event in store.events()]
    scheduler, expected = Scheduler(config), list[Any]()
    for at_s, item in records:
        if isinstance(item, RunBegan):  # a process began here; what the last one still wanted to do is void
            scheduler, expected = Scheduler(config), []
        if type(item).__name__ in FACTS:
            assert expected == []
            event: Event = item  # type: ignore[assignment]
            expected = list(scheduler.on_event(event, at_s))
        else:
            assert item == expected.pop(0)
    assert expected == []
    return len(records)


def test_events_replayed_give_the_same_actions(unbroken: Path) -> None:
    assert BY_NAME.keys() > FACTS
    assert assert_replays(unbroken) > 50


def num_events(run_dir: Path) -> int:
    try:
        with RunStore(run_dir, read_only=True) as store:
            return len(store.events())
    except OSError:
        return 0


def kill_at_some_moment(recipe: Path, run_dir: Path, moments: random.Random) -> bool:
    """Resume, and kill -9 a random while after a random number of further events; False if the run ended before."""
    process = start(recipe, "--resume")
    target = num_events(run_dir) + moments.randint(0, 12)
    while process.poll() is None and not (run_dir.exists() and num_events(run_dir) >= target):
        time.sleep(0.05)
    time.sleep(moments.uniform(0.0, 0.4))
    process.kill()
    output, _ = process.communicate()
    assert "leaked" not in output
    return process.returncode == -signal.SIGKILL


def break_and_resume(recipe: Path, run_dir: Path, moments: random.Random, times: int) -> None:
    killed = sum(kill_at_some_moment(recipe, run_dir, moments) for _ in range(times))
    assert killed >= times - 1, "the run ended before it was killed often enough"
    assert run_training(load_config(recipe), resume=True, quiet=True).reason == "done"


def assert_same_run(broken: Path, unbroken: Path) -> None:
    assert measured(broken) == measured(unbroken)
    assert rollouts(broken) == rollouts(unbroken)


def test_killed_and_resumed_equals_unbroken(unbroken: Path, tmp_path: Path) -> None:
    break_and_resume(write_recipe(tmp_path, "run"), tmp_path / "run", random.Random(1), times=2)
    assert_same_run(tmp_path / "run", unbroken)
    assert_replays(tmp_path / "run")


@pytest.mark.slow
def test_killed_at_ten_random_moments_equals_unbroken(unbroken: Path, tmp_path: Path) -> None:
    break_and_resume(write_recipe(tmp_path, "run"), tmp_path / "run", random.Random(2), times=10)
    assert_same_run(tmp_path / "run", unbroken)
    assert_replays(tmp_path / "run")


def test_ctrl_c_leaves_a_checkpoint_to_resume_from(unbroken: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "run", save_every=100)
    process = start(recipe)
    database = tmp_path / "run" / "metrics.jsonl"
    until_s = time.monotonic() + 120
    while not (database.exists() and database.read_text().count("\n") >= 3):
        assert process.poll() is None and time.monotonic() < until_s, process.communicate()
        time.sleep(0.02)
    for number in (signal.SIGINT, signal.SIGTERM):  # `timeout` and batch systems signal the process and its group
        process.send_signal(number)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 130 and "--resume" in output, output
    saved = (tmp_path / "run" / "latest").read_text().strip()
    assert saved not in ("checkpoints/step_0", "checkpoints/step_6")
    assert run_training(load_config(recipe), resume=True, quiet=True).reason == "done"
    assert_same_run(tmp_path / "run", unbroken)


@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"mode": "sync", "rollout": {"workers": 2}}, marks=pytest.mark.slow)],
    ids=["colocated", "sync"],
)
def test_signals_that_come_again_and_again_end_a_run_with_130(changes: dict[str, Any], tmp_path: Path) -> None:
    """Also while it ends, down to the last moments of the interpreter."""
    train, run = SETTINGS["train"] | {"steps": 1000}, {"dir": str(tmp_path / "run"), "save_every": 1000}
    recipe = tmp_path / "run.yaml"
    recipe.write_text(yaml.safe_dump(SETTINGS | {"train": train, "run": run, "eval": {"every": 0}} | changes))
    process, rows = start(recipe), tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (rows.exists() and rows.read_text().count("\n") >= 2):
        time.sleep(0.02)
    for number in itertools.cycle([signal.SIGTERM, signal.SIGINT]):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.15)
            break
    said, _ = process.communicate()
    assert process.returncode == 130 and "Traceback" not in said and "leaked" not in said, said
    assert not {"processes.json", ".scratch", ".lock"} & {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "method", "call"), [(Trainer, "supervised_step", 2), (RolloutDesk, "advance", 60)])
def test_a_stop_inside_any_phase_loses_nothing(
    owner: type, method: str, call: int, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the warm start, and in every sixtieth engine step: in rollouts and in evaluations."""
    config = load_config(write_recipe(tmp_path, "run", save_every=100))
    original, calls, stops = getattr(owner, method), 0, 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **named)

    monkeypatch.setattr(owner, method, interrupted)
    while run_training(config, resume=True, quiet=True).reason != "done":
        calls, stops = 0, stops + 1
        if owner is Trainer:
            monkeypatch.undo()
        assert stops < 20
    assert stops >= 1
    assert_same_run(tmp_path / "run", unbroken)
    assert_replays(tmp_path / "run")


@pytest.mark.parametrize(
    "changes", [{"sleep": "all"}, pytest.param({"kv_tokens": 64}, marks=pytest.mark.slow)], ids=str
)
def test_memory_settings_change_no_number(changes: dict[str, Any], unbroken: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"run": {"dir": str(tmp_path / "run")}, "engine": SETTINGS["engine"] | changes}
    assert run_training(build_config(settings), quiet=True).reason == "done"
    assert measured(tmp_path / "run") == measured(unbroken) and rollouts(tmp_path / "run") == rollouts(unbroken)


def test_the_token_match_is_the_share_of_tokens_that_come_out_the_same_alone(tmp_path: Path) -> None:
    model = load_model("tiny", dtype=torch.float32, device=torch.device("cpu"))
    engine = build_engine(
        build_config(SETTINGS | {"run": {"dir": tmp_path}}), model, load_tokenizer("tiny"), torch.device("cpu")
    )
    desk = RolloutDesk(engine, None, None, 0)  # type: ignore[arg-type]
    engine.submit([Request("0/0/0", "0/0", (5, 6, 7), 3, SamplingParams(max_new_tokens=10))])
    found: list[Rollout] = []
    while engine.has_work:
        found += engine.step()
    assert desk.token_match(found) == 1.0
    wrong = (*found[0].token_ids[:-2], 1, 2)
    matching = sum(a == b for a, b in zip(wrong, found[0].token_ids, strict=True))
    assert desk.token_match([dataclasses.replace(found[0], token_ids=wrong)]) == matching / 10 < 1


def test_if_it_need_not_be_the_same_the_share_that_is_is_measured_every_step(tmp_path: Path) -> None:
    changes = {"engine": SETTINGS["engine"] | {"exact": False}, "run": {"dir": tmp_path}, "eval": {"every": 0}}
    run_training(build_config(SETTINGS | changes | {"train": SETTINGS["train"] | {"steps": 2}}), quiet=True)
    assert [row["rollout/token_match"] for row in measured(tmp_path)[1:]] == [1.0, 1.0]


def test_the_bfloat16_engine_keeps_exact_rotary_frequencies(tmp_path: Path) -> None:
    changes = {"run": {"dir": tmp_path}, "engine": {"dtype": "bfloat16"}}
    model = load_model("tiny", dtype=torch.float32, device=torch.device("cpu"))
    engine = build_engine(build_config(SETTINGS | changes), model, *TINY_ON_CPU)
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    assert torch.equal(engine.model.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_the_engine_settings_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class NotedEngine(Engine):
        def __init__(self, model: PreTrainedModel, **options: Any) -> None:
            given.update(options)
            super().__init__(model, **options)

    monkeypatch.setattr("slipstream.runtime.engines.Engine", NotedEngine)
    model = load_model("tiny", dtype=torch.float32, device=torch.device("cpu"))
    settings = {"max_sequences": 8, "max_prompt_tokens": 32}
    by_default, changed = (
        build_engine(
            build_config(SETTINGS | {"run": {"dir": tmp_path}, "engine": engine, "draft": {"source": "history"}}),
            model,
            load_tokenizer("tiny"),
            torch.device("cpu"),
        )
        for engine in (settings, settings | {"kv_tokens": 130, "exact": False})
    )
    wanted = {"max_sequences": 8, "max_length": 52, "kv_tokens": 130, "exact": False}
    assert {name: given[name] for name in wanted} == wanted
    assert given["drafter"].max_drafts == 32 and given["policy"] is not None and given["decode"]([5]) != ""
    assert (by_default.facts().num_pages, changed.facts().num_pages) == (8, 3), "pages of 64 tokens"


def test_two_processes_cannot_train_in_one_folder(unbroken: Path) -> None:
    with RunFolder.opened(unbroken), pytest.raises(ValueError, match="another process is training"):
        run_training(load_config(unbroken / "config.yaml"), resume=True, quiet=True)


def test_a_run_is_not_resumed_with_another_recipe(unbroken: Path) -> None:
    other = load_config(unbroken / "config.yaml", ["seed=5", "tasks.train=[{source: collatz, size: 9}]"])
    with pytest.raises(ValueError, match="other settings of seed, tasks"):
        run_training(other, resume=True, quiet=True)


def test_evaluation_prompts_are_not_trained_on(tmp_path: Path) -> None:
    task = {"source": "sorting", "size": 30, "seed": 1, "params": PAIRS}
    tasks = {"train": [task], "eval": {"overlap": {**task, "size": 10}}}
    small = {"steps": 3, "prompts_per_step": 6, "samples_per_prompt": 2}
    settings = SETTINGS | {"run": {"dir": tmp_path / "run"}, "tasks": tasks, "train": small, "warmup": None}
    run_training(build_config(settings), quiet=True)
    with RunStore(tmp_path / "run", read_only=True) as store:
        trained = {item.prompt_key for item in store.rollouts(kind="train")}
        evaluated = {item.prompt_key for item in store.rollouts(kind="eval")}
    assert trained and evaluated and not trained & evaluated


def test_resume_from_an_earlier_checkpoint_makes_it_the_latest(unbroken: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    config = load_config(unbroken / "config.yaml", [f"run.dir={run_dir}"])
    older = run_dir / "checkpoints" / "step_4"
    assert run_training(config, resume=older, overwrite=True, quiet=True).reason == "done"
    assert_same_run(run_dir, unbroken)
    with pytest.raises(ValueError, match="is not a checkpoint of"):
        run_training(config, resume=unbroken / "checkpoints" / "step_4", quiet=True)


def test_resuming_a_finished_run_changes_nothing(unbroken: Path) -> None:
    before = measured(unbroken)
    outcome = run_training(load_config(unbroken / "config.yaml"), resume=True, quiet=True)
    assert outcome.reason == "done" and measured(unbroken) == before


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({"name": "dr_grpo"}, marks=pytest.mark.slow),  # its numbers: `test_train_algorithms.py`
        {"name": "rloo", "kl_coef": 0.05},
        pytest.param({"name": "reinforce++"}, marks=pytest.mark.slow),
        {"name": "gspo"},
        pytest.param({"name": "cispo"}, marks=pytest.mark.slow),
        {"name": "grpo", "clip_high": 0.28, "aggregation": "token_mean", "dynamic_sampling": True},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_every_algorithm_runs(algorithm: dict[str, Any], tmp_path: Path) -> None:
    small = {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 3, "updates_per_step": 2}
    settings = SETTINGS | {"run": {"dir": tmp_path / "run"}, "algorithm": algorithm, "train": small, "warmup": None}
    assert run_training(build_config(settings), quiet=True).reason == "done"
    rows = measured(tmp_path / "run")
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])
    assert ("actor/kl" in rows[1]) == (algorithm.get("kl_coef", 0) > 0)
