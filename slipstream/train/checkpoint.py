"""Checkpoints on disk: `checkpoints/step_N/` in the run folder, and the text file `latest` that names the newest.

Owns their layout, their integrity and their removal; not what the run puts into `run_state`. A checkpoint is a Hugging
Face folder (float32 safetensors, config, tokenizer) with `trainer.pt`, `run_state.json` and `manifest.json` beside, and
files that the run gives it.

Invariants: a folder called step_N is complete (it is written under a temporary name, flushed, then renamed); at every
moment of a save at least one earlier checkpoint is whole; older ones go only after the new one is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slipstream.files import TEMPORARY, flush, open_to_readers, read_json, read_text, replacing

MANIFEST, RUN_STATE, TRAINER_STATE, LATEST = "manifest.json", "run_state.json", "trainer.pt", "latest"
REPLACED = ".replaced"
"""Suffix of an older step_N while a newer step_N takes its place: still whole, and found if we are killed there."""
STEP_FOLDER = re.compile(rf"step_(\d+)({re.escape(REPLACED)})?")


class CheckpointNotSaved(OSError):
    """The disk refused a checkpoint. Earlier checkpoints are intact and no partial one is left."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint; the weights are loaded from `path` by models.load_model or from_pretrained, what the
    trainer knows beside them, which is twice as much, by load_trainer_state."""

    path: Path
    step: int
    run_state: dict[str, Any]


def save_checkpoint(
    run_dir: Path,
    step: int,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trainer_state: dict[str, Any],
    run_state: dict[str, Any],
    keep_last: int,
    weights: dict[str, torch.Tensor] | None = None,
    files: Mapping[str, bytes] = {},
) -> Path:
    """Write step_N, point `latest` at it, and remove all but the newest `keep_last` checkpoints up to step N.

    Later steps (from before a resume of an earlier one) are left alone. `run_state` must be JSON. `weights`: instead of
    the model's own, which may be a part of them. `files`: others that go with them, by name.
    """
    folder = run_dir / "checkpoints"
    target = folder / f"step_{step}"
    partial = folder / f"{TEMPORARY}step_{step}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        partial.mkdir()
        model.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)
        _save_tensors(trainer_state, partial / TRAINER_STATE)
        (partial / RUN_STATE).write_text(json.dumps(run_state, indent=1))
        for name, content in files.items():
            (partial / name).write_bytes(content)
        manifest = {"step": step, "files": {name: _fingerprint(partial / name) for name in _files_under(partial)}}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _flush_tree(partial)
        _move_into_place(partial, target)
        _write_atomically(run_dir / LATEST, f"{target.relative_to(run_dir)}\n")
    except (OSError, SafetensorError) as error:
        written = _bytes_under(partial)
        _remove(partial)
        raise CheckpointNotSaved(_explain_failure(target, error, written)) from error
    except BaseException:
        _remove(partial)
        raise
    for old in [path for number, path in _step_folders(folder) if number <= step][keep_last:]:
        _remove(old)
    return target


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The one that `latest` names; if that is gone, the one with the highest step; None if there is none."""
    pointer = run_dir / LATEST
    if pointer.exists():
        instead = "write a checkpoint's folder into it, e.g. checkpoints/step_20, or remove it: the newest is taken"
        name = read_text(pointer, instead).strip()
        if "\0" in name or "\n" in name or len(name) > 1000:
            raise ValueError(f"{pointer} does not name a checkpoint: {instead}")
        if (run_dir / name / MANIFEST).is_file():
            return run_dir / name
    return next((path for _, path in _step_folders(run_dir / "checkpoints")), None)


def latest_step(run_dir: Path) -> int:
    """Step of the checkpoint that `latest` names, whether it is there or not; -1 if it names none."""
    try:
        match = STEP_FOLDER.fullmatch(Path((run_dir / LATEST).read_text().strip()).name)
    except (OSError, ValueError):
        return -1
    return int(match[1]) if match else -1


def checkpoints_after(run_dir: Path, step: int = -1) -> list[Path]:
    """Those of later steps, the newest first."""
    return [path for number, path in _step_folders(run_dir / "checkpoints") if number > step]


def remove_checkpoints_after(run_dir: Path, step: int) -> None:
    for path in checkpoints_after(run_dir, step):
        _remove(path)


def step_of(path: Path) -> int:
    """How many steps led to a checkpoint."""
    return read_manifest(path)[0]


