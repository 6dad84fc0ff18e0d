"""What another setting would save, of runs whose costs are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulated_runs import write_run

from slipstream.cli import main
from slipstream.config import dump_config, load_config
from slipstream.observe.store import RunStore
from slipstream.simulate import against
from slipstream.simulate import what_if as module
from slipstream.simulate.against import read_recorded
from slipstream.simulate.what_if import what_if


def test_a_run_that_is_led_as_it_was_takes_what_it_took(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 20)
    recorded = read_recorded(tmp_path / "run")
    told = {(one.mode, one.rollout_devices): one for one in what_if(tmp_path / "run").settings}
    steady = recorded.steps[3:]
    measured = sum(
        recorded.metrics["timing_s/step"][step] - recorded.metrics["timing_s/eval"][step] for step in steady
    ) / len(steady)
    assert told["colocated", 1].step_s == pytest.approx(measured, rel=0.1)
    assert told["colocated", 1].idle_share < 0.1


def test_more_devices_and_overlap_save_time_and_the_slower_part_is_the_limit(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 20)
    told = {(one.mode, one.rollout_devices): one for one in what_if(tmp_path / "run").settings}
    alone = told["colocated", 1].step_s
    assert told["sync", 1].step_s < alone, "training overlaps with sampling"
    assert told["async", 1].step_s < told["sync", 1].step_s
    assert told["sync", 4].step_s < told["sync", 2].step_s < told["sync", 1].step_s
    recorded = read_recorded(tmp_path / "run")
    training = [recorded.metrics["timing_s/update_actor"][step] for step in recorded.steps]
    for one in told.values():
        assert one.step_s > 0.9 * min(training), "somebody has to train"
    assert told["async", 4].idle_share > told["async", 1].idle_share, "then devices wait for the one that trains"
    assert ("rhyme", 1) not in told and ("rhyme", 2) in told


def test_too_few_steps_say_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 5)
    with pytest.raises(ValueError, match="6 are needed"):
        what_if(tmp_path / "run")


def test_the_report_of_another_mode_says_for_which_it_is(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 20)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(dump_config(load_config(config, ["mode=sync"])))
    with pytest.raises(SystemExit, match="0"):
        main(["report", str(tmp_path / "run")])
    assert "for runs with mode=colocated only" in (tmp_path / "run" / "report.html").read_text()


def test_only_the_newest_steps_of_a_long_run_are_read_and_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", 60, slowdown=2.0)
    stores = list[RunStore]()

    def opened(*given: Any, **settings: Any) -> RunStore:
        stores.append(RunStore(*given, **settings))
        return stores[-1]

    monkeypatch.setattr(against, "RunStore", opened)
    told = what_if(tmp_path / "run")
    assert (told.first_step, told.last_step) == (29, 60), "32 steps, and one before them that prepares"
    assert stores[-1].rows_read < 33 * (12 + 5) + 200
    monkeypatch.setattr(module, "NEWEST", (32, 150))
    told = what_if(tmp_path / "run")
    assert (told.first_step, told.last_step) == (50, 60), "12 rollouts a step"
    monkeypatch.setattr(module, "NEWEST", (32, 1))
    assert what_if(tmp_path / "run").first_step == 55, "with fewer steps nothing can be said"
    recorded = read_recorded(tmp_path / "run")
    slow = [recorded.metrics["timing_s/step"][step] - 3.0 * (step % 4 == 0) for step in range(55, 61)]
    alone = next(one for one in told.settings if one.mode == "colocated")
    assert alone.step_s == pytest.approx(sum(slow) / len(slow), rel=0.15), "as fast as it is now, not as it was"


def test_the_report_shows_it_or_says_why_not(tmp_path: Path) -> None:
    for name, steps, shown in (("long", 20, "sync, 2 sample and 1 trains"), ("short", 5, "6 are needed")):
        write_run(tmp_path / name, steps)
        with pytest.raises(SystemExit, match="0"):
            main(["report", str(tmp_path / name)])
        assert shown in (tmp_path / name / "report.html").read_text()
