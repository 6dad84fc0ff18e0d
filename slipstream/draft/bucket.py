"""What is known of ways of drafting for one size of batch: what they give, what they cost, which is best. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from slipstream.draft.beliefs import Beliefs
from slipstream.engine.strategy import OFF, Strategy

WINDOW, WINDOW_ROWS, WINDOW_ALONE = 15, 192, 384
"""Steps of one way that show how it does now, and so many more in small batches that sequences and steps together make
this many; of a sequence alone still more, so that there are several texts among them."""
SETTLING = 2 * WINDOW
"""Steps after which a way that was just taken takes as long as it will."""
HOPELESS_AT_BEST = 0.97
"""A way is not even tried if it could give no more than this."""
CLEARLY = 1.03
"""So many times faster another way has to be before it takes over; to stop drafting, just faster."""
FOUND_AFTER = 3
"""Steps of a stretch that have run when the first of them is read."""
STEP_ERROR, LEAST_ERROR = 1.5, 0.03
"""Of the gain that a trial of one step of one sequence shows, and of the longest trial."""
FORESEEN_ERROR, FURTHER_ERROR = 0.1, 0.3
"""Of the gain that follows from what the best way gives, before any trial: with fewer drafts than it makes, and with
more, of which it shows nothing but how the first ones fare."""
DRIFT, TEXTS_DRIFT = 1e-6, 1.5e-6
"""Variance of gains that comes with each step, of each alone and of all together: drafters learn, and texts change."""
TEXTS = 0.15
"""Standard deviation of what the texts of one moment make drafts worth, against those of another."""
DOUBT = 0.3
"""Standard error of what drafts of any way are worth, once texts have changed."""
SURPRISE = 2.0
"""Texts have changed where a way gives so many standard errors less than it should."""
HARDLY_EVER = 0.1
"""Right drafts a step and sequence: a model with fewer is of no use to any size of batch."""
ASKED, ASKED_ROWS = 32, 32
"""Steps of ways that ask a model, the last ones, which show how often it is right; sequences in them, at least."""
FEEDING = 0.03
"""Of a step's time that a model takes which is told of it, as long as that was not measured."""
PACE = 0.05
"""Of what is known of how long steps without drafts take, with and without telling a model: the weight of the last."""
SEEN_STEPS = 4000
"""Steps after which what stretches of repeated text brought is half forgotten."""
MANY_DRAFTS, FEW_ROWS = 8, 32
"""More drafts each than this are tried with up to so many sequences only, and once half as many have proved best."""


@dataclass(slots=True)
class Seen:
    """Steps in stretches of repeated text, and elsewhere of ways that look for it: sums, for what looking is worth."""

    tokens: float = 0.0
    """A sequence; in all such steps."""
    seconds: float = 0.0
    tokens_outside: float = 0.0
    """In those outside of a stretch."""
    seconds_outside: float = 0.0
    num_steps: float = 0.0

    def add(self, tokens: float, seconds: float, is_outside: bool) -> None:
        keep = 0.5 if self.num_steps > SEEN_STEPS else 1.0
        self.num_steps = keep * self.num_steps + 1
        self.tokens, self.seconds = keep * self.tokens + tokens, keep * self.seconds + seconds
        self.tokens_outside = keep * self.tokens_outside + tokens * is_outside
        self.seconds_outside = keep * self.seconds_outside + seconds * is_outside

    def worth_of_passing_by(self) -> float:
        """Of a token outside, in those of a way that sees: less than one if stretches bring more than other texts."""
        if not self.tokens_outside:
            return 1.0
        return min(1.0, self.tokens_outside / self.seconds_outside * self.seconds / self.tokens)


