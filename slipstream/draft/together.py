"""One worker's part in training a drafter together with others: its own texts, weights that are averaged.

A round begins for everybody from the same published version, takes each so many updates on its own texts, and ends with
the average of what came of it, weighted by updates. Moments of the optimizer stay with each; who was not there in the
round before adopts the leader's. Between two updates a member can be told to stop; what it did in this round is then
given up. Knows nothing of processes: where shares lie, and who leads, it is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.draft import versions
from slipstream.draft.online import DrafterTrainer
from slipstream.draft.saved import WEIGHTS, DrafterState, DrafterStateLost, load_drafter_state, save_drafter_state
from slipstream.models.weights import write_weights


def average(parts: Iterable[tuple[Mapping[str, Tensor], int]]) -> dict[str, Tensor]:
    """Of (weights, updates that they took), weighted by updates, in float32; one at a time is in memory. Of weights
    that are the same it is the same to the bit. Empty if nobody made an update; ValueError if they do not fit."""
    mean, total = dict[str, Tensor](), 0
    for weights, num_updates in parts:
        if num_updates <= 0:
            continue
        total += num_updates
        if not mean:
            mean = {name: tensor.to(torch.float32, copy=True) for name, tensor in weights.items()}
            continue
        if {name: one.shape for name, one in weights.items()} != {name: one.shape for name, one in mean.items()}:
            raise ValueError("these are weights of different drafters")
        for name, tensor in weights.items():
            mean[name].lerp_(tensor.float(), num_updates / total)
    return mean


@dataclass(frozen=True, slots=True)
class Share:
    """What a member gave after a round."""

    folder: Path
    num_updates: int


class Member:
    def __init__(self, trainer: DrafterTrainer, folder: Path, *, name: str, target_digest: str) -> None:
        """`folder`: of the versions, the same for all members. If there is none yet, this one's is the first.
        `target_digest`: of the policy, for the record."""
        self.trainer, self.folder, self.name, self.target_digest = trainer, folder, name, target_digest
        self._trained_from: int | None = None
        """The version from which it trained last."""
        self._num_updates = 0
        """Of the version from which it trains."""
        if not versions.numbers(folder):
            versions.publish_first(folder, self._state(trainer.state_dict(), trainer.num_updates), name)

    def newest(self) -> DrafterState:
        """To draft with."""
        return versions.load_newest(self.folder)

    def train(
        self, version: int, num_updates: int, share_folder: Path, stopped: Callable[[], bool]
    ) -> tuple[bool, int]:
        """A round. Whether it was done to its end, and how many updates were made; `stopped` is asked before and
        after each. There is a share if both are so. RuntimeError if the weights are no longer numbers."""
        self._begin_from(version)
        self.trainer.follow()
        if not len(self.trainer.lessons):
            return True, 0
        for number in range(num_updates):
            if stopped():
                return False, number
            self.trainer.start()
            self.trainer.finish()
        if stopped():
            return False, num_updates
        weights = {f"{WEIGHTS}{name}": one.to("cpu", copy=True) for name, one in self.trainer.weights()}
        if not all(bool(one.isfinite().all()) for one in weights.values()):
            self._trained_from = None  # nor are the moments, then
            raise RuntimeError(f"the drafter of {self.name} has weights that are not numbers")
        share_folder.mkdir(parents=True, exist_ok=True)
        save_drafter_state(share_folder, DrafterState(version, num_updates, self.target_digest, weights))
        return True, num_updates

    def lead(self, shares: Sequence[Share], stopped: Callable[[], bool]) -> int | None:
        """Publish the average: its number; None if it was to stop meanwhile. A share that cannot be read is left out.
        DrafterStateLost if none is left."""
        num_updates, was_stopped = 0, False

        def parts() -> Iterable[tuple[Mapping[str, Tensor], int]]:
            nonlocal num_updates, was_stopped
            for share in shares:
                was_stopped = was_stopped or stopped()
                if was_stopped:
                    return
                try:
                    state = load_drafter_state(share.folder)
                except DrafterStateLost as error:
                    warnings.warn(f"a share of a round of the drafter is left out: {error}", stacklevel=2)
                    continue
                num_updates += state.num_updates
                yield state.weights, state.num_updates

        mean = average(parts())
        if was_stopped or stopped():
            return None
        if not mean:
            raise DrafterStateLost("no share of this round is left")
        tensors = {f"{WEIGHTS}{name}": one for name, one in mean.items()}
        moments = {name: one for name, one in self.trainer.state_dict().items() if not name.startswith(WEIGHTS)}
        state = self._state(tensors | moments, self._num_updates + num_updates)
        return versions.publish(self.folder, state, self.name)

    def _begin_from(self, version: int) -> None:
        state = versions.load_version(self.folder, version)
        if self._trained_from in (version - 1, version):
            self.trainer.finish()
            write_weights(self.trainer.model, state.weights.items())
            self.trainer.num_updates = state.num_updates
        else:
            moments = versions.load_optimizer(self.folder, version)
            self.trainer.load_state_dict(state.tensors | moments, state.num_updates)
        self._trained_from, self._num_updates = version, state.num_updates

    def _state(self, tensors: dict[str, Tensor], num_updates: int) -> DrafterState:
        return DrafterState(0, num_updates, self.target_digest, tensors)
