"""Nothing that a run recorded is deleted without --overwrite, and an end leaves what the README lists."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.config import Config, build_config, dump_config, load_config
from slipstream.observe.store import RunStore
from slipstream.runtime import local
from slipstream.runtime.folder import SCRATCH_FOLDER, RunFolder
from slipstream.runtime.local import run_training
from slipstream.train.checkpoint import Checkpoint

GCD = {"source": "gcd", "size": 8, "seed": 1, "params": {"wording": "terse"}}
SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "tasks": {"train": [GCD], "eval": {"held": {**GCD, "seed": 2, "size": 3}}},
    "sampling": {"max_new_tokens": 8},
    "engine": {"max_sequences": 8, "max_prompt_tokens": 32},
    "draft": {"source": "history"},
    "train": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2},
}
KEPT_AT_THE_END = {
    *("config.yaml", "run.db", "history.db", "metrics.jsonl", "trace.json", "report.html", "checkpoints", "latest"),
}


def settings(run_dir: Path, **changes: Any) -> Config:
    return build_config(SETTINGS | {"run": {"dir": str(run_dir), "save_every": 1}} | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    assert run_training(settings(run_dir), quiet=True).reason == "done"
    return run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, with checkpoints of steps 1 and 2."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rollouts(run_dir: Path) -> list[tuple[Any, ...]]:
    with RunStore(run_dir, read_only=True, at_rest=True) as store:
        return [(one.uid, one.token_ids, one.logprobs, one.reward) for one in store.rollouts()]


def refused(run_dir: Path, words: str, config: Config | None = None, **how: Any) -> None:
    """Says so, and changes nothing."""
    before = contents(run_dir)
    with pytest.raises(ValueError, match=words):
        run_training(config or settings(run_dir), quiet=True, **how)
    assert contents(run_dir) == before


def test_a_run_leaves_what_the_readme_lists(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == KEPT_AT_THE_END
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["step_1", "step_2"]
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert all(f"`{name}" in readme for name in KEPT_AT_THE_END | {"logs", "tensorboard", "drafter", "reference"})


@pytest.mark.parametrize("mode", ["colocated", "sync", "async", "rhyme"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_record_without_checkpoints_is_deleted_only_with_overwrite(mode: str, resume: bool, run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    config = settings(run_dir, mode=mode, rollout={"workers": 1 if mode == "colocated" else 2})
    words = r"14 rollouts, up to step 2\) and no checkpoint to go on from; write --overwrite"
    refused(run_dir, words, config, resume=resume)
    (run_dir / "latest").unlink()
    refused(run_dir, words, config, resume=resume)


def test_whatever_is_left_of_a_record_is_kept(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    written = load_config(run_dir / "config.yaml")
    (run_dir / "run.db").unlink()
    for name in ("metrics.jsonl", "history.db", "report.html", "trace.json"):
        refused(run_dir, rf"{name}.*\) and no checkpoint", written.model_copy(update={"run": settings(run_dir).run}))
        (run_dir / name).unlink()
    (run_dir / "latest").unlink()
    (run_dir / "config.yaml").unlink()
    assert not list(run_dir.iterdir())


def test_overwrite_replaces_a_record_without_checkpoints(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    train = SETTINGS["train"] | {"steps": 1}
    assert run_training(settings(run_dir, train=train), overwrite=True, quiet=True).step == 1
    with RunStore(run_dir, read_only=True, at_rest=True) as store:
        assert (store.last_step(), store.num_rollouts_after()) == (1, 4 + 3 + 3)


def test_resume_and_overwrite_contradict_each_other(run_dir: Path) -> None:
    refused(run_dir, "give one of the two", resume=True, overwrite=True)


def test_overwrite_deletes_nothing_if_the_new_run_cannot_begin(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = {"dir": str(run_dir), "loggers": ["wandb"]}
    refused(run_dir, "pip install", settings(run_dir, run=run), overwrite=True)


@pytest.mark.parametrize("damage", ["gone", "gone with latest", "gone and unnamed"])
def test_an_older_checkpoint_is_resumed_from_only_by_name_and_with_overwrite(
    damage: str, finished: Path, run_dir: Path
) -> None:
    shutil.rmtree(run_dir / "checkpoints" / "step_2")
    if damage == "gone with latest":
        (run_dir / "latest").unlink()
    if damage == "gone and unnamed":
        (run_dir / "latest").write_text("\n")
    older = run_dir / "checkpoints" / "step_1"
    refused(run_dir, "was saved at step 2, and that checkpoint is gone", resume=True)
    refused(run_dir, "holds 7 rollouts of steps 2 to 2, which came after .*step_1: add --overwrite", resume=older)
    if damage == "gone":
        assert run_training(settings(run_dir), resume=older, overwrite=True, quiet=True).step == 2
        assert rollouts(run_dir) == rollouts(finished)


def test_resuming_from_an_older_checkpoint_deletes_the_newer_one_with_overwrite(finished: Path, run_dir: Path) -> None:
    older, newer = (run_dir / "checkpoints" / name for name in ("step_1", "step_2"))
    refused(run_dir, "7 rollouts of steps 2 to 2 and checkpoint step_2, which came after", resume=older)
    train = SETTINGS["train"] | {"steps": 1}
    config = settings(run_dir, train=train, eval={"before_train": False})
    assert run_training(config, resume=older, overwrite=True, quiet=True).step == 1
    assert not newer.exists() and (run_dir / "latest").read_text() == "checkpoints/step_1\n"
    with RunStore(run_dir, read_only=True, at_rest=True) as store:
        assert (store.last_step(), store.saved_step()) == (1, 1)


def test_the_newest_checkpoint_may_be_named(finished: Path, run_dir: Path) -> None:
    assert run_training(settings(run_dir), resume=run_dir / "checkpoints" / "step_2", quiet=True).reason == "done"
    assert rollouts(run_dir) == rollouts(finished)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_ended_before_its_first_checkpoint_begins_again(
    resume: bool, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then it has recorded the evaluation before training, which comes out the same."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("lost")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr(local, "save_checkpoint", fail)
        run_training(settings(tmp_path / "run"), quiet=True)
    with RunStore(tmp_path / "run", read_only=True, at_rest=True) as store:
        assert store.num_rollouts_after() == 3 and store.saved_step() == -1
    assert run_training(settings(tmp_path / "run"), resume=resume, quiet=True).reason == "done"
    assert rollouts(tmp_path / "run") == rollouts(finished)


def test_how_much_is_recorded_anew_is_said(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(run_dir / "run.db") as connection:
        connection.execute("UPDATE rollouts SET uid = '3' || uid, step = 3 WHERE step = 2")
    assert run_training(settings(run_dir), resume=True).reason == "done"
    assert "7 rollouts of steps 3 to 3, recorded after it, are recorded anew" in " ".join(
        capsys.readouterr().out.split()
    )


def other_recipe(folder: Path) -> None:
    (folder / "config.yaml").write_text("# by hand\n" + yaml.safe_dump(SETTINGS | {"run": {"dir": str(folder)}}))


def other_database(folder: Path) -> None:
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute("CREATE TABLE mine (value TEXT)")


def other_folder(folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "mine.txt").write_text("mine")


def other_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"epoch": 1}\n')


@pytest.mark.parametrize("make", [other_recipe, other_database, other_folder, other_metrics])
@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}], ids=str)
def test_files_of_other_programs_are_left_alone(
    make: Callable[[Path], None], how: dict[str, Any], tmp_path: Path
) -> None:
    make(tmp_path)
    (name,) = (path.name for path in tmp_path.iterdir())
    refused(tmp_path, f"holds {name}, and no sign that a run wrote them", **how)


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Begins a run in a folder and ends it, with nothing in between."""

    def begin(config: Config, step: int | None = None, overwrite: bool = False) -> Path:
        path, checkpoint = config.run.dir, None
        with RunFolder.opened(path) as folder:
            if step is not None:
                place = path / "checkpoints" / f"step_{step}"
                place.mkdir(parents=True, exist_ok=True)
                (place / "manifest.json").write_text(json.dumps({"step": step, "files": {}}))
                checkpoint = Checkpoint(place, step, {})
            folder.begin(config, checkpoint, overwrite)
        return path

    yield begin


