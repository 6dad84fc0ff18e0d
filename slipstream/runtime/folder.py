"""The run folder's life: new, resumed, replaced or refused; and one writer at a time.

Invariants, asserted by `tests/test_runtime_folder.py`:
- nothing in the folder is changed before everything that the user can get wrong has been looked at;
- nothing that a run recorded is deleted without `overwrite`, but for what `resume` computes again: steps after the
  newest checkpoint;
- nothing is written or deleted in a folder where another program's files have the names of a run's;
- an end leaves nothing of SCRATCH_FOLDER and no partial file, unless the process is killed; the next run of the folder
  removes them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from slipstream.config import Config, dump_config, load_config
from slipstream.files import TEMPORARY, replacing
from slipstream.observe.store import RunStore, is_run_store
from slipstream.runtime.control import CONTROL_FILE
from slipstream.train.checkpoint import (
    Checkpoint,
    checkpoints_after,
    latest_checkpoint,
    latest_step,
    load_checkpoint,
    point_latest_at,
    remove_checkpoints_after,
)

PROCESSES_FILE = "processes.json"
"""The process numbers of a run that has several, by name."""
MARKER_FILE = ".here"
"""By which nodes of a cluster know the folder, while a run goes on."""
# What a run makes, and all that --overwrite removes: the folder may hold other things.
CONTENTS = (
    "config.yaml",
    "run.db",
    "run.db-wal",
    "run.db-shm",
    "history.db",
    "history.db-wal",
    "history.db-shm",
    "metrics.jsonl",
    "report.html",
    "trace.json",
    "latest",
    "wandb_id",
    PROCESSES_FILE,
    CONTROL_FILE,
)
RESULTS = ("run.db", "history.db", "metrics.jsonl", "report.html", "trace.json", "tensorboard")
"""What is worth keeping of a run whose checkpoints are gone."""
REFERENCE_FOLDER = "reference"
LOGS_FOLDER = "logs"
"""What each process printed."""
SCRATCH_FOLDER = ".scratch"
"""What processes of a run share while it goes on. No resume needs it: all of it follows from a checkpoint."""
LESSONS_FOLDER = f"{SCRATCH_FOLDER}/lessons"
WEIGHTS_FOLDER = f"{SCRATCH_FOLDER}/weights"
"""On their way from the trainer to rollout workers."""
VERSIONS_FOLDER = f"{SCRATCH_FOLDER}/drafter"
"""Of the drafter that rollout workers train together."""
FOLDERS = ("checkpoints", REFERENCE_FOLDER, "tensorboard", LOGS_FOLDER)
LOCK_FILE = ".lock"
EARLIER_SETTINGS = re.compile(r"config\.until_step_(\d+)\.yaml")
"""Settings of the steps up to this one, where a run was resumed with others."""
# With these changed, what follows a checkpoint would not be the same run.
IDENTITY = ("model", "seed", "tasks", "warmup")


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_begun = False

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[RunFolder]:
        """The folder, locked for this process until the end."""
        path.mkdir(parents=True, exist_ok=True)
        try:
            with _locked(path / LOCK_FILE):
                folder = cls(path)
                try:
                    yield folder
                finally:
                    folder._tidy_up()
        finally:
            if not any(path.iterdir()):  # nothing came of it
                path.rmdir()

    def checkpoint_to_resume(self, config: Config, resume: bool | Path, overwrite: bool) -> Checkpoint | None:
        """The verified checkpoint to go on from, None to begin; ValueError if neither is what the user can want."""
        self._refuse_files_of_others()
        if isinstance(resume, Path):
            self._refuse_foreign(resume)
            self._refuse_other_recipe(config)
            checkpoint = load_checkpoint(resume)
            if checkpoint.step < self._saved_step() and not overwrite:
                raise ValueError(
                    f"{self.path} holds {self._recorded(checkpoint.step)}, which came after {resume}: add --overwrite "
                    "to delete that, and copy the folder first if you want to keep it; for a new run that starts from "
                    f"these weights write model={resume} and another run.dir"
                )
            return checkpoint
        if overwrite:
            if resume:
                raise ValueError(
                    f"--resume goes on with the run in {self.path}, --overwrite deletes it: give one of the two"
                )
            return None
        latest = latest_checkpoint(self.path)
        if latest is None:
            self._refuse_record()
            return None
        if not resume:
            raise ValueError(
                f"{self.path} already holds a run (checkpoint {latest.name}); add --resume to go on with it, "
                "--overwrite to replace it, or choose another folder with run.dir=..."
            )
        self._refuse_other_recipe(config)
        checkpoint = load_checkpoint(latest)
        if checkpoint.step < self._saved_step():
            raise ValueError(
                f"{self.path} was saved at step {self._saved_step()}, and that checkpoint is gone. To go on from "
                f"{latest} write --resume-from {latest} --overwrite, which deletes {self._recorded(checkpoint.step)}; "
                "copy the folder first to keep that"
            )
        return checkpoint

    def begin(self, config: Config, checkpoint: Checkpoint | None, overwrite: bool) -> None:
        """Make the folder that of this run. With a checkpoint `overwrite` concerns what came after it, which the
        caller deletes from the store."""
        self._has_begun = True
        if overwrite and checkpoint is None:
            self._clear()
        self._remove_partial()
        settings = dump_config(config)
        if checkpoint is not None:
            self._keep_earlier_settings(settings, checkpoint.step)
            point_latest_at(self.path, checkpoint.path)
            if overwrite:
                remove_checkpoints_after(self.path, checkpoint.step)
        with replacing(self.path / "config.yaml") as partial:
            partial.write_text(settings)

    def _saved_step(self) -> int:
        """Step of the newest checkpoint that the run tells of, whether it is still there or not; -1 if it tells of
        none."""
        return max(latest_step(self.path), self._ask_store(RunStore.saved_step, otherwise=-1))

    def _recorded(self, after_step: int) -> str:
        """What the folder holds of later steps, in words."""
        num_rollouts = self._ask_store(lambda store: store.num_rollouts_after(after_step), otherwise=0)
        last_step = self._ask_store(RunStore.last_step, otherwise=-1)
        found = [f"{num_rollouts:,} rollouts of steps {after_step + 1} to {last_step}"] if num_rollouts else []
        found += [f"checkpoint {path.name}" for path in checkpoints_after(self.path, after_step)]
        return " and ".join(found) or f"what was recorded after step {after_step}"

    def _refuse_record(self) -> None:
        """ValueError if there are results and no checkpoint to go on from. What a run records before its first
        checkpoint is none: it follows from the recipe, and is computed again."""
        if self._has_store():
            with RunStore(self.path, read_only=True, at_rest=True) as store:
                if store.saved_step() < 0 and store.last_step() <= 0:
                    return
                found = f"{store.num_rollouts_after():,} rollouts, up to step {store.last_step()}"
        else:
            names = [name for name in RESULTS if _holds_something(self.path / name)]
            if not names:
                return
            found = ", ".join(names)
        raise ValueError(
            f"{self.path} holds the record of a run ({found}) and no checkpoint to go on from; write --overwrite to "
            "delete that record and begin again, or choose another folder with run.dir=..."
        )

    def _ask_store(self, question: Callable[[RunStore], int], otherwise: int) -> int:
        if not self._has_store():
            return otherwise
        with RunStore(self.path, read_only=True, at_rest=True) as store:
            return question(store)

    def _has_store(self) -> bool:
        """Whether run.db has been written; RunStoreError if it is damaged or something else."""
        if not (self.path / "run.db").is_file():
            return False
        RunStore(self.path, read_only=True, at_rest=True).close()
        return is_run_store(self.path)

    def _refuse_files_of_others(self) -> None:
        taken = [name for name in (*CONTENTS, *FOLDERS) if (self.path / name).exists()]
        if taken and not self._is_of_a_run():
            raise ValueError(
                f"{self.path} holds {', '.join(taken)}, and no sign that a run wrote them; choose another folder with "
                "run.dir=..., or move them away"
            )

    def _is_of_a_run(self) -> bool:
        if is_run_store(self.path) or checkpoints_after(self.path):
            return True
        written = self.path / "config.yaml"
        try:
            return written.is_file() and written.read_text() == dump_config(load_config(written))
        except (OSError, ValueError):
            return False

    def _keep_earlier_settings(self, settings: str, step: int) -> None:
        """Those that the steps up to `step` had, if they were others, in a file of their own."""
        kept = sorted(
            (int(match[1]), path) for path in self.path.iterdir() if (match := EARLIER_SETTINGS.fullmatch(path.name))
        )
        own, written = self.path / f"config.until_step_{step}.yaml", self.path / "config.yaml"
        before = next((path for until, path in kept if until >= step), written)
        if step > 0 and before != own and before.is_file() and before.read_text() != settings:
            with replacing(own) as partial:
                partial.write_bytes(before.read_bytes())
        for until, path in kept:
            if until > step:
                path.unlink()

    def _refuse_foreign(self, checkpoint: Path) -> None:
        if not checkpoint.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(
                f"{checkpoint} is not a checkpoint of {self.path}; to start a new run from its weights write "
                f"model={checkpoint}"
            )

    def _refuse_other_recipe(self, config: Config) -> None:
        written = self.path / "config.yaml"
        if not written.is_file():
            return
        before, now = load_config(written).model_dump(mode="json"), config.model_dump(mode="json")
        changed = [key for key in IDENTITY if before[key] != now[key]]
        if changed:
            raise ValueError(
                f"{self.path} was begun with other settings of {', '.join(changed)} (see {written}); to resume, give "
                "the same ones; for a new run use --overwrite or another run.dir"
            )

    def _clear(self) -> None:
        for name in CONTENTS:
            (self.path / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for path in self.path.iterdir():
            if EARLIER_SETTINGS.fullmatch(path.name):
                path.unlink()

    def _tidy_up(self) -> None:
        """Removes what only processes of a run need: all of them are gone."""
        if not self._has_begun:
            return
        for name in (PROCESSES_FILE, CONTROL_FILE, MARKER_FILE):
            (self.path / name).unlink(missing_ok=True)
        self._remove_partial()

    def _remove_partial(self) -> None:
        """What a process that died was writing, and what processes shared."""
        shutil.rmtree(self.path / SCRATCH_FOLDER, ignore_errors=True)
        checkpoints = self.path / "checkpoints"
        for folder in (self.path, checkpoints, *checkpoints.glob("step_*")):
            for path in folder.glob(f"{TEMPORARY}*"):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock on a file that is there only while it is held. ValueError if another process holds it."""
    lock = _take_lock(path)
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _take_lock(path: Path) -> TextIO:
    while True:
        lock = path.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        except BlockingIOError:
            lock.close()
            raise ValueError(
                f"another process is training in {path.parent}; wait for it or choose another run.dir"
            ) from None
        except FileNotFoundError:
            pass
        lock.close()  # its holder removed it between our two calls
