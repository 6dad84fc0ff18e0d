"""What ways of drafting are believed to give against none, in tokens a second, and how sure that is. Pure.

Ways are compared in pairs, on the texts of a moment, so what is believed of one hangs together with what is believed of
others: if the way that four others were measured by turns out to give more than was thought, so do these. Logarithms of
the gains are therefore jointly normal, and every comparison moves all of them, each as far as it hangs together with
what was compared (a Kalman filter).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple

from slipstream.engine.strategy import OFF, Strategy


class Beliefs:
    def __init__(self) -> None:
        self._means: dict[Strategy, float] = {}
        """Logarithms of the gains over none."""
        self._covariances: dict[tuple[Strategy, Strategy], float] = {}
        """Of the errors of any two; those of a way with itself are its variance. None is what others are measured by,
        and has no error."""

    def __contains__(self, way: Strategy) -> bool:
        return way == OFF or way in self._means

    def __iter__(self) -> Iterator[Strategy]:
        yield OFF
        yield from self._means

    def gain(self, way: Strategy, other: Strategy = OFF, errors: float = 0.0) -> float:
        """How many times the tokens a second of the other it gives; with so many standard errors more."""
        return math.exp(self._mean(way) - self._mean(other) + errors * math.sqrt(self.variance(way, other)))

    def variance(self, way: Strategy, other: Strategy = OFF) -> float:
        """Of the logarithm of that."""
        shared = self._covariance(way, other)
        return max(0.0, self._covariance(way, way) + self._covariance(other, other) - 2 * shared)

    def add(self, way: Strategy, other: Strategy, gain: float, variance: float) -> None:
        """A new way, of which it is known what it gives against another."""
        assert way not in self
        own = self._covariance(other, other) + variance
        for one in list(self._means):
            self._covariances[way, one] = self._covariances[one, way] = self._covariance(other, one)
        self._means[way] = self._mean(other) + math.log(gain)
        self._covariances[way, way] = own

    def compare(self, way: Strategy, other: Strategy, gain: float, variance: float) -> None:
        """What one gave against the other was measured, with this variance of its logarithm."""
        surprise = math.log(gain / self.gain(way, other))
        expected = self.variance(way, other) + variance
        shared = {one: self._covariance(one, way) - self._covariance(one, other) for one in self._means}
        for one, covariance in shared.items():
            self._means[one] += covariance / expected * surprise
            for two, with_two in shared.items():
                self._covariances[one, two] -= covariance * with_two / expected

    def doubt_all(self, variance: float) -> None:
        """All gains over none may have changed, by the same factor."""
        for pair in self._covariances:
            self._covariances[pair] += variance

    def doubt_each(self, variance: float, ways: Sequence[Strategy] | None = None) -> None:
        """Those of these ways may have, each by a factor of its own; of all, if none are named."""
        for way in self._means if ways is None else ways:
            if way in self._means:
                self._covariances[way, way] += variance

    def state_dict(self) -> dict[str, list[list[float]]]:
        return {
            "means": [[*astuple(way), mean] for way, mean in self._means.items()],
            "covariances": [[self._covariances[one, two] for two in self._means] for one in self._means],
        }

    def load_state_dict(self, state: dict[str, list[list[float]]], known: Sequence[Strategy]) -> None:
        """Of ways that are known here."""
        ways = [Strategy(*numbers) for *numbers, _ in state["means"]]  # type: ignore[arg-type]
        self._means = {way: line[-1] for way, line in zip(ways, state["means"], strict=True) if way in known}
        self._covariances = {
            (one, two): value
            for one, line in zip(ways, state["covariances"], strict=True)
            for two, value in zip(ways, line, strict=True)
            if one in known and two in known
        }

    def _mean(self, way: Strategy) -> float:
        return 0.0 if way == OFF else self._means[way]

    def _covariance(self, one: Strategy, two: Strategy) -> float:
        return self._covariances.get((one, two), 0.0)
