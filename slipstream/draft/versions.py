"""Versions of a drafter in a folder: numbered, complete or not there, and verified when they are read.

A version is a folder of its own, `000007`, with the weights; in `optimizer` in it lies what training them goes on from,
for whoever joins in (who only drafts does not read it). It is written under another name and renamed, so of two that
are published at once both are kept, under two numbers. The newest two stay: the last but one for whoever is at it.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from slipstream.draft.saved import WEIGHTS, DrafterState, DrafterStateLost, load_drafter_state
from slipstream.draft.saved import save_drafter_state as save
from slipstream.files import TEMPORARY

KEPT = 2
OPTIMIZER_FOLDER = "optimizer"


def numbers(folder: Path) -> list[int]:
    """Of the versions that are there, the newest last."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def publish_first(folder: Path, state: DrafterState, writer: str) -> None:
    """As version 0, unless there is one already."""
    if not numbers(folder):
        prepare(folder, 0, state, writer)
        commit(folder, 0, writer)


def next_number(folder: Path) -> int:
    return max(numbers(folder), default=-1) + 1


def prepare(folder: Path, number: int, state: DrafterState, writer: str) -> None:
    """All of the work of publishing, for a large drafter seconds: afterwards it is there, under a name of the writer's,
    and nobody sees it. `state.step` is not looked at. `writer`: whoever writes at the same time has another name."""
    forget_partial(folder, writer)
    partial = _partial(folder, writer)
    try:
        (partial / OPTIMIZER_FOLDER).mkdir(parents=True)
        save(partial, replace(state, step=number, tensors=_part(state.tensors, is_weight=True)))
        save(partial / OPTIMIZER_FOLDER, replace(state, step=number, tensors=_part(state.tensors, is_weight=False)))
    except BaseException:
        forget_partial(folder, writer)
        raise


def commit(folder: Path, number: int, writer: str) -> bool:
    """What was prepared is the version of this number; False if there is such a version already."""
    try:
        os.rename(_partial(folder, writer), folder / _name(number))
    except OSError:
        if not (folder / _name(number)).is_dir():
            raise
        return False
    finally:
        forget_partial(folder, writer)
    for old in numbers(folder)[:-KEPT]:
        shutil.rmtree(folder / _name(old), ignore_errors=True)
    return True


def load_version(folder: Path, number: int) -> DrafterState:
    """Its weights alone; `step` is its number. DrafterStateLost says what is wrong."""
    state = load_drafter_state(folder / _name(number))
    if state.step != number:
        raise DrafterStateLost(f"{folder / _name(number)} holds version {state.step}")
    return state


def load_newest(folder: Path) -> DrafterState:
    """Or, with a warning, the one before it if that is damaged."""
    problem = f"{folder} holds no drafter"
    for number in reversed(numbers(folder)):
        try:
            return load_version(folder, number)
        except DrafterStateLost as error:
            problem = str(error)
            warnings.warn(f"a version of the drafter is passed over: {error}", stacklevel=2)
    raise DrafterStateLost(problem)


def load_optimizer(folder: Path, number: int) -> dict[str, Tensor]:
    """What belongs to these weights; empty where nobody has trained them."""
    return load_drafter_state(folder / _name(number) / OPTIMIZER_FOLDER).tensors


def load_whole(folder: Path) -> DrafterState:
    """The newest, with what training it goes on from: for a checkpoint."""

    def whole() -> DrafterState:
        state = load_newest(folder)
        return replace(state, tensors=state.tensors | load_optimizer(folder, state.step))

    try:
        return whole()
    except DrafterStateLost:  # newer ones may have taken its place between the two
        return whole()


def forget_partial(folder: Path, writer: str) -> None:
    """What somebody who died in the middle of it left behind."""
    shutil.rmtree(_partial(folder, writer), ignore_errors=True)


def _partial(folder: Path, writer: str) -> Path:
    return folder / f"{TEMPORARY}{writer}"


def _name(number: int) -> str:
    return f"{number:06d}"


def _part(tensors: Mapping[str, Tensor], *, is_weight: bool) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS) == is_weight}
