"""Which way of drafting pays, as measured: for each size of batch the one that gives most tokens a second, or none.

Pure: it is told what a step did and how long it took, and says what the next one should do. A new size of batch tries
every way for a few steps, from few drafts to many, but for those that cannot win by what the others have shown;
afterwards the best stays until another is clearly better, and the others are tried again, rarely, since texts change.
Ways are compared by what they give on the same texts, as near as can be: some texts are easy to draft for all of them.
So drafting that does not pay costs a step or two in a hundred.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from slipstream.engine.strategy import OFF, Strategy

WINDOW, WINDOW_ROWS = 15, 192
"""Steps of one way that show how it does now, and so many more in small batches that sequences and steps together make
this many: with drafts a single sequence has one token in most steps and many in some."""
FIRST_TRIAL, FIRST_TRIAL_ROWS = 6, 64
"""Steps in a row that count at the first trial of a way."""
TRIAL, TRIAL_ROWS, BETWEEN_TRIALS = 5, 32, 150
"""Afterwards: steps of a way that is not the best, and the least number of steps between two such trials."""
PATIENCE = 4
"""Times as long a trial may become while it cannot be told whether its way is better: such a way costs hardly more."""
LEAST_EASE = 0.01
"""Texts of which nothing can be drafted say nothing about ways."""
OWN_WINDOWS = 2
"""For so long what the best way gives says more about it, which may have been lucky in its trial, than about texts."""
REMEMBERED = 8
"""Trials of a way that count."""
TRIAL_COST = 0.005
"""Of all steps: the slower a way was, the longer it waits for its next trial, so that trials cost no more than this."""
SETTLING = 2 * WINDOW
"""Steps after which a way that was just taken takes as long as it will."""
HOPELESS = 0.85
"""A trial ends early when its way gives less than so many times the tokens of the best."""
HOPELESS_AT_BEST = 0.97
"""A way is not even tried if it could give no more than this."""
CLEARLY = 1.03
"""So many times faster another way has to be before it takes over; to stop drafting, just faster."""


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
    *(Strategy(2.0, 4, 2), Strategy(4.0, 4, 4), Strategy(8.0, 4, 6), Strategy(2.0, 0, 2), Strategy(4.0, 0, 4)),
    *(Strategy(8.0, 4, 4, 3), Strategy(16.0, 4, 5, 4)),
)
"""A short match is a poor reason to pass the model over: one token in common says less than it does."""
TREE_ROWS = 8
"""Trees are tried with up to so many sequences: they verify many drafts of which most are wrong by design."""
MANY_DRAFTS, FEW_ROWS = 8, 32
"""More drafts each than this are tried with up to so many sequences only, and once half as many have proved best."""


@dataclass(slots=True)
class _Gain:
    """What a way's steps gave, and how easy texts were then: sums."""

    num_steps: float = 0.0
    right: float = 0.0
    """Drafts, a sequence and step."""
    squares: float = 0.0
    ease: float = 0.0

    def add(self, right: float, ease: float) -> None:
        self.num_steps += 1
        self.right += right
        self.squares += right * right
        self.ease += ease

    def fade(self, num_steps: float) -> None:
        """To what so many steps say."""
        if self.num_steps > num_steps:
            share = num_steps / self.num_steps
            self.num_steps, self.right, self.squares, self.ease = (
                share * one for one in (self.num_steps, self.right, self.squares, self.ease)
            )

    def mean(self, errors: float = 0.0) -> float:
        """Right drafts for each unit of ease; with so many standard errors more."""
        right = self.right / self.num_steps
        if errors:
            right += errors * math.sqrt(max(0.0, self.squares / self.num_steps - right * right) / self.num_steps)
        return max(0.0, right) * self.num_steps / self.ease


