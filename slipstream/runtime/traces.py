"""Recorded runs, to be replayed: a run's folder, or lines of JSON, compressed or not.

A line is a rollout: `{"p": prompt, "ep": epoch, "t": [token ids]}`. Token ids of prompts, if known, are lines
`{"p": prompt, "ids": [token ids]}` in a file of the same name with "prompts" for "rollouts".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.draft.workloads import Recorded
from slipstream.files import parse_json, read_lines
from slipstream.observe.store import RunStore, RunStoreError


def read_trace(path: Path) -> list[Recorded]:
    """ValueError if nothing can be read there, with what to write instead."""
    if path.is_dir():
        return _read_run(path)
    prompts = path.with_name(path.name.replace("rollouts", "prompts"))
    prompt_ids = {}
    if prompts != path and prompts.is_file():
        prompt_ids = {str(line["p"]): tuple(line["ids"]) for line in _lines(prompts, ("p", "ids"))}
    rollouts = [
        Recorded(str(line["p"]), line["ep"], tuple(line["t"]), prompt_ids.get(str(line["p"]), ()))
        for line in _lines(path, ("p", "ep", "t"))
    ]
    return _with_texts(rollouts, path)


def _read_run(folder: Path) -> list[Recorded]:
    try:
        with RunStore(folder, read_only=True) as store:
            rollouts = [Recorded(one.prompt_key, one.step, one.token_ids) for one in store.rollouts(kind="train")]
            return _with_texts(rollouts, folder)
    except RunStoreError as error:
        raise ValueError(str(error)) from error


def _with_texts(rollouts: list[Recorded], path: Path) -> list[Recorded]:
    found = [rollout for rollout in rollouts if rollout.token_ids]
    if not found:
        raise ValueError(f"{path}: no rollout with a token is recorded here")
    return found


def _is_fit(name: str, value: Any) -> bool:
    """Epochs are whole numbers, texts lists of them; a prompt may have any name."""
    if name in ("t", "ids"):
        return isinstance(value, list) and all(isinstance(token, int) and 0 <= token < 2**31 for token in value)
    return name != "ep" or isinstance(value, int)


def _lines(path: Path, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    expected = f"a line of JSON with {', '.join(names)} was expected"
    for number, text in read_lines(path, "give the folder of a run, or a file with a line of JSON a rollout"):
        try:
            line = parse_json(text, f"{path}, line {number}")
        except ValueError as error:
            raise ValueError(f"{error}; {expected}") from None
        if not isinstance(line, dict) or not all(name in line and _is_fit(name, line[name]) for name in names):
            raise ValueError(f"{path}, line {number}: {expected}")
        yield line
