"""Which way of drafting pays, as measured: for each size of batch the one that gives most tokens a second, or none.

Pure: it is told what a step did and how long it took, and says what the next one should do. A new size of batch tries
every way for a few steps; afterwards the best stays until another is clearly better, and the others are tried again,
rarely, since texts change. So drafting that does not pay costs a step or two in a hundred.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from slipstream.engine.strategy import OFF, Strategy

WINDOW, WINDOW_ROWS = 15, 192
"""Steps of one way that count, and so many more in small batches that sequences and steps together make this many: with
drafts a single sequence has one token in most steps and many in some."""
FIRST_TRIAL, FIRST_TRIAL_ROWS = 6, 64
"""Steps in a row at the first trial of a way."""
TRIAL, TRIAL_ROWS, BETWEEN_TRIALS = 3, 32, 150
"""Afterwards: steps of a way that is not the best, and the least number of steps between two such trials."""
TRIAL_COST = 0.01
"""Of all steps: the slower a way was, the longer it waits for its next trial, so that trials cost no more than this."""
HOPELESS = 0.8
"""A trial ends early when its way gives less than so many times the tokens of the best."""
CLEARLY = 1.03
"""So many times faster another way has to be before it takes over."""


DEFAULT_STRATEGIES = (OFF, Strategy(0.5, 2), Strategy(1.0, 2), Strategy(2.0, 1), Strategy(4.0, 1), Strategy(8.0, 1))


@dataclass(slots=True)
class _Bucket:
    steps: dict[Strategy, deque[tuple[float, float]]]
    """By way: tokens a sequence, and seconds, of the last steps."""
    window: int
    """Steps of one way that count."""
    best: Strategy = OFF
    trial: Strategy | None = None
    trial_length: int = 0
    trial_steps: list[tuple[float, float]] = field(default_factory=list)
    since_trial: int = 0
    next_trial: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """For the record: what was chosen for a size of batch, and why."""

    batch: int
    strategy: Strategy
    reason: str


class Selector:
    def __init__(self, strategies: Sequence[Strategy] = DEFAULT_STRATEGIES) -> None:
        assert OFF in strategies, "what must never be slower than off has to know how fast off is"
        self._strategies = tuple(strategies)
        self._buckets: dict[int, _Bucket] = {}
        self.choices: list[Choice] = []
        """Every change of the best way since they were last taken, in order."""
        self.saved_s = 0.0
        """By drafts, as estimated: what the same tokens would have taken without, at the rates measured."""

    def choose(self, batch: int) -> Strategy:
        """For a step of so many sequences."""
        bucket, batch = self._bucket(batch), max(1, batch)
        if bucket.trial is None:
            untried = [strategy for strategy in self._strategies if not bucket.steps[strategy]]
            others = [strategy for strategy in self._strategies if strategy != bucket.best]
            if untried:
                self._begin_trial(bucket, untried[0], max(FIRST_TRIAL, FIRST_TRIAL_ROWS // batch))
            elif others:
                candidate, length = others[bucket.next_trial % len(others)], max(TRIAL, TRIAL_ROWS // batch)
                lost = length * max(0.0, _rate(bucket.steps[bucket.best]) / _rate(bucket.steps[candidate]) - 1)
                if bucket.since_trial >= max(BETWEEN_TRIALS, lost / TRIAL_COST):
                    self._begin_trial(bucket, candidate, length)
                    bucket.next_trial += 1
        return bucket.trial or bucket.best

    def _begin_trial(self, bucket: _Bucket, strategy: Strategy, length: int) -> None:
        bucket.trial, bucket.trial_length, bucket.trial_steps = strategy, length, []

    def observe(self, batch: int, strategy: Strategy, num_tokens: int, seconds: float) -> None:
        """A step of `batch` sequences and nothing else gave `num_tokens` in `seconds`."""
        bucket, step = self._bucket(batch), (num_tokens / batch, seconds)
        if bucket.steps[OFF] and strategy != OFF:
            self.saved_s += step[0] / _rate(bucket.steps[OFF]) - seconds
        bucket.since_trial += 1
        if bucket.trial != strategy:
            bucket.steps[strategy].append(step)
            if strategy == bucket.best and bucket.since_trial % bucket.window == 0:
                self._settle(batch, bucket)  # texts may have changed: what was best is no longer, by its own record
            return
        bucket.trial_steps.append(step)
        counted = bucket.trial_steps[1:]  # the first may have prepared the others
        is_over = len(bucket.trial_steps) >= bucket.trial_length
        if len(counted) >= min(FIRST_TRIAL, bucket.trial_length) - 1 and bucket.steps[bucket.best]:
            is_over |= _rate(counted) < HOPELESS * _rate(bucket.steps[bucket.best])
        if is_over:
            bucket.steps[strategy].extend(counted)
            bucket.trial, bucket.since_trial = None, 0
            self._settle(batch, bucket)

    def take_choices(self) -> list[Choice]:
        choices, self.choices = self.choices, []
        return choices

    def has_tried_all(self, batch: int) -> bool:
        bucket = self._bucket(batch)
        return bucket.trial is None and all(bucket.steps.values())

    def best(self, batch: int) -> Strategy:
        """What has given most tokens a second so far."""
        return self._bucket(batch).best

    def rates(self, batch: int) -> dict[Strategy, float]:
        """Tokens a second and sequence, by way, where they were measured."""
        return {strategy: _rate(steps) for strategy, steps in self._bucket(batch).steps.items() if steps}

    def state_dict(self) -> dict[str, object]:
        """Numbers and strings only, for a checkpoint."""
        return {
            str(size): {
                "best": _plain(bucket.best),
                "steps": [[*_plain(strategy), list(steps)] for strategy, steps in bucket.steps.items()],
            }
            for size, bucket in self._buckets.items()
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        for size, saved in state.items():
            bucket = self._bucket(int(size))
            assert isinstance(saved, dict)
            for drafts_each, min_match, steps in saved["steps"]:
                if Strategy(drafts_each, min_match) in bucket.steps:
                    bucket.steps[Strategy(drafts_each, min_match)].extend((tokens, s) for tokens, s in steps)
            best = Strategy(*saved["best"])
            bucket.best = best if best in bucket.steps else OFF

    def _bucket(self, batch: int) -> _Bucket:
        size = 1 << (max(1, batch) - 1).bit_length()
        if size not in self._buckets:
            window = max(WINDOW, WINDOW_ROWS // size)
            self._buckets[size] = _Bucket({strategy: deque(maxlen=window) for strategy in self._strategies}, window)
        return self._buckets[size]

    def _settle(self, batch: int, bucket: _Bucket) -> None:
        rates = self.rates(batch)
        fastest = max(rates, key=lambda strategy: rates[strategy])
        if fastest != bucket.best and rates[fastest] > CLEARLY * rates.get(bucket.best, 0.0):
            gain = rates[fastest] / rates[bucket.best] if bucket.best in rates else 1.0
            reason = f"{fastest} gives {gain:.2f} times the tokens of {bucket.best}"
            bucket.best = fastest
            self.choices.append(Choice(batch, fastest, reason))


def _rate(steps: Collection[tuple[float, float]]) -> float:
    """Tokens a second and sequence: the mean of the tokens, which come in bursts, over the median of the times, which
    have outliers."""
    return statistics.fmean(tokens for tokens, _ in steps) / statistics.median(seconds for _, seconds in steps)


def _plain(strategy: Strategy) -> tuple[float, int]:
    return strategy.drafts_each, strategy.min_match