@dataclass(slots=True)
class _Bucket:
    """What is known of one size of batch.

    Ways are measured at different times. Steps take longer as texts grow, and some texts are easy to draft for every
    way: so what a way costs and gives is its time and its right drafts against those of the best way just then, and
    what was measured early is still right late.
    """

    ways: Sequence[Strategy]
    """That may be tried."""
    window: int
    """Steps that show how the best way does now."""
    gains: dict[Strategy, _Gain] = field(default_factory=dict)
    ease: float = 1.0
    """Right drafts of a unit now."""
    costs: dict[Strategy, float] = field(default_factory=dict)
    """By way: the time of a step, in units that all ways share."""
    unit_s: float = 0.0
    """Seconds of a unit now."""
    best: Strategy = OFF
    taken_at: int = -SETTLING
    """The step since which it is."""
    best_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Seconds of the last steps of the best way."""
    best_right: deque[float] = field(default_factory=deque)
    """And its right drafts a sequence, of so many steps as a window has."""
    trial: Strategy | None = None
    trial_length: int = 0
    trial_steps: list[tuple[float, float]] = field(default_factory=list)
    """Tokens a sequence, and seconds."""
    tried_at: dict[Strategy, int] = field(default_factory=dict)
    """By way: the step of its last trial since the best way changed, which says that texts have."""
    left_out: set[Strategy] = field(default_factory=set)
    """Ways that could not win when their turn came; for the record, they are looked at again."""
    num_steps: int = 0
    since_trial: int = 0

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
        return tokens / (cost * self.unit_s) / self.rate(self.best)

    def tokens(self, way: Strategy, errors: float = 0.0) -> float:
        """A step and sequence now; with so many standard errors more."""
        return 1.0 + self.gains[way].mean(errors) * self.ease

    def rate(self, way: Strategy, errors: float = 0.0) -> float:
        """Tokens a second and sequence."""
        return self.tokens(way, errors) / (self.costs[way] * self.unit_s)

    def follow_texts(self, tokens: float) -> None:
        """A step of the best way gave a sequence so many."""
        self.best_right.append(tokens - 1.0)
        if len(self.best_right) > self.window:
            self.best_right.popleft()
        if self.num_steps - self.taken_at <= OWN_WINDOWS * self.window:
            self.gains[self.best].add(tokens - 1.0, self.ease)
        else:
            self.look_at_texts()

    def look_at_texts(self) -> None:
        gain = self.gains[self.best]
        if len(self.best_right) == self.window and gain.right > 0:
            self.ease = max(LEAST_EASE, sum(self.best_right) / self.window / gain.mean())

    def follow_pace(self, seconds: float) -> None:
        """A step of the best way took so long: at first that says more about the way, whose steps come to be as large
        as its drafts need, and later about the time."""
        self.best_s.append(seconds)
        if self.num_steps - self.taken_at <= SETTLING:
            self.costs[self.best] = statistics.median(self.best_s) / self.unit_s
        else:
            self.unit_s = statistics.median(self.best_s) / self.costs[self.best]

    def learn(self, strategy: Strategy, steps: Sequence[tuple[float, float]]) -> None:
        """What a trial showed. The first way of all makes the unit."""
        gain = self.gains.setdefault(strategy, _Gain())
        gain.fade((REMEMBERED - 1) * len(steps))
        for tokens, _ in steps:
            gain.add(tokens - 1.0, self.ease)
        typical_s = statistics.median(seconds for _, seconds in steps)  # a single step may take any time
        self.unit_s = self.unit_s or typical_s
        self.costs[strategy] = typical_s / self.unit_s
        self.tried_at[strategy] = self.num_steps

    def is_open(self, steps: Sequence[tuple[float, float]]) -> bool:
        """Whether a way with these steps may, within a standard error, be good enough to take over, and may be not."""
        if self.best not in self.costs:
            return False
        tokens, took_s = [one for one, _ in steps], statistics.median(seconds for _, seconds in steps)
        needed = CLEARLY * self.rate(self.best) * took_s
        return abs(statistics.fmean(tokens) - needed) < _error_of(tokens)

    def take(self, strategy: Strategy) -> None:
        """For the best from now on, at the pace of the one before. If it is not to draft, texts have changed, or the
        model that drafts: what ways gave against each other will then be measured anew."""
        if strategy == OFF:
            self.look_at_texts()
            for gain in self.gains.values():
                gain.fade(1.0)
        self.best = strategy
        self.taken_at = self.num_steps
        self.tried_at.clear()
        self.best_right.clear()
        self.best_s.clear()
        self.best_s.append(self.costs[strategy] * self.unit_s)


@dataclass(frozen=True, slots=True)
class Choice:
    """For the record: what was chosen for a size of batch, and why."""

    batch: int
    strategy: Strategy
    reason: str


class Selector:
    def __init__(self, strategies: Sequence[Strategy] = DEFAULT_STRATEGIES) -> None:
        assert strategies[0] == OFF, "what must never be slower than off has to know first how fast off is"
        self._strategies = tuple(strategies)
        self._buckets: dict[int, _Bucket] = {}
        self.choices: list[Choice] = []
        """Every change of the best way since they were last taken, in order."""
        self.saved_s = 0.0
        """By drafts, as estimated: what the same tokens would have taken without, at the rates measured."""

    def choose(self, batch: int) -> Strategy:
        """For a step of so many sequences."""
        bucket = self._bucket(batch)
        if bucket.trial is None and bucket.since_trial % WINDOW == 0:
            self._consider_trial(bucket, max(1, batch))
        return bucket.trial or bucket.best

    def _consider_trial(self, bucket: _Bucket, batch: int) -> None:
        untried = bucket.untried()
        if untried:
            # Between two of them the best way shows how long steps take by now.
            if bucket.since_trial or not bucket.costs:
                bucket.trial, bucket.trial_length = untried[0], max(FIRST_TRIAL, FIRST_TRIAL_ROWS // batch)
            return
        if bucket.since_trial < BETWEEN_TRIALS:
            return
        others = [strategy for strategy in bucket.costs if strategy != bucket.best]
        length, best_rate = max(TRIAL, TRIAL_ROWS // batch), bucket.rate(bucket.best)
        # At best, by what is known of them: a way that looked bad by chance is soon tried again.
        hopes = {strategy: bucket.rate(strategy, errors=1.0) for strategy in others}

        def is_due(strategy: Strategy) -> float:
            """From 1 on: steps since its last trial, against those it should wait."""
            lost = length * max(0.0, best_rate / hopes[strategy] - 1)
            wait = max(BETWEEN_TRIALS, lost * len(others) / TRIAL_COST)
            if strategy not in bucket.tried_at:
                return (bucket.num_steps - bucket.taken_at) / BETWEEN_TRIALS
            return (bucket.num_steps - bucket.tried_at[strategy]) / wait

        if others:
            strategy = max(others, key=lambda one: (is_due(one), hopes[one]))
            if is_due(strategy) >= 1:
                bucket.trial, bucket.trial_length = strategy, length

    def observe(self, batch: int, strategy: Strategy, tokens_each: float, seconds: float) -> None:
        """A step of `batch` sequences and nothing else gave each so many tokens on average, in `seconds`."""
        bucket = self._bucket(batch)
        if strategy not in bucket.ways:
            return  # chosen for fewer sequences than were then seated
        if OFF in bucket.costs and strategy != OFF:
            self.saved_s += tokens_each / bucket.rate(OFF) - seconds
        bucket.num_steps += 1
        bucket.since_trial += 1
        if bucket.trial != strategy:
            if strategy == bucket.best and strategy in bucket.costs:
                bucket.follow_pace(seconds)
                bucket.follow_texts(tokens_each)
                if bucket.since_trial % bucket.window == 0:
                    self._settle(batch, bucket)  # texts may have changed: what was best may be so no longer
            return
        bucket.trial_steps.append((tokens_each, seconds))
        counted = bucket.trial_steps[1:]  # the first may have prepared the others
        lengths, rest = divmod(len(counted), bucket.trial_length)
        is_over = lengths > 0 and rest == 0 and (lengths == PATIENCE or not bucket.is_open(counted))
        if len(counted) >= min(FIRST_TRIAL, bucket.trial_length) - 1 and bucket.best in bucket.costs:
            is_over |= _rate_at_best(counted, strategy, batch) < HOPELESS * bucket.rate(bucket.best)
        if is_over:
            bucket.learn(strategy, counted)
            bucket.trial, bucket.trial_steps, bucket.since_trial = None, [], 0
            self._settle(batch, bucket)
            self._note_hopeless(batch, bucket)

    def take_choices(self) -> list[Choice]:
        choices, self.choices = self.choices, []
        return choices

    def has_tried_all(self, batch: int) -> bool:
        bucket = self._bucket(batch)
        return bucket.trial is None and not bucket.untried()

    def best(self, batch: int) -> Strategy:
        """What has given most tokens a second so far."""
        return self._bucket(batch).best

    def rates(self, batch: int) -> dict[Strategy, float]:
        """Tokens a second and sequence, by way, where they were measured."""
        bucket = self._bucket(batch)
        return {strategy: bucket.rate(strategy) for strategy in bucket.costs}

    def state_dict(self) -> dict[str, object]:
        """Numbers and strings only, for a checkpoint."""
        return {
            str(size): {
                "best": _plain(bucket.best),
                "unit_s": bucket.unit_s,
                "ease": bucket.ease,
                "ways": [[*_plain(way), cost, astuple(bucket.gains[way])] for way, cost in bucket.costs.items()],
            }
            for size, bucket in self._buckets.items()
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        for size, saved in state.items():
            assert isinstance(saved, dict)
            if "ease" not in saved:
                continue  # of a version that kept times or tokens, which say nothing later: it is learned anew
            bucket = self._bucket(int(size))
            bucket.unit_s, bucket.ease = saved["unit_s"], saved["ease"]
            for *numbers, cost, gain in saved["ways"]:
                strategy = Strategy(*numbers)
                if strategy in bucket.ways:
                    bucket.costs[strategy], bucket.gains[strategy] = cost, _Gain(*gain)
            best = Strategy(*saved["best"])
            if best in bucket.costs:
                bucket.take(best)

    def _bucket(self, batch: int) -> _Bucket:
        size = 1 << (max(1, batch) - 1).bit_length()
        if size not in self._buckets:
            window = max(WINDOW, WINDOW_ROWS // size)
            ways = [
                way
                for way in self._strategies
                if size <= (TREE_ROWS if way.branches > 1 else FEW_ROWS)
                or (way.drafts_each <= MANY_DRAFTS and way.branches == 1)
            ]
            self._buckets[size] = _Bucket(ways, window)
        return self._buckets[size]

    def _settle(self, batch: int, bucket: _Bucket) -> None:
        """Another way must be faster at worst, by what is known of it."""
        best_rate = bucket.rate(bucket.best)
        needed = {way: 1.0 if way == OFF else CLEARLY for way in bucket.costs if way != bucket.best}
        margins = {way: bucket.rate(way, errors=-0.5) / best_rate - need for way, need in needed.items()}
        fastest = max(margins, key=lambda way: margins[way], default=bucket.best)
        if margins.get(fastest, 0.0) > 0:
            gain = bucket.rate(fastest) / best_rate
            self.choices.append(Choice(batch, fastest, f"{fastest} gives {gain:.2f} times the tokens of {bucket.best}"))
            bucket.take(fastest)

    def _note_hopeless(self, batch: int, bucket: _Bucket) -> None:
        for way in bucket.ways:
            if way not in bucket.costs and way not in bucket.left_out and bucket.hope(way) < HOPELESS_AT_BEST:
                bucket.left_out.add(way)
                reason = f"{way} is not tried: {bucket.hope(way):.2f} times the tokens of this at best"
                self.choices.append(Choice(batch, bucket.best, reason))


def _rate_at_best(steps: Sequence[tuple[float, float]], strategy: Strategy, batch: int) -> float:
    """As if one sequence more had had all its drafts right: tokens come in bursts, and a few steps may miss them."""
    num_rows = batch * len(steps)
    num_tokens = batch * sum(tokens for tokens, _ in steps) + 1 + strategy.drafts_each
    return num_tokens / (num_rows + 1) / statistics.median(seconds for _, seconds in steps)


def _error_of(values: Sequence[float]) -> float:
    """The standard error of their mean."""
    return statistics.pstdev(values) / math.sqrt(len(values))


def _plain(strategy: Strategy) -> tuple[float, int, int, int]:
    return strategy.drafts_each, strategy.min_match, strategy.depth, strategy.branches
