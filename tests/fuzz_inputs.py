"""Bad inputs, drawn by a keyed seed: values for every setting, damage for every file, words for every option.

Shared by `test_cli_fuzz.py`, which asks in one process for seconds, and `benchmarks/fuzz.py`, which asks in processes
of their own for as long as it is told to and trains with what was accepted.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from pydantic import BaseModel

from slipstream.cli import app
from slipstream.config import Config

GCD = {"source": "gcd", "size": 8, "seed": 1, "params": {"wording": "terse"}}
DEEP: Any = []
for _ in range(90):
    DEEP = [DEEP]
WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400),
    *(0.0, -0.0, 0.5, 1.5, -1.0, 1e-320, 1e-30, 1e9, 1e38, 1e308, math.nan, math.inf, -math.inf),
    *(
        "",
        " ",
        "x",
        "0",
        "1",
        "-1",
        "nan",
        "inf",
        "1e3",
        "off",
        "auto",
        "é\u2028",
        "a\nb",
        "a\0b",
        "\ud800",
        "{prompt}",
    ),
    *("../..", "/", "/dev/null", "~", "x" * 5000, "%s%n{0}", "\x1b[31m", "[bold]", "a: b # c"),
    *([], [1], ["x"], [None], [[]], [math.nan], {}, {"a": 1}, {"": None}, {1: 2}, DEEP),
    *(datetime.date(2020, 1, 1), b"\xff\x00"),
)
"""For a setting of any type, as YAML can hold them."""


def base_tree(run_dir: Path) -> dict[str, Any]:
    """A recipe that trains for one step in seconds, with every section and list that settings can be in."""
    return {
        "model": "tiny",
        "run": {"dir": str(run_dir), "save_every": 1},
        "tasks": {"train": [dict(GCD)], "eval": {"held": {**GCD, "seed": 2, "size": 2}}},
        "reward": {"functions": [{"function": "task"}]},
        "sampling": {"max_new_tokens": 8},
        "engine": {"max_sequences": 8, "max_prompt_tokens": 32},
        "train": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2},
    }


def settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted path and the pydantic field of every setting, sections included; of a list its first item."""
    for name, info in section.model_fields.items():
        yield prefix + name, info
        for part in (info.annotation, *get_args(info.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                inside = {tuple: ".0", dict: ".held"}.get(get_origin(info.annotation), "")
                yield from settings(part, f"{prefix}{name}{inside}.")


def values_for(info: Any) -> list[Any]:
    """The values of WRONG, the field's choices, and what lies at and beside its bounds."""
    values: list[Any] = list(WRONG)
    for part in (info.annotation, *get_args(info.annotation)):
        values += [choice for choice in get_args(part) or [part] if isinstance(choice, str)]
    for bound in info.metadata:
        for name in ("ge", "gt", "le", "lt"):
            edge = getattr(bound, name, None)
            if edge is not None:
                values += [edge, edge - 1, edge + 1, edge * (1 + 1e-12), edge * (1 - 1e-12)]
    return values


def with_value(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    node: Any = tree
    *sections, name = path.split(".")
    for section in sections:
        node = node[int(section)] if isinstance(node, list) else node.setdefault(section, {})
    node[name] = value
    return tree


def draw_setting(chance: random.Random) -> tuple[str, Any]:
    """A setting and a value for it: two in three of a type that it takes, so that many are accepted."""
    path, info = chance.choice(list(settings()))
    values = values_for(info)
    kinds = [part for part in (info.annotation, *get_args(info.annotation)) if part in (int, float, str, bool)]
    if kinds and chance.random() < 2 / 3:
        values = [value for value in values if type(value) in kinds]
    return path, chance.choice(values)


def damage(content: bytes, chance: random.Random) -> bytes:
    """The content with a wound: cut, flipped, stuffed, replaced; or, of JSON, with another value somewhere."""
    kind = chance.randrange(12)
    at = chance.randrange(len(content) + 1)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[at:]
    if kind == 2:
        return content[:at] + bytes(chance.randrange(256) for _ in range(8)) + content[at:]
    if kind == 3:
        wounded = bytearray(content)
        for _ in range(min(len(content), 4)):
            wounded[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        return bytes(wounded)
    if kind == 4:
        return chance.choice([b"", b"\0" * 64, b"\n", b"\xff\xfe", b"\xef\xbb\xbf", bytes(range(256)), b"[" * 5000])
    if kind == 5:
        return content + content
    if kind == 6:
        return b"\xef\xbb\xbf" + content
    if kind == 7:
        return content.replace(b"\n", b"\r\n")
    try:
        lines = [json.loads(line) for line in content.decode().splitlines()]
        tree: Any = lines if len(lines) > 1 else lines[0]
    except (ValueError, IndexError):
        return content[:at] + content[at + 16 :]
    swapped = swap_value(tree, chance)
    if len(lines) > 1 and isinstance(swapped, list):
        return b"".join(_dumped(line) + b"\n" for line in swapped)
    return _dumped(swapped)


def swap_value(tree: Any, chance: random.Random) -> Any:
    """The JSON tree with one value, anywhere in it, taken away or replaced by one of WRONG."""
    places: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        places += [(node, key) for key in keys]
        waiting += [node[key] for key in keys]
    if not places:
        return chance.choice(WRONG)
    node, key = chance.choice(places)
    if chance.random() < 0.2:
        del node[key]
    else:
        node[key] = chance.choice(WRONG)
    return tree


def _dumped(tree: Any) -> bytes:
    return json.dumps(tree, default=str, skipkeys=True).encode("utf-8", "surrogatepass")


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda path: os.symlink("/dev/zero", path),
    "a link to itself": lambda path: os.symlink(path, path),
    "nothing": lambda path: None,
}
"""What may stand where a file should, and how to make it."""


def commands() -> dict[tuple[str, ...], Any]:
    """All commands of the command line, by their words."""
    found: dict[tuple[str, ...], Any] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        inside = getattr(command, "commands", None)
        if inside is None:
            found[words] = command
        for name, one in (inside or {}).items():
            walk(one, (*words, name))

    walk(typer.main.get_command(app), ())
    return found


WORDS = (
    *("", " ", "x", "0", "-1", "1", "2", "1.5", "nan", "inf", "-inf", "1e308", "1e-308", "99999999999999999999"),
    *(",", "1,", "1,,2", "a;b", ";", "h100", "h100:", "h100:0", "h100:2@nan", "h100:2@1,h100:3", "é", "a\nb", "\udcff"),
    *("--help", "--", "tiny", "tiny,tiny", ".", "/", "/dev/null", "/proc/nothing", "x" * 300, "x/" * 60, "[bold]"),
)
"""For an option of any type."""


def draw_words(chance: random.Random, leave_out: set[tuple[str, ...]]) -> list[str]:
    """A command with its arguments and some options, the most of them wrong."""
    every = {words: command for words, command in commands().items() if words not in leave_out}
    words = chance.choice(sorted(every))
    line = list(words)
    for parameter in every[words].params:
        is_option = bool(parameter.opts) and parameter.opts[0].startswith("-")
        if is_option and not parameter.required and chance.random() < 0.6:
            continue
        if is_option:
            line.append(chance.choice([*parameter.opts, *parameter.secondary_opts]))
        if not is_option or not getattr(parameter, "is_flag", False):
            line.append(chance.choice(WORDS))
    return line
