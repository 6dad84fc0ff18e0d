"""Worlds for the selector: what a step of a way gives there, and how long it takes."""

from __future__ import annotations

import random
from collections.abc import Callable

from slipstream.draft.selector import Selector
from slipstream.engine.strategy import StepResult, Strategy

World = Callable[[int, Strategy], tuple[int, float]]
"""Tokens and seconds of a step of a batch with a strategy."""


def drive(selector: Selector, world: World, batch: int, steps: int) -> float:
    """Tokens a second over all steps."""
    tokens, seconds = 0, 0.0
    for _ in range(steps):
        strategy = selector.choose(batch)
        gained, took = world(batch, strategy)
        selector.observe(StepResult(batch, strategy, gained / batch, took))
        tokens, seconds = tokens + gained, seconds + took
    return tokens / seconds


def world_with(odds: float, cost_of_draft: float, seed: int = 0) -> World:
    dice = random.Random(seed)

    def step(batch: int, strategy: Strategy) -> tuple[int, float]:
        tokens = 0
        for _ in range(batch):
            tokens += 1
            for _ in range(int(strategy.drafts_each)):
                if dice.random() > odds:
                    break
                tokens += 1
        cost = 1.0 + cost_of_draft * strategy.drafts_each + (0.01 if strategy.drafts_each else 0.0)
        return tokens, cost * dice.uniform(0.97, 1.03)

    return step


def texts_with(easy: float, hard: float, seed: int) -> World:
    """Each sequence is easy or hard to draft until it ends."""
    dice = random.Random(seed)
    odds: list[float] = []

    def step(batch: int, strategy: Strategy) -> tuple[int, float]:
        tokens = 0
        odds.extend(dice.choice([easy, hard]) for _ in range(batch - len(odds)))
        for row in range(batch):
            tokens += 1
            for _ in range(int(strategy.drafts_each)):
                if dice.random() > odds[row]:
                    break
                tokens += 1
            if dice.random() < 1 / 60:
                odds[row] = dice.choice([easy, hard])
        return tokens, (1.0 + 0.12 * strategy.drafts_each) * dice.uniform(0.97, 1.03)

    return step
