"""Reading what another run remembers, without changing it: its history.db, or else the rollouts of its run.db.

Steps are counted back from that run's last one, which becomes 0: they come before all steps of the run that takes over.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from slipstream.history.format import FACTS, FILE_NAME, OF_PROMPT, Row, check_version, faults_named, narrow

RUN_FILE = "run.db"
_CHUNK_ROWS = 4096
_FROM_HISTORY = f"SELECT key, {FACTS}, tokens FROM prompts JOIN rollouts ON {OF_PROMPT} ORDER BY newest, id, place"
_FROM_RUN = f"SELECT prompt_key, {FACTS}, token_ids FROM rollouts WHERE kind = 'train' ORDER BY rowid"


def find_source(run_dir: Path) -> Path:
    """The file to read."""
    names = (FILE_NAME, RUN_FILE)
    for name in names:
        if (run_dir / name).is_file():
            return run_dir / name
    near = [file.parent for name in names for file in (*run_dir.parent.glob(name), *sorted(run_dir.glob(f"*/{name}")))]
    advice = f"write {near[0]}" if near else "write the folder of a run, such as runs/quickstart"
    raise ValueError(f"{run_dir} holds neither {FILE_NAME} nor {RUN_FILE}; {advice}")


def read_source(source: Path) -> Iterator[list[Row]]:
    """Its rollouts in chunks, those of a prompt oldest first."""
    # SQLite makes a -shm file beside what it reads unless `immutable` promises that nobody writes; a writer has a -wal.
    has_log = source.with_name(source.name + "-wal").exists()
    address = f"{source.resolve().as_uri()}?mode=ro{'' if has_log else '&immutable=1'}"
    with faults_named(source), closing(sqlite3.connect(address, uri=True, timeout=30.0)) as connection:
        check_version(connection, source)
        connection.execute("BEGIN")  # a live run's last step and its rollouts, of one moment
        (last_step,) = connection.execute("SELECT MAX(step) FROM rollouts").fetchone()
        is_history = source.name == FILE_NAME
        rows = connection.execute(_FROM_HISTORY if is_history else _FROM_RUN)
        while chunk := rows.fetchmany(_CHUNK_ROWS):
            yield [
                (key, step - last_step, *facts, tokens if is_history else narrow(tokens))
                for key, step, *facts, tokens in chunk
            ]
