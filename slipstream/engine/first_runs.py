"""What an engine on a GPU runs once, on no sequence, before its first: so that no kernel is new in mid-run.

A kernel that is new has to be compiled, if the machine never had it, and loaded, which makes the host wait until the
GPU has nothing left to do. So a graph that is made behind steps under way (`ahead.py`) would stop them after all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import product

import numpy as np

from slipstream.engine.fitting import coarsely
from slipstream.engine.packing import Launch, StepSizes, padded_launches_of
from slipstream.engine.sequences import Samplers, StepPlan
from slipstream.engine.strategy import OFF, Feeding, StepDrafts, Strategy

FEW = 8
"""Sequences that are few, for kernels that differ in this."""


def first_runs(
    ways: Callable[[int], Sequence[Strategy]], *, has_model: bool, with_cuts: bool, num_slots: int, max_tokens: int
) -> Iterator[Launch]:
    """Steps of every size that has a graph at first, since matrix products have kernels for some sizes; every kind of
    step, with one sequence, with few and with all. `ways`: that steps of so many sequences may have. `has_model`:
    whether a learned drafter gets anything. `with_cuts`: whether requests have top-k, top-p or min-p.

    But for the chains that a tree's drafter makes beside prompts: they are seldom, and have kernels of others."""
    feedings = tuple(Feeding) if has_model else (Feeding.NOTHING,)
    most = min(num_slots, max_tokens)
    batches = {most, *(1 << power for power in range(most.bit_length()))}
    most_samples = coarsely(max(math.ceil(one * (1 + way.drafts_each)) for one in batches for way in (OFF, *ways(one))))
    for num_tokens in sorted({coarsely(count) for count in range(1, max_tokens + 1)}):
        num_rows, num_samples = min(num_tokens, num_slots), min(num_tokens, most_samples)
        yield Launch(None, StepSizes(num_tokens, num_rows, num_samples, False, with_cuts, feeding=feedings[-1]))
    for batch in sorted({1, min(FEW, most), most}):
        met = set[Hashable]()
        for way, feeding in product((OFF, *ways(batch)), feedings):
            for launch in _launches(way, feeding, batch, max_tokens, num_slots, with_cuts):
                if launch.kind not in met and (feeding == Feeding.ALL or not way.depth):
                    met.add(launch.kind)
                    yield launch


def _launches(
    way: Strategy, feeding: Feeding, batch: int, max_tokens: int, num_slots: int, with_cuts: bool
) -> list[Launch]:
    """Of a step in which so many sequences decode."""
    num_drafts = min(math.ceil(way.drafts_each * batch), max_tokens - batch)
    plan = StepPlan(
        samplers=Samplers(np.arange(batch)),
        num_rows=batch,
        num_tokens=batch + num_drafts,
        num_drafts=num_drafts,
        with_cuts=with_cuts,
    )
    return padded_launches_of(plan, StepDrafts(batch, False, way, num_drafts, feeding), coarsely, num_slots)
