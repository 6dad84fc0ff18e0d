"""Rollouts to simulate: drawn with a long tail, or as long as those of a recorded run. Pure.

A drawn length is its prompt's typical length times chance: prompts differ among themselves, the samples of one less,
and all are cut at a limit. Prompts come up again in every epoch, and all lengths may grow from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from slipstream.rng import keyed_random


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The rollouts of one step: how long each will be, which nobody knows before, and whose prompt it has."""

    lengths: dict[str, float]
    prompts: dict[str, str]
    trained: dict[str, float] = field(default_factory=dict)
    """Tokens that training computes of each, where that is not all: groups of equal rewards teach nothing."""


MAX_ROLLOUTS = 5_000_000
"""Of a whole simulation, which would take some hours."""


@dataclass(frozen=True, slots=True)
class LongTail:
    median: float
    """Tokens of a rollout."""
    limit: float
    prompt_spread: float = 0.8
    """Standard deviation of the logarithm of typical lengths, prompt by prompt."""
    sample_spread: float = 0.4
    """And of the samples of a prompt around it."""
    growth: float = 1.0
    """Times so much longer from one step to the next."""

    def draw(
        self, *, num_prompts: int, prompts_per_step: int, samples: int, steps: int, seed: int
    ) -> list[SimulatedStep]:
        if steps * prompts_per_step * samples > MAX_ROLLOUTS:
            raise ValueError(
                f"{steps:,} steps of {prompts_per_step:,} prompts x {samples:,} samples are more than the "
                f"{MAX_ROLLOUTS:,} rollouts that are simulated at most: write fewer"
            )
        order: list[int] = []
        drawn = []
        for step in range(1, steps + 1):
            if len(order) < prompts_per_step:
                fresh = list(range(num_prompts))
                keyed_random("simulated order", seed, step).shuffle(fresh)
                order += fresh
            asked, order = order[:prompts_per_step], order[prompts_per_step:]
            lengths, prompts = {}, {}
            for position, number in enumerate(asked):
                typical = keyed_random("typical length", seed, number).gauss(0, self.prompt_spread)
                dice = keyed_random("simulated length", seed, step, position)
                for sample in range(samples):
                    uid = f"{step}/{position}/{sample}"
                    length = self.median * self.growth ** (step - 1)
                    length *= math.exp(typical + dice.gauss(0, self.sample_spread))
                    lengths[uid] = min(self.limit, max(1.0, float(round(length))))
                    prompts[uid] = str(number)
            drawn.append(SimulatedStep(lengths, prompts))
        return drawn


PRESETS = {
    "5k": LongTail(median=1_300, limit=5_000),
    "10k": LongTail(median=2_600, limit=10_000),
    "20k": LongTail(median=5_200, limit=20_000),
    "32k": LongTail(median=6_500, limit=32_000, prompt_spread=0.9),
}
"""By the most tokens of a rollout. The median is about a quarter of the limit and one in thirty is cut, as where models
reason at length."""


def recorded_steps(rollouts: Iterable[tuple[int, str, str, int]]) -> list[SimulatedStep]:
    """From (step, uid, prompt, length) of a run."""
    steps: dict[int, SimulatedStep] = {}
    for step, uid, prompt, length in rollouts:
        found = steps.setdefault(step, SimulatedStep({}, {}))
        found.lengths[uid], found.prompts[uid] = float(max(1, length)), prompt
    return [steps[step] for step in sorted(steps)]
