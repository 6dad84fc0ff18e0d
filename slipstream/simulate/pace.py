"""Rollouts that go faster at some places than at others, as drafts are right more often once there is text. Pure.

All sequences of a batch advance together by one unit of work at a time; how many tokens a unit is depends on where a
rollout is. So lengths are turned into work and back, and a worker knows of work alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Pace:
    stretches: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    """(tokens that a rollout has, times as many tokens a unit from there on)."""

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.stretches]
        if not starts or starts[0] != 0 or any(one >= other for one, other in pairwise(starts)):
            raise ValueError(f"a pace has stretches from 0 on, in order: {self.stretches}")
        if any(times <= 0 for _, times in self.stretches):
            raise ValueError(f"a rollout cannot stand still: {self.stretches}")

    def work(self, num_tokens: float) -> float:
        """Units until a rollout has so many tokens."""
        if len(self.stretches) == 1:  # the usual case, asked a million times
            return num_tokens / self.stretches[0][1]
        done = 0.0
        for (start, times), end in self._with_ends():
            if num_tokens <= end:
                return done + (num_tokens - start) / times
            done += (end - start) / times
        raise AssertionError("the last stretch has no end")

    def num_tokens(self, work: float) -> float:
        """The other way round."""
        for (start, times), end in self._with_ends():
            if work <= (end - start) / times:
                return start + work * times
            work -= (end - start) / times
        raise AssertionError("the last stretch has no end")

    def _with_ends(self) -> list[tuple[tuple[float, float], float]]:
        ends = [*(start for start, _ in self.stretches[1:]), float("inf")]
        return list(zip(self.stretches, ends, strict=True))
