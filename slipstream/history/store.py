"""Past rollouts by prompt, in one SQLite file, `<run>/history.db`: what drafts and length forecasts come from.

Invariants:
- one `add` is one transaction: once it returns a kill -9 loses nothing of it, and a reader sees all of it or nothing;
- a prompt keeps its newest `keep_per_prompt` rollouts, in the order in which they were added;
- beyond `disk_bytes` whole prompts are forgotten, as `eviction.py` says;
- the memory cache never shows what the file no longer says, whoever wrote to it.

A run can do without this file: losing it costs time, not results. To look inside: `SELECT * FROM readable`.
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from slipstream.history.cache import ByteBoundedCache
from slipstream.history.eviction import Candidate, choose_evictions
from slipstream.history.format import (
    FACTS,
    OF_PROMPT,
    SCHEMA,
    SCHEMA_VERSION,
    Row,
    check_version,
    faults_named,
    pack,
    unpack,
    words_of,
)
from slipstream.history.takeover import find_source, read_source

FILL_AFTER_EVICTION = 0.95
"""Of `disk_bytes`: an eviction makes more room than is needed at once, so that not every add has to evict."""

_NEWEST = "SELECT IFNULL(MAX(newest), 0) FROM prompts"
_PROMPT_ID = "INSERT INTO prompts (key) VALUES (?) ON CONFLICT (key) DO UPDATE SET key = key RETURNING id"
_INSERT = "INSERT INTO rollouts VALUES ((? << 36) + ?, ?, ?, ?, ?, ?, ?)"
_KEEP_NEWEST = f"""
DELETE FROM rollouts WHERE place IN (
    SELECT place FROM prompts JOIN rollouts ON {OF_PROMPT} WHERE id = ? ORDER BY place DESC LIMIT -1 OFFSET ?)
"""
_SUM_UP = f"""
UPDATE prompts SET (newest, num_rollouts, num_bytes, has_spread) = (
    SELECT IFNULL(MAX(place) & 0xfffffffff, 0), COUNT(*), TOTAL(LENGTH(tokens)), IFNULL(MAX(reward) > MIN(reward), 0)
    FROM rollouts WHERE {OF_PROMPT})
