"""The run's memory: rollouts, events and metrics in one SQLite file, `<run>/run.db`.

Invariants:
- one call is one transaction: after a kill -9 a step's rollouts are all there or none is;
- a uid has one row: adding it again (a replayed step) replaces it, so nothing is counted twice;
- after `forget_after(n)` no row of a later step is left, so a resumed run writes those steps afresh;
- a reader (`read_only=True`) sees the last committed state while a run is writing, and never makes it wait;
- what goes wrong with the file is a RunStoreError that names the file and says what to do.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from slipstream.observe.ledger import Entry
from slipstream.types import Scored, Unscored

SCHEMA_VERSION = 1
RolloutKind = Literal["train", "eval"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rollouts (
    uid TEXT PRIMARY KEY, step INTEGER NOT NULL, kind TEXT NOT NULL CHECK (kind IN ('train', 'eval')),
    set_name TEXT NOT NULL, prompt_key TEXT NOT NULL, prompt_text TEXT NOT NULL, grp TEXT NOT NULL,
    sample INTEGER NOT NULL, seed TEXT NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL, text TEXT NOT NULL,
    reward REAL, parts TEXT NOT NULL, fault TEXT, finish_reason TEXT NOT NULL, length INTEGER NOT NULL,
    first_version INTEGER NOT NULL, last_version INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS rollouts_by_step ON rollouts (kind, step, length);
CREATE INDEX IF NOT EXISTS rollouts_by_prompt ON rollouts (prompt_key, step);
CREATE TABLE IF NOT EXISTS drafts (uid TEXT PRIMARY KEY, origins BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, at_s REAL NOT NULL, name TEXT NOT NULL, payload TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS metrics (step INTEGER NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY (step, name))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger (
    step INTEGER NOT NULL, device TEXT NOT NULL, account TEXT NOT NULL, seconds REAL NOT NULL,
    PRIMARY KEY (step, device, account)) WITHOUT ROWID;
"""
_COLUMNS = (
    "uid, step, kind, set_name, prompt_key, prompt_text, grp, sample, seed, token_ids, logprobs, text, reward, parts, "
    "fault, finish_reason, length, first_version, last_version"
)
_ADVICE = {
    "SQLITE_FULL": "the disk is full: free some space, then start the run again (it resumes from its last checkpoint)",
    "SQLITE_READONLY": "the file or its folder cannot be written: check its permissions, or choose another run.dir",
    "SQLITE_CANTOPEN": "the file cannot be opened: check that the folder exists and that you may read and write it",
    "SQLITE_IOERR": "reading or writing failed: check disk space, quota and the file system (SQLite needs a local one)",
    "SQLITE_BUSY": "another process holds it: a run folder takes one writing run at a time",
    "SQLITE_NOTADB": "it is not a Slipstream store: move it away, or choose another run.dir",
    "SQLITE_CORRUPT": "the file is damaged: move it away; checkpoints do not depend on it",
}


