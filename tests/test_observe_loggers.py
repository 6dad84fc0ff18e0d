"""metrics.jsonl across kills and full disks; TensorBoard and wandb without their usual baggage."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe.loggers import MetricLog


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_object_a_step(tmp_path: Path) -> None:
    with MetricLog(tmp_path / "new") as log:
        log.write(0, {"eval/a/avg@1": 0.5})
        log.write(1, {"reward/mean": 0.25, "actor/grad_norm": math.nan, "x": math.inf})
        assert lines(tmp_path / "new") == [
            {"step": 0, "eval/a/avg@1": 0.5},
            {"step": 1, "reward/mean": 0.25, "actor/grad_norm": None, "x": None},
        ]


def test_resume_cuts_later_steps(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log:
        for step in range(6):
            log.write(step, {"a": float(step)})
    with MetricLog(tmp_path) as log:
        log.resume_after(3)
        log.write(4, {"a": 40.0})
    assert [(line["step"], line["a"]) for line in lines(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("half", ['{"step": 3, "a": 0.', '{"step": 3, "a": 1.0}', "{"])
def test_half_line_of_a_killed_writer(tmp_path: Path, half: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n' + half)
    with MetricLog(tmp_path) as log:
        log.resume_after(1)
        log.write(2, {"a": 5.0})
    assert lines(tmp_path) == [{"step": 1, "a": 1.0}, {"step": 2, "a": 5.0}]


def test_half_line_without_resume_is_not_glued(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    with MetricLog(tmp_path) as log:
        log.write(2, {})
    assert lines(tmp_path) == [{"step": 1}, {"step": 2}]


def test_a_whole_line_without_an_end_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}')
    with MetricLog(tmp_path) as log:
        log.resume_after(2)
        log.write(3, {"a": 3.0})
    assert [line["a"] for line in lines(tmp_path)] == [1.0, 2.0, 3.0]


def test_a_foreign_line_is_shown(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with MetricLog(tmp_path) as log, pytest.raises(ValueError, match=r"metrics\.jsonl.*hello"):
        log.resume_after(1)
    assert "hello" in (tmp_path / "metrics.jsonl").read_text(), "a refused resume changes nothing"


def test_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        with MetricLog(tmp_path) as log:
            with pytest.raises(OSError, match=r"metrics\.jsonl.*disk full"):
                for step in range(1000):
                    log.write(step, {f"name{i}": 0.5 for i in range(20)})
            assert [line["step"] for line in lines(tmp_path)] == list(range(len(lines(tmp_path))))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_unknown_logger(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensorboard, wandb"):
        MetricLog(tmp_path, ["mlflow"])


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboard.compat.proto.event_pb2"), ("wandb", "wandb")]
)
def test_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"pip install slipstream-rl\[{name}\]"):
        MetricLog(tmp_path, [name])


def test_tensorboard_reads_back_and_resume_purges(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = (
        "import sys; from pathlib import Path; from slipstream.observe.loggers import MetricLog\n"
        "with MetricLog(Path(sys.argv[1]), ['tensorboard']) as log:\n"
        "    if len(sys.argv) > 2: log.resume_after(2)\n"
        "    for step in (range(3, 5) if len(sys.argv) > 2 else range(1, 5)):\n"
        "        log.write(step, {'reward/mean': step * (10.0 if len(sys.argv) > 2 else 1.0)})\n"
        "assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    subprocess.run([sys.executable, "-c", code, str(tmp_path), "again"], check=True, timeout=60)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 1), (2, 2), (3, 30), (4, 40)]


def test_wandb_keeps_its_run_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    logged: list[tuple[dict[str, float], int]] = []

    class FakeRun:
        def log(self, metrics: dict[str, float], step: int) -> None:
            logged.append((metrics, step))

        def finish(self) -> None:
            logged.append(({}, -1))

    def init(**arguments: Any) -> FakeRun:
        calls.append(arguments)
        return FakeRun()

    fake = types.ModuleType("wandb")
    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        with MetricLog(tmp_path / "my-run", ["wandb"], config={"seed": 1}) as log:
            log.resume_after(0)
            log.write(1, {"a": 1.0})
    first, second = calls
    assert first["id"] == second["id"] == (tmp_path / "my-run" / "wandb_id").read_text().strip() != ""
    assert first["resume"] == "allow" and first["name"] == "my-run" and first["config"] == {"seed": 1}
    assert logged == [({"a": 1.0}, 1), ({}, -1)] * 2
