"""Recipes as plain trees: YAML files with `defaults:`, and dotted overrides laid over them. Knows no setting's name.

Owns where a recipe is found: at a path, or by the name of one that comes with Slipstream (`slipstream/recipes/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

SHIPPED = Path(__file__).parent / "recipes"


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
    return path if path.is_file() else shipped_recipes().get(str(name), path)


def read_recipe(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ValueError(f"{path}: `defaults:` goes in a circle")
    try:
        text = path.read_text()
    except FileNotFoundError:
        names = ", ".join(shipped_recipes())
        raise ValueError(f"no recipe at {path}; those that come with Slipstream are taken by name: {names}") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder; give the .yaml file of a recipe") from None
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: a recipe is a mapping of keys to values")
    parents = tree.pop("defaults", [])
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        merged = _merge(merged, read_recipe(find_recipe(parent, path.parent), (*seen, path.resolve())))
    return _merge(merged, tree)


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
            raise ValueError(f"cannot read override {override!r}: write key=value, e.g. train.steps=20")
        try:
            value = yaml.safe_load(text) if text else None
        except yaml.YAMLError as error:
            reason = getattr(error, "problem", None) or "it cannot be parsed"
            raise ValueError(f"override {override!r}: the value is not valid YAML: {reason}") from None
        try:
            tree = _with_value(tree, dotted.split("."), value)
        except ValueError as error:
            raise ValueError(f"override {override!r}: {error}") from None
    return tree


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
