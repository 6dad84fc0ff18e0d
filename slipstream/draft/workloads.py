"""Workloads for measuring drafts: what is to be sampled, and what the history holds of it. Pure.

A workload is replayed: the engine walks its texts at the full cost of sampling them, so that any model shape can be
timed with texts of any likeness to their history.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.rng import derive_seed, keyed_random

PROMPT_TOKENS = 24
GROUP = 8
"""Samples of a prompt."""
FRESH_RUN = 2.5
"""Tokens between two stretches that are as in the past, on average: so many they are in recorded runs (docs/log.md)."""
SHORTEST, LONGEST = 0.75, 1.25
"""Lengths of texts, as multiples of the one asked for: in step, all that run would end and begin together."""
FEW_KINDS = 32
"""Kinds of tokens in adversarial texts: so few that something always matches and is wrong."""


@dataclass(frozen=True, slots=True)
class ReplayGroup:
    """The samples of one prompt, and its earlier rollouts, newest first."""

    prompt_ids: tuple[int, ...]
    texts: tuple[tuple[int, ...], ...]
    past: tuple[tuple[int, ...], ...]


def alike(num_sequences: int, length: int, likeness: float, vocab_size: int, seed: int = 0) -> list[ReplayGroup]:
    """Each text is a past one in which stretches of a few tokens are others.

    `likeness`: the share of tokens that a draft can give, which leaves out those stretches and the first token after
    each, before which nothing is alike.
    """
    cycle = (FRESH_RUN + 1) / (1 - likeness)
    chance_of_change, chance_of_return = 1 / (cycle - FRESH_RUN), 1 / FRESH_RUN
    groups = []
    for number in range(-(-num_sequences // GROUP)):
        dice = keyed_random("workload", seed, number)
        members = min(GROUP, num_sequences - number * GROUP)
        past = tuple(_draw(dice, one, vocab_size) for one in _lengths(members, length, seed, number))
        texts = tuple(_vary(dice, text, chance_of_change, chance_of_return, vocab_size) for text in past)
        groups.append(ReplayGroup(_draw(dice, PROMPT_TOKENS, vocab_size), texts, past))
    return groups


def _lengths(members: int, length: int, seed: int, number: int) -> list[int]:
    """The same in every workload."""
    dice = keyed_random("lengths", seed, number)
    return [round(length * dice.uniform(SHORTEST, LONGEST)) for _ in range(members)]


def _vary(
    dice: random.Random, text: tuple[int, ...], chance_of_change: float, chance_of_return: float, vocab_size: int
) -> tuple[int, ...]:
    tokens = []
    is_alike = True
    for token in text:
        tokens.append(token if is_alike else dice.randrange(3, vocab_size))
        is_alike ^= dice.random() < (chance_of_change if is_alike else chance_of_return)
    return tuple(tokens)


def adversarial(num_sequences: int, length: int, vocab_size: int, seed: int = 0) -> list[ReplayGroup]:
    """Texts and history of a few kinds of tokens, drawn independently: matches everywhere, all of them misleading."""
    kinds = min(vocab_size, FEW_KINDS)
    groups = []
    for number in range(-(-num_sequences // GROUP)):
        dice = keyed_random("adversary", seed, number)
        members = min(GROUP, num_sequences - number * GROUP)
        lengths = _lengths(members, length, seed, number)
        texts, past = (tuple(_draw(dice, one, kinds) for one in lengths) for _ in range(2))
        groups.append(ReplayGroup(_draw(dice, PROMPT_TOKENS, kinds), texts, past))
    return groups


@dataclass(frozen=True, slots=True)
class Recorded:
    """A rollout of a run that was recorded."""

    prompt: str
    step: int
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...] = ()
    """If they were recorded too."""


def epochs_of(rollouts: Iterable[Recorded], vocab_size: int, keep: int) -> list[list[ReplayGroup]]:
    """By how often its prompt had come up before: each group with the last `keep` rollouts of its prompt, newest first.

    A prompt without recorded ids gets some of its own.
    """
    visits: dict[str, dict[int, list[Recorded]]] = {}
    for rollout in rollouts:
        visits.setdefault(rollout.prompt, {}).setdefault(rollout.step, []).append(rollout)
    epochs: list[list[ReplayGroup]] = []
    for prompt, by_step in sorted(visits.items()):
        past: list[tuple[int, ...]] = []
        made_up = _draw(keyed_random("prompt", prompt), PROMPT_TOKENS, vocab_size)
        for number, step in enumerate(sorted(by_step)):
            texts = tuple(rollout.token_ids for rollout in by_step[step] if rollout.token_ids)
            if len(epochs) == number:
                epochs.append([])
            epochs[number].append(ReplayGroup(by_step[step][0].prompt_ids or made_up, texts, tuple(past[:keep])))
            past = [*texts, *past]
    return epochs


def _draw(dice: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(dice.randrange(3, vocab_size) for _ in range(length))


def seed_of(group: int, member: int) -> int:
    return derive_seed("replay", group, member)
