"""Recipes as plain trees: YAML files with `defaults:`, and dotted overrides laid over them. Knows no setting's name.

Owns where a recipe is found: at a path, or by the name of one that comes with Slipstream (`slipstream/recipes/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from slipstream.files import MAX_DEPTH, exists, parse_yaml, read_text, shown

SHIPPED = Path(__file__).parent / "recipes"
MAX_BYTES = 1_000_000
"""Of a recipe; a data set given by mistake would take minutes to parse as YAML."""
MAX_PARENTS = 30
"""Recipes above one another."""


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with Slipstream, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}


def first_comment(path: Path) -> str:
    """What the first line of a recipe says of it; an empty string if that line is no comment."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def find_recipe(name: Path | str, folder: Path = Path()) -> Path:
    """The file of a recipe: `name` as a path from `folder`, else the recipe of that name that comes with Slipstream.

    A file of the user's wins over a shipped recipe of the same name. Where neither is found, the path from `folder`.
    """
    path = folder / name
    return path if exists(path) and path.is_file() else shipped_recipes().get(str(name), path)


def read_recipe(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if not exists(path):
        names = ", ".join(shipped_recipes())
        raise ValueError(f"no recipe at {shown(path)}; those that come with Slipstream are taken by name: {names}")
    here = path.resolve()
    if here in seen:
        raise ValueError(f"{path}: `defaults:` goes in a circle")
    if len(seen) > MAX_PARENTS:
        raise ValueError(f"{path}: more than {MAX_PARENTS} recipes above one another by `defaults:`")
    tree = parse_yaml(read_text(path, "give the .yaml file of a recipe", max_bytes=MAX_BYTES), str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: a recipe is a mapping of keys to values")
    merged: dict[str, Any] = {}
    for parent in _parents(tree.pop("defaults", []), path):
        merged = _merge(merged, read_recipe(find_recipe(parent, path.parent), (*seen, here)))
    return _merge(merged, tree)


def _parents(value: Any, path: Path) -> list[str]:
    parents = value if isinstance(value, list) else [value]
    if not all(isinstance(parent, str) and parent for parent in parents):
        raise ValueError(
            f"{path}: `defaults:` is {value!r:.60}; write the file of the recipe that this one changes, e.g. "
            "`defaults: base.yaml`, or a list of such files"
        )
    return parents


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    return {**base, **{key: _laid_over(base.get(key), value) for key, value in top.items()}}


def _laid_over(old: Any, new: Any) -> Any:
    """Mappings key by key; an empty one, which would add nothing, takes the place of what was there, like all else."""
    return _merge(old, new) if isinstance(old, dict) and isinstance(new, dict) and new else new


def collect_overrides(arguments: Sequence[str]) -> list[str]:
    """Accept `a.b=v`, `--a.b=v` and `--a.b v` from a command line, and give them back as `a.b=v`."""
    overrides, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        name = word.removeprefix("--")
        if "=" in name:
            overrides.append(name)
        elif word.startswith("--") and rest:
            overrides.append(f"{name}={rest.pop(0)}")
        else:
            raise ValueError(f"cannot read {word!r}: write key=value or --key value, e.g. train.steps=20")
    return overrides


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        dotted, separator, text = override.partition("=")
        if not separator or not dotted:
            raise ValueError(f"cannot read override {override!r:.200}: write key=value, e.g. train.steps=20")
        if dotted.count(".") > MAX_DEPTH:
            raise ValueError(f"override {override!r:.80}: no setting has a name of more than {MAX_DEPTH} parts")
        try:
            tree = _with_value(tree, dotted.split("."), _value_of(text))
        except ValueError as error:
            raise ValueError(f"override {override!r}: {error}") from None
    return tree


def _value_of(text: str) -> Any:
    """The value that an override gives. YAML's comments are for files: here a # is text like any other."""
    value = parse_yaml(text, "the value")
    if "#" not in text:
        return value
    tokens = [token for token in yaml.scan(text) if token.start_mark.index < token.end_mark.index]
    rest = text[tokens[-1].end_mark.index :] if tokens else text
    if not rest.strip():
        return value
    if any(not isinstance(token, yaml.ScalarToken) or not token.plain for token in tokens):
        raise ValueError(f"{rest.strip()[:20]!r} would be a comment of YAML: leave it out, or write the text in quotes")
    return text


def _with_value(node: Any, keys: Sequence[str], value: Any, path: str = "") -> Any:
    """A copy of `node` with `value` at `keys`, merged into a mapping that is there; a number is an item of a list."""
    if not keys:
        return _laid_over(node, value)
    key, rest = keys[0], keys[1:]
    here = f"{path}.{key}".lstrip(".")
    if isinstance(node, list):
        if not key.isdecimal() or int(key) >= len(node):
            raise ValueError(f"{path} is a list of {len(node)} item(s), numbered from 0: {key!r} is none of them")
        index = int(key)
        return [*node[:index], _with_value(node[index], rest, value, here), *node[index + 1 :]]
    base = node if isinstance(node, dict) else {}
    return {**base, key: _with_value(base.get(key), rest, value, here)}