class RunStoreError(OSError):
    """The store's file cannot be used; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """One row of `rollouts`. `reward` is None exactly when `fault` says why there is none."""

    uid: str
    step: int
    kind: RolloutKind
    set_name: str
    prompt_key: str
    prompt_text: str
    group: str
    sample: int
    seed: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    reward: float | None
    parts: Mapping[str, float]
    fault: str | None
    finish_reason: str
    length: int
    first_version: int
    last_version: int


@dataclass(frozen=True, slots=True)
class StoredEvent:
    step: int
    at_s: float
    name: str
    payload: Mapping[str, Any]


class RunStore:
    """Open `<run_dir>/run.db`, creating it unless `read_only`. Methods may be called from any thread, one at a time."""

    def __init__(self, run_dir: Path, read_only: bool = False) -> None:
        self.path = Path(run_dir) / "run.db"
        self._lock = threading.RLock()
        if read_only and not self.path.is_file():
            raise RunStoreError(f"{self.path}: no such file; give the folder of a run (it holds run.db)")
        with self._faults_named():
            self._connection = self._open_to_read() if read_only else self._open_to_write()

    def _open_to_write(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunStoreError(f"{self.path}: cannot make the run folder ({error}); choose another run.dir") from error
        connection = sqlite3.connect(self.path, timeout=30.0, check_same_thread=False)
        try:
            # WAL: readers and the writer do not block each other, and a half-written transaction is ignored when the
            # file is opened again. NORMAL: committed pages are in the kernel when a call returns, so a kill -9 loses
            # nothing; only a power cut may lose the last transactions (never older ones, never consistency), and
            # `sync` closes that gap where it matters, at a checkpoint. FULL would pay an fsync for every step.
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            self._check_version(connection)
            connection.executescript(_SCHEMA)
            with connection:
                connection.execute("INSERT OR IGNORE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
        except BaseException:
            connection.close()
            raise
        return connection

    def _open_to_read(self) -> sqlite3.Connection:
        address = self.path.resolve().as_uri()
        wal = self.path.with_name(self.path.name + "-wal")
        # Reading a WAL file needs its -shm beside it, which cannot be made on a read-only disk (an archived run).
        # Without a -wal there is no writer, and the file may be read as it lies.
        for flags in ("mode=ro", "mode=ro&immutable=1"):
            connection = sqlite3.connect(f"{address}?{flags}", uri=True, timeout=30.0, check_same_thread=False)
            try:
                self._check_version(connection)
                return connection
            except sqlite3.OperationalError:
                connection.close()
                if wal.exists() or "immutable" in flags:
                    raise
            except BaseException:
                connection.close()
                raise
        raise AssertionError("one of the two ways returns or raises")

    def _check_version(self, connection: sqlite3.Connection) -> None:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            return
        row = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        if row and int(row[0]) != SCHEMA_VERSION:
            raise RunStoreError(
                f"{self.path}: written with store schema {row[0]}, this Slipstream reads {SCHEMA_VERSION}; "
                "use the version that made the run, or another run.dir"
            )

    def add_rollouts(
        self,
        step: int,
        kind: RolloutKind,
        set_name: str,
        prompts: Mapping[str, tuple[str, str]],
        results: Sequence[Scored | Unscored],
    ) -> None:
        """Write all results in one transaction; `prompts` gives each group's (prompt key, prompt text)."""
        drafted = [
            (result.rollout.request.uid, bytes(result.rollout.origins)) for result in results if result.rollout.origins
        ]
        rows = [_rollout_row(step, kind, set_name, prompts[result.rollout.request.group], result) for result in results]
        marks = ", ".join("?" * len(_COLUMNS.split(", ")))
        with self._transaction() as connection:
            connection.executemany(f"INSERT OR REPLACE INTO rollouts ({_COLUMNS}) VALUES ({marks})", rows)
            connection.executemany("DELETE FROM drafts WHERE uid = ?", [(row[0],) for row in rows])
            connection.executemany("INSERT INTO drafts VALUES (?, ?)", drafted)

    def add_event(self, step: int, at_s: float, name: str, payload: Mapping[str, Any]) -> None:
        row = (step, at_s, name, json.dumps(payload))
        with self._transaction() as connection:
            connection.execute("INSERT INTO events (step, at_s, name, payload) VALUES (?, ?, ?, ?)", row)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Values of one step; a name given again replaces the old value. NaN is kept (SQLite holds it as NULL)."""
        rows = [(step, name, float(value)) for name, value in metrics.items()]
        with self._transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", rows)

    def add_ledger(self, entries: Sequence[Entry]) -> None:
        """Of whole steps; what was known of them is replaced."""
        with self._transaction() as connection:
            connection.executemany("DELETE FROM ledger WHERE step = ?", {(entry.step,) for entry in entries})
            connection.executemany("INSERT INTO ledger VALUES (?, ?, ?, ?)", [astuple(entry) for entry in entries])

    def ledger(self) -> list[Entry]:
        """By step and device; empty for a run from before there was one."""
        if not self._read("SELECT 1 FROM sqlite_master WHERE name = 'ledger'"):
            return []
        return [Entry(*row) for row in self._read("SELECT * FROM ledger ORDER BY step, device, account")]

    def forget_after(self, trained_step: int, recorded_step: int) -> None:
        """For a resume: forget training rollouts and events of steps after `trained_step`, and evaluations and metrics
        of steps after `recorded_step`. The two differ by one when a run stopped before a trained step was evaluated."""
        with self._transaction() as connection:
            for kind, last in (("train", trained_step), ("eval", recorded_step)):
                later = "FROM rollouts WHERE kind = ? AND step > ?"
                connection.execute(f"DELETE FROM drafts WHERE uid IN (SELECT uid {later})", (kind, last))
                connection.execute(f"DELETE {later}", (kind, last))
            connection.execute("DELETE FROM events WHERE step > ?", (trained_step,))
            connection.execute("DELETE FROM metrics WHERE step > ?", (recorded_step,))
            connection.execute("DELETE FROM ledger WHERE step > ?", (recorded_step,))

    def sync(self) -> None:
        """Bring all commits to the disk proper, so that a power cut cannot lose them; for checkpoints."""
        with self._lock, self._faults_named():
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def metrics_by_name(self) -> dict[str, dict[int, float]]:
        """{name: {step: value}}, steps ascending."""
        found: dict[str, dict[int, float]] = {}
        for step, name, value in self._read("SELECT step, name, value FROM metrics ORDER BY step, name"):
            found.setdefault(name, {})[step] = math.nan if value is None else value
        return found

    def rollouts(
        self,
        step: int | None = None,
        kind: RolloutKind | None = None,
        limit: int | None = None,
    ) -> list[StoredRollout]:
        """Rows in order of step, set, group and sample."""
        rows = self._read(
            f"SELECT {_COLUMNS} FROM rollouts WHERE (?1 IS NULL OR step = ?1) AND (?2 IS NULL OR kind = ?2) "
            "ORDER BY step, set_name, grp, sample, uid LIMIT ?3",
            (step, kind, -1 if limit is None else limit),
        )
        return [_stored_rollout(row) for row in rows]

    def origins_of(self, uid: str) -> tuple[int, ...]:
        """Where each token of a rollout came from (types.ORIGIN_NAMES); empty if it was sampled without a drafter."""
        if not self._read("SELECT 1 FROM sqlite_master WHERE name = 'drafts'"):
            return ()  # a run from before drafts
        rows = self._read("SELECT origins FROM drafts WHERE uid = ?", (uid,))
        return tuple(rows[0][0]) if rows else ()

    def lengths_by_step(self, kind: RolloutKind = "train") -> dict[int, list[int]]:
        """{step: response lengths in tokens, ascending}; answered from an index, no text is read."""
        found: dict[int, list[int]] = {}
        for step, length in self._read(
            "SELECT step, length FROM rollouts WHERE kind = ? ORDER BY step, length", (kind,)
        ):
            found.setdefault(step, []).append(length)
        return found

    def events(self, name: str | None = None) -> list[StoredEvent]:
        """In the order they were added."""
        rows = self._read(
            "SELECT step, at_s, name, payload FROM events WHERE ?1 IS NULL OR name = ?1 ORDER BY id", (name,)
        )
        return [StoredEvent(step, at_s, event, json.loads(payload)) for step, at_s, event, payload in rows]

    def close(self) -> None:
        with self._lock, self._faults_named():
            self._connection.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _read(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._faults_named():
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._faults_named(), self._connection:
            yield self._connection

    @contextmanager
    def _faults_named(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.OperationalError, sqlite3.DatabaseError) as error:
            if isinstance(error, (sqlite3.ProgrammingError, sqlite3.IntegrityError)):
                raise  # our mistake, not the file's
            code = getattr(error, "sqlite_errorname", None) or ""
            advice = next((text for prefix, text in _ADVICE.items() if code.startswith(prefix)), "see the cause above")
            raise RunStoreError(f"{self.path}: {error} ({code or 'no code'}); {advice}") from error


def _rollout_row(
    step: int, kind: RolloutKind, set_name: str, prompt: tuple[str, str], result: Scored | Unscored
) -> tuple[Any, ...]:
    rollout, request = result.rollout, result.rollout.request
    reward, parts, fault = None, {}, None
    if isinstance(result, Scored):
        assert math.isfinite(result.reward), f"{request.uid}: a reward of {result.reward} must be an Unscored"
        reward, parts = float(result.reward), dict(result.parts)
    else:
        fault = _storable(f"{result.kind}: {result.detail}")
    return (
        *(
            request.uid,
            step,
            kind,
            set_name,
            prompt[0],
            _storable(prompt[1]),
            request.group,
            int(request.uid.rpartition("/")[2]),
        ),
        str(request.seed),  # text: SQLite's integers are signed, a seed uses all 64 bits
        np.asarray(rollout.token_ids, dtype="<i4").tobytes(),
        np.asarray(rollout.logprobs, dtype="<f4").tobytes(),
        *(_storable(result.text), reward, json.dumps(parts), fault, rollout.finish_reason, len(rollout.token_ids)),
        *(rollout.first_version, rollout.last_version),
    )


def _storable(text: str) -> str:
    # A grader's message may hold a lone surrogate (a file name that is not UTF-8), which SQLite refuses.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _stored_rollout(row: tuple[Any, ...]) -> StoredRollout:
    values = dict(zip(_COLUMNS.split(", "), row, strict=True))
    values["group"] = values.pop("grp")
    values["seed"] = int(values["seed"])
    values["token_ids"] = tuple(np.frombuffer(values["token_ids"], dtype="<i4").tolist())
    values["logprobs"] = tuple(np.frombuffer(values["logprobs"], dtype="<f4").tolist())
    values["parts"] = json.loads(values["parts"])
    return StoredRollout(**values)
