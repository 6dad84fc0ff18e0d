"""Reports beside a run: at checkpoints, not too often, and the last when it ends."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe import reports
from slipstream.observe.reports import REFRESH_S, Reports
from slipstream.observe.store import RunStore


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with RunStore(tmp_path) as store:
        store.add_metrics(1, {"reward/mean": 0.5})
        store.add_event(1, 0.0, "StepTrained", {"step": 1})
    return tmp_path


def test_the_end_has_the_last_checkpoint_and_a_run_without_one_leaves_nothing(run_dir: Path) -> None:
    with Reports(run_dir, print):
        pass
    assert not (run_dir / "report.html").exists()
    with Reports(run_dir, print) as some:
        some.refresh()
        assert not (run_dir / "report.html").exists(), "a young run is not held up for it"
    assert "reward" in (run_dir / "report.html").read_text() and (run_dir / "trace.json").exists()


def test_a_process_of_its_own_writes_it_not_too_often(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, commands = Clock(), list[Any]()
    popen = subprocess.Popen

    def started(command: Any, **settings: Any) -> Any:
        commands.append(command)
        return popen(command, **settings)

    monkeypatch.setattr(subprocess, "Popen", started)
    written: list[Path] = []
    monkeypatch.setattr(reports, "write_both", written.append)
    with Reports(run_dir, print, clock) as some:
        for now_s, expected in ((1.0, 0), (REFRESH_S, 1), (REFRESH_S + 1, 1)):
            clock.now_s = now_s
            some.refresh()
            assert len(commands) == expected
    assert (run_dir / "report.html").exists() and written == [run_dir], "the child's, and the last"


def test_a_report_that_cannot_be_written_is_told_and_tried_again_at_the_end(run_dir: Path) -> None:
    clock, said = Clock(), list[str]()
    with Reports(run_dir, said.append, clock) as some:
        clock.now_s = REFRESH_S
        (run_dir / "report.html").mkdir()
        some.refresh()
    assert len(said) == 2 and all("the report could not be written: " in line for line in said), said
