"""What an engine on a GPU does once, on no sequence, before its first: so that hardly anything is new in mid-run.

A kernel that is new has to be compiled, if the machine never had it, and loaded, which makes the host wait until the
GPU has nothing left to do. So a graph that is made behind steps under way (`ahead.py`) would stop them after all. And
where a rollout begins or ends there is not enough under way to make one behind: most graphs are made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from slipstream.engine.fitting import FREE, SMALL, coarsely, fitted, padded
from slipstream.engine.packing import Launch, StepSizes, padded_launches_of
from slipstream.engine.sequences import Samplers, StepPlan
from slipstream.engine.strategy import OFF, Feeding, StepDrafts, Strategy, size_of

FEW = 8
"""Sequences that are few, for kernels that differ in this."""
DRAFTED_ROWS = 128
"""Up to so many sequences, ways of drafting have a graph from the beginning, for as many drafts as they may make. With
more, most do not pay, and steps last longer: those that are tried get theirs behind steps under way."""
LEAST_PROMPTS = 64
"""Tokens of a step with prompts, at least, that has a graph from the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRuns:
    ways: Callable[[int], Sequence[Strategy]]
    """That steps of so many sequences may have."""
    has_model: bool
    """Whether a learned drafter gets anything."""
    with_cuts: bool
    """Whether requests have top-k, top-p or min-p."""
    num_slots: int
    max_tokens: int
    """Of a step."""

    def runs(self) -> Iterator[Launch]:
        """Steps of every size that has a graph at first, since matrix products have kernels for some sizes; every kind
        of step, with one sequence, with few and with all.

        But for the chains that a tree's drafter makes beside prompts: they are seldom, and have kernels of others."""
        feedings = tuple(Feeding) if self.has_model else (Feeding.NOTHING,)
        ways = [(batch, way) for batch in self._batches() for way in (OFF, *self.ways(batch))]
        most_samples = coarsely(max(math.ceil(batch * (1 + way.drafts_each)) for batch, way in ways))
        for num_tokens in sorted({*self._token_sizes(), *self._decoding_sizes()}):
            sizes = num_tokens, min(num_tokens, self.num_slots), min(num_tokens, most_samples)
            yield Launch(None, StepSizes(*sizes, False, self.with_cuts, feeding=feedings[-1]))
        for batch in sorted({1, min(FEW, self._most), self._most}):
            met = set[Hashable]()
            for way, feeding in product((OFF, *self.ways(batch)), feedings):
                for launch in self._launches(way, feeding, batch):
                    if launch.kind not in met and (feeding == Feeding.ALL or not way.depth):
                        met.add(launch.kind)
                        yield launch

    def graphs(self) -> list[Launch]:
        """Sizes that steps of most runs have, or have room in: of all that decode, of those that may draft with few
        sequences, and of prompts without drafts. To be made after the first runs. The others are made when they are
        met."""
        feedings = (Feeding.NOTHING, Feeding.KEYS) if self.has_model else (Feeding.NOTHING,)
        steps: list[tuple[Strategy, Feeding, int, int]] = []
        for batch, feeding in product(self._decoding_sizes(), feedings):
            steps.append((OFF, feeding, batch, 0))
        for batch, way in self.prepared():
            # After a way that asks a model, one that does not may go on telling it all.
            fed = (Feeding.ALL,) if way.depth else (*feedings, Feeding.ALL) if self.has_model else feedings
            steps += [(way, feeding, batch, 0) for feeding in fed]
        for num_tokens, feeding in product(self._token_sizes(), feedings):
            if num_tokens >= LEAST_PROMPTS:
                decoding = 1, min(self._most, num_tokens - 1)
                steps += [(OFF, feeding, batch, num_tokens - batch) for batch in decoding]
        return list(dict.fromkeys(launch for step in steps for launch in self._launches(*step)))

    def prepared(self) -> list[tuple[int, Strategy]]:
        """Sizes of batch, and ways with them that have graphs from the beginning, whatever a model is told."""
        counts = range(1, min(DRAFTED_ROWS, self._most) + 1)
        batches = {min(self._most, (size_of if count <= SMALL else coarsely)(count)) for count in counts}
        return [(batch, way) for batch in sorted(batches) for way in self.ways(batch)]

    @property
    def _most(self) -> int:
        return min(self.num_slots, self.max_tokens)

    def _batches(self) -> list[int]:
        """Each as many as the one before and as many again, up to all."""
        return sorted({min(self._most, 1 << power) for power in range(self._most.bit_length() + 1)})

    def _token_sizes(self) -> list[int]:
        return sorted({coarsely(count) for count in range(1, self.max_tokens + 1)})

    def _decoding_sizes(self) -> list[int]:
        """Of the small ones few, since a larger one takes no longer."""
        return sorted({(coarsely if count <= FREE else padded)(count) for count in range(1, self._most + 1)})

    def _launches(self, way: Strategy, feeding: Feeding, batch: int, num_prefilled: int = 0) -> list[Launch]:
        """Of a step in which so many sequences decode, and so many tokens of another's prompt are computed."""
        wanted = math.ceil(way.drafts_each * batch)
        num_drafts = min(fitted(batch, wanted), self.max_tokens - batch) if wanted else 0
        plan = StepPlan(
            samplers=Samplers(np.arange(batch)),
            num_rows=batch + (num_prefilled > 0),
            num_tokens=batch + num_drafts + num_prefilled,
            num_drafts=num_drafts,
            with_cuts=self.with_cuts,
        )
        drafts = StepDrafts(batch, False, way, num_drafts, feeding)
        return padded_launches_of(plan, drafts, padded, self.num_slots)
