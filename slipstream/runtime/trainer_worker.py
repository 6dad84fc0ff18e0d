"""A rank of the trainer that does what messages say, one after the other. A plain class: it knows no process and no
pipe. All ranks are told the same; the first speaks for them.

Between two messages its weights are those after a whole number of steps, so that what is published or saved is what the
message names, also while groups of the next step have been fed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

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
    def __init__(self, rank: TrainerRank, weights: WeightSink | None, say: Callable[[FromTrainer], None]) -> None:
        """`weights`: None for a rank that only takes part."""
        self._rank, self._weights, self._say = rank, weights, say
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
                if path is not None:
                    self._say(StateSaved(message.step, path, time.perf_counter() - started))

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
