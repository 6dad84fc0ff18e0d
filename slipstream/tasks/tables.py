"""The rows of a data file, parsed when they are asked for.

Owns where a row stands in its file. Invariants: a file is read once, when it is opened, so that changes to it do not
reach a run that goes on; what stays in memory is the file's bytes (of parquet, its columns) and eight bytes a row; a
row that cannot be parsed is a ValueError that names its place, raised when that row is asked for.
"""

from __future__ import annotations

import codecs
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

from slipstream.files import decoded, needs_check, parse_json, read_bytes

T = TypeVar("T")
Row = dict[str, Any]
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
INSTEAD = "give a .jsonl file (a JSON object on each line), a .json file (a list of objects) or a .parquet file"
BLOCK_ROWS = 64
"""Rows of a columnar table that are converted together: few enough that drawing one row stays cheap."""
WINDOW_BYTES = 1 << 20
"""A .json file is decoded and parsed this much at a time."""
_scan = json.JSONDecoder().raw_decode
_NEWLINE, _BLANKS = 10, b" \t\n\r"


class Computed(Sequence[T], Generic[T]):
    """A sequence whose items are computed each time they are asked for."""

    def __init__(self, count: int, item: Callable[[int], T]) -> None:
        self._count, self.item = count, item

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return map(self.item, range(self._count))

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self.item(place) for place in range(self._count)[index]]
        return self.item(range(self._count)[index])


class Joined(Computed[T]):
    """Several sequences, one after another."""

    def __init__(self, parts: Sequence[Sequence[T]]) -> None:
        self._parts = parts
        super().__init__(sum(map(len, parts)), self._find)

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts)

    def _find(self, place: int) -> T:
        for part in self._parts:
            if place < len(part):
                return part[place]
            place -= len(part)
        raise IndexError(place)


def read_file(path: Path, on_rows: Callable[[int], object] | None = None) -> Computed[Row]:
    """The rows of a .jsonl, .json (a list of objects) or .parquet file.

    `on_rows` is called with how many more rows have been found, where finding them takes long."""
    if path.suffix == ".parquet":
        return _parquet(path)
    data = read_bytes(path, INSTEAD)
    return _json_array(data, path, on_rows) if path.suffix == ".json" else _json_lines(data, path)


def in_blocks(count: int, read: Callable[[int, int], list[Row]]) -> Computed[Row]:
    """Rows of a table that is read faster in blocks; `read(first, last)` excludes `last`."""
    held: dict[int, list[Row]] = {}

    def item(place: int) -> Row:
        block, offset = divmod(place, BLOCK_ROWS)
        if block not in held:
            held.clear()
            held[block] = read(block * BLOCK_ROWS, min(count, (block + 1) * BLOCK_ROWS))
        return held[block][offset]

    return Computed(count, item)


