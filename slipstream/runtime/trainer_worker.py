"""A rank of the trainer that does what messages say, one after the other. A plain class: it knows no process and no
pipe. All ranks are told the same; the first speaks for them.

Between two messages its weights are those after a whole number of steps, so that what is published or saved is what the
message names, also while groups of the next step have been fed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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
    Working,
)
from slipstream.train.trainer_rank import TrainerRank
from slipstream.types import WeightVersion

TELL_S = 0.2
"""Between two reports that it works."""


class WeightSink(Protocol):
    """Where weights go."""

    def publish(self, weights: Iterable[tuple[str, Tensor]], number: int) -> WeightVersion: ...


class TrainerWorker:
    def __init__(
        self,
        rank: TrainerRank,
        weights: WeightSink | None,
        say: Callable[[FromTrainer], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`weights`: None for a rank that only takes part."""
        self._rank, self._weights, self._say, self._clock = rank, weights, say, clock
        self._step: int | None = None
        """The one that groups were fed to, if any were."""
        self._done = self._fed = 0
        """Its response tokens: that have given their gradient, and all."""
        self._busy_s = 0.0
        self._told_s = -TELL_S

    def tell(self) -> None:
        """That it works, unless it said so a moment ago."""
        if self._clock() - self._told_s >= TELL_S:
            self._told_s = self._clock()
            self._say(Working(self._step, self._done, self._fed))

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
                    deque(self._told_of(self._rank.weights()), maxlen=0)  # all ranks go through them
                    return
                version = self._weights.publish(self._told_of(self._rank.weights()), message.number)
                self._say(WeightsPublished(version, time.perf_counter() - started))
            case SaveState():
                path = self._rank.save(message.step, message.run_state, message.files)
                if path is not None:
                    self._say(StateSaved(message.step, path, time.perf_counter() - started))

    def _feed(self, message: FeedSamples) -> None:
        if self._step is None:
            self._rank.begin_step()
            self._step = message.step
        assert self._step == message.step, f"step {self._step} is under way, not {message.step}"
        self._fed += sum(len(sample.response_ids) for sample in message.samples)
        self._rank.feed(message.samples, self._see_progress)
        self.tell()

    def _finish(self, message: FinishStep) -> dict[str, float]:
        assert self._step in (None, message.step), f"step {self._step} is under way, not {message.step}"
        if self._step is None:
            self._rank.skip_step()
            return {}
        metrics = self._rank.finish_step(self._see_progress)
        self._step, self._done, self._fed = None, 0, 0
        return metrics

    def _see_progress(self, num_done: int, num_fed: int) -> None:
        self._done = num_done
        self.tell()

    def _told_of(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for one in weights:
            yield one
            self.tell()
