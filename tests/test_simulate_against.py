"""A run whose phases take what the simulator says they take is foretold exactly; one that changes pace is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import build_config, dump_config
from slipstream.observe.store import RunStore
from slipstream.rng import keyed_random
from slipstream.simulate.against import foretell, num_steps
from slipstream.types import Request, Rollout, SamplingParams, Scored

SLOTS = 4


def write_run(folder: Path, steps: int, slowdown: float = 1.0, *, drafted: float = 0.0, learns: bool = True) -> None:
    """Six groups of two a step, every other one with equal rewards. A decoding step takes 10 ms and 1 ms a sequence,
    training 0.5 s and 2 ms a token with a gradient, the rest 50 ms, and evaluation 3 s now and then."""
    config = {"model": "tiny", "run": {"dir": str(folder)}, "engine": {"max_sequences": SLOTS}}
    tasks = {"train": [{"source": "gym:chain_sum", "size": 10}]}
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(build_config(config | {"tasks": tasks})))
    with RunStore(folder) as store:
        for step in range(1, steps + 1):
            dice = keyed_random("against", step)
            results, taught, lengths = [], 0, []
            for group in range(6):
                for sample in range(2):
                    length = dice.randint(5, 60)
                    request = Request(f"{step}/{group}/{sample}", f"{step}/{group}", (1,), 1, SamplingParams())
                    rollout = Rollout(request, (7,) * length, (-1.0,) * length, "stop", 0, 0)
                    results.append(Scored(rollout, "text", float(learns and sample and group % 2), {}))
                    lengths.append(float(length))
                    taught += length if learns and group % 2 else 0
            prompts = {f"{step}/{group}": (f"key {group}", "prompt") for group in range(6)}
            store.add_rollouts(step, "train", "set", prompts, results)
            pace = slowdown if step > steps // 2 else 1.0
            gen_s = pace * (0.010 * num_steps(lengths, SLOTS) + 0.001 * sum(lengths))
            train_s = pace * (0.5 + 0.002 * taught)
            eval_s = 3.0 if step % 4 == 0 else 0.0
            times = {"timing_s/gen": gen_s, "timing_s/update_actor": train_s, "timing_s/eval": eval_s}
            times["rollout/spec_drafted"] = drafted
            store.add_metrics(step, times | {"timing_s/step": gen_s + train_s + eval_s + 0.05})


def test_steps_of_a_batch_by_hand() -> None:
    assert num_steps([5.0, 3.0, 4.0], 2) == 7, "the third follows the second after 3 steps"
    assert num_steps([5.0, 3.0, 4.0], 3) == 5


def test_what_follows_the_rules_is_foretold(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 16)
    phases, told = foretell(tmp_path / "run")
    assert told == 8 and [phase.name for phase in phases] == ["rollout", "training", "the rest", "step"]
    assert all(phase.error < 1e-6 and phase.foretold_s == pytest.approx(phase.measured_s) for phase in phases)


def test_a_run_without_a_gradient_is_foretold_too(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 16, learns=False)
    assert all(phase.error < 1e-6 for phase in foretell(tmp_path / "run")[0])


def test_a_run_with_drafts_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 16, drafted=5.0)
    with pytest.raises(ValueError, match="with drafts"):
        foretell(tmp_path / "run")


def test_what_changes_its_pace_is_not(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 16, slowdown=2.0)
    by_name = {phase.name: phase for phase in foretell(tmp_path / "run")[0]}
    assert by_name["rollout"].error == pytest.approx(0.5) and by_name["training"].error == pytest.approx(0.5)


def test_the_rollouts_of_a_run_can_be_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", 8)
    settings = ["--run", str(tmp_path / "run"), "--gpus", "4", "--systems", "colocated; Slipstream"]
    for arguments, code, says in (
        (["--steps", "7"], 0, "12 rollouts a step, lengths of run"),
        (["--steps", "9"], 2, "give --steps 8"),
        (["--steps", "7", "--scaling", "2"], 2, "leave one out"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["simulate", *settings, *arguments])
        shown = capsys.readouterr()
        assert stopped.value.code == code and says in " ".join((shown.out + shown.err).split())


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", 16)
    write_run(tmp_path / "short", 5)
    record = tmp_path / "against.json"
    for arguments, code, says in (
        (["--against", str(tmp_path / "run"), "--json", str(record)], 0, "8 steps foretold"),
        (["--against", str(tmp_path / "short")], 2, "4 steps to compare"),
        (["--against", str(tmp_path / "none")], 2, "no run's folder"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["simulate", *arguments])
        shown = capsys.readouterr()
        assert stopped.value.code == code and says in " ".join((shown.out + shown.err).split())
    assert json.loads(record.read_text())["phases"][0]["name"] == "rollout"
