"""Files that are there whole or not at all, whatever happens to the process or to the power."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp-"
"""How the names of what is being written begin, and of what may be removed."""
_UMASK = os.umask(0o022)
os.umask(_UMASK)  # it can only be asked for by setting it


@contextmanager
def replacing(path: Path, *, flush_name: bool = True) -> Iterator[Path]:
    """A name beside it for a file that takes its place, once it is written and on the disk. `flush_name`: before going
    on; who writes many files into a folder may flush that once."""
    partial = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        yield partial
        open_to_readers(partial)
        flush(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if flush_name:
        flush(path.parent)


def open_to_readers(path: Path) -> None:
    """With the mode that a new file has here: a library that writes tensors may give them to their owner alone, and
    whoever serves a model is often another user."""
    mode = path.stat().st_mode
    if mode | (0o666 & ~_UMASK) != mode:
        path.chmod(mode | (0o666 & ~_UMASK))


def flush(path: Path) -> None:
    """To the disk: what a file holds, or which names a folder has."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
