"""One worker's part in training a drafter together with others: its own texts, weights that are averaged.

A round begins for everybody from the same published version, takes each so many updates on its own texts, and ends with
the average of what came of it, weighted by updates. Moments of the optimizer stay with each; who was not there in the
round before adopts the leader's. Both are done piece by piece, with files read and written aside, so that whoever does
them can turn to something else at any time; what was done of a round is then given up. Knows nothing of processes:
where shares lie, and who leads, it is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.draft import versions
from slipstream.draft.online import DrafterTrainer
from slipstream.draft.saved import (
    DRAFTER_FILE,
    WEIGHTS,
    DrafterState,
    DrafterStateLost,
    load_drafter_state,
    save_drafter_state,
)
from slipstream.models.weights import write_weights

Answer = TypeVar("Answer")
PIECE_S = 0.01
"""Seconds at most until a member may turn to something else, while a file is read or written."""


@dataclass(slots=True)
class Average:
    """Of weights, by the updates that they took, in float32; of weights that are the same it is the same to the bit."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    """Empty as long as nobody made an update."""
    num_updates: int = 0

    def add(self, weights: Mapping[str, Tensor], num_updates: int) -> None:
        """ValueError if they do not fit."""
        if num_updates <= 0:
            return
        self.num_updates += num_updates
        if not self.weights:
            self.weights = {name: tensor.to(torch.float32, copy=True) for name, tensor in weights.items()}
            return
        given, here = ({name: one.shape for name, one in some.items()} for some in (weights, self.weights))
        if given != here:
            raise ValueError("these are weights of different drafters")
        for name, tensor in weights.items():
            self.weights[name].lerp_(tensor.float(), num_updates / self.num_updates)


@dataclass(frozen=True, slots=True)
class Share:
    """What a member gave after a round."""

    folder: Path
    num_updates: int


class Member:
    def __init__(self, trainer: DrafterTrainer, folder: Path, *, name: str, target_digest: str) -> None:
        """`folder`: of the versions, the same for all members. ValueError if there is none, which it would see.
        `target_digest`: of the policy that its texts are of, for the record; changes with the policy."""
        self.trainer, self.folder, self.name, self.target_digest = trainer, folder, name, target_digest
        self._trained_from: int | None = None
        """The version from which it trained last."""
        self._num_updates = 0
        """Of the version from which it trains."""
        self._num_made = 0
        """In the round that it is in."""
        self._files = ThreadPoolExecutor(1, "drafter-files")
        """One at a time: what was given up in mid-file is over before the next begins."""
        if not versions.numbers(folder):
            raise ValueError(
                f"{name} finds no version of the drafter in {folder}: workers that train it together must see the "
                "run's folder. Write run.dir=... on a file system that they share, or draft.source=history"
            )

    def newest(self) -> DrafterState:
        """To draft with."""
        return versions.load_newest(self.folder)

    def train(self, version: int, num_updates: int, share_folder: Path) -> Generator[None, None, int]:
        """A round, an update at a time; how many were made, of which there is a share if they were any. Closed before
        its end, it leaves none. RuntimeError if the weights are no longer numbers."""
        yield from self._begin_from(version)
        self.trainer.follow()
        num_made = 0
        while num_made < num_updates and len(self.trainer.lessons):  # which a new policy may have put an end to
            self.trainer.start()
            self.trainer.finish()
            num_made = self._num_made = num_made + 1
            yield
        if not num_made:
            return 0
        weights = {f"{WEIGHTS}{name}": one.to("cpu", copy=True) for name, one in self.trainer.weights()}
        if not all(bool(one.isfinite().all()) for one in weights.values()):
            self._trained_from = None  # nor are the moments, then
            raise RuntimeError(f"the drafter of {self.name} has weights that are not numbers")
        share_folder.mkdir(parents=True, exist_ok=True)
        share = DrafterState(version, num_made, self.target_digest, weights)
        forget = partial((share_folder / DRAFTER_FILE).unlink, missing_ok=True)
        yield from self._aside(partial(save_drafter_state, share_folder, share), forget)
        return num_made

    def give_up(self) -> int:
        """The round that it is in is over, one way or the other: updates that were made in it."""
        num_made, self._num_made = self._num_made, 0
        return num_made

    def lead(self, shares: Sequence[Share]) -> Generator[None, None, tuple[int, int]]:
        """Publish the average, of a share at a time: its number, and the updates that it took in all. A share that
        cannot be read is left out. DrafterStateLost if none is left."""
        mean = Average()
        for share in shares:
            try:
                state = yield from self._aside(partial(load_drafter_state, share.folder))
            except DrafterStateLost as error:
                warnings.warn(f"a share of a round of the drafter is left out: {error}", stacklevel=2)
                continue
            mean.add(state.weights, state.num_updates)
            yield
        if not mean.weights:
            raise DrafterStateLost("no share of this round is left")
        tensors = {f"{WEIGHTS}{name}": one for name, one in mean.weights.items()}
        moments = {name: one for name, one in self.trainer.state_dict().items() if not name.startswith(WEIGHTS)}
        num_updates = self._num_updates + mean.num_updates
        state = self._state(tensors | moments, num_updates)
        while True:
            number = versions.next_number(self.folder)
            forget = partial(versions.forget_partial, self.folder, self.name)
            yield from self._aside(partial(versions.prepare, self.folder, number, state, self.name), forget)
            if versions.commit(self.folder, number, self.name):
                return number, num_updates

    def close(self) -> None:
        self._files.shutdown()
        versions.forget_partial(self.folder, self.name)
        self.trainer.close()

    def _aside(
        self, work: Callable[[], Answer], forget: Callable[[], None] = lambda: None
    ) -> Generator[None, None, Answer]:
        """In a thread, which goes on if the round is given up; what comes of it is then forgotten."""
        done = self._files.submit(work)
        try:
            while wait([done], PIECE_S).not_done:
                yield
        except GeneratorExit:
            self._files.submit(forget)
            raise
        return done.result()

    def _begin_from(self, version: int) -> Generator[None, None, None]:
        state = yield from self._aside(partial(versions.load_version, self.folder, version))
        if self._trained_from in (version - 1, version):
            self.trainer.finish()
            write_weights(self.trainer.model, state.weights.items())
            self.trainer.num_updates = state.num_updates
        else:
            moments = yield from self._aside(partial(versions.load_optimizer, self.folder, version))
            self.trainer.load_state_dict(state.tensors | moments, state.num_updates)
        self._trained_from, self._num_updates = version, state.num_updates

    def _state(self, tensors: dict[str, Tensor], num_updates: int) -> DrafterState:
        return DrafterState(0, num_updates, self.target_digest, tensors)
