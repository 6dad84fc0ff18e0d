"""Which way of drafting pays, as measured: for each size of batch the one that gives most tokens a second, or none.

Pure: it is told what a step did and how long it took, and says what the next one should do. A new size of batch tries
every way for a few steps, from few drafts to many, but for those that cannot win by what the others have shown;
afterwards the best stays until another is clearly better, and the others are tried again, rarely, since texts change.
A trial counts against what the best way gave just before it: what was drafted well an hour ago says little about now.
So drafting that does not pay costs a step or two in a hundred.

Texts that repeat others come in stretches, in which copying is cheap and right and a model that drafts is neither. So
steps in such a stretch are judged apart from those outside, each with a best way of its own. Outside, a way that looks
for repetitions also finds the next stretch: what those bring counts against ways that would pass them by.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from slipstream.engine.strategy import MATCHING, OFF, Strategy

WINDOW, WINDOW_ROWS, WINDOW_ALONE = 15, 192, 384
"""Steps of one way that show how it does now, and so many more in small batches that sequences and steps together make
this many; of a sequence alone still more, so that there are several texts among them."""
FIRST_TRIAL, FIRST_TRIAL_ROWS = 6, 64
"""Steps in a row that count at the first trial of a way."""
TRIAL, TRIAL_ROWS, BETWEEN_TRIALS = 5, 32, 150
"""Afterwards: steps of a way that is not the best, and the least number of steps between two such trials."""
AFTER_ROWS, AT_ONCE = 128, 1.15
"""Steps and sequences of the best way that a better one is compared with after its trial, as with those before, since
texts may have been easier just then; unless it is so many times better."""
PATIENCE = 4
"""Times as long a trial may become while it cannot be told whether its way is better: such a way costs hardly more."""
TRIAL_COST = 0.005
"""Of all steps: the slower a way was, the longer it waits for its next trial, so that trials cost no more than this."""
MOST_BETWEEN = 500
"""Steps in which one way is tried again, bad as all may have been: a drafter learns."""
LEAST_LOSS = 0.25
"""Steps that any trial may lose."""
OUTDATED = 3
"""Times as much may a trial cost of a way that has not been tried since the best way changed."""
SETTLING = 2 * WINDOW
"""Steps after which a way that was just taken takes as long as it will."""
HOPELESS = 0.85
"""A trial ends early when its way gives less than so many times the tokens of the best."""
HOPELESS_AT_BEST = 0.97
"""A way is not even tried if it could give no more than this."""
CLEARLY = 1.03
"""So many times faster another way has to be before it takes over; to stop drafting, just faster."""


SEEN_ROWS = 4096
"""Sequences and steps, after which what stretches of repeated text brought is half forgotten."""


DEFAULT_STRATEGIES = (
    *(OFF, Strategy(0.5, 2), Strategy(1.0, 2)),
    *(Strategy(2.0, 1), Strategy(4.0, 1), Strategy(8.0, 1), Strategy(16.0, 1)),
)
MODEL_STRATEGIES = (
    *(OFF, Strategy(1.0, 0, 1), Strategy(2.0, 0, 2), Strategy(4.0, 0, 4), Strategy(6.0, 0, 6)),
    *(Strategy(8.0, 0, 4, 3), Strategy(16.0, 0, 5, 4)),
)
MIXED_STRATEGIES = (
    *(OFF, Strategy(1.0, 2), Strategy(2.0, 1), Strategy(4.0, 1), Strategy(8.0, 1), Strategy(16.0, 1)),
    *(Strategy(2.0, 4, 2), Strategy(4.0, 4, 4), Strategy(8.0, 4, 6), Strategy(4.0, 8, 4), Strategy(8.0, 8, 6)),
    *(Strategy(8.0, 4, 4, 3), Strategy(16.0, 4, 5, 4)),
)
"""A short match is a poor reason to pass the model over: one token in common says less than it does."""
TREE_ROWS = 8
"""Trees are tried with up to so many sequences: they verify many drafts of which most are wrong by design."""
MANY_DRAFTS, FEW_ROWS = 8, 32
"""More drafts each than this are tried with up to so many sequences only, and once half as many have proved best."""


@dataclass(slots=True)
class _Seen:
    """Steps of ways that look for repeated text, sums: what finding a stretch of it is worth."""

    tokens: float = 0.0
    """A sequence; in all such steps."""
    seconds: float = 0.0
    tokens_outside: float = 0.0
    """In those outside of a stretch."""
    seconds_outside: float = 0.0
    num_rows: float = 0.0

    def add(self, batch: int, tokens: float, seconds: float, is_outside: bool) -> None:
        keep = 0.5 if self.num_rows > SEEN_ROWS else 1.0
        self.num_rows = keep * self.num_rows + batch
        self.tokens, self.seconds = keep * self.tokens + tokens, keep * self.seconds + seconds
        self.tokens_outside = keep * self.tokens_outside + tokens * is_outside
        self.seconds_outside = keep * self.seconds_outside + seconds * is_outside

    def worth_of_passing_by(self) -> float:
        """Of a token outside, in those of a way that sees: less than one if stretches bring more than other texts."""
        if not self.tokens_outside:
            return 1.0
        return min(1.0, self.tokens_outside / self.seconds_outside * self.seconds / self.tokens)


@dataclass(slots=True)
class _Bucket:
    """What is known of one size of batch, in stretches of repeated text or outside.

    Ways are measured at different times, and steps take longer as texts grow: so what a way costs is its time against
    that of the best way just then, and what was measured early is still right late.
    """

    ways: Sequence[Strategy]
    """That may be tried."""
    window: int
    """Steps that show how the best way does now."""
    worth_of_passing_by: float = 1.0
    """What a token of a way that does not look for repeated text counts."""
    right: dict[Strategy, deque[float]] = field(default_factory=dict)
    """By way: right drafts a sequence in each step of its last trial; of the best one, in its last steps."""
    costs: dict[Strategy, float] = field(default_factory=dict)
    """By way: the time of a step, in units that all ways share."""
    unit_s: float = 0.0
    """Seconds of a unit now."""
    best: Strategy = OFF
    taken_at: int = -SETTLING
    """The step since which it is."""
    best_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Seconds of the last steps of the best way."""
    trial: Strategy | None = None
    trial_length: int = 0
    trial_steps: list[tuple[float, float]] = field(default_factory=list)
    """Tokens a sequence, and seconds."""
    tried_at: dict[Strategy, int] = field(default_factory=dict)
    """By way: the step of its last trial."""
    left_out: set[Strategy] = field(default_factory=set)
    """Ways that could not win when their turn came; for the record, they are looked at again."""
    num_steps: int = 0
    since_trial: int = 0
    contender: Strategy | None = None
    """A way that was better in its trial than the best one before; and than after it?"""

    def untried(self) -> list[Strategy]:
        most = max(MANY_DRAFTS, 2 * self.best.drafts_each)
        return [
            way
            for way in self.ways
            if way not in self.costs and way.drafts_each <= most and self.hope(way) >= HOPELESS_AT_BEST
        ]

    def hope(self, way: Strategy) -> float:
        """The rate that a way may have at best, against that of the best way, by those of its kind with fewer drafts:
        more drafts bring less each, and cost no less each. Infinite while nothing speaks against it."""
        kind = sorted(
            (one for one in self.costs if one.kind == way.kind and 0 < one.drafts_each < way.drafts_each),
            key=lambda one: one.drafts_each,
        )
        if not kind or self.best not in self.costs:
            return math.inf
        last, before = kind[-1], kind[-2] if len(kind) > 1 else OFF
        more = (way.drafts_each - last.drafts_each) / (last.drafts_each - before.drafts_each)
        tokens = self.tokens(last, errors=1.0)
        tokens += more * max(0.0, tokens - (self.tokens(before) if before in self.costs else 1.0))
        cost = self.costs[last]
        if before != OFF:  # from none to some there is a step, which says nothing about more
            cost += more * max(0.0, cost - self.costs[before])
        return self.worth(way) * tokens / (cost * self.unit_s) / self.rate(self.best)

    def worth(self, way: Strategy) -> float:
        """Of one of its tokens."""
        return 1.0 if way.looks_for_matches else self.worth_of_passing_by

    def tokens(self, way: Strategy, errors: float = 0.0) -> float:
        """A step and sequence now; with so many standard errors more."""
        right = self.right[way]
        return 1.0 + max(0.0, statistics.fmean(right) + (errors * _error_of(right) if errors else 0.0))

    def rate(self, way: Strategy, errors: float = 0.0) -> float:
        """Tokens a second and sequence, as they count."""
        return self.worth(way) * self.plain_rate(way, errors)

    def plain_rate(self, way: Strategy, errors: float = 0.0) -> float:
        return self.tokens(way, errors) / (self.costs[way] * self.unit_s)

    def follow_best(self, tokens: float, seconds: float) -> None:
        """A step of the best way gave a sequence so many. How long it took says more about the way at first, whose
        steps come to be as large as its drafts need, and later about the time."""
        self.right[self.best].append(tokens - 1.0)
        self.best_s.append(seconds)
        if self.num_steps - self.taken_at <= SETTLING:
            self.costs[self.best] = statistics.median(self.best_s) / self.unit_s
        else:
            self.unit_s = statistics.median(self.best_s) / self.costs[self.best]

    def learn(self, strategy: Strategy, steps: Sequence[tuple[float, float]]) -> None:
        """What a trial showed. The first way of all makes the unit."""
        self.right[strategy] = deque((tokens - 1.0 for tokens, _ in steps), maxlen=self.window)
        typical_s = statistics.median(seconds for _, seconds in steps)  # a single step may take any time
        self.unit_s = self.unit_s or typical_s
        self.costs[strategy] = typical_s / self.unit_s
        self.tried_at[strategy] = self.num_steps

    def is_open(self, way: Strategy, steps: Sequence[tuple[float, float]]) -> bool:
        """Whether a way with these steps may, within a standard error, be good enough to take over, and may be not."""
        if self.best not in self.costs:
            return False
        tokens, took_s = [one for one, _ in steps], statistics.median(seconds for _, seconds in steps)
        needed = CLEARLY * self.rate(self.best) * took_s / self.worth(way)
        return abs(statistics.fmean(tokens) - needed) < _error_of(tokens)

    def begin_as(self, outside: _Bucket) -> None:
        """With the best way there, which has found the first stretch; steps take as long here."""
        for way in (OFF, outside.best):
            if way in outside.costs and way in self.ways:
                self.costs[way], self.right[way] = outside.costs[way], outside.right[way].copy()
        self.unit_s = outside.unit_s
        if outside.best in self.costs:
            self.take(outside.best)

    def take(self, strategy: Strategy) -> None:
        """For the best from now on, at the pace of the one before."""
        self.best, self.contender = strategy, None
        self.taken_at = self.num_steps
        self.best_s.clear()
        self.best_s.append(self.costs[strategy] * self.unit_s)


