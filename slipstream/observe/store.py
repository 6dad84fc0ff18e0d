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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np

from slipstream.observe.buckets import MOST_POINTS, Buckets, Curve, Part, width_for
from slipstream.observe.ledger import Entry
from slipstream.types import Scored, Unscored

StoredT = TypeVar("StoredT")
SCHEMA_VERSION = 1
FETCHED_ROWS = 1000
"""Of a result that is read bit by bit."""
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
CREATE TABLE IF NOT EXISTS cuts (uid TEXT PRIMARY KEY, log_kept BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS extras (uid TEXT PRIMARY KEY, columns TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, at_s REAL NOT NULL, name TEXT NOT NULL, payload TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_by_name ON events (name, id);
CREATE TABLE IF NOT EXISTS metrics (step INTEGER NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY (step, name))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger (
    step INTEGER NOT NULL, device TEXT NOT NULL, account TEXT NOT NULL, seconds REAL NOT NULL,
    PRIMARY KEY (step, device, account)) WITHOUT ROWID;
"""
_BUCKET = "CASE WHEN step <= 0 THEN 0 ELSE 1 + (step - 1) / :width END"
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


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """What the simulator asks of a stored rollout: nothing of its text or tokens."""

    step: int
    uid: str
    prompt_key: str
    group: str
    reward: float | None
    length: int


def is_run_store(run_dir: Path) -> bool:
    """Whether `run.db` is a store that Slipstream has written, of any version; no process may write to it now."""
    path = run_dir / "run.db"
    flags = "mode=ro" if path.with_name("run.db-wal").exists() else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?{flags}", uri=True, timeout=30.0)) as connection:
            return bool(connection.execute("SELECT 1 FROM meta WHERE key = 'schema_version'").fetchall())
    except sqlite3.Error:
        return False


class RunStore:
    """Open `<run_dir>/run.db`, creating it unless `read_only`. Methods may be called from any thread, one at a time."""

    def __init__(self, run_dir: Path, read_only: bool = False, at_rest: bool = False) -> None:
        """`at_rest`: to read a store that nobody writes to meanwhile, which leaves no file beside it."""
        self.path = Path(run_dir) / "run.db"
        self._lock = threading.RLock()
        self.rows_read = 0
        """Rows that queries have answered with, so far: what a reader has looked at one by one."""
        if read_only and not self.path.is_file():
            raise RunStoreError(f"{self.path}: no such file; give the folder of a run (it holds run.db)")
        with self._faults_named():
            self._connection = self._open_to_read(at_rest) if read_only else self._open_to_write()

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

    def _open_to_read(self, at_rest: bool) -> sqlite3.Connection:
        address = self.path.resolve().as_uri()
        wal = self.path.with_name(self.path.name + "-wal")
        # Reading a WAL file needs its -shm beside it, which cannot be made on a read-only disk (an archived run).
        # Without a -wal there is no writer, and the file may be read as it lies.
        first = () if at_rest and not wal.exists() else ("mode=ro",)
        for flags in (*first, "mode=ro&immutable=1"):
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
        if row and str(row[0]) != str(SCHEMA_VERSION):
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
        cut = [
            (result.rollout.request.uid, np.asarray(result.rollout.log_kept, dtype="<f4").tobytes())
            for result in results
            if result.rollout.log_kept
        ]
        logged = [
            (result.rollout.request.uid, _storable(json.dumps(dict(result.extras), ensure_ascii=False)))
            for result in results
            if result.extras
        ]
        rows = [_rollout_row(step, kind, set_name, prompts[result.rollout.request.group], result) for result in results]
        marks = ", ".join("?" * len(_COLUMNS.split(", ")))
        with self._transaction() as connection:
            connection.executemany(f"INSERT OR REPLACE INTO rollouts ({_COLUMNS}) VALUES ({marks})", rows)
            for table, found in (("drafts", drafted), ("cuts", cut), ("extras", logged)):
                connection.executemany(f"DELETE FROM {table} WHERE uid = ?", [(row[0],) for row in rows])
                connection.executemany(f"INSERT INTO {table} VALUES (?, ?)", found)

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
        if not self._has_table("ledger"):
            return []
        return [Entry(*row) for row in self._read("SELECT * FROM ledger ORDER BY step, device, account")]

    def ledger_by_step(self, buckets: Buckets) -> list[Entry]:
        """Seconds a step, by account, all devices together; one entry a bucket and account."""
        if not self._has_table("ledger"):
            return []
        query = f"SELECT {_BUCKET} AS bucket, account, sum(seconds) FROM ledger GROUP BY bucket, account"
        return [
            Entry(buckets.ends[bucket], "all", account, seconds / buckets.num_steps[bucket])
            for bucket, account, seconds in self._read(query, {"width": buckets.width})
            if bucket in buckets.ends
        ]

    def ledger_by_device(self) -> list[Entry]:
        """Seconds of the whole run, by device and account."""
        if not self._has_table("ledger"):
            return []
        query = "SELECT max(step), device, account, sum(seconds) FROM ledger GROUP BY device, account"
        return [Entry(*row) for row in self._read(query)]

    def num_rollouts_after(self, step: int = -1) -> int:
        """Training and evaluation rollouts of later steps."""
        return int(self._read("SELECT COUNT(*) FROM rollouts WHERE step > ?", (step,))[0][0])

    def last_step(self) -> int:
        """Newest step of a rollout or a metric; -1 if there is none."""
        steps = "SELECT MAX(step) FROM rollouts UNION SELECT MAX(step) FROM metrics"
        return max((step for (step,) in self._read(steps) if step is not None), default=-1)

    def saved_step(self) -> int:
        """Step of the newest checkpoint that was saved; -1 if none was."""
        (newest,) = self._read("SELECT MAX(json_extract(payload, '$.step')) FROM events WHERE name = 'Saved'")[0]
        return -1 if newest is None else int(newest)

    def forget_after(self, trained_step: int, recorded_step: int) -> None:
        """For a resume: forget training rollouts and events of steps after `trained_step`, and evaluations and metrics
        of steps after `recorded_step`. The two differ by one when a run stopped before a trained step was evaluated."""
        with self._transaction() as connection:
            for kind, last in (("train", trained_step), ("eval", recorded_step)):
                later = "FROM rollouts WHERE kind = ? AND step > ?"
                for table in ("drafts", "cuts", "extras"):
                    connection.execute(f"DELETE FROM {table} WHERE uid IN (SELECT uid {later})", (kind, last))
                connection.execute(f"DELETE {later}", (kind, last))
            connection.execute("DELETE FROM events WHERE step > ?", (trained_step,))
            connection.execute("DELETE FROM metrics WHERE step > ?", (recorded_step,))
            connection.execute("DELETE FROM ledger WHERE step > ?", (recorded_step,))

    def sync(self) -> None:
        """Bring all commits to the disk proper, so that a power cut cannot lose them; for checkpoints."""
        with self._lock, self._faults_named():
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def metrics_by_name(self, first_step: int | None = None) -> dict[str, dict[int, float]]:
        """{name: {step: value}}, steps ascending."""
        found: dict[str, dict[int, float]] = {}
        query = "SELECT step, name, value FROM metrics WHERE ?1 IS NULL OR step >= ?1 ORDER BY step, name"
        for step, name, value in self._read(query, (first_step,)):
            found.setdefault(name, {})[step] = math.nan if value is None else value
        return found

    def metric_rows(self, first_step: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, its metrics) from this step on, one after another."""
        query = "SELECT step, name, value FROM metrics WHERE step >= ? ORDER BY step, name"
        for step, rows in groupby(self._each(query, (first_step,)), key=itemgetter(0)):
            yield step, {name: math.nan if value is None else value for _, name, value in rows}

    def newest_step(self) -> int:
        """That has metrics; 0 if none has."""
        return self._read("SELECT max(step) FROM metrics")[0][0] or 0

    def buckets(self, most_points: int = MOST_POINTS) -> Buckets:
        """Groups recorded steps into at most `most_points` points, and one for step 0."""
        width = width_for(self.newest_step(), most_points)
        query = f"SELECT {_BUCKET} AS bucket, max(step), count(DISTINCT step) FROM metrics GROUP BY bucket"
        rows = self._read(query, {"width": width})
        return Buckets(width, {row[0]: row[1] for row in rows}, {row[0]: row[2] for row in rows})

    def curves(self, buckets: Buckets) -> dict[str, Curve]:
        """All metrics. One with few values has them all, whatever the buckets are."""
        # SQLite takes a bare column (value) from the row that has the max().
        query = (
            f"SELECT name, {_BUCKET} AS bucket, max(step), value, avg(value), total(value), count(value), count(*) "
            "FROM metrics GROUP BY name, bucket"
        )
        parts: dict[str, list[Part]] = {}
        for name, bucket, last_step, last, mean, total, num_good, num_all in self._read(
            query, {"width": buckets.width}
        ):
            value, mean = (math.nan if one is None else one for one in (last, mean))
            parts.setdefault(name, []).append(Part(bucket, last_step, value, mean, total, num_all, num_all - num_good))
        few = [name for name, found in parts.items() if sum(part.count for part in found) <= len(buckets.ends)]
        few = few if buckets.width > 1 else []
        each: dict[str, dict[int, float]] = {}
        query = f"SELECT step, name, value FROM metrics WHERE name IN ({', '.join('?' * len(few))}) ORDER BY step"
        for step, name, value in self._read(query, tuple(few)):
            each.setdefault(name, {})[step] = math.nan if value is None else value
        return {name: Curve(found, buckets, each.get(name)) for name, found in parts.items()}

    def metric(self, step: int, name: str) -> float | None:
        rows = self._read("SELECT value FROM metrics WHERE step = ? AND name = ?", (step, name))
        return rows[0][0] if rows else None

    def seconds(self, whole: str, parts: Sequence[str], beside: Sequence[str]) -> float:
        """Summed over the steps: the metric `whole` where a step has it, else `parts`; and `beside` in any case."""
        names = {"whole": (whole,), "parts": parts, "beside": beside}
        sums = ", ".join(
            f"total(value) FILTER (WHERE name IN ({', '.join('?' * len(found))})) AS {label}"
            for label, found in names.items()
        )
        query = (
            "SELECT total(CASE WHEN has_whole THEN whole ELSE parts END + beside) FROM "
            f"(SELECT {sums}, max(name = ?) AS has_whole FROM metrics GROUP BY step)"
        )
        return float(self._read(query, (*(name for found in names.values() for name in found), whole))[0][0])

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
        return [self._decoded(_stored_rollout, row) for row in rows]

    def rollout_facts(self, kind: RolloutKind = "train", first_step: int = 0) -> Iterator[RolloutFacts]:
        """As `rollouts` of these steps, one after another and without texts and tokens."""
        query = (
            "SELECT step, uid, prompt_key, grp, reward, length FROM rollouts WHERE kind = ? AND step >= ? "
            "ORDER BY step, set_name, grp, sample, uid"
        )
        for row in self._each(query, (kind, first_step)):
            yield RolloutFacts(*row)

    def rollout(self, row: int) -> StoredRollout:
        """By the number of its row, as `rows_of_step` has it."""
        return self._decoded(_stored_rollout, self._row(f"SELECT {_COLUMNS} FROM rollouts WHERE rowid = ?", row))

    def reward(self, row: int) -> tuple[float | None, str]:
        """And the uid."""
        reward, uid = self._row("SELECT reward, uid FROM rollouts WHERE rowid = ?", row)
        return reward, uid

    def rows_of_step(self, step: int, kind: RolloutKind = "train") -> list[tuple[int, int]]:
        """(number of its row, length in tokens) of each rollout, ascending by length; answered from an index."""
        query = "SELECT rowid, length FROM rollouts WHERE kind = ? AND step = ? ORDER BY length, rowid"
        return self._read(query, (kind, step))

    def num_rollouts(self, step: int, kind: RolloutKind = "train") -> int:
        return int(self._read("SELECT count(*) FROM rollouts WHERE kind = ? AND step = ?", (kind, step))[0][0])

    def origins_of(self, uid: str) -> tuple[int, ...]:
        """Where each token of a rollout came from (types.ORIGIN_NAMES); empty if it was sampled without a drafter."""
        if not self._has_table("drafts"):
            return ()  # a run from before drafts
        rows = self._read("SELECT origins FROM drafts WHERE uid = ?", (uid,))
        return tuple(rows[0][0]) if rows else ()

    def log_kept_of(self, uid: str) -> tuple[float, ...]:
        """Log of the mass that cuts kept at each token of a rollout; empty if it was sampled without cuts."""
        if not self._has_table("cuts"):
            return ()  # a run from before they were recorded
        rows = self._read("SELECT log_kept FROM cuts WHERE uid = ?", (uid,))
        return tuple(np.frombuffer(rows[0][0], dtype="<f4").tolist()) if rows else ()

    def some_steps(self, most: int, kind: RolloutKind = "train") -> list[int]:
        """At most `most` steps that have rollouts, evenly spread, the first and the last among them. Uses an index."""
        ends = [self._read(f"SELECT {end}(step) FROM rollouts WHERE kind = ?", (kind,))[0][0] for end in ("min", "max")]
        if ends[0] is None:
            return []
        first, last = ends
        parts = max(1, most - 1)
        wanted = {first + ((last - first) * place + parts // 2) // parts for place in range(most)}
        nearest = "SELECT max(step) FROM rollouts WHERE kind = ? AND step <= ?"
        return sorted({self._read(nearest, (kind, step))[0][0] for step in wanted if step <= last})

    def newest_steps(self, most: int, kind: RolloutKind = "train") -> list[int]:
        """The last steps that have rollouts, ascending; each is looked up in an index."""
        found: list[int] = []
        below = math.inf
        while len(found) < most:
            query = "SELECT max(step) FROM rollouts WHERE kind = ? AND step < ?"
            below = self._read(query, (kind, below))[0][0]
            if below is None:
                break
            found.append(below)
        return found[::-1]

    def extras_of(self, uid: str) -> dict[str, Any]:
        """What reward functions logged for a rollout, by column; empty if nothing."""
        if not self._has_table("extras"):
            return {}  # a run from before there were any
        rows = self._read("SELECT columns FROM extras WHERE uid = ?", (uid,))
        return dict(json.loads(rows[0][0])) if rows else {}

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
        query = "SELECT step, at_s, name, payload FROM events "
        if name is None:
            rows = self._read(query + "ORDER BY id")
        else:
            rows = self._read(query + "WHERE name = ? ORDER BY id", (name,))
        return [self._decoded(_stored_event, row) for row in rows]

    def newest_events(self, most: int, names: Sequence[str] | None = None) -> list[StoredEvent]:
        """The newest `most` events, or that many of each name, in the order they were added."""
        query = "SELECT step, at_s, name, payload, id FROM events "
        end = "ORDER BY id DESC LIMIT ?"
        if names is None:
            rows = self._read(query + end, (most,))
        else:
            rows = [row for name in names for row in self._read(query + "WHERE name = ? " + end, (name, most))]
        return [self._decoded(_stored_event, row[:-1]) for row in sorted(rows, key=lambda row: row[-1])]

    def first_event(self) -> StoredEvent | None:
        rows = self._read("SELECT step, at_s, name, payload FROM events ORDER BY id LIMIT 1")
        return self._decoded(_stored_event, rows[0]) if rows else None

    def num_events(self, *names: str) -> int:
        """Of these names; of all without any."""
        if not names:
            return int(self._read("SELECT count(*) FROM events")[0][0])
        marks = ", ".join("?" * len(names))
        return int(self._read(f"SELECT count(*) FROM events WHERE name IN ({marks})", names)[0][0])

    def close(self) -> None:
        with self._lock, self._faults_named():
            self._connection.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _row(self, query: str, number: int) -> tuple[Any, ...]:
        """The row of that number, which an index of the file has named."""
        rows = self._read(query, (number,))
        if not rows:
            raise self._damaged(f"row {number} is in an index and not in its table")
        return rows[0]

    def _decoded(self, decode: Callable[[tuple[Any, ...]], StoredT], row: tuple[Any, ...]) -> StoredT:
        try:
            return decode(row)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(f"a row cannot be decoded ({type(error).__name__}: {error})") from error

    def _damaged(self, what: str) -> RunStoreError:
        return RunStoreError(
            f"{self.path}: {what}: the file is damaged; restore it from a copy, or use another run.dir"
        )

    def _read(self, query: str, values: tuple[Any, ...] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._faults_named():
            rows = self._connection.execute(query, values).fetchall()
            self.rows_read += len(rows)
            return rows

    def _each(self, query: str, values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """As `_read`, a few rows at a time."""
        with self._lock, self._faults_named():
            cursor = self._connection.execute(query, values)
        while True:
            with self._lock, self._faults_named():
                rows = cursor.fetchmany(FETCHED_ROWS)
            if not rows:
                return
            self.rows_read += len(rows)
            yield from rows

    def _has_table(self, name: str) -> bool:
        """False for a run from before there was one."""
        return bool(self._read("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)))

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


def _stored_event(row: tuple[Any, ...]) -> StoredEvent:
    step, at_s, name, payload = row
    return StoredEvent(step, at_s, name, json.loads(payload))


def _stored_rollout(row: tuple[Any, ...]) -> StoredRollout:
    values = dict(zip(_COLUMNS.split(", "), row, strict=True))
    values["group"] = values.pop("grp")
    values["seed"] = int(values["seed"])
    values["token_ids"] = tuple(np.frombuffer(values["token_ids"], dtype="<i4").tolist())
    values["logprobs"] = tuple(np.frombuffer(values["logprobs"], dtype="<f4").tolist())
    values["parts"] = json.loads(values["parts"])
    return StoredRollout(**values)
