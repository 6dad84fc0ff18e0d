"""In which rollouts a learned drafter is told what is said, and may be asked. Pure.

One that is best for no size of batch, or saves less than it takes to keep it up to date, is asked throughout a rollout
and then left alone until what that lost is no more than ALLOWED of the time since it began: to tell it what is said
takes some 4 % of a step of a small model, and trials take as much again. So one that never pays takes no more than
this, and if it learns, up to twice as much. By rollouts, since what a few sequences are to draft with has to be told
while they are many.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

ALLOWED = 0.01
"""Of the time, what a model may lose that does not pay, as estimated: what it saves for sequences that others outlast
counts as saved, so it may be twice as much."""
LEARNED = 0.8
"""Times as much as before a model is thought to lose that has learned for as long as it was asked: left alone for good,
it would learn in vain."""
GROWN, STEADY_STEPS = 4, 6000
"""A rollout is over when there are so many times the sequences that there were at its end. Where that never happens, it
counts as over after so many steps, or twice as many as the longest had."""
LEAST_STEPS = 500
"""In which it may be asked, before it is left alone: as many rollouts as that takes, if they are short."""
FED_BEFORE = 32
"""Steps in which it is told what is said before it is asked, after it was told nothing."""


class Asking:
    def __init__(self, has_model: bool) -> None:
        """`has_model`: whether there is one before `note_model`."""
        self.is_on = self._has_model = has_model
        self._num_steps, self._began_at, self._fewest, self._longest = 0, 0, sys.maxsize, 0
        """Steps in all; of this rollout the first, and the smallest size of batch; and how many the longest had."""
        self._told_from, self._used_from = -FED_BEFORE, -FED_BEFORE
        """The step since which it is told what is said, and the one in which it first proved the best for any size."""
        self._since_s, self._asked_s, self._lost_s = 0.0, 0.0, 0.0
        """What steps have taken since the last rollout began in which it was asked; and while it is left alone, what
        those took until then, and what of that was lost."""
        self._has_learned = False
        """Since it is left alone."""
        self._gain_s = 0.0
        """What it saved since it is told, less what it took to tell it; of a rollout half as much as of the next."""
        self._forgiven_s = 0.0
        """Of that, what was lost before it first proved the best."""

    def state_dict(self) -> dict[str, float]:
        """Numbers only, for a checkpoint: a drafter that was left alone is left alone by whoever goes on from it."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if state.keys() != vars(self).keys():
            return  # of another version: it is learned anew
        # What was saved before there was a model says nothing of the one there is by now.
        if state["_has_model"] or not self._has_model:
            vars(self).update(state)

    @property
    def may_ask(self) -> bool:
        return self.is_on and self._num_steps - self._told_from >= FED_BEFORE

    def note_step(self, size: int, seconds: float, is_in_use: Callable[[], bool]) -> str | None:
        """One of this size of batch. `is_in_use`: whether the model is best for any. Says why, if from now on it is
        asked, or left alone."""
        self._num_steps += 1
        self._since_s += seconds
        num_steps, self._fewest = self._num_steps - self._began_at, min(self._fewest, size)
        has_grown = size >= GROWN * self._fewest
        if has_grown:
            self._longest = max(self._longest, num_steps)
        if has_grown or num_steps >= max(STEADY_STEPS, 2 * self._longest):
            self._began_at, self._fewest = self._num_steps, size
            return self._begin_rollout(is_in_use())
        return None

    def note_use(self) -> None:
        """It is the best for a size of batch, and was for none. What trials lost until then says nothing of what it
        saves from now on; but once only, or one that is the best by chance now and then would never be found out. And
        should it be left alone after all, then until that is made up for too."""
        if self._used_from <= self._told_from:
            self._used_from, self._forgiven_s = self._num_steps, max(0.0, -self._gain_s)

    def note_gain(self, seconds: float) -> None:
        """What the model saved in a step, less what it took to tell it of that."""
        self._gain_s += seconds

    def _begin_rollout(self, is_in_use: bool) -> str | None:
        pays = is_in_use and self._gain_s + self._forgiven_s > 0
        told_for = self._num_steps - max(self._told_from, self._used_from)
        if not self._has_model or (self.is_on and not pays and told_for < LEAST_STEPS):
            return None
        if self.is_on:
            self._asked_s, self._lost_s, self._has_learned = self._since_s, min(-self._gain_s, self._since_s), False
        was_on, self.is_on = self.is_on, pays or self._is_due()
        if self.is_on:
            kept = 0.5 if was_on else 0.0
            self._since_s, self._gain_s, self._forgiven_s = 0.0, kept * self._gain_s, kept * self._forgiven_s
        if self.is_on and not was_on:
            self._told_from = self._num_steps
            learned = ", with what it has learned since," if self._has_learned else ""
            lost = f"the {self._lost_s:.3g} s that it lost are" if self._lost_s > 0 else "what it lost is"
            return f"{lost}{learned} no more than {ALLOWED:.0%} of the time since"
        if was_on and not self.is_on:
            saved = (
                f"it saved {self._gain_s:.3g} s of {self._asked_s:.3g} s, with what it takes to tell it what is said"
            )
            return saved if is_in_use else f"{saved}, and is best for no number of sequences"
        return None

    def _is_due(self) -> bool:
        """Whether what it lost is little by now, or would be with what it has learned."""
        times_alone = self._since_s / self._asked_s - 1.0
        lost_s = self._lost_s * (LEARNED**times_alone if self._has_learned else 1.0)
        return lost_s <= ALLOWED * self._since_s

    def note_model(self) -> None:
        """There is one, with other weights. If it is the first, the rollout in which it is asked begins here."""
        self._has_learned = True
        if not self._has_model:
            self._has_model = self.is_on = True
            self._told_from = self._began_at = self._num_steps
            self._fewest, self._since_s = sys.maxsize, 0.0
