"""The drafter in a checkpoint: one file beside the others, with its weights and all that its training goes on from.

Written by a thread of its own from a copy on the host, after the checkpoint: that does not wait for it, the next one
and the end of the run do. A file is complete (written under a temporary name, flushed, then renamed) and carries its
hash, so a lost or damaged one is noticed; that costs the drafter and never the run, since no token depends on it.
"""

from __future__ import annotations

import hashlib
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.files import replacing

DRAFTER_FILE = "drafter.safetensors"
WEIGHTS = "model."
"""Before the names of the drafter's weights; other tensors are its optimizer's."""


class DrafterStateLost(ValueError):
    """A checkpoint's drafter is missing, or is not what was saved."""


@dataclass(frozen=True, slots=True)
class DrafterState:
    step: int
    num_updates: int
    target_digest: str
    """`models.weights.fingerprint` of the policy that it was saved with, in the trainer's number format."""
    tensors: dict[str, Tensor]
    """On the host."""

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name.removeprefix(WEIGHTS): one for name, one in self.tensors.items() if name.startswith(WEIGHTS)}


def load_drafter_state(checkpoint_folder: Path) -> DrafterState:
    """Verified against its hash. DrafterStateLost says what is wrong."""
    path = checkpoint_folder / DRAFTER_FILE
    if not path.is_file():
        raise DrafterStateLost(f"{path} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state = DrafterState(int(told["step"]), int(told["num_updates"]), told["target_digest"], tensors)
        if told["digest"] != _digest(state):
            raise DrafterStateLost(f"{path} has other content than was saved (its hash differs)")
        return state
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, DrafterStateLost):
            raise
        raise DrafterStateLost(f"{path} is damaged ({error})") from error


def names_in(checkpoint_folder: Path) -> list[str]:
    """Of the drafter's weights, without reading them. DrafterStateLost if there is none to be read."""
    path = checkpoint_folder / DRAFTER_FILE
    try:
        with safe_open(path, framework="pt") as file:
            names = [name.removeprefix(WEIGHTS) for name in file.keys() if name.startswith(WEIGHTS)]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DrafterStateLost(f"{path} cannot be read ({error})") from error
    if not names:
        raise DrafterStateLost(f"{path} holds no weights")
    return names


def save_drafter_state(checkpoint_folder: Path, state: DrafterState) -> None:
    """At once; atomically."""
    told = {
        "step": str(state.step),
        "num_updates": str(state.num_updates),
        "target_digest": state.target_digest,
        "digest": _digest(state),
    }
    with replacing(checkpoint_folder / DRAFTER_FILE) as partial:
        save_file(state.tensors, partial, told)


class DrafterSaver:
    """Saves in the background, one at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "drafter")
        self._under_way: tuple[Path, Future[None]] | None = None

    def save(self, checkpoint_folder: Path, state: DrafterState) -> None:
        """Begin to; nobody may change the tensors of `state` from here on."""
        self.wait()
        self._under_way = checkpoint_folder, self._thread.submit(save_drafter_state, checkpoint_folder, state)

    def wait(self) -> None:
        """Until the last one is on the disk."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        folder, done = under_way
        try:
            done.result()
        except (OSError, SafetensorError) as error:
            warnings.warn(f"the drafter of {folder} could not be saved: {error}", stacklevel=2)

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()


def _digest(state: DrafterState) -> str:
    digest = hashlib.blake2b(f"{state.step} {state.num_updates} {state.target_digest}".encode(), digest_size=16)
    for name, tensor in sorted(state.tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