@dataclass(frozen=True, slots=True)
class Choice:
    """For the record: what was chosen for a size of batch, and why."""

    batch: int
    strategy: Strategy
    reason: str
    is_matching: bool = False
    """Whether it is for stretches of repeated text."""


class Selector:
    def __init__(self, strategies: Sequence[Strategy] = DEFAULT_STRATEGIES) -> None:
        assert strategies[0] == OFF, "what must never be slower than off has to know first how fast off is"
        self._strategies = tuple(strategies)
        self._buckets: dict[tuple[int, bool], _Bucket] = {}
        """By the most sequences that count as this size, and whether texts repeat others."""
        self._seen: defaultdict[int, _Seen] = defaultdict(_Seen)
        self.choices: list[Choice] = []
        """Every change of the best way since they were last taken, in order."""
        self.saved_s = 0.0
        """By drafts, as estimated: what the same tokens would have taken without, at the rates measured."""

    def choose(self, batch: int, is_matching: bool = False) -> Strategy:
        """For a step of so many sequences, of which most, or not, were just found to repeat other texts."""
        bucket = self._bucket(batch, is_matching)
        if bucket.trial is None and bucket.contender is None and bucket.since_trial % WINDOW == 0:
            self._consider_trial(bucket, max(1, batch))
        return bucket.trial or bucket.best

    def _consider_trial(self, bucket: _Bucket, batch: int) -> None:
        untried = bucket.untried()
        if untried:
            # Between two of them the best way shows how long steps take by now.
            if bucket.since_trial or not bucket.costs:
                bucket.trial, bucket.trial_length = untried[0], max(FIRST_TRIAL, FIRST_TRIAL_ROWS // batch)
            return
        others = [way for way in bucket.costs if way != bucket.best]
        length, best_rate = max(TRIAL, TRIAL_ROWS // batch), bucket.rate(bucket.best)
        promising = max(others, key=bucket.rate, default=bucket.best)
        if bucket.since_trial and bucket.rate(promising) > CLEARLY * best_rate:
            # The best way is not what it was, or texts are not: this one has only to show that it still is.
            bucket.trial, bucket.trial_length = promising, length
            return
        if not others or bucket.since_trial < BETWEEN_TRIALS:
            return
        # Steps that a trial loses, if the way is as good as it may be by what is known: one that looked bad by chance
        # is soon tried again. Those that lose little have more trials, so that all together cost what they may.
        hopes = {way: bucket.rate(way, errors=1.0) for way in others}
        losses = {way: max(LEAST_LOSS, length * (best_rate / hopes[way] - 1)) for way in others}
        shares = sum(1 / loss for loss in losses.values())

        def is_due(way: Strategy) -> float:
            """From 1 on: steps since its last trial, against those it should wait."""
            tried_at = bucket.tried_at.get(way, 0)
            # What was tried against another best way, on the texts of that time, says less.
            trial_cost = TRIAL_COST if tried_at > bucket.taken_at else OUTDATED * TRIAL_COST
            wait = min(MOST_BETWEEN * len(others), losses[way] ** 2 * shares / trial_cost)
            return (bucket.num_steps - tried_at) / max(BETWEEN_TRIALS, wait)

        way = max(others, key=lambda one: (is_due(one), hopes[one]))
        if is_due(way) >= 1:
            bucket.trial, bucket.trial_length = way, length

    def observe(
        self, batch: int, strategy: Strategy, tokens_each: float, seconds: float, is_matching: bool = False
    ) -> None:
        """A step of `batch` sequences and nothing else gave each so many tokens on average, in `seconds`."""
        bucket = self._bucket(batch, is_matching)
        if strategy not in bucket.ways:
            return  # chosen for fewer sequences than were then seated
        if OFF in bucket.costs and strategy != OFF:
            self.saved_s += tokens_each / bucket.plain_rate(OFF) - seconds
        if is_matching or strategy.looks_for_matches:
            seen = self._seen[_size(batch)]
            seen.add(batch, tokens_each, seconds, not is_matching)
            self._bucket(batch).worth_of_passing_by = seen.worth_of_passing_by()
        bucket.num_steps += 1
        bucket.since_trial += 1
        if bucket.trial != strategy:
            if strategy == bucket.best and strategy in bucket.costs:
                bucket.follow_best(tokens_each, seconds)
                if bucket.contender is not None and bucket.since_trial >= max(TRIAL, AFTER_ROWS // max(1, batch)):
                    self._settle(batch, bucket, bucket.contender, is_matching)
                if bucket.since_trial % bucket.window == 0:
                    self._settle(batch, bucket, OFF, is_matching)  # texts may have changed, but not what this gives
            return
        bucket.trial_steps.append((tokens_each, seconds))
        counted = bucket.trial_steps[1:]  # the first may have prepared the others
        lengths, rest = divmod(len(counted), bucket.trial_length)
        is_over = lengths > 0 and rest == 0 and (lengths == PATIENCE or not bucket.is_open(strategy, counted))
        if len(counted) >= min(FIRST_TRIAL, bucket.trial_length) - 1 and bucket.best in bucket.costs:
            at_best = bucket.worth(strategy) * _rate_at_best(counted, strategy, batch)
            is_over |= at_best < HOPELESS * bucket.rate(bucket.best)
        if is_over:
            bucket.learn(strategy, counted)
            bucket.trial, bucket.trial_steps, bucket.since_trial = None, [], 0
            bucket.contender = strategy
            if bucket.rate(strategy) > AT_ONCE * bucket.rate(bucket.best):
                self._settle(batch, bucket, strategy, is_matching)
            self._settle(batch, bucket, OFF, is_matching)
            self._note_hopeless(batch, bucket, is_matching)

    def take_choices(self) -> list[Choice]:
        choices, self.choices = self.choices, []
        return choices

    def has_tried_all(self, batch: int) -> bool:
        bucket = self._bucket(batch)
        return bucket.trial is None and not bucket.untried()

    def best(self, batch: int, is_matching: bool = False) -> Strategy:
        """What has given most tokens a second so far."""
        return self._bucket(batch, is_matching).best

    def rates(self, batch: int) -> dict[Strategy, float]:
        """Tokens a second and sequence, by way, where they were measured."""
        bucket = self._bucket(batch)
        return {strategy: bucket.plain_rate(strategy) for strategy in bucket.costs}

    def state_dict(self) -> dict[str, object]:
        """Numbers and strings only, for a checkpoint."""
        return {
            f"{size} {'matching' if is_matching else 'plain'}": {
                "best": _plain(bucket.best),
                "seen": astuple(self._seen[size]),
                "unit_s": bucket.unit_s,
                "ways": [[*_plain(way), cost, list(bucket.right[way])] for way, cost in bucket.costs.items()],
            }
            for (size, is_matching), bucket in self._buckets.items()
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        for name, saved in state.items():
            assert isinstance(saved, dict)
            if "seen" not in saved:
                continue  # of a version that judged all texts together: it is learned anew
            size, scene = name.split()
            self._seen[int(size)] = _Seen(*saved["seen"])
            bucket = self._bucket(int(size), scene == "matching")
            bucket.unit_s = saved["unit_s"]
            bucket.costs.clear()
            for *numbers, cost, right in saved["ways"]:
                strategy = Strategy(*numbers)
                if strategy in bucket.ways:
                    bucket.costs[strategy], bucket.right[strategy] = cost, deque(right, maxlen=bucket.window)
            best = Strategy(*saved["best"])
            if best in bucket.costs:
                bucket.take(best)

    def _bucket(self, batch: int, is_matching: bool = False) -> _Bucket:
        size = _size(batch)
        if (size, is_matching) not in self._buckets:
            window = WINDOW_ALONE if size == 1 else max(WINDOW, WINDOW_ROWS // size)
            ways = [
                way
                for way in self._strategies
                if (
                    size <= (TREE_ROWS if way.branches > 1 else FEW_ROWS)
                    or (way.drafts_each <= MANY_DRAFTS and way.branches == 1)
                )
                and not (is_matching and 0 < way.drafts_each < MATCHING)  # would not see that the stretch goes on
            ]
            self._buckets[size, is_matching] = bucket = _Bucket(ways, window)
            if is_matching:
                bucket.begin_as(self._bucket(batch))
        return self._buckets[size, is_matching]

    def _settle(self, batch: int, bucket: _Bucket, way: Strategy, is_matching: bool) -> None:
        """Between the best way and another that was just tried, which must be faster at worst."""
        if way == bucket.contender:
            bucket.contender = None
        if way not in bucket.costs or way == bucket.best:
            return
        best_rate = bucket.rate(bucket.best)
        if bucket.rate(way, errors=-0.5) > (1.0 if way == OFF else CLEARLY) * best_rate:
            gain = bucket.rate(way) / best_rate
            self.choices.append(
                Choice(batch, way, f"{way} gives {gain:.2f} times the tokens of {bucket.best}", is_matching)
            )
            bucket.take(way)

    def _note_hopeless(self, batch: int, bucket: _Bucket, is_matching: bool) -> None:
        for way in bucket.ways:
            if way not in bucket.costs and way not in bucket.left_out and bucket.hope(way) < HOPELESS_AT_BEST:
                bucket.left_out.add(way)
                reason = f"{way} is not tried: {bucket.hope(way):.2f} times the tokens of this at best"
                self.choices.append(Choice(batch, bucket.best, reason, is_matching))


def _rate_at_best(steps: Sequence[tuple[float, float]], strategy: Strategy, batch: int) -> float:
    """As if one sequence more had had all its drafts right: tokens come in bursts, and a few steps may miss them."""
    num_rows = batch * len(steps)
    num_tokens = batch * sum(tokens for tokens, _ in steps) + 1 + strategy.drafts_each
    return num_tokens / (num_rows + 1) / statistics.median(seconds for _, seconds in steps)


def _size(batch: int) -> int:
    """The most sequences that are judged together with so many."""
    return 1 << (max(1, batch) - 1).bit_length()


def _error_of(values: Sequence[float]) -> float:
    """The standard error of their mean."""
    return statistics.pstdev(values) / math.sqrt(len(values))


def _plain(strategy: Strategy) -> tuple[float, int, int, int]:
    return strategy.drafts_each, strategy.min_match, strategy.depth, strategy.branches
