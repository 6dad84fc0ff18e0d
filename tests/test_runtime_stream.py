"""Runs with processes that sample and one that trains: the same weights as in one process, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_runtime import SETTINGS, measured, rollouts, start
from transformers import AutoModelForCausalLM

from slipstream.config import load_config
from slipstream.observe.store import RunStore
from slipstream.runtime.local import run_training

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
    assert {"rollout-0.log", "rollout-1.log", "trainer.log"} == {
        path.name for path in (tmp_path / "run" / "logs").iterdir()
    }


@pytest.mark.parametrize("mode", ["async", "rhyme"])
def test_a_run_that_is_a_step_ahead_keeps_the_bound(tmp_path: Path, mode: str) -> None:
    outcome = run_training(load_config(write_recipe(tmp_path, "run", **SYNC | {"mode": mode})), quiet=True)
    assert (outcome.reason, outcome.step) == ("done", STEPS)
    with RunStore(tmp_path / "run", read_only=True) as store:
        events = [(event.name, event.payload) for event in store.events()]
        stored = store.rollouts(kind="train")
    assert len({one.uid for one in stored}) == len(stored) == STEPS * 9
    assert all(one.step - 2 <= one.first_version <= one.last_version < one.step for one in stored)
    assert any(one.first_version == one.step - 2 for one in stored), "some were sampled ahead"
    names = [(name, payload.get("step")) for name, payload in events]
    assert names.index(("Generate", 2)) < names.index(("StepTrained", 1))


def test_killed_and_hung_processes_change_nothing(colocated: Path, tmp_path: Path) -> None:
    """A worker is killed, the other hangs, then the trainer is killed, then the run itself."""
    recipe, run_dir = write_recipe(tmp_path, "run", **SYNC), tmp_path / "run"
    run = start(recipe)
    wait_for(run_dir, 0)
    os.kill(pid_of(run_dir, "rollout-0"), signal.SIGKILL)
    os.kill(pid_of(run_dir, "rollout-1"), signal.SIGSTOP)
    wait_for(run_dir, 1)
    os.kill(pid_of(run_dir, "trainer"), signal.SIGKILL)
    wait_for(run_dir, 2)
    children = [pid_of(run_dir, name) for name in ("rollout-0", "rollout-1", "trainer")]
    run.kill()
    said, _ = run.communicate(timeout=60)
    assert "rollout-0 is started again" in said and "rollout-1 has said nothing for" in said
    assert "trainer (process" in said and "was ended by SIGKILL. Its log:" in said
    deadline_s = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline_s, "a process outlives the run"
        time.sleep(0.1)
    resumed = start(recipe, "--resume")
    said, _ = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, said
    assert_same_run(run_dir, colocated)


def test_ctrl_c_saves_and_the_run_goes_on(colocated: Path, tmp_path: Path) -> None:
    recipe, run_dir = write_recipe(tmp_path, "run", **SYNC), tmp_path / "run"
    run = start(recipe)
    wait_for(run_dir, 1)
    os.kill(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=100)
    assert run.returncode == 130 and "--resume" in said, said
    resumed = start(recipe, "--resume")
    said, _ = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, said
    assert_same_run(run_dir, colocated)
