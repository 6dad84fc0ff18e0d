"""Runs with processes that sample and one that trains: the same weights as in one process, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_runtime import FACTS, SETTINGS, measured, rollouts, start
from transformers import AutoModelForCausalLM

from slipstream.config import load_config
from slipstream.draft.saved import load_drafter_state
from slipstream.models.loading import load_model
from slipstream.models.weights import fingerprint
from slipstream.observe.store import RunStore
from slipstream.runtime import local
from slipstream.runtime.control import ask_for_workers, workers_asked_for
from slipstream.runtime.drafters import export_from, find_drafter
from slipstream.runtime.folder import RunFolder
from slipstream.runtime.kept import Kept, recall
from slipstream.runtime.local import run_training
from slipstream.schedule.events import FLEET, from_record
from slipstream.schedule.pipeline import Pipeline
from slipstream.train.checkpoint import latest_checkpoint
from slipstream.train.trainer import Trainer

STEPS = 4
LEFT = {"config.yaml", "run.db", "metrics.jsonl", "trace.json", "report.html", "checkpoints", "latest", "logs"}
"""In the folder of a run with several processes, at its end."""
SYNC: dict[str, Any] = {"mode": "sync", "rollout": {"workers": 2, "silence_s": 5}}


def write_recipe(folder: Path, name: str, **changes: Any) -> Path:
    train = SETTINGS["train"] | {"steps": STEPS, "deterministic": True}
    tree = SETTINGS | {"train": train, "eval": {"every": 2}, "run": {"dir": str(folder / name), "save_every": 2}}
    # With a cut, weights depend on the kept mass of each token too: it must come through all that is done to workers.
    tree["sampling"] = SETTINGS["sampling"] | {"top_p": 0.9}
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


def assert_tidy(run_dir: Path, also: frozenset[str] = frozenset()) -> None:
    """Nothing is left of what only its processes needed, and nothing half written."""
    assert {path.name for path in run_dir.iterdir()} == LEFT | also
    assert not list(run_dir.rglob(".*"))


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


def until(holds: Callable[[], bool], what: str, run: subprocess.Popen[str]) -> None:
    until_s = time.monotonic() + 300.0
    while not holds():
        assert run.poll() is None, f"it ended before {what}: {run.communicate()[0]}"
        assert time.monotonic() < until_s, f"it never came: {what}"
        time.sleep(0.02)


def wait_for(run_dir: Path, step: int, run: subprocess.Popen[str]) -> None:
    """Until this step is recorded."""
    rows = run_dir / "metrics.jsonl"
    until(
        lambda: rows.exists() and any(json.loads(line)["step"] == step for line in rows.read_text().splitlines()),
        f"step {step}",
        run,
    )


def told_by(event_name: str, field: str, run_dir: Path) -> list[str]:
    """What such events say there, in order; nothing before the run has a store."""
    try:
        with RunStore(run_dir, read_only=True) as store:
            return [event.payload[field] for event in store.events(event_name)]
    except OSError:
        return []


def workers_that(event_name: str, run_dir: Path) -> list[str]:
    """To whom this happened."""
    return told_by(event_name, "worker", run_dir)


def harm_everyone(run_dir: Path, run: subprocess.Popen[str]) -> tuple[str, str]:
    """Of two workers the first that takes part hangs, the other is killed, while a third joins; then the trainer is
    killed. Returns the two. Each as soon as it takes part: one that is still starting is given longer before it counts
    as hanging, and one that is ready early could sample the whole run before the other is."""
    until(lambda: len(workers_that("WorkerJoined", run_dir)) >= 1, "the first worker", run)
    first = workers_that("WorkerJoined", run_dir)[0]
    os.kill(pid_of(run_dir, first), signal.SIGSTOP)
    ask_for_workers(run_dir, 3)
    (other,) = {"rollout-0", "rollout-1"} - {first}
    until(lambda: other in workers_that("WorkerJoined", run_dir), "the other worker", run)
    os.kill(pid_of(run_dir, other), signal.SIGKILL)
    until(lambda: {first, other} <= {*workers_that("WorkerLeft", run_dir)}, "both are lost", run)
    wait_for(run_dir, 1, run)
    os.kill(pid_of(run_dir, "trainer"), signal.SIGKILL)
    return first, other


def test_a_synchronous_run_with_two_workers_has_the_weights_of_a_colocated_one(colocated: Path, tmp_path: Path) -> None:
    outcome = run_training(load_config(write_recipe(tmp_path, "run", **SYNC)), quiet=True)
    assert (outcome.reason, outcome.step) == ("done", STEPS)
    assert_tidy(tmp_path / "run")
    assert_same_run(tmp_path / "run", colocated)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["rollout/staleness"] == 0 and row["timing_s/gen"] > 0 for row in rows[1:])
    # What a worker told of before a row was written is in that row, whichever step it was for.
    assert sum(row["workers/decode_s"] for row in rows) > 0
    assert sum(row["workers/tokens"] for row in rows) >= sum(row["rollout/tokens"] for row in rows[1:])
    with RunStore(tmp_path / "run", read_only=True) as store:
        ledger = store.ledger()
    assert {one.device for one in ledger if one.account == "start"} == {"rollout-0", "rollout-1", "trainer"}
    # Together: one of the workers may be ready late, and do little.
    sampled = {one.account for one in ledger if one.device != "trainer"}
    assert {"decode", "evaluation", "training wait"} <= sampled and "training" not in sampled
    assert {"training", "reward wait"} <= {one.account for one in ledger if one.device == "trainer"}
    assert {"rollout-0.log", "rollout-1.log", "trainer.log"} == {
        path.name for path in (tmp_path / "run" / "logs").iterdir()
    }


def test_a_run_in_several_processes_that_learns_nothing_says_so_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards.py").write_text("def nothing(completions, **columns):\n    return [0.0] * len(completions)\n")
    reward = {"functions": [{"function": f"{tmp_path / 'rewards.py'}:nothing"}]}
    config = load_config(write_recipe(tmp_path, "run", mode="async", reward=reward))
    outcome = run_training(config)
    out = capsys.readouterr().out
    assert "hint after step 3: no group had a reward signal" in out and "completion (" in out
    assert [text.startswith("nothing was learned") for text in outcome.advice] == [True]


def test_a_warm_start_that_was_interrupted_is_finished_here_and_trained_on_elsewhere(
    colocated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(write_recipe(tmp_path, "run", **SYNC))
    plain = Trainer.supervised_step

    def interrupted(self: Trainer, *arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return plain(self, *arguments)

    monkeypatch.setattr(Trainer, "supervised_step", interrupted)
    assert run_training(config, quiet=True).reason == "interrupted"
    monkeypatch.undo()
    assert run_training(config, resume=True, quiet=True).reason == "done"
    assert_same_run(tmp_path / "run", colocated)

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the process that trains loads the weights; this one does without")

    monkeypatch.setattr(local, "load_model", load)
    assert run_training(config, resume=True, quiet=True).reason == "done", "there is nothing left to do"


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
    recipe, run_dir = write_recipe(tmp_path, "run", **SYNC), tmp_path / "run"
    run = start(recipe)
    hanging, killed = harm_everyone(run_dir, run)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert "rollout workers: 3 instead of 2" in said
    assert f"{killed} is started again" in said and f"{hanging} has said nothing for" in said
    assert "trainer (process" in said and "was ended by SIGKILL. Its log:" in said
    assert "leaked" not in said
    assert_tidy(run_dir, frozenset({"run.db-wal", "run.db-shm"}) & {path.name for path in run_dir.iterdir()})
    assert_same_run(run_dir, colocated)


@pytest.mark.slow
def test_a_trainer_that_hangs_is_killed_and_the_run_goes_on_from_its_checkpoint(
    colocated: Path, tmp_path: Path
) -> None:
    """Sampled and stored meanwhile, the step after the checkpoint is not sampled again."""
    recipe, run_dir = write_recipe(tmp_path, "run", **SYNC), tmp_path / "run"
    run = start(recipe, "train.silence_s=8")
    wait_for(run_dir, 3, run)
    os.kill(pid_of(run_dir, "trainer"), signal.SIGSTOP)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert "trainer hangs: it said nothing for 8 s (train.silence_s) and was killed\ntrainer (process" in said
    assert "the run goes on from" in said and "9 rollouts that were sampled after" in said
    assert_same_run(run_dir, colocated)


@pytest.mark.parametrize(
    ("mode", "end"),
    [
        pytest.param("async", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("rhyme", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_a_step_ahead_keeps_the_bound_also_when_it_is_resumed(
    tmp_path: Path, mode: str, end: signal.Signals
) -> None:
    """And goes on from the tokens that it had."""
    changes = SYNC | {"mode": mode, "tasks": {"train": SETTINGS["tasks"]["train"]}}
    recipe, run_dir = write_recipe(tmp_path, "run", **changes), tmp_path / "run"
    run = start(recipe)
    wait_for(run_dir, 1, run)
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
    config, checkpoint = load_config(recipe), latest_checkpoint(run_dir)
    assert checkpoint is not None
    saved = int(checkpoint.name.removeprefix("step_"))
    kept = recall(run_dir, checkpoint, saved, True, config, Kept()).left(saved)
    assert sum(len(one.token_ids) for one in kept) > 0
    assert run_training(config, resume=True, quiet=True).reason == "done"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    with RunStore(run_dir, read_only=True) as store:
        wanted = sum(one.length for one in store.rollouts(kind="train") if one.step > saved)
    sampled = sum(row["workers/tokens"] for row in rows if row["step"] > saved)
    assert sampled == wanted - sum(len(one.token_ids) for one in kept), "what is known is not sampled again"
    with RunStore(run_dir, read_only=True) as store:
        names = [(event.name, event.payload.get("step")) for event in store.events()]
        stored = store.rollouts(kind="train")
    assert len({one.uid for one in stored}) == len(stored) == STEPS * 9
    assert all(one.step - 2 <= one.first_version <= one.last_version < one.step for one in stored)
    assert sorted({int(one.group.split("/")[1]) for one in stored}) == list(range(STEPS * 3)), "no prompt is left out"
    assert any(one.first_version == one.step - 2 for one in stored), "some were sampled ahead"
    assert names.index(("Generate", 2)) < names.index(("StepTrained", 1))


@pytest.mark.slow
def test_workers_that_train_a_drafter_together_sample_the_same_and_checkpoints_hold_it(
    colocated: Path, tmp_path: Path
) -> None:
    run_dir, drafter = tmp_path / "run", {"updates": 4, "lr": 4e-3}
    recipe = write_recipe(tmp_path, "run", **SYNC, draft={"source": "drafter"}, drafter=drafter)
    assert run_training(load_config(recipe), quiet=True).reason == "done"
    assert_same_run(run_dir, colocated)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["drafter/updates"] >= 4 and any(row.get("drafter/loss", 0.0) > 0 for row in rows)
    assert sum(row.get("rollout/spec_drafted", 0) for row in rows) > 0 and rows[-1]["drafter/version"] > 0
    with RunStore(run_dir, read_only=True) as store:
        taught = {one.device for one in store.ledger() if one.account == "drafter training"}
        assert store.events("TrainRound") and store.events("Publish")
    assert taught == {"rollout-0", "rollout-1"}
    assert "of them by workers that had nothing to sample" in (run_dir / "report.html").read_text()
    saved = find_drafter(run_dir)
    policy = load_model(str(saved.target), dtype=torch.float32, device=torch.device("cpu"))
    assert saved.state.num_updates > 0 and saved.state.target_digest == fingerprint(policy)
    assert any(name.startswith("optimizer.") for name in saved.state.tensors), "what its training goes on from"
    assert_tidy(run_dir)
    lines = export_from(run_dir, tmp_path / "exported", file_format=None, dtype="float32", target=None)
    assert "a drafter for" in lines[0] and (tmp_path / "exported" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_worker_killed_while_it_trains_the_drafter_changes_nothing_and_a_resumed_run_goes_on_with_it(
    colocated: Path, tmp_path: Path
) -> None:
    """The leader of a round is killed in it, then the whole run; drafts come from both sources."""
    run_dir, drafter = tmp_path / "run", {"updates": 60, "lr": 1e-3}
    rollout = SYNC["rollout"] | {"silence_s": 60}
    recipe = write_recipe(
        tmp_path, "run", **SYNC | {"rollout": rollout}, draft={"source": "both"}, drafter=drafter,
        history={"warm_from": str(colocated)},
    )  # fmt: skip
    run = start(recipe)
    wait_for(run_dir, 0, run)
    until(lambda: bool(told_by("TrainRound", "leader", run_dir)), "a round of the drafter", run)
    leader = told_by("TrainRound", "leader", run_dir)[0]
    os.kill(pid_of(run_dir, leader), signal.SIGKILL)
    wait_for(run_dir, 3, run)
    os.kill(run.pid, signal.SIGKILL)
    said, _ = run.communicate(timeout=100)
    assert f"{leader} is started again" in said, said
    before = load_drafter_state(run_dir / "checkpoints" / "step_2").num_updates
    assert run_training(load_config(recipe), resume=True, quiet=True).reason == "done"
    assert_same_run(run_dir, colocated)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert before > 0 and rows[3]["drafter/updates"] >= before, "it goes on from where it was"
    assert find_drafter(run_dir).state.num_updates >= before
    assert_tidy(run_dir, frozenset({"history.db"}))


@pytest.mark.slow
def test_workers_draft_from_what_earlier_epochs_had(colocated: Path, tmp_path: Path) -> None:
    """Their drafts come with the requests; tokens and weights stay the same."""
    recipe = write_recipe(tmp_path, "run", **SYNC, draft={"source": "history"}, history={"warm_from": str(colocated)})
    assert run_training(load_config(recipe), quiet=True).reason == "done"
    assert_same_run(tmp_path / "run", colocated)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("rollout/spec_accepted", 0) for row in rows) > 50
    assert any(row.get("rollout/spec_saved_s") for row in rows), "workers tell what they estimate"
    newest = latest_checkpoint(tmp_path / "run")
    assert newest is not None
    state = json.loads((newest / "run_state.json").read_text())
    assert any(len(bucket["ways"]) > 1 for bucket in state["drafting"].values()), "what they measured is in checkpoints"


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


def test_rhyme_with_too_few_workers_for_two_groups_is_told_when_it_is_scaled(tmp_path: Path) -> None:
    tree = SETTINGS | {"mode": "rhyme", "rollout": {"workers": 4}, "run": {"dir": str(tmp_path)}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    with RunFolder.opened(tmp_path):
        assert "shares nothing out by length" in (ask_for_workers(tmp_path, 3) or "")
        assert ask_for_workers(tmp_path, 4) is None
