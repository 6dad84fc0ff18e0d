"""What an engine on a GPU runs once, on no sequence, before its first: so that no kernel is new in mid-run. Pure.

A kernel that is new has to be compiled, if the machine never had it, and loaded, which makes the host wait until the
GPU has nothing left to do. So a graph that is made behind steps under way (`ahead.py`) would stop them after all.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from slipstream.engine.fitting import coarsely
from slipstream.engine.packing import Launch, StepSizes, padded_launches_of
from slipstream.engine.sequences import Samplers, StepPlan
from slipstream.engine.strategy import Feeding, StepDrafts, Strategy

FEW = 8
"""Sequences that are few, for kernels that differ in this; and the most that have trees."""


def first_runs(strategies: Sequence[Strategy], *, has_model: bool, num_slots: int, max_tokens: int) -> Iterator[Launch]:
    """Steps of every size that has a graph at first, since matrix products have kernels for some sizes; every kind of
    step, with few sequences and with all. `has_model`: whether a learned drafter gets anything."""
    feedings = tuple(Feeding) if has_model else (Feeding.NOTHING,)
    most_samples = coarsely(math.ceil(num_slots * (1 + max(one.drafts_each for one in strategies))))
    for num_tokens in sorted({coarsely(count) for count in range(1, max_tokens + 1)}):
        num_rows, num_samples = min(num_tokens, num_slots), min(num_tokens, most_samples)
        yield Launch(None, StepSizes(num_tokens, num_rows, num_samples, False, False, feeding=feedings[-1]))
    for batch in sorted({min(FEW, num_slots), num_slots}):
        met = set[Hashable]()
        for strategy in strategies:
            if strategy.branches > 1 and batch > FEW:
                continue
            for feeding in feedings if not strategy.depth else (Feeding.ALL,):
                for launch in _launches(strategy, feeding, batch, max_tokens, num_slots):
                    if launch.kind not in met:
                        met.add(launch.kind)
                        yield launch


def _launches(strategy: Strategy, feeding: Feeding, batch: int, max_tokens: int, num_slots: int) -> list[Launch]:
    """Of a step in which so many sequences decode."""
    batch = min(batch, max_tokens)
    num_drafts = min(math.ceil(strategy.drafts_each * batch), max_tokens - batch)
    samplers = Samplers(np.arange(batch))
    plan = StepPlan(samplers=samplers, num_rows=batch, num_tokens=batch + num_drafts, num_drafts=num_drafts)
    drafts = StepDrafts(batch, False, strategy, num_drafts, feeding)
    return padded_launches_of(plan, drafts, coarsely, num_slots)
