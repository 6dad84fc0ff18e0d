"""When a way of drafting is tried for one size of batch, which, and for how many steps. Pure.

A new size tries what nothing speaks against; then whatever is better by what is known; and now and then each of the
others, the less it loses the sooner, so that trials cost a fixed share of all steps.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from slipstream.draft.bucket import CLEARLY, Bucket
from slipstream.engine.strategy import OFF, Strategy

FIRST_TRIAL, FIRST_TRIAL_ROWS = 6, 64
"""Steps in a row that count at the first trial of a way."""
TRIAL, TRIAL_ROWS, BETWEEN_TRIALS = 5, 32, 15
"""Afterwards: steps of a way that is not the best, and how many times as many are between two such trials at least."""
TRIAL_COST = 0.005
"""Of all steps: the slower a way was, the longer it waits for its next trial, so that trials cost no more than this."""
MOST_BETWEEN = 500
"""Steps in which one way is tried again, bad as all may have been: a drafter learns."""
LEAST_LOSS = 0.25
"""Steps that any trial may lose."""
OUTDATED = 3
"""Times as much may a trial cost of a way that has not been tried since the best way changed."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What matters for a trial and is not of this size of batch alone."""

    may_ask: bool
    """Whether a model may be asked in the next step."""
    steps_to_ask: int
    """Until one that was hardly ever right is asked again."""
    may_prepare: bool
    """Whether there is time to make a way ready that was never tried here."""
    prepared: Container[Strategy]
    """Ways that are ready all the same."""
    likely: Sequence[Strategy]
    """To be the best, in order, as elsewhere."""


def trial_length(batch: int) -> int:
    return max(TRIAL, TRIAL_ROWS // max(1, batch))


def between_trials(batch: int) -> int:
    return BETWEEN_TRIALS * trial_length(batch)


def find_trial(bucket: Bucket, batch: int, outlook: Outlook) -> tuple[Strategy, int] | None:
    """A way that is due, if any, and the steps that are to count."""
    batch, had_no_use = max(1, batch), bucket.has_no_use_for_model
    # A model that was told nothing is first told what is said, until the next look.
    untried = [way for way in bucket.look_again() if not way.depth or (outlook.may_ask and not had_no_use)]
    ready = [way for way in untried if way in outlook.prepared]
    if not bucket.costs or ready or (untried and outlook.may_prepare):
        # Between two of them the best way shows how long steps take by now.
        if bucket.costs and not bucket.since_trial:
            return None
        way = _likeliest(ready or untried, outlook.likely) if bucket.costs else OFF
        return way, max(FIRST_TRIAL, FIRST_TRIAL_ROWS // batch)
    again = _find_known(bucket, batch, outlook)
    return None if again is None else (again, trial_length(batch))


def _likeliest(untried: Sequence[Strategy], likely: Sequence[Strategy]) -> Strategy:
    """Else there is an order, from few drafts to many."""
    return next((way for way in likely if way in untried), untried[0])


def _find_known(bucket: Bucket, batch: int, outlook: Outlook) -> Strategy | None:
    """Among the ways that were tried before."""
    known, between = bucket.costs.keys() - bucket.beaten - {bucket.best}, between_trials(batch)
    others = [way for way in bucket.costs if way in known and (outlook.may_ask or not way.depth)]
    promising = max(others, key=bucket.gain, default=bucket.best)
    if bucket.since_trial and bucket.gain(promising) > CLEARLY:
        return promising  # better by what is known, if not for certain
    was_given_up = bucket.best == OFF and 0 < bucket.again_after < between
    if others and was_given_up and bucket.since_trial >= bucket.again_after:
        bucket.again_after *= 2
        return promising  # given up a moment ago: hard texts may have been few
    if bucket.since_trial < between:
        return None
    beaten = bucket.beaten & bucket.costs.keys()
    if outlook.may_ask and beaten and not bucket.is_matching and outlook.steps_to_ask <= 0:
        return max(beaten, key=bucket.gain)
    return _find_due(bucket, batch, others) if others else None


def _find_due(bucket: Bucket, batch: int, others: Sequence[Strategy]) -> Strategy | None:
    # Steps that a trial loses, if the way is as good as it may be by what is known: one that looked bad by chance
    # is soon tried again. Those that lose little have more trials, so that all together cost what they may.
    hopes = {way: bucket.gain(way, errors=1.0) for way in others}
    losses = {way: max(LEAST_LOSS, trial_length(batch) * (1 / hopes[way] - 1)) for way in others}
    shares = sum(1 / loss for loss in losses.values())

    def waited(way: Strategy) -> float:
        """Steps since its last trial, in those it should wait."""
        tried_at = bucket.tried_at.get(way, 0)
        # What was tried against another best way, on the texts of that time, says less.
        trial_cost = TRIAL_COST if tried_at > bucket.taken_at else OUTDATED * TRIAL_COST
        wait = min(MOST_BETWEEN * len(others), losses[way] ** 2 * shares / trial_cost)
        return (bucket.num_steps - tried_at) / max(between_trials(batch), wait)

    way = max(others, key=lambda one: (waited(one), hopes[one]))
    return way if waited(way) >= 1 else None
