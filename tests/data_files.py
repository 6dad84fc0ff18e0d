"""Data files as users have them, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Writes rows in the format that the file's name ends in: .parquet, .json, else a JSON value a line."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
