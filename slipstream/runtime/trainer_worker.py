"""A rank of the trainer that does what messages say, one after the other. A plain class: it knows no process and no
pipe. All ranks are told the same; the first speaks for them.

Between two messages its weights are those after a whole number of steps, so that what is published or saved is what the
message names, also while groups of the next step have been fed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError
from torch import Tensor

from slipstream.draft import versions
from slipstream.draft.saved import save_drafter_state
from slipstream.models.weights import digest_of
from slipstream.runtime.trainer_messages import (
    FeedSamples,
    FinishStep,
    FromTrainer,
    PublishWeights,
    SaveState,
    StateSaved,
    StepFinished,
    ToTrainer,
    WeightsPublished,
)
from slipstream.train.trainer_rank import TrainerRank
from slipstream.types import WeightVersion


class WeightSink(Protocol):
    """Where weights go."""

    def publish(self, weights: Iterable[tuple[str, Tensor]], number: int) -> WeightVersion: ...


class TrainerWorker:
    def __init__(
        self,
        rank: TrainerRank,
        weights: WeightSink | None,
        say: Callable[[FromTrainer], None],
        drafter_folder: Path | None = None,
    ) -> None:
        """`weights`: None for a rank that only takes part. `drafter_folder`: of the versions of a drafter that
        checkpoints are to hold, if there is one."""
        self._rank, self._weights, self._say, self._drafter_folder = rank, weights, say, drafter_folder
        self._step: int | None = None
        """The one that groups were fed to, if any were."""
        self._busy_s = 0.0

    def obey(self, message: ToTrainer) -> None:
        started = time.perf_counter()
        match message:
            case FeedSamples():
                self._feed(message)
                self._busy_s += time.perf_counter() - started
            case FinishStep():
                metrics = self._finish(message)
                busy_s, self._busy_s = self._busy_s + time.perf_counter() - started, 0.0
                self._say(StepFinished(message.step, metrics, busy_s))
            case PublishWeights():
                if self._weights is None:
                    deque(self._rank.weights(), maxlen=0)  # all ranks go through them
                    return
                version = self._weights.publish(self._rank.weights(), message.number)
                self._say(WeightsPublished(version, time.perf_counter() - started))
            case SaveState():
                path = self._rank.save(message.step, message.run_state)
                problem = self._save_drafter(path, message.step)
                if path is not None:
                    self._say(StateSaved(message.step, path, time.perf_counter() - started, problem))

    def _save_drafter(self, checkpoint: Path | None, step: int) -> str:
        """The newest version, into the checkpoint; what went wrong, which costs the drafter alone."""
        if self._drafter_folder is None:
            return ""
        digest = digest_of(self._rank.weights())  # all ranks go through them
        if checkpoint is None:
            return ""
        try:
            state = versions.load_whole(self._drafter_folder)
            save_drafter_state(checkpoint, replace(state, step=step, target_digest=digest))
        except (OSError, SafetensorError, ValueError) as error:
            return f"the drafter of {checkpoint} could not be saved: {error}"
        return ""

    def _feed(self, message: FeedSamples) -> None:
        if self._step is None:
            self._rank.begin_step()
            self._step = message.step
        assert self._step == message.step, f"step {self._step} is under way, not {message.step}"
        self._rank.feed(message.samples)

    def _finish(self, message: FinishStep) -> dict[str, float]:
        assert self._step in (None, message.step), f"step {self._step} is under way, not {message.step}"
        if self._step is None:
            self._rank.skip_step()
            return {}
        self._step = None
        return self._rank.finish_step()
