"""The drafter's training in the course of a step, beside the policy's in one process.

Some of it runs in the tail of the rollout (`tail.py`), the rest after the policy's training, whose forward passes show
it their hidden states. Of rollouts that taught the policy nothing, as where all of a group failed, there are none: some
are read for it, since it is to draft those too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from slipstream.config import Config
from slipstream.draft.online import LESSON_TOKENS, DrafterTrainer
from slipstream.draft.reading import Reader
from slipstream.engine.engine import Engine
from slipstream.rng import keyed_random
from slipstream.runtime.drafting import Publisher
from slipstream.runtime.tail import TailTrainer
from slipstream.schedule.events import Item
from slipstream.train.policy import MicroBatch
from slipstream.train.trainer import Trainer
from slipstream.types import Rollout


class Learning:
    def __init__(
        self, drafter: DrafterTrainer, trainer: Trainer, engine: Engine, config: Config, record: Callable[[Item], None]
    ) -> None:
        """`trainer`: the policy's."""
        self._drafter, self._updates, self._seed = drafter, config.drafter.updates, config.seed
        self._reader = Reader(drafter, trainer.policy.hidden, tokens_at_once=config.train.micro_batch_tokens)
        self._publisher = Publisher(drafter, engine)
        self.tail = TailTrainer(drafter, self._publisher.publish, updates=self._updates, record=record)
        self._num_in_tail = 0
        self._shown: set[str] = set()
        """Rollouts of the step that the policy's training has computed."""
        trainer.on_hidden = self._show

    def ensure_published(self) -> None:
        """The engine has weights, and is to have a drafter from the first step on."""
        self._publisher.ensure()

    def make_way(self, *, for_sampling: bool) -> None:
        """Something else is about to be done; beside sampling, the update under way may still run."""
        if for_sampling:
            self.tail.recall()
        else:
            self.tail.stop()

    def end_rollout(self) -> dict[str, float]:
        self._num_in_tail, metrics = self.tail.take()
        return metrics | self._publisher.metrics()

    def begin_training(self) -> None:
        """The policy's, which shows its hidden states."""
        self._drafter.begin_step()
        self._shown.clear()

    def end_training(self, step: int, rollouts: Iterable[Rollout]) -> dict[str, float]:
        """`rollouts`: all of the step."""
        num_read = self._read([one for one in rollouts if one.request.uid not in self._shown], step)
        self._drafter.train(max(0, self._updates - self._num_in_tail))
        self._publisher.publish()
        self.tail.add_lessons(self._drafter.lessons.num_new)
        return self._drafter.take_metrics() | {"drafter/texts_read": float(num_read)}

    def _read(self, unseen: list[Rollout], step: int) -> int:
        """Some by chance, with as many tokens as all updates together look at: how many."""
        keyed_random("unseen", self._seed, step).shuffle(unseen)
        num_read, room = 0, self._updates * LESSON_TOKENS
        for rollout in unseen:
            if room > 0 and self._reader.add(rollout):
                room -= len(rollout.request.prompt_ids) + len(rollout.token_ids)
                num_read += 1
        for _ in self._reader.read():
            pass
        return num_read

    def _show(self, batch: MicroBatch, hidden_TD: Tensor) -> None:
        self._shown.update(batch.names)
        self._drafter.collect(batch.token_ids_T, batch.lengths, batch.response_lengths, hidden_TD)
