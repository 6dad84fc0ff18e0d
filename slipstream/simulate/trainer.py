"""A trainer that takes its time, without training. Pure."""

from __future__ import annotations


class SimulatedTrainer:
    """When it will be done with what it was given."""

    def __init__(self, streams: bool, token_s: float) -> None:
        self.step = 1
        self.is_ending = False
        self._streams, self.token_s = streams, token_s
        self._free_s = 0.0
        self._early: dict[int, float] = {}
        """Tokens of groups that belong to steps to come."""

    def take_in(self, step: int, num_tokens: float, now_s: float) -> None:
        if not self._streams:
            return
        if step > self.step:
            self._early[step] = self._early.get(step, 0.0) + num_tokens
        else:
            self._free_s = max(self._free_s, now_s) + num_tokens * self.token_s

    def end(self, num_tokens: float, now_s: float) -> float:
        self.is_ending = True
        if not self._streams:
            self._free_s = max(self._free_s, now_s) + num_tokens * self.token_s
        return max(self._free_s, now_s)

    def go_on(self, now_s: float) -> None:
        self.step, self.is_ending = self.step + 1, False
        self._free_s = max(self._free_s, now_s) + self._early.pop(self.step, 0.0) * self.token_s
