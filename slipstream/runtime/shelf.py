"""Weights on their way from a trainer to workers on the same machine: a file for each version, written whole.

Readers see a version entirely or not at all (it is renamed into place); the last few stay, for readers that are late.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.models.weights import fingerprint, fingerprint_of, write_weights
from slipstream.types import WeightVersion

KEPT = 3


class Publisher:
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        folder.mkdir(parents=True, exist_ok=True)

    def publish(self, weights: Iterable[tuple[str, Tensor]], number: int) -> WeightVersion:
        tensors = {name: tensor.to(self._dtype).cpu().contiguous() for name, tensor in weights}
        version = WeightVersion(number, fingerprint_of(tensors.items()))
        partial = self._folder / f".tmp-{number}"
        save_file(tensors, partial)
        os.replace(partial, self._folder / f"{number}.safetensors")
        for old in self._folder.glob("*.safetensors"):
            if int(old.stem) <= number - KEPT:
                old.unlink()
        return version


class Receiver:
    def __init__(self, folder: Path, worker: str) -> None:
        self._folder, self._worker = folder, worker

    def catch_up(self, model: PreTrainedModel, number: int) -> WeightVersion:
        write_weights(model, load_file(self._folder / f"{number}.safetensors").items())
        return WeightVersion(number, fingerprint(model))
