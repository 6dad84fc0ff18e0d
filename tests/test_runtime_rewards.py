"""What reward functions see and log in a whole run: the data's form, and where logs arrive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_runtime import SETTINGS, measured

from slipstream.config import build_config
from slipstream.observe.report import write_report
from slipstream.observe.store import RunStore
from slipstream.runtime.local import run_training

LOGGED = "logged/sees_messages/mean_length"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    for name, count in (("train", 8), ("test", 2)):
        rows = [
            {"prompt": [{"role": "system", "content": "sort"}, {"role": "user", "content": f"{name[:2]} {number}"}]}
            for number in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = SETTINGS | {
        "run": {"dir": folder / "run"},
        "tasks": {
            "train": [{"source": str(folder / "train.jsonl")}],
            "eval": {"test": {"source": str(folder / "test.jsonl")}},
        },
        "reward": {
            "functions": [{"function": f"{Path(__file__).parent / 'data' / 'trl_rewards.py'}:sees_messages"}],
        },
        "warmup": None,
        "train": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2, "lr": 1e-3},
        "eval": {"every": 2},
    }
    assert run_training(build_config(settings), quiet=True).reason == "done"
    return folder / "run"


def test_metrics_that_rewards_log_are_in_the_runs_metrics(run_dir: Path) -> None:
    rows = measured(run_dir)
    for step in (1, 2):
        assert rows[step][LOGGED] == pytest.approx(rows[step]["reward/mean"])
    for step in (0, 2):
        logged = rows[step]["eval/test/logged/sees_messages/mean_length"]
        assert logged == pytest.approx(rows[step]["eval/test/avg@1"])
    with RunStore(run_dir, read_only=True) as store:
        assert store.metrics_by_name()[LOGGED] == {step: rows[step][LOGGED] for step in (1, 2)}


def test_columns_that_rewards_log_are_in_the_store_with_their_rollouts(run_dir: Path) -> None:
    with RunStore(run_dir, read_only=True) as store:
        rollouts = store.rollouts()
        extras = {item.uid: store.extras_of(item.uid) for item in rollouts}
    assert rollouts and all(extras[item.uid]["length"] == item.reward for item in rollouts)
    assert all(extras[item.uid]["asked"] in item.prompt_text for item in rollouts)


def test_the_report_shows_what_rewards_log(run_dir: Path) -> None:
    html = write_report(run_dir).read_text()
    assert "Logged by reward functions" in html and LOGGED in html
    assert "<small>asked</small>" in html


def test_a_replayed_step_forgets_what_was_logged(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes((run_dir / "run.db").read_bytes())
    with RunStore(tmp_path) as store:
        (one,) = store.rollouts(step=2, kind="train", limit=1)
        assert store.extras_of(one.uid)
        store.forget_after(1, 1)
        assert store.extras_of(one.uid) == {}
