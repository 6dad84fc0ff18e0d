"""Rollouts that a drafter is to learn from and of which the policy's training shows nothing: they are read once more,
for hidden states.

That is all of them where nobody trains the policy, and elsewhere those that taught it nothing. Owns the rollouts that
wait for it. They are read with the weights that are there then, some tokens at a time, and become lessons
(`lessons.py`); those that nobody found time for while the policy changed twice are forgotten.

Axes: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from slipstream.draft.online import LESSON_TOKENS, DrafterTrainer
from slipstream.types import Rollout

Text = tuple[tuple[int, ...], int]
"""Its tokens, and how many of them are the response's."""
Hidden = Callable[[Tensor, Sequence[int]], Tensor]
"""From documents packed one after another and their lengths to the policy's last hidden states [T, D]."""


class Reader:
    def __init__(self, trainer: DrafterTrainer, hidden: Hidden, *, tokens_at_once: int = LESSON_TOKENS) -> None:
        """`hidden`: a forward of the policy, whose features the trainer catches."""
        self._trainer, self._hidden, self._tokens_at_once = trainer, hidden, tokens_at_once
        self._new: list[Text] = []
        self._old: list[Text] = []
        """Of the policy before this one."""

    def __len__(self) -> int:
        """Rollouts that wait to be read."""
        return len(self._old) + len(self._new)

    def add(self, rollout: Rollout) -> bool:
        """False if there is nothing to learn from it: the last token is asked nothing of."""
        if len(rollout.token_ids) < 2:
            return False
        ids = (*rollout.request.prompt_ids, *rollout.token_ids)
        self._new.append((ids[:-1], len(rollout.token_ids)))
        return True

    def new_policy(self) -> None:
        """Its weights have changed."""
        self._trainer.begin_step()
        self._old, self._new = self._new, []

    def read(self) -> Iterator[None]:
        """All that waits, some tokens at a time, or one text that has more."""
        while self._old or self._new:
            batch, num_tokens = list[Text](), 0
            for waiting in (self._old, self._new):
                while waiting and (not batch or num_tokens + len(waiting[0][0]) <= self._tokens_at_once):
                    batch.append(waiting.pop(0))
                    num_tokens += len(batch[-1][0])
            self._read(batch)
            yield

    @torch.no_grad()
    def _read(self, batch: list[Text]) -> None:
        ids_T = torch.tensor([token for ids, _ in batch for token in ids], device=self._trainer.device)
        lengths = [len(ids) for ids, _ in batch]
        last_TD = self._hidden(ids_T, lengths)
        self._trainer.collect(ids_T, lengths, [num_response for _, num_response in batch], last_TD)
