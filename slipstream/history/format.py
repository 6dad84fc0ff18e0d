"""What history.db looks like: its tables, how tokens are packed, its version, and what is said if it cannot be used."""

from __future__ import annotations

import sqlite3
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE_NAME = "history.db"
SCHEMA_VERSION = 1

FACTS = "step, length, reward, first_version, last_version"
Row = tuple[Any, ...]
"""A rollout on its way into the file: its prompt's key, then FACTS, then its packed tokens."""

# A rollout's place is its prompt's id and its serial number among all that were ever added, so that the rollouts of a
# prompt lie side by side: a read is one seek. WITHOUT ROWID would do this with two plain columns, but moves rows beyond
# a quarter of a page to pages of their own: half as fast and twice as large at 2,000 tokens a rollout.
OF_PROMPT = "place BETWEEN id << 36 AND (id << 36) + 0xfffffffff"
# `prompts` sums up the rollouts of each prompt: totals and evictions need not read a million of them.
SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS prompts (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, newest INTEGER NOT NULL DEFAULT 0,
    num_rollouts INTEGER NOT NULL DEFAULT 0, num_bytes INTEGER NOT NULL DEFAULT 0,
    has_spread INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS prompts_by_age ON prompts (newest);
CREATE TABLE IF NOT EXISTS rollouts (
    place INTEGER PRIMARY KEY, step INTEGER NOT NULL, length INTEGER NOT NULL, reward REAL,
    first_version INTEGER NOT NULL, last_version INTEGER NOT NULL, tokens BLOB NOT NULL);
CREATE VIEW IF NOT EXISTS readable AS
    SELECT key, {FACTS}, ROW_NUMBER() OVER (PARTITION BY key ORDER BY place DESC) AS age_rank
    FROM prompts JOIN rollouts ON {OF_PROMPT};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""


WORDS = "I"
"""The array type of tokens: 32 bits."""


class HistoryStoreError(OSError):
    """A file cannot be used; the message names it and says what to do."""


def pack(token_ids: Sequence[int]) -> bytes:
    """As many bytes a token as the largest id needs: all lowest bytes, then all second ones, and so on. A vocabulary of
    49k takes 2.0 bytes a token, where zlib level 1 on 32-bit ids takes 2.2 of prose and four times as long."""
    return narrow(_little_endian(words_of(token_ids)).tobytes())


def narrow(words: bytes) -> bytes:
    """Pack tokens that are 32-bit little-endian words."""
    planes = [words[byte::4] for byte in range(4)]
    while planes and not planes[-1].strip(b"\0"):
        planes.pop()
    return b"".join(planes)


def unpack(packed: bytes, length: int) -> array[int]:
    words = bytearray(4 * length)
    for byte in range(len(packed) // max(length, 1)):
        words[byte::4] = packed[byte * length : (byte + 1) * length]
    return _little_endian(array(WORDS, bytes(words)))


def words_of(token_ids: Sequence[int]) -> array[int]:
    """4 bytes each, where a tuple takes 40, and read by numpy without looking at each."""
    if isinstance(token_ids, array) and token_ids.typecode == WORDS:
        return token_ids
    return array(WORDS, token_ids)


def _little_endian(words: array[int]) -> array[int]:
    """From the machine's own order, or back."""
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words


def check_version(connection: sqlite3.Connection, path: Path) -> int:
    """The file's schema version, 0 if it is empty; a newer one than ours is an error."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise HistoryStoreError(
            f"{path}: written with history schema {version}, this Slipstream reads {SCHEMA_VERSION}; use the version "
            "that made it, or move the file away (a run only loses time without it)"
        )
    return int(version)


@contextmanager
def faults_named(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        if isinstance(error, (sqlite3.ProgrammingError, sqlite3.IntegrityError)):
            raise  # our mistake, not the file's
        raise HistoryStoreError(
            f"{path}: {error}; check its permissions and the space on its disk, which must be a local one. If it is "
            "damaged, go on without it: a run only loses time"
        ) from error
