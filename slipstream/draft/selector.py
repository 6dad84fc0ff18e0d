"""Which way of drafting pays, as measured: for each size of batch the one that gives most tokens a second, or none.

Pure: it is told what a step did and how long it took, and says what the next one should do. A new size of batch tries
every way for a few steps; afterwards the best stays until another is clearly better, and the others are tried again,
rarely, since texts change. So drafting that does not pay costs a few steps in a hundred.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.engine.strategy import OFF, Strategy

WINDOW = 15
"""Steps of one way that its rate is the median of."""
FIRST_TRIALS = 6
"""Steps in a row at the first trial of a way. The first step of a trial is never counted: it may prepare the others."""
TRIALS, BETWEEN_TRIALS = 3, 150
"""Afterwards: so many steps of a way that is not the best, every so many steps."""
CLEARLY = 1.03
"""So many times faster another way has to be before it takes over."""


DEFAULT_STRATEGIES = (OFF, Strategy(0.5, 4), Strategy(1.0, 2), Strategy(2.0, 2), Strategy(4.0, 2), Strategy(8.0, 2))


@dataclass(slots=True)
class _Bucket:
    rates: dict[Strategy, deque[float]]
    best: Strategy = OFF
    trial: Strategy | None = None
    trial_length: int = 0
    steps_left: int = 0
    since_trial: int = 0
    next_trial: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """For the record: what was chosen for a size of batch, and why."""

    batch: int
    strategy: Strategy
    reason: str
    rates: dict[str, float] = field(default_factory=dict)


class Selector:
    def __init__(self, strategies: Sequence[Strategy] = DEFAULT_STRATEGIES) -> None:
        assert OFF in strategies, "what must never be slower than off has to know how fast off is"
        self._strategies = tuple(strategies)
        self._buckets: dict[int, _Bucket] = {}
        self.choices: list[Choice] = []
        """Every change of the best way, in order."""
        self.saved_s = 0.0
        """By drafts, as estimated: what the same tokens would have taken without, at the rates measured."""

    def choose(self, batch: int) -> Strategy:
        """For a step of so many sequences."""
        bucket = self._bucket(batch)
        if bucket.trial is None:
            untried = [strategy for strategy in self._strategies if not bucket.rates[strategy]]
            others = [strategy for strategy in self._strategies if strategy != bucket.best]
            if untried:
                bucket.trial, bucket.trial_length = untried[0], FIRST_TRIALS
            elif bucket.since_trial >= BETWEEN_TRIALS and others:
                bucket.trial, bucket.trial_length = others[bucket.next_trial % len(others)], TRIALS
                bucket.next_trial += 1
            bucket.steps_left = bucket.trial_length
        return bucket.trial or bucket.best

    def observe(self, batch: int, strategy: Strategy, num_tokens: int, seconds: float) -> None:
        """A step of `batch` sequences and nothing else gave `num_tokens` in `seconds`."""
        bucket = self._bucket(batch)
        is_trial = bucket.trial == strategy
        if not is_trial or bucket.steps_left < bucket.trial_length:
            bucket.rates[strategy].append(num_tokens / seconds / batch)
        bucket.since_trial += 1
        if bucket.rates[OFF] and strategy != OFF:
            self.saved_s += num_tokens / (statistics.median(bucket.rates[OFF]) * batch) - seconds
        if is_trial:
            bucket.steps_left -= 1
            if bucket.steps_left <= 0:
                bucket.trial, bucket.since_trial = None, 0
                self._settle(batch, bucket)

    def best(self, batch: int) -> Strategy:
        """What has given most tokens a second so far."""
        return self._bucket(batch).best

    def rates(self, batch: int) -> dict[Strategy, float]:
        """Tokens a second and sequence, by way, where they were measured."""
        known = self._bucket(batch).rates.items()
        return {strategy: statistics.median(rates) for strategy, rates in known if rates}

    def state_dict(self) -> dict[str, object]:
        """Numbers and strings only, for a checkpoint."""
        return {
            str(size): {
                "best": _plain(bucket.best),
                "rates": [[*_plain(strategy), list(rates)] for strategy, rates in bucket.rates.items()],
            }
            for size, bucket in self._buckets.items()
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        for size, saved in state.items():
            bucket = self._bucket(int(size))
            assert isinstance(saved, dict)
            for drafts_each, min_match, rates in saved["rates"]:
                if Strategy(drafts_each, min_match) in bucket.rates:
                    bucket.rates[Strategy(drafts_each, min_match)].extend(rates)
            best = Strategy(*saved["best"])
            bucket.best = best if best in bucket.rates else OFF

    def _bucket(self, batch: int) -> _Bucket:
        size = 1 << (max(1, batch) - 1).bit_length()
        if size not in self._buckets:
            self._buckets[size] = _Bucket({strategy: deque(maxlen=WINDOW) for strategy in self._strategies})
        return self._buckets[size]

    def _settle(self, batch: int, bucket: _Bucket) -> None:
        medians = {strategy: statistics.median(rates) for strategy, rates in bucket.rates.items() if rates}
        fastest = max(medians, key=lambda strategy: medians[strategy])
        if fastest != bucket.best and medians[fastest] > CLEARLY * medians.get(bucket.best, 0.0):
            gain = medians[fastest] / medians[bucket.best] if bucket.best in medians else 1.0
            reason = f"{fastest} gives {gain:.2f} times the tokens of {bucket.best}"
            bucket.best = fastest
            named = {str(strategy): rate for strategy, rate in medians.items()}
            self.choices.append(Choice(batch, fastest, reason, named))


def _plain(strategy: Strategy) -> tuple[float, int]:
    return strategy.drafts_each, strategy.min_match