WHERE id = ?
"""
_BYTES_IN_USE = """
SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size
"""


@dataclass(frozen=True, slots=True)
class PastRollout:
    """What is remembered of one rollout."""

    prompt_key: str
    token_ids: Sequence[int]
    """An array, whatever was given."""
    reward: float | None
    """None if the grader failed."""
    step: int
    """Of this run; 0 or less if it was taken over from another."""
    first_version: int
    last_version: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", words_of(self.token_ids))


class HistoryStore:
    """Open the file at `path`, creating it. Methods may be called from any thread, one at a time."""

    def __init__(
        self,
        path: Path,
        *,
        keep_per_prompt: int = 16,
        disk_bytes: int | None = 8 << 30,
        memory_bytes: int = 256 << 20,
    ) -> None:
        assert keep_per_prompt > 0, keep_per_prompt
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._keep_per_prompt = keep_per_prompt
        self._disk_bytes = disk_bytes
        self._cache: ByteBoundedCache[tuple[PastRollout, ...]] = ByteBoundedCache(memory_bytes)
        self._version_seen = 0
        self._lock = threading.RLock()
        with faults_named(self.path):
            self._connection = sqlite3.connect(self.path, timeout=30.0, isolation_level=None, check_same_thread=False)
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self) -> None:
        # WAL: readers and the writer do not block each other. NORMAL: committed pages are in the kernel when `add`
        # returns, so a kill -9 loses nothing; only a power cut may lose the last adds, never the file. FULL would pay
        # an fsync for each add to save a few drafts. Pages of 8 KiB hold 16 rollouts of 200 tokens.
        # The log is cut back to 64 MiB after a takeover.
        settings = {"page_size": 8192, "journal_mode": "WAL", "synchronous": "NORMAL", "journal_size_limit": 64 << 20}
        for name, value in settings.items():
            self._connection.execute(f"PRAGMA {name} = {value}")
        if check_version(self._connection, self.path) < SCHEMA_VERSION:
            self._connection.executescript(SCHEMA)

    def add(self, rollouts: Sequence[PastRollout]) -> None:
        """Remember `rollouts`, oldest first."""
        rows = []
        for past in rollouts:
            assert past.reward is None or math.isfinite(past.reward), f"{past.prompt_key}: a reward of {past.reward}"
            facts = (past.step, len(past.token_ids), past.reward, past.first_version, past.last_version)
            rows.append((past.prompt_key, *facts, pack(past.token_ids)))
        with self._transaction():
            self._insert(rows)

    def warm_from(self, run_dir: str | Path) -> None:
        """For a new run: add what another one remembers, in place of what was taken over before. One transaction, so
        that it can be done again after a kill; the other run is left as it is."""
        source = find_source(Path(run_dir))
        if source.resolve() == self.path.resolve():
            raise ValueError(f"{source} is this run's own history; write the folder of another run")
        with self._transaction():
            self._forget("step <= 0")
            for rows in read_source(source):
                self._insert(rows)

    def forget_after(self, step: int) -> None:
        """For a resume: forget the rollouts of later steps, which are going to be sampled again."""
        with self._transaction():
            self._forget(f"step > {step:d}")

    def of_prompt(self, key: str, limit: int | None = None) -> tuple[PastRollout, ...]:
        """Newest first; empty if the prompt was never seen, or is forgotten."""
        with self._lock:
            found = self._cached(key)
            if found is None:
                found = tuple(
                    PastRollout(key, unpack(tokens, length), reward, step, first, last)
                    for step, length, reward, first, last, tokens in self._read(f"{FACTS}, tokens", key)
                )
                self._cache.put(key, found, _memory_bytes(found))
            return found[:limit]

    def lengths(self, key: str) -> tuple[int, ...]:
        """Response lengths in tokens, newest first."""
        with self._lock:
            found = self._cached(key)
            if found is None:
                return tuple(length for (length,) in self._read("length", key))
            return tuple(len(past.token_ids) for past in found)

    @property
    def num_rollouts(self) -> int:
        return self._number("SELECT IFNULL(SUM(num_rollouts), 0) FROM prompts")

    @property
    def num_prompts(self) -> int:
        return self._number("SELECT COUNT(*) FROM prompts")

    @property
    def num_bytes(self) -> int:
        """Bytes in use in the file, which may be larger: what evictions free is used again before the file grows."""
        return self._number(_BYTES_IN_USE)

    def close(self) -> None:
        with self._lock, faults_named(self.path):
            self._connection.close()

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _insert(self, rows: Sequence[Row]) -> None:
        new: dict[str, list[Row]] = {}
        for serial, (key, *rest) in enumerate(rows, self._number(_NEWEST) + 1):
            new.setdefault(key, []).append((serial, *rest))
        for key, entries in new.items():
            kept = entries[-self._keep_per_prompt :]
            (prompt_id,) = self._connection.execute(_PROMPT_ID, (key,)).fetchone()
            # The old go before the new come, which then find room on the same pages: a file of 0.8 times the size.
            self._connection.execute(_KEEP_NEWEST, (prompt_id, self._keep_per_prompt - len(kept)))
            self._connection.executemany(_INSERT, [(prompt_id, *entry) for entry in kept])
            self._connection.execute(_SUM_UP, (prompt_id,))
            self._cache.drop(key)
        self._make_room()

    def _forget(self, which: str) -> None:
        prompt_ids = self._connection.execute(f"SELECT DISTINCT place >> 36 FROM rollouts WHERE {which}").fetchall()
        self._connection.execute(f"DELETE FROM rollouts WHERE {which}")
        self._connection.executemany(_SUM_UP, prompt_ids)
        self._connection.execute("DELETE FROM prompts WHERE num_rollouts = 0")
        self._cache.clear()

    def _make_room(self) -> None:
        while self._disk_bytes is not None and (num_bytes := self.num_bytes) > self._disk_bytes:
            rows = self._connection.execute(f"SELECT id, ({_NEWEST}) - newest, num_bytes, has_spread FROM prompts")
            candidates = [Candidate(*row) for row in rows]
            # Pages are what the disk holds, tokens are what is known of a prompt: both shrink by the same share.
            share = 1 - FILL_AFTER_EVICTION * self._disk_bytes / num_bytes
            bytes_to_free = math.ceil(share * sum(prompt.num_bytes for prompt in candidates))
            evicted = choose_evictions(candidates, bytes_to_free)
            for prompt_id in evicted:
                self._connection.execute(_KEEP_NEWEST, (prompt_id, 0))
                self._connection.execute("DELETE FROM prompts WHERE id = ?", (prompt_id,))
            self._cache.clear()
            if not evicted:
                return  # not even an empty file is that small

    def _cached(self, key: str) -> tuple[PastRollout, ...] | None:
        version = self._number("PRAGMA data_version")  # which any commit of another connection changes
        if version != self._version_seen:
            self._cache.clear()
            self._version_seen = version
        return self._cache.get(key)

    def _read(self, columns: str, key: str) -> list[Row]:
        query = f"SELECT {columns} FROM prompts JOIN rollouts ON {OF_PROMPT} WHERE key = ? ORDER BY place DESC"
        with faults_named(self.path):
            return self._connection.execute(query, (key,)).fetchall()

    def _number(self, query: str) -> int:
        with self._lock, faults_named(self.path):
            return int(self._connection.execute(query).fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, faults_named(self.path), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield


def _memory_bytes(found: tuple[PastRollout, ...]) -> int:
    # A token takes 4 bytes; a record with its array, and an entry of the cache, have some 350 beside theirs.
    return 350 + sum(350 + 4 * len(past.token_ids) for past in found)