def _parquet(path: Path) -> Computed[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None

    def read(first: int, last: int) -> list[Row]:
        try:
            return list(table.slice(first, last - first).to_pylist())
        except ValueError as error:  # a string that is not UTF-8
            raise _unreadable(path, error) from None

    return in_blocks(table.num_rows, read)


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: not a readable parquet file: {' '.join(str(error).split())}")


def _json_lines(data: bytes, path: Path) -> Computed[Row]:
    starts = array("q", _line_starts(data))

    def item(place: int) -> Row:
        start = starts[place]
        end = data.find(b"\n", start)
        line = data[start : end if end >= 0 else len(data)].strip()
        try:
            text = line.decode("utf-8")
            row, length = _scan(text)
        except (ValueError, RecursionError):
            text, length = "", -1
        if length != len(text) or needs_check(text):  # or broken, or something after it: the reader has the words
            number = data.count(b"\n", 0, start) + 1
            row = parse_json(decoded(line, path, number, INSTEAD), f"{path}:{number}")
        return _checked(row, place, path)

    return Computed(len(starts), item)


def _line_starts(data: bytes) -> Iterator[int]:
    """Of the lines that are not blank."""
    start, length = 0, len(data)
    while start < length:
        end = data.find(b"\n", start)
        end = length if end < 0 else end
        if data[start] > 32 or data[start:end].strip():  # most lines are told from blank ones by their first byte
            yield start
        start = end + 1


def _json_array(data: bytes, path: Path, on_rows: Callable[[int], object] | None) -> Computed[Row]:
    starts, ends = array("q"), array("q")
    try:
        for number, (start, end) in enumerate(_elements(data), 1):
            starts.append(start)
            ends.append(end)
            if on_rows is not None and not number % 1000:
                on_rows(1000)
    except (ValueError, RecursionError):  # whatever is wrong, the reader of the whole has the words and the line
        tree = parse_json(decoded(data, path, 1, INSTEAD), str(path))
        if not isinstance(tree, list):
            raise ValueError(
                f"{path}: a .json file must hold a list of objects; one object per line is .jsonl"
            ) from None
        return Computed(len(tree), lambda place: _checked(tree[place], place, path))

    def item(place: int) -> Row:
        text = data[starts[place] : ends[place]].decode("utf-8")
        return _checked(parse_json(text, f"{path}: row {place}"), place, path)

    return Computed(len(starts), item)


def _elements(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each element of a JSON list begins and ends, in bytes; ValueError if it is no list, or broken.

    The text is decoded window by window: as one string it may take four times the bytes of the file.
    """
    at = _after_blanks(data, 0)
    if data[at : at + 1] != b"[":
        raise ValueError("no list")
    at = _after_blanks(data, at + 1)
    if data[at : at + 1] == b"]":
        _expect_end(data, at + 1)
        return
    window, text, place, size = at, "", 0, WINDOW_BYTES
    # `window`: where `text` begins in the data; `place`: the next element in it, which begins at byte `at`.
    text = _window(data, window, size)
    while True:
        try:
            _, end = _scan(text, place)
            is_whole = end < len(text) or window + size >= len(data)  # a number may go on behind the window
        except ValueError:
            if window + size >= len(data):
                raise
            is_whole = False
        if not is_whole:
            size = WINDOW_BYTES if place else 2 * size
            window, text, place = at, _window(data, at, size), 0
            continue
        num_bytes = len(text[place:end].encode())
        yield at, at + num_bytes
        after = _after_blanks(data, at + num_bytes)
        if data[after : after + 1] == b"]":
            _expect_end(data, after + 1)
            return
        if data[after : after + 1] != b",":
            raise ValueError("neither the next element nor the end")
        following = _after_blanks(data, after + 1)
        place, at = end + following - (at + num_bytes), following  # separators are ASCII: as many characters as bytes
        if place >= len(text):
            window, text, place, size = at, _window(data, at, WINDOW_BYTES), 0, WINDOW_BYTES


def _window(data: bytes, start: int, size: int) -> str:
    """Without the last character, if the window cuts it in two."""
    return codecs.getincrementaldecoder("utf-8")().decode(data[start : start + size], start + size >= len(data))


def _after_blanks(data: bytes, at: int) -> int:
    while data[at : at + 1] and data[at] in _BLANKS:
        at += 1
    return at


def _expect_end(data: bytes, at: int) -> None:
    if _after_blanks(data, at) != len(data):
        raise ValueError("something after the list")


def _checked(row: Any, place: int, path: Path) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{path}: row {place} is {type(row).__name__}; every row must be an object with columns")
    return row


def rows_of(table: Any, size: int | None) -> Computed[Row]:
    """The first `size` rows of a table of the hub, or of any iterable of rows."""
    if isinstance(table, Computed):
        return cast("Computed[Row]", table)
    if not (hasattr(table, "__len__") and hasattr(table, "column_names")):  # a list, or a stream of the hub
        kept = list(islice(table, size))
        return Computed(len(kept), kept.__getitem__)

    def read(first: int, last: int) -> list[Row]:
        columns = table[first:last]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    return in_blocks(len(table), read)
