"""Drafters on disk: in a run's checkpoints, or in a folder of their own; found, saved and exported.

A folder of its own holds the drafter as a checkpoint does (`draft/saved.py`) and `drafter.json`: the checkpoint whose
policy it drafts for, and how it was taught.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from slipstream.draft.eagle import build_draft, kind_of
from slipstream.draft.export import FORMATS, export_drafter, refuse_filled, works_in_sglang
from slipstream.draft.saved import DRAFTER_FILE, DrafterState, load_drafter_state, save_drafter_state
from slipstream.files import check_output_folder, read_json, replacing
from slipstream.models.loading import load_model
from slipstream.models.weights import fingerprint
from slipstream.train.checkpoint import find_damage, latest_checkpoint

ABOUT = "drafter.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SERVED_DRAFTS = 4
"""Of a step, in what we say to type: as many as a drafter is taught to go on its own."""


@dataclass(frozen=True, slots=True)
class SavedDrafter:
    state: DrafterState
    target: Path
    """The checkpoint of the policy that it drafts for."""
    tokens_a_step_before: float | None = None
    """What it gave before `train-drafter` taught it, if that did."""

    @property
    def kind(self) -> str:
        return kind_of(self.state.weights)


def find_drafter(source: Path) -> SavedDrafter:
    """Of a run's latest checkpoint, of a checkpoint, or of a folder of `train-drafter`."""
    if (source / ABOUT).is_file():
        try:
            about = read_json(source / ABOUT, "give another folder of train-drafter")
            target, before = Path(about["target"]), about.get("tokens_a_step_before")
            if before is not None and not isinstance(before, int | float):
                raise TypeError(f"tokens_a_step_before is {before!r:.40}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{source / ABOUT} is damaged ({error!r}): train it again with --out {source}") from error
        return SavedDrafter(load_drafter_state(source), target, before)
    checkpoint = find_checkpoint(source)
    if not (checkpoint / DRAFTER_FILE).is_file():
        raise ValueError(
            f"{checkpoint} has no drafter: train with draft.source=drafter or both, or teach one from what "
            f"the run recorded: slipstream train-drafter {source}"
        )
    return SavedDrafter(load_drafter_state(checkpoint), checkpoint)


def find_checkpoint(source: Path) -> Path:
    """Of a run the latest, or the one given."""
    if (source / "config.yaml").is_file():
        latest = latest_checkpoint(source)
        if latest is None:
            raise ValueError(f"{source} has no checkpoint yet")
        return latest
    if not (source / "manifest.json").is_file():
        raise ValueError(f"{source} is neither a run folder, nor a checkpoint, nor a folder of train-drafter")
    return source


def save_drafter(folder: Path, state: DrafterState, about: dict[str, Any]) -> None:
    """Each file whole: one that is there is replaced at once. The large one last: a folder without it says so."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / ABOUT) as partial:
        partial.write_text(json.dumps(about, indent=1) + "\n")
    save_drafter_state(folder, state)


def export_from(source: Path, folder: Path, *, file_format: str | None, dtype: str, target: Path | None) -> list[str]:
    """What to type to use it. ValueError for what the user can fix, before anything is written."""
    if file_format is not None and file_format not in FORMATS:
        raise ValueError(f"unknown format {file_format!r}: one of {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: one of {', '.join(DTYPES)}")
    check_output_folder(folder, "the new folder")
    refuse_filled(folder)
    drafter = find_drafter(source)
    own_format = next(name for name, kind in FORMATS.items() if kind == drafter.kind)
    if file_format not in (None, own_format):
        raise ValueError(f"the drafter of {source} is of the kind {drafter.kind}: give --format {own_format}")
    target = target or drafter.target
    damage = find_damage(target) if (target / "manifest.json").is_file() else None
    if not target.is_dir() or damage is not None:
        why = damage or "there is no such folder"
        raise ValueError(f"the model that it drafts for, {target}, cannot be read: {why}; give one with --target")
    model = load_model(str(target), dtype=torch.float32, device=torch.device("cpu"))
    check_fit(drafter, model.config, "give the model it was taught by with --target")
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    if head.bias is not None:
        raise ValueError(f"the head of {target} has a bias, which other engines' drafters have no place for")
    export_drafter(
        folder,
        file_format=own_format,
        weights=drafter.state.weights,
        target=model.config,
        head_VD=head.weight,
        dtype=DTYPES[dtype],
    )
    asked = {"method": own_format, "model": str(folder), "num_speculative_tokens": SERVED_DRAFTS}
    taught = f"{drafter.state.num_updates:,} updates" if drafter.state.num_updates else "that has learned nothing yet"
    lines = [
        f"wrote {folder}: a drafter for {target}, {taught}",
        f"use it in vLLM: vllm serve {target} --speculative-config '{json.dumps(asked)}'",
    ]
    if fingerprint(model) != drafter.state.target_digest:
        lines.append(f"it was taught by other weights than those in {target} now: fewer of its drafts will be right")
    if works_in_sglang(own_format, model.config):
        lines.append(
            f"or in SGLang: python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {folder}"
        )
    return lines


def check_fit(drafter: SavedDrafter, target: PretrainedConfig, instead: str) -> None:
    """ValueError if it was made for a model of another shape. `instead`: what to write, then."""
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in build_draft(target, drafter.kind).state_dict().items()}
    given = {name: tensor.shape for name, tensor in drafter.state.weights.items()}
    if wanted != given:
        name = next(name for name in sorted(wanted.keys() | given.keys()) if wanted.get(name) != given.get(name))
        raise ValueError(
            f"this drafter, taught by {drafter.target}, is for a model of another shape: its {name} is "
            f"{tuple(given.get(name, ()))}, and {tuple(wanted.get(name, ()))} is needed; {instead}"
        )
