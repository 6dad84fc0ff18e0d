"""How a fleet is led: choices by name, so that they can be compared. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.schedule.dispatch import DISPATCHES, Dispatch
from slipstream.schedule.tiers import equal_tiers, two_tiers

PLACEMENTS: dict[str, Dispatch | None] = {
    "least load": None,
    **DISPATCHES,
    "ranking groups": equal_tiers,
    "two tiers": two_tiers,
}
"""How the rollouts of a step come to workers: all by a plan when the step opens, or (None) one by one, the longest
first, to whoever would be done first."""
TAILS = {
    "whole": "every rollout ends where it began",
    "move": "a worker without work takes half of what the most crowded one has",
    "chunks": "after every CHUNK tokens a rollout goes where it would be faster, if that is anywhere",
    "carry": "groups that are not done when CARRIED of a step are left go on in the next step",
    "outliers": "of these, only groups with a rollout that is GROWTH times as long as forecast; others are moved",
    "oversample": "OVERSAMPLED of the next step's groups are begun too; the first that are done make up the step",
}
CARRYING = {"carry", "outliers", "oversample"}
"""Tails with which a group may be trained a step later than it was asked for."""
MOVING = {"move", "outliers"}


def oldest_version(step: int, staleness: int) -> int:
    """The rule of staleness, which whoever begins a rollout keeps: what is trained in a step was begun with the weights
    of this version, or newer ones. Version v is that after step v."""
    return max(0, step - 1 - staleness)


@dataclass(frozen=True, slots=True)
class Rules:
    placement: str = "least load"
    tail: str = "whole"
    staleness: int = 0
    mixes_steps: bool = True
    """A worker with free slots takes up the next step beside the one it has; else, as published systems do, once it is
    done with its share of that."""
    lends_idle: bool = False
    """Workers without work are lent, to train a drafter, until there is some."""

    def __post_init__(self) -> None:
        for name, known in (("placement", PLACEMENTS), ("tail", TAILS)):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} '{getattr(self, name)}'; known: {', '.join(known)}")
        if self.carries and not self.staleness:
            raise ValueError(f"tail '{self.tail}' trains rollouts a step late: it needs a staleness of 1 or more")
        if self.tail == "oversample" and not self.mixes_steps:
            raise ValueError("tail 'oversample' samples for two steps at once: it needs mixes_steps")

    @property
    def carries(self) -> bool:
        return self.tail in CARRYING

    @property
    def moves(self) -> bool:
        return self.tail in MOVING


MODES: dict[str, Rules] = {
    "sync": Rules(tail="move"),
    "async": Rules(tail="move", staleness=1),
    "rhyme": Rules("two tiers", "move", staleness=1, mixes_steps=False),
}
"""By the recipe's mode, where sampling has workers of its own."""
