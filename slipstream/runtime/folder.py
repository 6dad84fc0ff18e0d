"""The run folder's life: new, resumed, replaced or refused; and one writer at a time.

Invariant: nothing in the folder is changed before everything that the user can get wrong has been looked at.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.config import Config, dump_config, load_config
from slipstream.files import TEMPORARY, replacing
from slipstream.runtime.control import CONTROL_FILE
from slipstream.train.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, point_latest_at

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
LESSONS_FOLDER = "lessons"
REFERENCE_FOLDER = "reference"
LOGS_FOLDER = "logs"
"""What each process printed."""
WEIGHTS_FOLDER = "weights"
"""On their way from the trainer to rollout workers."""
VERSIONS_FOLDER = "drafter_versions"
"""Of the drafter that rollout workers train together."""
FOLDERS = ("checkpoints", REFERENCE_FOLDER, "tensorboard", LESSONS_FOLDER, LOGS_FOLDER, WEIGHTS_FOLDER, VERSIONS_FOLDER)
# With these changed, what follows a checkpoint would not be the same run.
IDENTITY = ("model", "seed", "tasks", "warmup")


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[RunFolder]:
        """The folder, locked for this process until the end."""
        path.mkdir(parents=True, exist_ok=True)
        with (path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process is training in {path}; wait for it or choose another run.dir"
                ) from None
            try:
                yield cls(path)
            finally:
                if [entry.name for entry in path.iterdir()] == [".lock"]:  # nothing came of it
                    (path / ".lock").unlink()
                    path.rmdir()

    def checkpoint_to_resume(self, config: Config, resume: bool | Path, overwrite: bool) -> Checkpoint | None:
        """The verified checkpoint to go on from, None to begin; ValueError if neither is what the user can want."""
        latest = latest_checkpoint(self.path)
        if isinstance(resume, Path):
            self._refuse_foreign(resume)
            self._refuse_other_recipe(config)
            return load_checkpoint(resume)
        if latest is None or overwrite:
            return None
        if not resume:
            raise ValueError(
                f"{self.path} already holds a run (checkpoint {latest.name}); add --resume to go on with it, "
                "--overwrite to replace it, or choose another folder with run.dir=..."
            )
        self._refuse_other_recipe(config)
        return load_checkpoint(latest)

    def begin(self, config: Config, checkpoint: Checkpoint | None, overwrite: bool) -> None:
        """Make the folder that of this run."""
        if overwrite:
            self._clear()
        if checkpoint is not None:
            point_latest_at(self.path, checkpoint.path)
        with replacing(self.path / "config.yaml") as partial:
            partial.write_text(dump_config(config))

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
            for one in (name, f"{TEMPORARY}{name}"):
                (self.path / one).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
