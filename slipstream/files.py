"""Files: writes that happen whole or not at all, and the one reader of text, JSON and YAML that users give.

Contract of the readers: what the user can fix is a ValueError of one sentence, with the file, the place in it, and
`instead`, what to give. What they return holds no lone surrogates, which no UTF-8 text can hold, and is at most
MAX_DEPTH levels deep, so that code that walks it, copies it or sends it to another process needs no guard of its own.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, cast

import yaml

MAX_DEPTH = 100
"""Levels of nesting in a JSON or YAML file; Python's stack holds about 1,000 calls."""
MAX_VALUES = 1_000_000
"""Values in a YAML file, each alias (*name) counted with all that it stands for."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
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


def read_text(path: Path, instead: str, *, max_bytes: int | None = None) -> str:
    """A UTF-8 file's text, without a byte order mark."""
    with _reading(path, instead) as file:
        if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
            size = os.fstat(file.fileno()).st_size
            raise ValueError(f"{shown(path)} has {size:,} bytes, and at most {max_bytes:,} are read here: {instead}")
        content = file.read()
    return decoded(content.removeprefix(codecs.BOM_UTF8), path, 1, instead)


def read_bytes(path: Path, instead: str) -> bytes:
    """A UTF-8 file's bytes, without a byte order mark; `decoded` makes text of parts of them."""
    with _reading(path, instead) as file:
        return file.read().removeprefix(codecs.BOM_UTF8)


def read_lines(path: Path, instead: str) -> Iterator[tuple[int, str]]:
    """The numbers, from 1 on, and texts of a UTF-8 file's lines; unpacked if the name ends in .gz.

    Lines end at \\n alone: JSON strings may hold U+2028 and its kin unescaped."""
    with _reading(path, instead) as raw:
        file = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
        try:
            for number, line in enumerate(file, 1):
                content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                yield number, decoded(content, path, number, instead)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{shown(path)} cannot be unpacked ({error}): {instead}") from None


def read_json(path: Path, instead: str) -> Any:
    """The value in a JSON file."""
    try:
        return parse_json(read_text(path, instead), shown(path))
    except ValueError as error:
        raise error if instead in str(error) else ValueError(f"{error}: {instead}") from None


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text; ValueError begins with `where`."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:  # also a number of more digits than Python reads
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if needs_check(text):
        check_tree(value, where)
    return value


def needs_check(text: str) -> bool:
    """Only escapes can hold a surrogate, and only brackets nest: a glance at the text spares most rows the walk."""
    return ("\\u" in text and _SURROGATE_ESCAPE.search(text) is not None) or text.count("[") + text.count(
        "{"
    ) > MAX_DEPTH


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; ValueError begins with `where`."""
    try:
        value = yaml.safe_load(text)
    except RecursionError:
        raise ValueError(f"{where}: nested more than {MAX_DEPTH} levels deep") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ValueError(f"{where}: not valid YAML: {error.problem or error.context}{place}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:  # ValueError: a date or a number that cannot be
        raise ValueError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    check_tree(value, where)
    return value


def check_tree(value: Any, where: str) -> None:
    """ValueError for lone surrogates and for what is nested too deep, refers to itself, or grows with its aliases."""
    waiting, num_values = [(value, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        num_values += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"{where}: nested more than {MAX_DEPTH} levels deep")
        if num_values > MAX_VALUES:
            raise ValueError(f"{where}: more than {MAX_VALUES:,} values")
        if isinstance(node, str):
            if LONE_SURROGATE.search(node):
                raise ValueError(
                    f"{where}: {node!a:.80} holds half of a surrogate pair (\\ud800 to \\udfff), which is no "
                    "character: write the whole pair, or the character itself"
                )
        elif isinstance(node, dict):
            waiting += [(item, depth + 1) for pair in node.items() for item in pair]
        elif isinstance(node, list | tuple | set):
            waiting += [(item, depth + 1) for item in node]


def exists(path: Path) -> bool:
    """Whether there is something of that name; not, if no file can have that name."""
    try:
        return path.exists()
    except OSError:
        return False


def shown(path: Path) -> str:
    """A path as a sentence can hold it: of a long one the ends, and of what cannot be printed its escapes."""
    text = str(path)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 250 else f"{text[:120]}...{text[-120:]}"


@contextmanager
def _reading(path: Path, instead: str) -> Iterator[BinaryIO]:
    """Opens a regular file. A pipe is refused before it is opened, which would wait for a writer for ever."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "a device")
            raise ValueError(f"{shown(path)} is {kind}, not a file: {instead}")
        file = path.open("rb")
    except FileNotFoundError:
        raise ValueError(f"{shown(path)} is not there: {instead}") from None
    except OSError as error:
        raise ValueError(f"{shown(path)} cannot be read ({error.strerror}): {instead}") from None
    with file:
        yield file


def decoded(content: bytes, path: Path, line: int, instead: str) -> str:
    """The text of UTF-8 bytes that begin on this line of the file."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        at, byte = line + content.count(b"\n", 0, error.start), content[error.start]
        raise ValueError(
            f"{shown(path)}, line {at}: byte 0x{byte:02x} is not UTF-8: save the file as UTF-8 text, or {instead}"
        ) from None


def check_output_file(path: Path | None, option: str) -> None:
    """ValueError if no file can be written there. For before the work; leaves nothing. None: no file is asked for."""
    if path is None:
        return
    name = f"{option} {shown(path)}"
    try:
        if path.is_dir():
            raise ValueError(f"{name} is a folder: write the name of a file in it")
        if path.exists():
            path.open("ab").close()
        elif path.parent.is_dir():
            path.touch()
            path.unlink()
        else:
            raise ValueError(f"{name}: there is no folder {shown(path.parent)} to write it to: make it first")
    except OSError as error:
        raise ValueError(f"{name} cannot be written ({error.strerror}): choose another file") from None


def check_output_folder(path: Path, option: str) -> None:
    """ValueError if that folder cannot be made, or no file be written into it. For before the work; leaves nothing."""
    name = f"{option} {shown(path)}"
    try:
        there = path.absolute()
        while not there.exists() and not there.is_symlink():
            there = there.parent
        if not there.is_dir():
            raise ValueError(f"{name} cannot be made ({shown(there)} is not a folder): choose another folder")
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"{name} cannot be written ({error.strerror}): choose another folder") from None
