"""A trainer that takes its time, without training. Pure."""

from __future__ import annotations


class SimulatedTrainer:
    """When it will be done with what it was given."""

    def __init__(self, streams: bool, token_s: float, update_s: float = 0.0, micro_batch_tokens: float = 0.0) -> None:
        """`micro_batch_tokens`: what is given piece by piece is computed once so many are there."""
        self.step = 1
        self.is_ending = False
        self.token_s = token_s
        self._streams, self._update_s, self._micro_batch_tokens = streams, update_s, micro_batch_tokens
        self._free_s = 0.0
        self._taken = 0.0
        """Tokens it was given for this step."""
        self._held = 0.0
        """Of these, tokens that wait for a full micro-batch."""
        self._early: dict[int, float] = {}
        """By step to come: tokens of groups that were asked for then."""

    def take_in(self, step: int, num_tokens: float, now_s: float) -> None:
        """A group that was asked for in `step` is done."""
        if not self._streams:
            return
        if step > self.step:
            self._early[step] = self._early.get(step, 0.0) + num_tokens
        else:
            self._feed(num_tokens, now_s)

    def end(self, num_tokens: float, now_s: float) -> float:
        """All of the step's tokens are known: when will it be done?"""
        self.is_ending = True
        # A group may have been asked for in another step than it is trained in.
        missing = max(0.0, num_tokens - self._taken)
        self._train(missing + self._held, now_s)
        self._held = 0.0
        if self._streams and missing:
            self._early[self.step + 1] = self._early.get(self.step + 1, 0.0) - missing
        self._taken = max(0.0, self._taken - num_tokens)
        self._free_s = max(self._free_s, now_s) + self._update_s
        return self._free_s

    def go_on(self, now_s: float) -> None:
        self.step, self.is_ending = self.step + 1, False
        self._feed(max(0.0, self._early.pop(self.step, 0.0)), now_s)

    def _feed(self, num_tokens: float, now_s: float) -> None:
        self._taken += num_tokens
        self._held += num_tokens
        if self._held >= self._micro_batch_tokens:
            rest = self._held % self._micro_batch_tokens if self._micro_batch_tokens else 0.0
            self._train(self._held - rest, now_s)
            self._held = rest

    def _train(self, num_tokens: float, now_s: float) -> None:
        self._free_s = max(self._free_s, now_s) + num_tokens * self.token_s
