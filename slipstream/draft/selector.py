"""Which way of drafting pays, as measured: for each size of batch the one with which rollouts end soonest, or none.

Pure: it is told what a step did and how long it took, and says what the next one should do. A new size of batch tries
every way for a few steps, but for those that cannot win by what the others have shown; afterwards the best stays until
another is better by its trials, each against what the best gave just before and after. So drafts that do not pay cost a
step or two in a hundred.

Texts that repeat others come in stretches, in which copies are cheap and right, and a model that drafts is not: steps
in a stretch are judged apart from those outside. There, a way that looks for copies also finds the next stretch, and
what stretches bring counts against passing them by.

Where slots that get free are taken by others, that is the one that gives most tokens a second. Else a rollout takes as
long as its last sequence, mostly a hard one: the part of a step's time that a single sequence would take is over only
with that one, so for this part the tokens of those that are behind count, and for the rest those of all.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.draft.asking import FED_BEFORE, Asking
from slipstream.draft.bucket import (
    ASKED,
    CLEARLY,
    FEW_ROWS,
    HOPELESS_AT_BEST,
    MANY_DRAFTS,
    WINDOW,
    WINDOW_ALONE,
    WINDOW_ROWS,
    Bucket,
    tokens_at_best,
)
from slipstream.draft.trials import FIRST_TRIAL, TRIAL, Outlook, between_trials, find_trial
from slipstream.engine.strategy import MATCHING, OFF, Feeding, StepResult, Strategy, size_of

AFTER_ROWS, AT_ONCE = 128, 1.15
"""Steps and sequences of the best way that another is compared with after its trial, as with those before, since texts
may have been easier just then, or harder; unless it is so many times better."""
ASK_AGAIN, ASK_OTHER = 1000, 250
"""Steps after which a model that was hardly ever right is asked again; and one that has other weights since."""
PATIENCE = 4
"""Times as long a trial may become while it cannot be told whether its way is better: such a way costs hardly more."""
SURE = 0.25
"""With so many standard errors less than is believed of it, a way must still be clearly better to take over."""
HOPELESS, HOPELESS_ROWS = 0.85, 512
"""A trial ends early when its way gives less than so many times the tokens of the best, in steps and sequences that
together make so many."""
FOLLOWED, FOLLOWED_STEPS = 0.2, 500
"""Of the last steps, about so many: where in more than this share others took the slots that got free, all sequences
count alike in the other steps too. Else ways would be judged now by one measure, now by another."""

PREPARING, FIRST_SHARE = 0.03, 3.0
"""On a GPU steps of a new size need a graph. Of the time that steps of a size of batch have taken, so much may go into
preparing ways that were never tried there, and what drafts have saved: so a run that is short does not pay for others
that would have been long. So many times as much into the first, which shows whether drafts pay."""
PREPARING_STEPS, COMPILING_STEPS = 25, 100
"""As many steps a way is expected to take to prepare. What takes longer than these at once is a kernel being compiled,
which is kept on the disk and nothing that this size of batch owes."""

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
    *(Strategy(2.0, 8, 2), Strategy(4.0, 8, 4), Strategy(8.0, 8, 6), Strategy(8.0, 8, 4, 3), Strategy(16.0, 8, 5, 4)),
)
"""A short match is a poor reason to pass the model over: ways that did so at four tokens gave .81 to .98 of these in 23
of 25 comparisons, and what is so much alike takes thousands of steps to tell apart."""
TELLING = (Strategy(4.0, 8, 4), Strategy(4.0, 1), Strategy(4.0, 0, 4))
"""Show soon whether drafts pay at all."""
ASKING = "asking"
"""Beside the sizes of batch in what is saved: whether a model is left alone, and until when."""
TREE_ROWS = 8
"""Trees are tried with up to so many sequences: they verify many drafts of which most are wrong by design."""


@dataclass(frozen=True, slots=True)
class Choice:
    """For the record: what was chosen for a size of batch, and why."""

    batch: int
    strategy: Strategy
    reason: str
    is_matching: bool = False
    """Whether it is for stretches of repeated text."""


@dataclass(frozen=True, slots=True)
class Turn:
    """For the record: a model is asked from now on, or left alone, and why."""

    is_asked: bool
    reason: str


class Selector:
    def __init__(
        self,
        strategies: Sequence[Strategy] = DEFAULT_STRATEGIES,
        *,
        has_price: bool = False,
        preparing: float = PREPARING,
        has_model: bool = True,
    ) -> None:
        """`has_price`: whether a way has to be prepared before it can be tried, as on a GPU. `preparing`: of the time
        of steps, how much that may take. `has_model`: whether there is one to ask before `note_new_model`."""
        assert strategies[0] == OFF, "what must never be slower than off has to know first how fast off is"
        self.strategies, self._has_price, self._preparing = tuple(strategies), has_price, preparing
        self._buckets: dict[tuple[int, bool], Bucket] = {}
        """By the most sequences that count as this size, and whether texts repeat others."""
        self._of_model: dict[int, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=ASKED))
        """By size: how many were in each of the last steps that asked a model, and how many drafts of it were right."""
        self._model = 0
        """Which model it is that drafts: they are counted."""
        self._asking = Asking(has_model)
        self.choices: list[Choice] = []
        """Every change of the best way since they were last taken, in order."""
        self.turns: list[Turn] = []
        """And of whether a model is asked."""
        self._saved_s = 0.0

    def choose(self, batch: int, is_matching: bool = False) -> Strategy:
        """For a step of so many sequences, which were just found to repeat known texts, or not."""
        bucket = self._bucket(batch, is_matching)
        if bucket.trial is None and bucket.contender is None and bucket.since_trial % WINDOW == 0:
            found = find_trial(bucket, batch, self._outlook(bucket))
            if found is not None:
                bucket.trial, bucket.trial_length = found
        if bucket.trial is not None and bucket.trial.depth and not self._asking.is_on:
            bucket.trial, bucket.trial_steps = None, []  # it was told nothing since
        return bucket.trial or self.best(batch, is_matching)

    def feed(self, batch: int) -> Feeding:
        """What a learned drafter gets of a step of so many sequences that does not ask it: nothing while it is of no
        use, but for a while before it is asked again, so that it knows what was said last."""
        bucket = self._bucket(batch)
        if not self._asking.is_on:
            return Feeding.NOTHING
        if not bucket.has_no_use_for_model or (bucket.contender is not None and bucket.contender.depth):
            return Feeding.KEYS
        wait = max(self._wait_to_ask(bucket), between_trials(batch) - bucket.since_trial)
        return Feeding.KEYS if bucket.beaten and wait <= FED_BEFORE else Feeding.NOTHING

    def _outlook(self, bucket: Bucket) -> Outlook:
        alike = (self._buckets.get((size, bucket.is_matching)) for size in (2 * bucket.size, bucket.size // 2))
        likely = [one.best for one in alike if one is not None]
        return Outlook(
            may_ask=self._asking.may_ask,
            steps_to_ask=self._wait_to_ask(bucket),
            may_prepare=self._may_prepare(bucket),
            # Steps in stretches have the sizes of those outside, whose graphs are there.
            prepared=self._bucket(bucket.size).costs if bucket.is_matching else (),
            # Where each way has its price, those that show most come before those with few drafts.
            likely=[*likely, *TELLING] if self._has_price else likely,
        )

    def _may_prepare(self, bucket: Bucket) -> bool:
        """One more way. Where nothing has to be prepared, as on CPU, always."""
        if not self._has_price or self._preparing == math.inf:
            return True
        owed_s = bucket.prepared_s + PREPARING_STEPS * bucket.unit_s
        share = self._preparing if len(bucket.costs) > 1 else FIRST_SHARE * self._preparing
        return owed_s <= share * bucket.ran_s + max(0.0, bucket.saved_s)

    def _wait_to_ask(self, bucket: Bucket) -> int:
        """Steps until a model that was hardly ever right is asked again."""
        steps = ASK_AGAIN if bucket.asked_model == self._model else ASK_OTHER
        return bucket.asked_at + steps - bucket.num_steps

    def _uses_model(self) -> bool:
        return any(bucket.best.depth for bucket in self._buckets.values())

    def note_new_model(self) -> None:
        """The learned drafter has other weights from now on."""
        self._model += 1
        was_asked = self._asking.is_on
        self._asking.note_model()
        if not was_asked and self._asking.is_on:
            self.turns.append(Turn(True, "it has been taught"))

    def observe_preparing(self, batch: int, seconds: float, is_matching: bool = False) -> None:
        """A step with drafts took so much longer, because it was the first of its size."""
        bucket = self._bucket(batch, is_matching)
        bucket.prepared_s += min(seconds, COMPILING_STEPS * bucket.unit_s)

    def observe(self, step: StepResult) -> None:
        """A step that only decoded."""
        batch, strategy, is_matching = step.batch, step.strategy, step.is_matching
        bucket = self._bucket(batch, is_matching)
        counted_tokens, seconds = self._counted_tokens(step, bucket), step.seconds
        if strategy not in bucket.ways:
            return  # chosen for more sequences than then ran
        bucket.ran_s += seconds
        reason = self._asking.note_step(bucket.size, seconds, self._uses_model)
        if reason is not None:
            self.turns.append(Turn(self._asking.is_on, reason))
        if step.of_model is not None and not is_matching:
            if bucket.asked_model != self._model:
                bucket.of_model.clear()  # another was right or wrong
            if bucket.trial != strategy or bucket.trial_steps:  # before the first of a trial it was not ready
                bucket.of_model.append((batch, batch * step.of_model))
            bucket.asked_at, bucket.asked_model = bucket.num_steps, self._model
        can_tell = strategy != OFF and OFF in bucket.costs
        saved_s = counted_tokens / bucket.plain_rate(OFF) - seconds if can_tell else 0.0
        self._saved_s, bucket.saved_s = self._saved_s + saved_s, bucket.saved_s + saved_s
        if strategy == OFF:
            self._bucket(batch).note_off(seconds, step.is_fed)
        if step.is_fed or strategy.depth:
            # What the best way that asks no model would have taken; less, if it had not been told of it either.
            alone_s = (seconds + saved_s) / bucket.beliefs.gain(bucket.without_model()) if strategy.depth else seconds
            self._asking.note_gain((1.0 - self._bucket(batch).feeding) * alone_s - seconds)
        if is_matching or strategy.looks_for_matches:
            self._bucket(batch).seen.add(counted_tokens, seconds, not is_matching)
        bucket.num_steps, bucket.since_trial = bucket.num_steps + 1, bucket.since_trial + 1
        if bucket.trial != strategy:
            if strategy == bucket.best and strategy in bucket.costs:
                bucket.follow_best(counted_tokens, seconds)
                # Before drafts are weighed against none, since the best way would then be another.
                after = min(bucket.window, max(TRIAL, AFTER_ROWS // max(1, batch)))
                if bucket.contender is not None and bucket.since_trial >= after:
                    self._settle(batch, bucket, bucket.contender)
                if bucket.since_trial % bucket.window == 0:
                    self._guard(batch, bucket)
            return
        bucket.trial_steps.append((counted_tokens, seconds))
        counted = bucket.trial_steps[1:]  # the first may have prepared the others
        lengths, rest = divmod(len(counted), bucket.trial_length)
        is_over = lengths > 0 and rest == 0 and (lengths == PATIENCE or not bucket.is_open(strategy, counted))
        enough = min(FIRST_TRIAL, bucket.trial_length) - 1, HOPELESS_ROWS // batch
        if len(counted) >= max(2, min(enough)) and bucket.best in bucket.costs:
            tokens = tokens_at_best([one - 1.0 for one, _ in counted], strategy, batch)
            took_s = statistics.median(step_s for _, step_s in counted)
            is_over |= bucket.worth(strategy) * tokens / took_s < HOPELESS * bucket.rate(bucket.best)
        if is_over:
            bucket.learn(strategy, counted)
            bucket.trial, bucket.trial_steps, bucket.since_trial = None, [], 0
            gain = bucket.rate(strategy) / bucket.rate(bucket.best)
            if gain > AT_ONCE or gain < HOPELESS or strategy == OFF:
                self._settle(batch, bucket, strategy)
            else:
                bucket.contender = strategy
            self._note_hopeless(batch, bucket)

    def _counted_tokens(self, step: StepResult, bucket: Bucket) -> float:
        """A step and sequence: those of all, or partly of those behind, if it is known what fewer sequences take."""
        bucket.followed += (step.others_follow - bucket.followed) / FOLLOWED_STEPS
        if step.others_follow or step.tokens_behind is None or bucket.followed > FOLLOWED:
            return step.tokens_each
        known = (size for (size, is_matching), one in self._buckets.items() if not is_matching and OFF in one.costs)
        fewest, share = min(known, default=bucket.size), 0.0
        if fewest < bucket.size and OFF in bucket.costs:
            share = min(1.0, self._bucket(fewest).off_s / bucket.off_s)
        return share * step.tokens_behind + (1.0 - share) * step.tokens_each

    def take_choices(self) -> list[Choice]:
        choices, self.choices = self.choices, []
        return choices

    def take_turns(self) -> list[Turn]:
        turns, self.turns = self.turns, []
        return turns

    def take_saved_s(self) -> float:
        """By drafts since this was last asked, as estimated: what these tokens would have taken without, as they count,
        at the rates measured."""
        saved_s, self._saved_s = self._saved_s, 0.0
        return saved_s

    def has_tried_all(self, batch: int) -> bool:
        bucket = self._bucket(batch)
        return bucket.trial is None and not bucket.untried()

    def best(self, batch: int, is_matching: bool = False) -> Strategy:
        """What has proved best so far; without a model while it is told nothing."""
        bucket = self._bucket(batch, is_matching)
        return bucket.best if self._asking.may_ask or not bucket.best.depth else bucket.without_model()

    def rates(self, batch: int) -> dict[Strategy, float]:
        """Tokens a second and sequence, as they count, by way, where they were measured."""
        bucket = self._bucket(batch)
        return {strategy: bucket.plain_rate(strategy) for strategy in bucket.costs}

    def state_dict(self) -> dict[str, object]:
        """Numbers and strings only, for a checkpoint."""
        buckets = {
            f"{size} {'matching' if is_matching else 'plain'}": bucket.state_dict()
            for (size, is_matching), bucket in self._buckets.items()
            if OFF in bucket.costs  # else hardly anything is known
        }
        return {**buckets, ASKING: self._asking.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        for name, saved in state.items():
            assert isinstance(saved, dict)
            if name == ASKING:
                self._asking.load_state_dict(saved)
            elif "seen" in saved:  # else of a version that judged all texts together: it is learned anew
                size, scene = name.split()
                bucket = self._new_bucket(int(size), scene == "matching")
                bucket.load_state_dict(saved)
                if OFF in bucket.costs:  # else hardly anything was known
                    self._buckets[bucket.size, bucket.is_matching] = bucket
        for bucket in list(self._buckets.values()):
            if bucket.is_matching:
                bucket.costs_outside = self._bucket(bucket.size).costs

    def _bucket(self, batch: int, is_matching: bool = False) -> Bucket:
        size = size_of(batch)
        if (size, is_matching) not in self._buckets:
            self._buckets[size, is_matching] = bucket = self._new_bucket(size, is_matching)
            if is_matching:
                was_in_use = self._uses_model()
                bucket.begin_as(self._bucket(size))
                if bucket.best.depth and not was_in_use:
                    self._asking.note_use()
        return self._buckets[size, is_matching]

    def ways(self, batch: int) -> list[Strategy]:
        """All that may be chosen for so many sequences."""
        size = size_of(batch)
        return [
            way
            for way in self.strategies
            if size <= (TREE_ROWS if way.branches > 1 else FEW_ROWS)
            or (way.drafts_each <= MANY_DRAFTS and way.branches == 1)
        ]

    def _new_bucket(self, size: int, is_matching: bool) -> Bucket:
        ways = [
            way
            for way in self.ways(size)
            # Fewer drafts would not show that a stretch goes on; where texts are repeated nobody looks for others, and
            # one who repeats a text alone has no use for a model.
            if not (is_matching and 0 < way.drafts_each < MATCHING)
            and not (is_matching and (way.branches > 1 or (size == 1 and way.depth)))
        ]
        window = WINDOW_ALONE if size == 1 else max(WINDOW, WINDOW_ROWS // size)
        has_model = any(way.depth for way in ways)
        return Bucket(
            ways, size, is_matching, window, of_model=self._of_model[size], has_no_use_for_model=not has_model
        )

    def _settle(self, batch: int, bucket: Bucket, way: Strategy) -> None:
        """Between the best way and another, which has just been tried and must be faster at worst."""
        if way == bucket.contender:
            bucket.contender = None
        if way not in bucket.costs:
            return
        bucket.weigh(way, bucket.best)
        if way == bucket.best or bucket.is_beaten(way):
            return
        if bucket.gain(OFF) > 1.0 if way == OFF else bucket.gain(way, errors=-SURE) > CLEARLY:
            reason = f"{way} gives {bucket.gain(way):.2f} times the tokens of {bucket.best}"
            self.choices.append(Choice(batch, way, reason, bucket.is_matching))
            if way.depth and not self._uses_model():
                self._asking.note_use()
            bucket.take(way)

    def _guard(self, batch: int, bucket: Bucket) -> None:
        """Texts may have changed, but not what no drafts give. A quiet while is no reason to stop looking for stretches
        that have paid so far, unless it is dear."""
        if bucket.best == OFF:
            return
        if bucket.is_beaten(bucket.best):
            way = bucket.without_model()
            reason = f"{way} costs less than {bucket.best}, whose model is hardly ever right"
            self.choices.append(Choice(batch, way, reason, bucket.is_matching))
            bucket.take(way)
            return
        bucket.weigh(bucket.best, OFF)
        if bucket.gain(OFF) > 1.0:
            reason = f"off gives {bucket.gain(OFF):.2f} times the tokens of {bucket.best}"
            self.choices.append(Choice(batch, OFF, reason, bucket.is_matching))
            bucket.give_up()

    def _note_hopeless(self, batch: int, bucket: Bucket) -> None:
        for way in bucket.ways:
            if way not in bucket.costs and way not in bucket.left_out and bucket.hope(way) < HOPELESS_AT_BEST:
                bucket.left_out.add(way)
                reason = f"{way} is not tried: {bucket.hope(way):.2f} times the tokens of this at best"
                self.choices.append(Choice(batch, bucket.best, reason, bucket.is_matching))


class Fixed(Selector):
    """One way throughout, for measurements: with as many sequences as it is made for, once there is a model if it asks
    one. It is never given up, and nothing is learned of it: what a checkpoint knows of others stays."""

    def __init__(self, way: Strategy, *, has_price: bool = False, has_model: bool = True) -> None:
        super().__init__((OFF, way), has_price=has_price, has_model=has_model)
        self._way, self._may_run = way, has_model or not way.depth

    def choose(self, batch: int, is_matching: bool = False) -> Strategy:
        return self.best(batch, is_matching)

    def best(self, batch: int, is_matching: bool = False) -> Strategy:
        return self._way if self._may_run and self._way in self.ways(batch) else OFF

    def feed(self, batch: int) -> Feeding:
        return Feeding.KEYS if self._may_run and self._way.depth else Feeding.NOTHING

    def note_new_model(self) -> None:
        self._may_run = True

    def observe(self, step: StepResult) -> None:
        pass

    def observe_preparing(self, batch: int, seconds: float, is_matching: bool = False) -> None:
        pass
