"""Runs with processes of their own, foretold from what their stages took."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_runs import write_run, write_streamed_run

from slipstream.cli import main
from slipstream.observe.store import RunStore
from slipstream.schedule.rules import MODES, Rules
from slipstream.schedule.speeds import SpeedCurve, curve_of_paces, sum_paces
from slipstream.simulate.streamed import foretell_streamed
from slipstream.simulate.system import Costs, System
from slipstream.simulate.trainer import SimulatedTrainer
from slipstream.simulate.workloads import SimulatedStep
from slipstream.simulate.world import simulate


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_is_foretold_from_the_stages_of_its_first_half(tmp_path: Path, mode: str) -> None:
    costs = write_streamed_run(tmp_path / "run", 20, mode=mode)
    told = foretell_streamed(tmp_path / "run")
    assert told.foretold_s == pytest.approx(told.measured_s, rel=0.03) and told.num_steps == 10
    assert told.costs.train_gpu_s == pytest.approx(costs.train_gpu_s)
    assert told.costs.update_s == pytest.approx(costs.update_s)
    for size in (1, 2, 3, 4):
        assert told.costs.curve.token_s(size) == pytest.approx(costs.curve.token_s(size))


def test_steps_that_take_longer_than_their_stages_tell_show_as_an_error(tmp_path: Path) -> None:
    """No time of a step is used, so a second half that is slower for another reason is not foretold."""
    write_streamed_run(tmp_path / "run", 20, slowdown=1.5)
    assert foretell_streamed(tmp_path / "run").error == pytest.approx(-1 / 3, abs=0.03)


def test_what_is_not_foretold_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "colocated", 20)
    with pytest.raises(ValueError, match="in turns"):
        foretell_streamed(tmp_path / "colocated")
    write_streamed_run(tmp_path / "run", 20)
    with RunStore(tmp_path / "run") as store:
        store.add_event(9, 1.0, "WorkerLeft", {"worker": "rollout-0"})
    with pytest.raises(ValueError, match="came and went"):
        foretell_streamed(tmp_path / "run")


def test_the_command_line_foretells_either_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_streamed_run(tmp_path / "run", 20)
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", "--against", str(tmp_path / "run")])
    assert "10 steps foretold" in " ".join(capsys.readouterr().out.split()), "wherever its lines break"


def test_a_trainer_begins_when_a_micro_batch_is_full_and_updates_once() -> None:
    trainer = SimulatedTrainer(streams=True, token_s=1.0, update_s=5.0, micro_batch_tokens=10)
    trainer.take_in(1, 4, now_s=0.0)
    trainer.take_in(1, 8, now_s=100.0)  # ten of the twelve are computed from here on
    assert trainer.end(12, now_s=104.0) == 110 + 2 + 5


def test_groups_that_are_trained_in_order_wait_for_earlier_ones() -> None:
    """The first is the longest: in order, all are trained after it."""

    def step_of(step: int) -> SimulatedStep:
        lengths = {f"{step}/{number}": 100.0 if number == 0 else 10.0 for number in range(4)}
        return SimulatedStep(lengths, {uid: uid for uid in lengths})

    work = [step_of(step) for step in range(1, 9)]
    costs = Costs(SpeedCurve(((1, 1.0),)), slots=4, gpus_a_worker=1, train_gpu_s=1.0)
    plain, ordered = (
        simulate(System(MODES["sync"], streams=True, in_order=in_order), costs, work, num_gpus=2, train_gpus=1)
        for in_order in (False, True)
    )
    assert (plain.step_s, ordered.step_s) == (200.0, 230.0)


def test_grades_take_their_time() -> None:
    work = [SimulatedStep({f"{step}/0": 10.0}, {f"{step}/0": "p"}) for step in range(1, 9)]
    costs = Costs(SpeedCurve(((1, 1.0),)), slots=4, gpus_a_worker=1, train_gpu_s=1.0, grading_s=3.0)
    assert simulate(System(Rules(), streams=True), costs, work, num_gpus=2, train_gpus=1).step_s == 23.0


def test_what_teaches_nothing_is_not_trained() -> None:
    work = [SimulatedStep({f"{step}/0": 10.0}, {f"{step}/0": "p"}, {f"{step}/0": 0.0}) for step in range(1, 9)]
    costs = Costs(SpeedCurve(((1, 1.0),)), slots=4, gpus_a_worker=1, train_gpu_s=1.0)
    assert simulate(System(Rules(), streams=True), costs, work, num_gpus=2, train_gpus=1).step_s == 10.0


def test_a_curve_from_paces_grows_whatever_chance_did() -> None:
    paces = sum_paces([((1, 1, 0.1),), ((1, 1, 0.3), (2, 6, 0.2)), ((1, 8, 0.5),)])
    assert paces == ((2, 2, 0.4), (2, 6, 0.2), (1, 8, 0.5))
    curve = curve_of_paces(paces)
    assert curve.points == ((2, pytest.approx(0.15)), (8, 0.5)), "steps of one and three sequences: as those of two"
