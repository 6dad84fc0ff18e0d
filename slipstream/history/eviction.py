"""Which prompts are forgotten when the history outgrows its disk: the one place that knows the rule. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NO_SPREAD_AGEING = 2
"""A prompt whose rewards are all alike counts as so many times older than it is."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prompt that may have to go."""

    prompt_id: int
    age: int
    """Rollouts of any prompt that were added since this one's newest."""
    num_bytes: int
    has_spread: bool


def choose_evictions(candidates: Iterable[Candidate], bytes_to_free: int) -> list[int]:
    """Ids of the prompts to forget, oldest first, until `bytes_to_free` are free. A prompt whose rewards have no spread
    (all right, all wrong or none known) gives no gradient and is drawn less often, so it goes before all that are less
    than twice as old."""
    chosen = []
    for prompt in sorted(candidates, key=_apparent_age, reverse=True):
        if bytes_to_free <= 0:
            break
        chosen.append(prompt.prompt_id)
        bytes_to_free -= prompt.num_bytes
    return chosen


def _apparent_age(prompt: Candidate) -> int:
    return prompt.age if prompt.has_spread else NO_SPREAD_AGEING * prompt.age
