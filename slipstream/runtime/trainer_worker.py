"""A trainer that does what messages say, one after the other. A plain class: it knows no process and no pipe.

Between two messages its weights are those after a whole number of steps, so that what is published or saved is what the
message names, also while groups of the next step have been fed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from slipstream.models.weights import named_weights
from slipstream.runtime.trainer_messages import (
    FeedSamples,
    FinishStep,
    FromTrainer,
    Progress,
    PublishWeights,
    SaveState,
    StateSaved,
    StepFinished,
    ToTrainer,
    WeightsPublished,
)
from slipstream.train.checkpoint import save_checkpoint
from slipstream.train.trainer import Trainer
from slipstream.types import WeightVersion

TELL_S = 0.2
"""Between two reports of progress."""


class WeightSink(Protocol):
    """Where weights go."""

    def publish(self, weights: Iterable[tuple[str, Tensor]], number: int) -> WeightVersion: ...


class TrainerWorker:
    def __init__(
        self,
        trainer: Trainer,
        tokenizer: PreTrainedTokenizerBase,
        run_dir: Path,
        keep_last: int,
        weights: WeightSink,
        say: Callable[[FromTrainer], None],
    ) -> None:
        self._trainer, self._tokenizer = trainer, tokenizer
        self._run_dir, self._keep_last = run_dir, keep_last
        self._weights, self._say = weights, say
        self._step: int | None = None
        """The one that groups were fed to, if any were."""
        self._busy_s = 0.0
        self._told_s = 0.0

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
                version = self._weights.publish(named_weights(self._trainer.model), message.number)
                self._say(WeightsPublished(version, time.perf_counter() - started))
            case SaveState():
                path = save_checkpoint(
                    self._run_dir,
                    message.step,
                    model=self._trainer.model,
                    tokenizer=self._tokenizer,
                    trainer_state=self._trainer.state_dict(),
                    run_state=message.run_state,
                    keep_last=self._keep_last,
                )
                self._say(StateSaved(message.step, path, time.perf_counter() - started))

    def _feed(self, message: FeedSamples) -> None:
        if self._step is None:
            self._trainer.begin_step()
            self._step = message.step
        assert self._step == message.step, f"step {self._step} is under way, not {message.step}"
        self._trainer.feed(message.samples, self._on_progress)

    def _finish(self, message: FinishStep) -> dict[str, float]:
        assert self._step in (None, message.step), f"step {self._step} is under way, not {message.step}"
        if self._step is None:
            self._trainer.skip_step()
            return {}
        self._step = None
        return self._trainer.finish_step(self._on_progress)

    def _on_progress(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_S:
            self._told_s = now_s
            self._say(Progress(done, total))
