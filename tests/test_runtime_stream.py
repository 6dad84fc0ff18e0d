"""Runs with processes that sample and one that trains: the same weights as in one process, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_runtime import FACTS, SETTINGS, measured, rollouts, start
from transformers import AutoModelForCausalLM

from slipstream.config import load_config
from slipstream.observe.store import RunStore
from slipstream.runtime.control import ask_for_workers, workers_asked_for
from slipstream.runtime.folder import RunFolder
from slipstream.runtime.local import run_training
from slipstream.schedule.events import FLEET, from_record
from slipstream.schedule.pipeline import Pipeline

STEPS = 4
SYNC: dict[str, Any] = {"mode": "sync", "rollout": {"workers": 2, "silence_s": 5}}


def write_recipe(folder: Path, name: str, **changes: Any) -> Path:
    train = SETTINGS["train"] | {"steps": STEPS, "deterministic": True}
    tree = SETTINGS | {"train": train, "eval": {"every": 2}, "run": {"dir": str(folder / name), "save_every": 2}}
    recipe = folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump(tree | changes))
    return recipe


def weights(run_dir: Path) -> dict[str, bytes]:
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / f"step_{STEPS}")
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def learned(run_dir: Path) -> list[dict[str, float]]:
    """What a row says of the policy; not of the workers, nor of how well their work was foretold."""
    kept = ("step", "reward/", "response_length/", "actor/", "mismatch_kl", "eval/")
    return [{name: value for name, value in row.items() if name.startswith(kept)} for row in measured(run_dir)]


def assert_same_run(run_dir: Path, other: Path) -> None:
    assert weights(run_dir) == weights(other)
    assert rollouts(run_dir) == rollouts(other), "none is lost, none is there twice, all have the same tokens"
    assert learned(run_dir) == learned(other)


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colocated")
    assert run_training(load_config(write_recipe(folder, "run")), quiet=True).reason == "done"
    return folder / "run"


def pid_of(run_dir: Path, name: str) -> int:
    return int(json.loads((run_dir / "processes.json").read_text())[name])


def wait_for(run_dir: Path, step: int, limit_s: float = 120.0) -> None:
    """Until this step is recorded."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines() if (run_dir / "metrics.jsonl").exists() else []
        if any(json.loads(line)["step"] == step for line in lines):
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was never recorded")


def test_a_synchronous_run_with_two_workers_has_the_weights_of_a_colocated_one(colocated: Path, tmp_path: Path) -> None:
    outcome = run_training(load_config(write_recipe(tmp_path, "run", **SYNC)), quiet=True)
    assert (outcome.reason, outcome.step) == ("done", STEPS)
    assert_same_run(tmp_path / "run", colocated)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["rollout/staleness"] == 0 and row["timing_s/gen"] > 0 for row in rows[1:])
    assert all(row["workers/decode_s"] > 0 for row in rows[1:])
    with RunStore(tmp_path / "run", read_only=True) as store:
        ledger = store.ledger()
    devices = ("rollout-0", "rollout-1", "trainer")
    seconds = [sum(one.seconds for one in ledger if one.device == device) for device in devices]
    assert max(seconds) == pytest.approx(min(seconds), rel=0.01), "all were there from the start to the end"
    accounts = {(one.device, one.account) for one in ledger}
    assert {("rollout-0", "decode"), ("rollout-1", "decode"), ("trainer", "training")} <= accounts
    assert not any(one.account == "training" for one in ledger if one.device != "trainer")
    assert {("rollout-0", "evaluation"), ("rollout-0", "training wait"), ("trainer", "reward wait")} <= accounts
    idle_s = sum(one.seconds for one in ledger if one.account == "idle")
    assert idle_s < 0.02 * sum(seconds), "what is waited for has a name"
    assert {"rollout-0.log", "rollout-1.log", "trainer.log"} == {
        path.name for path in (tmp_path / "run" / "logs").iterdir()
    }


def test_events_replayed_give_the_same_actions(tmp_path: Path) -> None:
    """Of a run that trains and evaluates at once; written in the order in which they came."""
    recipe = write_recipe(tmp_path, "run", **SYNC)
    assert run_training(load_config(recipe, ["train.steps=2", "warmup.steps=1"]), quiet=True).reason == "done"
    config = load_config(tmp_path / "run" / "config.yaml")
    with RunStore(tmp_path / "run", read_only=True) as store:
        items = [from_record(event.name, event.payload) for event in store.events()]
    pipeline, expected, num_events = Pipeline(config), list[Any](), 0
    for item in items:
        if isinstance(item, FLEET):
            continue
        if type(item).__name__ in FACTS:
            assert expected == []
            expected = list(pipeline.on_event(item, 0.0))  # type: ignore[arg-type]
            num_events += 1
        else:
            assert item == expected.pop(0)
    assert expected == [] and num_events > 10


def test_processes_that_are_killed_or_hang_change_nothing(colocated: Path, tmp_path: Path) -> None:
    """A third worker joins, one is killed and another hangs while they sample; then the trainer is killed."""
    recipe, run_dir = write_recipe(tmp_path, "run", **SYNC), tmp_path / "run"
    run = start(recipe)
    wait_for(run_dir, 0)
    ask_for_workers(run_dir, 3)
    os.kill(pid_of(run_dir, "rollout-0"), signal.SIGKILL)
    os.kill(pid_of(run_dir, "rollout-1"), signal.SIGSTOP)
    wait_for(run_dir, 1)
    os.kill(pid_of(run_dir, "trainer"), signal.SIGKILL)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert "rollout workers: 3 instead of 2" in said
    assert "rollout-0 is started again" in said and "rollout-1 has said nothing for" in said
    assert "trainer (process" in said and "was ended by SIGKILL. Its log:" in said
    assert_same_run(run_dir, colocated)


