"""Workloads for measuring drafts: what is to be sampled, and what the history holds of it. Pure.

A workload is replayed: the engine walks its texts at the full cost of sampling them, so that any model shape can be
timed with texts of any likeness to their history.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from slipstream.rng import derive_seed, keyed_random

PROMPT_TOKENS = 24
GROUP = 8
"""Samples of a prompt."""
FEW_KINDS = 32
"""Kinds of tokens in adversarial texts: so few that something always matches and is wrong."""


@dataclass(frozen=True, slots=True)
class ReplayGroup:
    """The samples of one prompt, and its earlier rollouts, newest first."""

    prompt_ids: tuple[int, ...]
    texts: tuple[tuple[int, ...], ...]
    past: tuple[tuple[int, ...], ...]


def alike(num_sequences: int, length: int, likeness: float, vocab_size: int, seed: int = 0) -> list[ReplayGroup]:
    """Each text is a past one in which a token is another with chance 1 - likeness."""
    groups = []
    for number in range(-(-num_sequences // GROUP)):
        dice = keyed_random("workload", seed, number)
        members = min(GROUP, num_sequences - number * GROUP)
        past = tuple(_draw(dice, length, vocab_size) for _ in range(members))
        texts = tuple(
            tuple(token if dice.random() < likeness else dice.randrange(3, vocab_size) for token in text)
            for text in past
        )
        groups.append(ReplayGroup(_draw(dice, PROMPT_TOKENS, vocab_size), texts, past))
    return groups


def adversarial(num_sequences: int, length: int, vocab_size: int, seed: int = 0) -> list[ReplayGroup]:
    """Texts and history of a few kinds of tokens, drawn independently: matches everywhere, all of them misleading."""
    kinds = min(vocab_size, FEW_KINDS)
    groups = []
    for number in range(-(-num_sequences // GROUP)):
        dice = keyed_random("adversary", seed, number)
        members = min(GROUP, num_sequences - number * GROUP)
        texts, past = (tuple(_draw(dice, length, kinds) for _ in range(members)) for _ in range(2))
        groups.append(ReplayGroup(_draw(dice, PROMPT_TOKENS, kinds), texts, past))
    return groups


def _draw(dice: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(dice.randrange(3, vocab_size) for _ in range(length))


def seed_of(group: int, member: int) -> int:
    return derive_seed("replay", group, member)
