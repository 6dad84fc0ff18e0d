"""Where a step's metrics go: `metrics.jsonl` always, TensorBoard and wandb when asked.

Invariants:
- a line of `metrics.jsonl` is one step, {"step": n, name: value, ...}, on the disk when `write` returns; it is strict
  JSON, so NaN and infinities are null there (the store keeps them);
- after `resume_after(n)` the file has no line of a later step, and no half line from a killed writer;
- TensorBoard is written without torch or TensorFlow; wandb is imported only when asked for.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from slipstream.files import parse_json, replacing

LINE_START = b'{"step": '


class Logger(Protocol):
    """A place that metrics are sent to."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def resume_after(self, step: int) -> None: ...
    def close(self) -> None: ...


class MetricLog:
    """The run's metrics.jsonl and the loggers asked for ("tensorboard", "wandb")."""

    def __init__(
        self,
        run_dir: Path,
        loggers: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        unknown = sorted(set(loggers) - set(LOGGERS))
        if unknown:
            raise ValueError(f"unknown logger {unknown[0]!r}; run.loggers takes {', '.join(LOGGERS)}")
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._targets: list[Logger] = [JsonLines(run_dir / "metrics.jsonl")]
        self._targets += [LOGGERS[name](run_dir, config or {}) for name in loggers]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step. Call it once a step, with everything known of it, evaluation included."""
        for target in self._targets:
            target.write(step, metrics)

    def resume_after(self, step: int) -> None:
        """Call before the first write of a resumed run: steps after `step` will be written again."""
        for target in self._targets:
            target.resume_after(step)

    def close(self) -> None:
        for target in self._targets:
            target.close()

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class JsonLines:
    """Append-only file of JSON lines that survives kill -9 and a full disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Unbuffered: a line is in the kernel whole or not at all as far as this process can help it.
        self._file = path.open("ab", buffering=0)
        self._cut_half_line()

    def _cut_half_line(self) -> None:
        content = self.path.read_bytes()
        half = content[content.rfind(b"\n") + 1 :]
        if half.endswith(b"}") and half.startswith(LINE_START):  # whole, but for its end: an editor's
            self._file.write(b"\n")
            return
        # A killed writer leaves the beginning of a line, a power cut perhaps zeros: anything else is not ours to cut.
        if half and not half.startswith(LINE_START[: len(half)]) and half.strip(b"\0"):
            raise _not_metrics(self.path, half)
        if half:
            self._file.truncate(len(content) - len(half))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, **numbers}, allow_nan=False).encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(end)  # or the next line would be glued to half of this one
            raise OSError(error.errno, f"cannot write {self.path}: {error}; is the disk full?") from error

    def resume_after(self, step: int) -> None:
        kept = [line for line in self._lines() if step_of_line(self.path, line) <= step]
        self._file.close()
        with replacing(self.path) as partial:
            partial.write_bytes(b"".join(kept))
        self._file = self.path.open("ab", buffering=0)

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines(keepends=True)

    def close(self) -> None:
        self._file.close()


def step_of_line(path: Path, line: bytes) -> int:
    """The step of a line of metrics.jsonl; ValueError names the file."""
    try:
        step = parse_json(line.decode(), str(path))["step"]
        if isinstance(step, int):
            return step
    except (ValueError, KeyError, TypeError):
        pass
    raise _not_metrics(path, line)


def _not_metrics(path: Path, line: bytes) -> ValueError:
    return ValueError(f"{path}: not a metrics line: {line[:80]!r}; move it elsewhere and resume again")


class TensorBoard:
    """Scalars under `<run>/tensorboard`, through tensorboard's own event writer."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise _missing_package("tensorboard") from None
        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def resume_after(self, step: int) -> None:
        # Old event files cannot be cut; a START record tells TensorBoard to drop what it read of these steps.
        start = self._session(status=self._session.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run whose id is kept in `<run>/wandb_id`, so that a resumed run continues its curves."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing_package("wandb") from None
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12] + "\n")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "slipstream"),
            name=run_dir.resolve().name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def resume_after(self, step: int) -> None:
        """Nothing to do: wandb keeps the first values of a step that is sent again."""

    def close(self) -> None:
        self._run.finish()


LOGGERS: dict[str, type[TensorBoard] | type[Wandb]] = {"tensorboard": TensorBoard, "wandb": Wandb}
PACKAGES = {"tensorboard": "tensorboard.compat.proto.event_pb2", "wandb": "wandb"}


def check_loggers(names: Sequence[str]) -> None:
    """ValueError if the package of one is not installed. For before a run folder changes."""
    for name in names:
        try:
            import_module(PACKAGES[name])
        except ImportError:
            raise _missing_package(name) from None


def _missing_package(name: str) -> ValueError:
    return ValueError(f"run.loggers has {name}, which is not installed: pip install slipstream-rl[{name}]")