def read_manifest(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """The step of a checkpoint, and the size and hash of each of its files; ValueError if it cannot be read."""
    manifest = read_json(path / MANIFEST, "give the folder of another checkpoint")
    try:
        step, files = manifest["step"], manifest["files"]
        expected = {name: {"bytes": file["bytes"], "blake2b": file["blake2b"]} for name, file in files.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / MANIFEST} is none: {type(error).__name__}: {error}") from None
    if not isinstance(step, int) or step < 0 or any("\0" in name for name in expected):
        raise ValueError(f"{path / MANIFEST} is none: its step is {step!r:.40}")
    return step, expected


def earlier_checkpoints(path: Path) -> list[Path]:
    """Those beside it of earlier steps, the newest first."""
    return [other for number, other in _step_folders(path.parent) if number < step_of(path)]


def point_latest_at(run_dir: Path, checkpoint: Path) -> None:
    """From now on this is where the run goes on, whatever comes after it."""
    _write_atomically(run_dir / LATEST, f"{checkpoint.resolve().relative_to(run_dir.resolve())}\n")


def load_checkpoint(path: Path) -> Checkpoint:
    """Verify every file against the manifest. ValueError names a damaged file and what to do."""
    problem = find_damage(path)
    if problem is not None:
        others = [other for _, other in _step_folders(path.parent) if other != path and find_damage(other) is None]
        advice = (
            "resume from another one: "
            + " or ".join(f"--resume-from {other}" for other in others)
            + ", with --overwrite if it is older: what came after it is then deleted"
            if others
            else f"no other intact checkpoint is in {path.parent}; start anew in another run.dir"
        )
        raise ValueError(f"checkpoint {path} cannot be used: {problem}; {advice}")
    return Checkpoint(
        path=path,
        step=step_of(path),
        run_state=read_json(path / RUN_STATE, "resume from another checkpoint"),
    )


def load_trainer_state(path: Path, *, lazily: bool = False) -> dict[str, Any]:
    """Of a checkpoint that somebody has verified. `lazily`: tensors are read when they are used, so use copies."""
    state: dict[str, Any] = torch.load(path / TRAINER_STATE, map_location="cpu", weights_only=True, mmap=lazily)
    return state


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Reads all of it."""
    if not path.is_dir():
        return "there is no such folder"
    if not (path / MANIFEST).exists():
        return f"{MANIFEST} is missing, so it is no checkpoint or an incomplete one"
    try:
        _, files = read_manifest(path)
    except ValueError as error:
        return f"{MANIFEST} is damaged ({error})"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
        if _fingerprint(file) != expected:
            return f"{name} has other content than was saved (its blake2b differs)"
    return None


def _step_folders(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints, the newest first; of the same step, one in its place before one being replaced."""
    found = []
    for path in folder.glob("step_*"):
        match = STEP_FOLDER.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append((int(match[1]), path))
    return sorted(found, key=lambda item: (-item[0], item[1].name))


def _move_into_place(partial: Path, target: Path) -> None:
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        _remove(replaced)
        target.rename(replaced)
    partial.rename(target)
    flush(target.parent)
    _remove(replaced)


def _save_tensors(state: dict[str, Any], path: Path) -> None:
    try:
        # Our own handle: after a failed write torch keeps its own open, and the removed file would still fill the disk.
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        # torch reports a failed write of its archive as a RuntimeError.
        raise OSError(f"{path.name}: {str(error).splitlines()[0]}") from error


def _files_under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _bytes_under(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in _files_under(folder))


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
    return {"bytes": path.stat().st_size, "blake2b": digest}


def _flush_tree(folder: Path) -> None:
    """To the disk, with all files as readable as new ones are here."""
    for path in folder.rglob("*"):
        if path.is_file():
            open_to_readers(path)
        flush(path)
    flush(folder)


def _write_atomically(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text)


def _remove(folder: Path) -> None:
    """Remove a folder so that, killed half-way, what is left of it cannot be taken for a checkpoint."""
    if not folder.exists():
        return
    if not folder.name.startswith(TEMPORARY):
        folder = folder.rename(folder.with_name(f"{TEMPORARY}removed-{folder.name}"))
    shutil.rmtree(folder)


def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)


def _explain_failure(target: Path, error: Exception, written_bytes: int) -> str:
    existing = target.parent
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    whole = [path for _, path in _step_folders(target.parent)]
    return (
        f"checkpoint {target} could not be saved: {error}. The partial one ({written_bytes / 1e6:.1f} MB) was removed, "
        f"and {free_bytes / 1e6:,.1f} MB are free in {existing}. "
        + (f"The previous checkpoint {whole[0]} is intact. " if whole else "There is no earlier checkpoint. ")
        + "Free some space, lower run.keep_last or move run.dir to a larger disk; then resume the run"
    )