@dataclass(slots=True)
class Bucket:
    """What is known of one size of batch, in stretches of repeated text or outside.

    Ways are measured at different times, and steps take longer as texts grow: so what a way costs is its time against
    that of the best way just then, and what was measured early is still right late.
    """

    ways: Sequence[Strategy]
    """That may be tried."""
    size: int
    """The most sequences."""
    is_matching: bool
    """Whether it is for stretches."""
    window: int
    """Steps that show how the best way does now."""
    seen: Seen = field(default_factory=Seen)
    """Outside only."""
    followed: float = 0.0
    """In which share of the last steps others took the slots that got free."""
    paces: dict[bool, float] = field(default_factory=dict)
    """Seconds of steps without drafts, by whether a model was told of them."""
    right: dict[Strategy, deque[float]] = field(default_factory=dict)
    """By way: right drafts a sequence in each step of its last trial; of the best one, in its last steps."""
    of_model: deque[tuple[int, float]] = field(default_factory=deque)
    """Sequences of the last steps outside of stretches that asked a model, and its right drafts, in all; stretches have
    the same, since few of their drafts are a model's."""
    beliefs: Beliefs = field(default_factory=Beliefs)
    """Of ways that were tried."""
    aged_at: int = 0
    """The step up to which doubt of them has grown."""
    costs: dict[Strategy, float] = field(default_factory=dict)
    """By way: the time of a step, in units that all ways share."""
    costs_outside: dict[Strategy, float] = field(default_factory=dict)
    """In stretches: those of ways as measured elsewhere, for ways that were never tried in one."""
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
    beaten: set[Strategy] = field(default_factory=set)
    """Ways with a model that is hardly ever right, as of the last look."""
    has_no_use_for_model: bool = False
    """Whether these are all that ask one and are not hopeless; not if it is too dear here, but right, since sequences
    may go on among fewer, where it is not."""
    asked_at: int = 0
    """The last step that asked one."""
    asked_model: int = 0
    """Which it asked."""
    left_out: set[Strategy] = field(default_factory=set)
    """Ways that could not win when their turn came; for the record, they are looked at again."""
    num_steps: int = 0
    ran_s: float = 0.0
    """All steps together."""
    saved_s: float = 0.0
    """By drafts, as estimated."""
    prepared_s: float = 0.0
    """Spent on making steps with drafts ready, which on a GPU are graphs."""
    since_trial: int = 0
    again_after: int = 0
    """Steps until drafts that were given up are tried again."""
    contender: Strategy | None = None
    """A way that was just tried, while it is seen what the best one gives after that."""

    def untried(self) -> list[Strategy]:
        most = max(MANY_DRAFTS, 2 * self.best.drafts_each)
        return [
            way
            for way in self.ways
            if way not in self.costs
            and way.drafts_each <= most
            and not self.is_beaten(way)
            and self.hope(way) >= HOPELESS_AT_BEST
        ]

    def without_model(self) -> Strategy:
        """The best way that asks none."""
        return max((way for way in self.beliefs if not way.depth), key=self.beliefs.gain, default=OFF)

    def is_beaten(self, way: Strategy) -> bool:
        """Whether a model is so seldom right that a way which asks it cannot keep up with those that do not, whatever
        is found in texts: its copies give no more than the best way gives in the time of as many copies alone. Each
        step shows that, where a comparison takes dozens. No draft is right more often than the first one, and one more
        of them counts as right."""
        if not way.depth:
            return False
        num_rows = sum(rows for rows, _ in self.of_model)
        costs = self.costs if way in self.costs or not self.costs_outside else self.costs_outside
        of_shallower = [cost for one, cost in costs.items() if 0 < one.depth <= way.depth]
        if num_rows < ASKED_ROWS or not of_shallower:
            return False
        first = self.right_of_model
        alone = [cost for one, cost in costs.items() if not one.depth and one.drafts_each == way.drafts_each]
        of_copies = max(alone) if alone else costs.get(self.without_model(), 1.0)
        least = of_copies + first * way.depth * way.branches
        return least < HOPELESS_AT_BEST * costs.get(way, min(of_shallower))

    @property
    def right_of_model(self) -> float:
        """Drafts of a model that were right, a step and sequence; one more counts as right."""
        return (sum(right for _, right in self.of_model) + 1) / max(1, sum(rows for rows, _ in self.of_model))

    def look_again(self) -> list[Strategy]:
        """Which ways are beaten by now; those that are so no longer may be anything: their model has learned. What is
        left to be tried."""
        beaten, untried = set(filter(self.is_beaten, self.ways)), self.untried()
        self.beliefs.doubt_each(FURTHER_ERROR**2, [*(self.beaten - beaten)])
        self.beaten = beaten
        is_too_dear = bool(beaten) and self.size > 1 and self.right_of_model >= HARDLY_EVER
        in_use = any(way.depth for way in (*(self.costs.keys() - beaten), *untried))
        self.has_no_use_for_model = not (in_use or is_too_dear)
        return untried

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
        tokens = max(tokens_at_best(self.right[last], last, self.size), self.tokens(last, errors=1.0))
        tokens += more * max(0.0, tokens - (self.tokens(before) if before in self.costs else 1.0))
        tokens = max(tokens, self.foreseen(way) or 0.0)
        cost = self.costs[last]
        if before != OFF:  # from none to some there is a step, which says nothing about more
            cost += more * max(0.0, cost - self.costs[before])
        return self.worth(way) * tokens / (cost * self.unit_s) / self.rate(self.best)

    def worth(self, way: Strategy) -> float:
        """Of one of its tokens."""
        return 1.0 if way.looks_for_matches else self.seen.worth_of_passing_by()

    def tokens(self, way: Strategy, errors: float = 0.0) -> float:
        """A step and sequence now; with so many standard errors more."""
        right = self.right[way]
        return 1.0 + max(0.0, statistics.fmean(right) + (errors * _error_of(right) if errors else 0.0))

    def rate(self, way: Strategy) -> float:
        """Tokens a second and sequence, as they count."""
        return self.worth(way) * self.plain_rate(way)

    def plain_rate(self, way: Strategy) -> float:
        return self.tokens(way) / (self.costs[way] * self.unit_s)

    def note_off(self, seconds: float, is_fed: bool) -> None:
        """A step without drafts took so long."""
        known_s = self.paces.get(is_fed, seconds)
        self.paces[is_fed] = known_s + PACE * (min(seconds, 2 * known_s) - known_s)  # a single one may take any time

    @property
    def feeding(self) -> float:
        """The share of a step without drafts that it takes to tell a model of it."""
        return max(0.0, 1.0 - self.paces[False] / self.paces[True]) if len(self.paces) == 2 else FEEDING

    @property
    def off_s(self) -> float:
        """Seconds of a step without drafts."""
        return self.costs[OFF] * self.unit_s

    def gain(self, way: Strategy, errors: float = 0.0) -> float:
        """Against the best way; with so many standard errors more, which grow as time goes by."""
        self._age_beliefs()
        return self.beliefs.gain(way, self.best, errors)

    def weigh(self, way: Strategy, other: Strategy) -> None:
        """One against another, by their last steps; against none, the texts of the moment have their share in it."""
        if way == OFF:
            way, other = other, way
        if way == OFF:
            return
        self._age_beliefs()
        gain = self.rate(way) / self.rate(other)
        # Not by how far steps differed: where texts are repeated they differ most, and would count least.
        num_rows = [self.size * len(self.right[one]) for one in (way, other) if one != OFF]
        variance = LEAST_ERROR**2 + sum(STEP_ERROR**2 / rows for rows in num_rows) + (TEXTS**2 if other == OFF else 0.0)
        if way not in self.beliefs:
            foreseen = self._foreseen_gain(way, other)
            self.beliefs.add(way, other, *(foreseen or (gain, variance)))
            if foreseen is None:
                return
        if other == OFF:
            expected = self.beliefs.variance(way) + variance
            if math.log(gain / self.beliefs.gain(way)) < -SURPRISE * math.sqrt(expected):
                self.beliefs.doubt_all(DOUBT**2)
        self.beliefs.compare(way, other, gain, variance)

    def _age_beliefs(self) -> None:
        num_steps, self.aged_at = self.num_steps - self.aged_at, self.num_steps
        if num_steps:
            self.beliefs.doubt_each(DRIFT * num_steps)
            self.beliefs.doubt_all(TEXTS_DRIFT * num_steps)

    def foreseen(self, way: Strategy) -> float | None:
        """Tokens a step, if it only makes more drafts than the best way or fewer, in a chain: of a sequence alone each
        step shows how many were right, and how often all were. That there were none to be had counts as wrong."""
        if self.size > 1 or self.best == OFF or way.kind != self.best.kind or way.branches > 1:
            return None
        if self.best not in self.right:
            return None
        right = self.right[self.best]
        if way.drafts_each <= self.best.drafts_each:
            return 1.0 + statistics.fmean(min(one, way.drafts_each) for one in right)
        most = max(right, default=0.0)  # what there was room for: sizes of steps are rounded
        num_full, num_right = sum(one >= most > 0 for one in right), sum(right)
        odds = (num_right + 1) / (num_right + len(right) - num_full + 2)
        further = sum(odds**index for index in range(1, int(way.drafts_each - most) + 1))
        return 1.0 + statistics.fmean(right) + num_full / len(right) * further

    def _foreseen_gain(self, way: Strategy, other: Strategy) -> tuple[float, float] | None:
        """Against the other, and the variance of its logarithm."""
        tokens = self.foreseen(way) if other == self.best else None
        if tokens is None:
            return None
        error = FORESEEN_ERROR if way.drafts_each <= other.drafts_each else FURTHER_ERROR
        return tokens / self.tokens(other) * self.costs[other] / self.costs[way], error**2

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

    def begin_as(self, outside: Bucket) -> None:
        """With the best way there that may be tried here, and its last steps, which were in the stretch already; steps
        take as long here."""
        best = outside.best
        if best not in self.ways:
            best = max((way for way in outside.beliefs if way in self.ways), key=outside.gain, default=OFF)
        for way in (OFF, best):
            if way in outside.costs:
                self.costs[way] = outside.costs[way]
                self.right[way] = deque(list(outside.right[way])[-FOUND_AFTER:], maxlen=self.window)
        self.unit_s, self.costs_outside = outside.unit_s, outside.costs
        for way in self.costs:
            self.weigh(way, OFF)
        if best in self.costs:
            self.take(best)

    def take(self, strategy: Strategy) -> None:
        """For the best from now on, at the pace of the one before."""
        self.best, self.contender = strategy, None
        self.taken_at = self.num_steps
        self.best_s.clear()
        self.best_s.append(self.costs[strategy] * self.unit_s)

    def give_up(self) -> None:
        """Drafts, which texts may soon be worth again."""
        self.take(OFF)
        self.beliefs.doubt_all(DOUBT**2)
        self.again_after = self.window

    def state_dict(self) -> dict[str, object]:
        """Numbers only. In stretches `of_model` is that of steps outside, which keep it."""
        return {
            "best": astuple(self.best),
            "seen": astuple(self.seen),
            "unit_s": self.unit_s,
            "ways": [[*astuple(way), cost, list(self.right[way])] for way, cost in self.costs.items()],
            "beliefs": self.beliefs.state_dict(),
            "of_model": [] if self.is_matching else list(map(list, self.of_model)),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Of the same size, where nothing is known yet."""
        self.unit_s, self.seen = saved["unit_s"], Seen(*saved["seen"])
        for *numbers, cost, right in saved["ways"]:
            way = Strategy(*numbers)
            if way in self.ways:
                self.costs[way], self.right[way] = cost, deque(right, maxlen=self.window)
        if OFF not in self.costs:
            return
        if "beliefs" in saved:
            self.beliefs.load_state_dict(saved["beliefs"], list(self.costs))
        for way in self.costs:
            if way not in self.beliefs:  # a contender, or all of an earlier version: by its last trial
                self.weigh(way, OFF)
        self.of_model.extend((rows, right) for rows, right in saved.get("of_model", ()))
        best = Strategy(*saved["best"])
        self.take(best if best in self.costs else OFF)


def tokens_at_best(right: Sequence[float], way: Strategy, batch: int) -> float:
    """Of steps with so many right drafts a sequence, as if one sequence more had had all its drafts right: they come in
    bursts, which a few steps may miss."""
    return 1.0 + (batch * sum(right) + way.drafts_each) / (batch * len(right) + 1)


def _error_of(values: Sequence[float]) -> float:
    """The standard error of their mean."""
    return statistics.pstdev(values) / math.sqrt(len(values))
