"""How long a rollout will be: from the prompt's past, from how all lengths drift, and from its group's progress. Pure.

What is forecast is the mean of the lengths that are still possible: the prompt's past lengths, brought to today's
level, and those of siblings that have ended, as far as they are longer than what was sampled already. Fresh lengths
count more than old ones. A prompt without a past is forecast from what is known of it (`ranker.py`), or else has the
past of all prompts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from slipstream.schedule.ranker import Features, LengthRanker

KEPT = 32
"""Lengths kept of a prompt."""
KEPT_OF_ALL = 512
"""And of all prompts together, for those never seen."""
HALF_LIFE = 2.0
"""Visits of a prompt after which a length counts half."""
SIBLING_WEIGHT = 2.0
"""Of one of the very policy: it counts as much as two of the visit before."""
BEYOND = 1.3
"""Times what was sampled already, where nothing known is longer."""
SHARES = (0.2, 0.1, 0.05)
"""Shares of the longest rollouts whose recall is told."""


class LengthForecaster:
    def __init__(self, features: Callable[[str], Features | None] = lambda prompt: None) -> None:
        """`features`: what is known of a prompt, of the same kind for all that have any."""
        self._features = features
        self._ranker = LengthRanker()
        self._visits: dict[str, deque[tuple[int, float, float]]] = {}
        """By prompt: (its visit, a length, the level when it was sampled)."""
        self._num_visits: dict[str, int] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=KEPT_OF_ALL)
        """(a length, the level), whatever the prompt."""
        self._typical: float | None = None
        """Mean of the recent ones at today's level."""
        self._shortest, self._longest = 1.0, math.inf
        """Of the recent ones: what is known of a prompt can be unlike anything that was learned from."""
        self._level = 0.0
        """By how much the logarithms of lengths have risen since the first step."""

    def learn_step(self, lengths: Mapping[str, Sequence[float]]) -> None:
        """The lengths of a step's rollouts, by prompt. Cut rollouts count with the length they were cut at."""
        # Prompts differ, so drift is told by those that were here before: how far they are now from where they were.
        shifts = []
        for prompt, group in lengths.items():
            if known := self._known(prompt):
                before = _mean((math.log(past), weight) for past, weight in known)
                shifts += [math.log(length) - before for length in group]
        if shifts:
            self._level += statistics.fmean(shifts)
        described = {prompt: found for prompt in lengths if (found := self._features(prompt)) is not None}
        self._ranker.learn_step(described, lengths, self._visits)
        for prompt, group in lengths.items():
            visit = self._num_visits[prompt] = self._num_visits.get(prompt, 0) + 1
            kept = self._visits.setdefault(prompt, deque(maxlen=KEPT))
            kept.extend((visit, float(length), self._level) for length in group)
            self._recent.extend((float(length), self._level) for length in group)
        self._typical = None
        recent = [length for length, _ in self._recent]
        self._shortest, self._longest = min(recent, default=1.0), max(recent, default=math.inf)

    def forecast(
        self, prompt: str, *, num_sampled: int = 0, ended_siblings: Iterable[float] = (), limit: float = math.inf
    ) -> float:
        """Tokens in all, of a rollout that has `num_sampled` of them."""
        known = self._known(prompt) + [(length, SIBLING_WEIGHT) for length in ended_siblings]
        features = self._features(prompt) if not known else None
        if features is not None and self._ranker.has_learned:
            # Whole tokens: the last digits of a regression are the machine's, and order would hang on them.
            told = float(round(self._ranker.forecast(features)))
            known = [(min(max(told, self._shortest), self._longest), 1.0)]
        elif not known and not num_sampled and self._recent:
            if self._typical is None:
                self._typical = _mean((length * math.exp(self._level - level), 1.0) for length, level in self._recent)
            known = [(self._typical, 1.0)]
        elif not known:
            known = [(length * math.exp(self._level - level), 1.0) for length, level in self._recent]
        possible = [(length, weight) for length, weight in known if length > num_sampled]
        return min(limit, _mean(possible) if possible else max(1.0, BEYOND * num_sampled))

    def _known(self, prompt: str) -> list[tuple[float, float]]:
        """(length at today's level, weight) of the prompt's past."""
        newest = self._num_visits.get(prompt, 0)
        return [
            (length * math.exp(self._level - level), 0.5 ** ((newest - visit) / HALF_LIFE))
            for visit, length, level in self._visits.get(prompt, ())
        ]


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    pairs = list(weighted)
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


# How good forecasts were: of the order, of the lengths themselves.


def tail_recall(forecast: Mapping[str, float], actual: Mapping[str, float], share: float) -> float:
    """Of the rollouts that were the longest `share`, those that were forecast to be among as many. Where several are
    just as long as the shortest of them (many are cut at the limit) any of these will do."""
    num_tail = max(1, round(share * len(actual)))
    least = sorted(actual.values())[-num_tail]
    foreseen = sorted(actual, key=lambda uid: (-forecast[uid], uid))[:num_tail]
    return sum(actual[uid] >= least for uid in foreseen) / num_tail


@dataclass(frozen=True, slots=True)
class Calibration:
    ratios: tuple[float, ...]
    """Mean actual length / mean forecast of each group of rollouts, those with the shortest forecasts first."""

    @property
    def error(self) -> float:
        """How far the logarithms of the ratios are from 0, on average: 0.1 is a group about 10 % longer or shorter."""
        return statistics.fmean(abs(math.log(ratio)) for ratio in self.ratios)


def calibration(forecast: Mapping[str, float], actual: Mapping[str, float], bins: int = 10) -> Calibration:
    """Of `bins` groups of rollouts, equally large up to one, in order of their forecasts."""
    order = sorted(actual, key=lambda uid: (forecast[uid], uid))
    bins = min(bins, len(order))
    bounds = [len(order) * number // bins for number in range(bins + 1)]
    groups = [order[start:end] for start, end in pairwise(bounds)]
    return Calibration(tuple(_ratio(forecast, actual, group) for group in groups))


def forecast_metrics(forecast: Mapping[str, float], actual: Mapping[str, float]) -> dict[str, float]:
    """Of the rollouts of a step, by the names of `observe/metrics.py`; none where there was no rollout."""
    if not actual:
        return {}
    return {
        **{f"length_forecast/recall_top{round(100 * share)}": tail_recall(forecast, actual, share) for share in SHARES},
        "length_forecast/actual_ratio": _ratio(forecast, actual, actual),
        "length_forecast/calibration_error": calibration(forecast, actual).error,
    }


def _ratio(forecast: Mapping[str, float], actual: Mapping[str, float], uids: Collection[str]) -> float:
    return math.fsum(actual[uid] for uid in uids) / math.fsum(forecast[uid] for uid in uids)