@pytest.mark.parametrize(
    ("mode", "end"), [("async", signal.SIGINT), pytest.param("rhyme", signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_run_that_is_a_step_ahead_keeps_the_bound_also_when_it_is_resumed(
    tmp_path: Path, mode: str, end: signal.Signals
) -> None:
    recipe, run_dir = write_recipe(tmp_path, "run", **SYNC | {"mode": mode}), tmp_path / "run"
    run = start(recipe)
    wait_for(run_dir, 1)
    others = [pid_of(run_dir, name) for name in ("rollout-0", "rollout-1", "trainer")]
    if end == signal.SIGINT:  # as a batch system does, which signals every process
        for pid in others:
            os.kill(pid, signal.SIGTERM)
    os.kill(run.pid, end)
    said, _ = run.communicate(timeout=200)
    assert run.returncode == (130 if end == signal.SIGINT else -end), said
    deadline_s = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in others):
        assert time.monotonic() < deadline_s, "a process outlives the run"
        time.sleep(0.1)
    assert run_training(load_config(recipe), resume=True, quiet=True).reason == "done"
    with RunStore(run_dir, read_only=True) as store:
        names = [(event.name, event.payload.get("step")) for event in store.events()]
        stored = store.rollouts(kind="train")
    assert len({one.uid for one in stored}) == len(stored) == STEPS * 9
    assert all(one.step - 2 <= one.first_version <= one.last_version < one.step for one in stored)
    assert sorted({int(one.group.split("/")[1]) for one in stored}) == list(range(STEPS * 3)), "no prompt is left out"
    assert any(one.first_version == one.step - 2 for one in stored), "some were sampled ahead"
    assert names.index(("Generate", 2)) < names.index(("StepTrained", 1))


@pytest.mark.slow
def test_workers_draft_from_what_earlier_epochs_had(colocated: Path, tmp_path: Path) -> None:
    """Their drafts come with the requests; tokens and weights stay the same."""
    recipe = write_recipe(tmp_path, "run", **SYNC, draft={"source": "history"}, history={"warm_from": str(colocated)})
    assert run_training(load_config(recipe), quiet=True).reason == "done"
    assert_same_run(tmp_path / "run", colocated)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("rollout/spec_accepted", 0) for row in rows) > 50


@pytest.mark.slow
def test_a_run_chooses_its_workers_and_says_why(tmp_path: Path) -> None:
    """Where more of them share the same cores: one is tried, and given back if it saves nothing; rollouts stay."""
    recipe = write_recipe(tmp_path, "run", **SYNC | {"rollout": {"workers": 1, "scale": {"min": 1, "max": 2}}})
    steps = 12
    # Long answers, few at a time, that hardly change: sampling takes longer than training.
    sizes = ["train.lr=1e-9", "sampling.max_new_tokens=40", "engine.max_sequences=2", "train.samples_per_prompt=4"]
    changes = [f"train.steps={steps}", "train.prompts_per_step=2", "eval.every=0", *sizes]
    assert run_training(load_config(recipe, changes), quiet=True).reason == "done"
    with RunStore(tmp_path / "run", read_only=True) as store:
        wanted = [event.payload for event in store.events("WorkersWanted")]
        joined = [event.payload["worker"] for event in store.events("WorkerJoined")]
        stored = store.rollouts(kind="train")
    assert wanted[0]["count"] == 2 and "a worker samples" in wanted[0]["reason"]
    assert joined == ["rollout-0", *[f"rollout-{number}" for number in range(1, len(joined))]] and len(joined) > 1
    assert all(1 <= one["count"] <= 2 for one in wanted)
    assert len({one.uid for one in stored}) == len(stored) == steps * 8
    alone = write_recipe(tmp_path, "alone", **SYNC | {"rollout": {"workers": 1}})
    assert run_training(load_config(alone, changes), quiet=True).reason == "done"
    assert rollouts(tmp_path / "run") == rollouts(tmp_path / "alone"), "whoever joins or leaves, no token changes"


@pytest.mark.slow
def test_two_trainer_ranks_give_the_weights_of_one_to_rounding(colocated: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "run", **SYNC)
    assert run_training(load_config(recipe, ["train.ranks=2"]), quiet=True).reason == "done"
    one, two = (
        AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / f"step_{STEPS}")
        for folder in (colocated, tmp_path / "run")
    )
    with RunStore(tmp_path / "run", read_only=True) as store:
        accounts = {(entry.device, entry.account) for entry in store.ledger()}
    assert {("trainer-1", "weight sync"), ("trainer-1", "checkpoint"), ("trainer-1", "training")} <= accounts
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("mode", "num_workers", "words"),
    [
        ("colocated", 2, "no workers to add"),
        ("rhyme", 1, "needs 2 or more"),
        ("sync", 2, "no run is going on in .*; start it with rollout.workers=2"),
    ],
)
def test_a_run_that_cannot_be_scaled_says_why(tmp_path: Path, mode: str, num_workers: int, words: str) -> None:
    rollout = {"workers": 1 if mode == "colocated" else 2}
    tree = SETTINGS | {"mode": mode, "rollout": rollout, "run": {"dir": str(tmp_path)}}
    with pytest.raises(ValueError, match="is not the folder of a run"):
        ask_for_workers(tmp_path, num_workers)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=words):
        ask_for_workers(tmp_path, num_workers)
    assert workers_asked_for(tmp_path) is None


def test_a_run_that_is_going_on_finds_what_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(SETTINGS | SYNC | {"run": {"dir": str(tmp_path)}}))
    with RunFolder.opened(tmp_path):
        ask_for_workers(tmp_path, 5)
    assert workers_asked_for(tmp_path) == 5