def test_what_processes_share_and_half_written_files_are_gone_at_the_end(tmp_path: Path) -> None:
    config, path = settings(tmp_path / "run"), tmp_path / "run"
    with RunFolder.opened(path) as folder:
        folder.begin(config, None, False)
        for name in (
            f"{SCRATCH_FOLDER}/weights/000000.full/00000.bucket",
            f"{SCRATCH_FOLDER}/drafter/.tmp-rollout-0/drafter.safetensors",
            "processes.json",
            "control.json",
            ".tmp-report.html",
            "checkpoints/.tmp-step_4/model.safetensors",
            "checkpoints/step_2/.tmp-drafter.safetensors",
            "checkpoints/step_2/manifest.json",
            "weights/mine.txt",
            "logs/trainer.log",
        ):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text("x")
    assert sorted(contents(path)) == [
        "checkpoints/step_2/manifest.json",
        "config.yaml",
        "logs/trainer.log",
        "weights/mine.txt",
    ]
    assert {one.name for one in path.iterdir()} == {"checkpoints", "config.yaml", "logs", "weights"}


def test_settings_that_earlier_steps_had_are_kept(tmp_path: Path, begun: Callable[..., Path]) -> None:
    def with_lr(lr: float) -> Config:
        return settings(tmp_path / "run", train=SETTINGS["train"] | {"lr": lr})

    def kept() -> dict[str, float]:
        return {
            path.name.removeprefix("config").removesuffix(".yaml"): load_config(path).train.lr
            for path in path.glob("config*.yaml")
        }

    path = begun(with_lr(1e-3))
    begun(with_lr(1e-3), step=2)
    assert kept() == {"": 1e-3}
    begun(with_lr(2e-3), step=4)
    begun(with_lr(3e-3), step=4)  # nothing was trained with 2e-3 that is still there
    assert kept() == {"": 3e-3, ".until_step_4": 1e-3}
    begun(with_lr(4e-3), step=8)
    assert kept() == {"": 4e-3, ".until_step_4": 1e-3, ".until_step_8": 3e-3}
    begun(with_lr(5e-3), step=6, overwrite=True)
    assert kept() == {"": 5e-3, ".until_step_4": 1e-3, ".until_step_6": 3e-3}
    begun(with_lr(6e-3), overwrite=True)
    assert kept() == {"": 6e-3} and (path / "config.yaml").read_text() == dump_config(with_lr(6e-3))


def test_a_folder_can_be_taken_again_at_once(tmp_path: Path) -> None:
    for _ in range(3):
        with (
            RunFolder.opened(tmp_path / "run"),
            pytest.raises(ValueError, match="another process is training"),
            RunFolder.opened(tmp_path / "run"),
        ):
            pass
        assert not (tmp_path / "run").exists(), "nothing came of it"
