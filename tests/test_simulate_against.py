"""A run whose phases take what the simulator says they take is foretold exactly; one that changes pace is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulated_runs import write_run

from slipstream.cli import main
from slipstream.simulate.against import foretell, num_steps


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
    with pytest.raises(ValueError, match=r"with drafts, .* give a run with draft\.source=off"):
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
