"""A rank of the trainer that does what messages say, one after the other. A plain class: it knows no process and no
pipe. All ranks are told the same; the first speaks for them.

Between two messages its weights are those after a whole number of steps, so that what is published or saved is what the
message names, also while groups of the next step have been fed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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
    TookPart,
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
        clock: Callable[[], float] = time.perf_counter,
        drafter_folder: Path | None = None,
    ) -> None:
        """`weights`: None for a rank that only takes part. `drafter_folder`: of the versions of a drafter that
        checkpoints are to hold, if there is one."""
        self._rank, self._weights, self._say, self._clock = rank, weights, say, clock
        self._drafter_folder = drafter_folder
        self._step: int | None = None
        """The one that groups were fed to, if any were."""
        self._done = self._fed = 0
        """Its response tokens: that have given their gradient, and all."""
        self._busy_s = self._told_busy_s = 0.0
        """Spent on it by messages that were obeyed, and what of it was told."""
        self._since_s: float | None = None
        """When it began to obey the one that is about it, if it is at one."""
        self._waits: list[tuple[float, float]] = []
        """From when to when there was nothing to do, in the step under way."""
        self._told_s = -TELL_S
        self._done_s = clock()

    def tell(self) -> None:
        """That it works, unless it said so a moment ago."""
        if self._clock() - self._told_s >= TELL_S:
            self._told_s = self._clock()
            self._say(Working(self._step, self._done, self._fed, self._take_untold()))

    def _take_untold(self) -> float:
        """Seconds of the step under way, since this was last asked."""
        busy_s = self._busy_s + (0.0 if self._since_s is None else self._clock() - self._since_s)
        before_s, self._told_busy_s = self._told_busy_s, busy_s
        return busy_s - before_s

    def obey(self, message: ToTrainer) -> None:
        started = self._clock()
        self._waits.append((self._done_s, started))
        match message:
            case FeedSamples():
                self._since_s = started
                self._feed(message)
                self._busy_s, self._since_s = self._busy_s + self._clock() - started, None
            case FinishStep():
                self._since_s = started
                metrics = self._finish(message)
                untold_s = self._take_untold()
                busy_s, self._busy_s, self._told_busy_s, self._since_s = self._told_busy_s, 0.0, 0.0, None
                since_s = started - message.grading_s
                waited_s = sum(max(0.0, to_s - max(from_s, since_s)) for from_s, to_s in self._waits)
                self._waits.clear()
                self._say(StepFinished(message.step, metrics, busy_s, untold_s, waited_s))
            case PublishWeights():
                if self._weights is None:
                    deque(self._told_of(self._rank.weights()), maxlen=0)  # all ranks go through them
                    self._say(TookPart("weight sync", self._clock() - started))
                else:
                    version = self._weights.publish(self._told_of(self._rank.weights()), message.number)
                    self._say(WeightsPublished(version, self._clock() - started))
            case SaveState():
                path = self._rank.save(message.step, message.run_state, message.files)
                problem = self._save_drafter(path, message.step)
                seconds = self._clock() - started
                if path is None:
                    self._say(TookPart("checkpoint", seconds))
                else:
                    self._say(StateSaved(message.step, path, seconds, problem))
        self._done_s = self._clock()

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
