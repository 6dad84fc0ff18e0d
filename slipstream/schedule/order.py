"""In which order the prompts of a data set come: every epoch a new permutation, keyed by (seed, epoch). Pure."""

from __future__ import annotations

from array import array
from functools import lru_cache

from slipstream.rng import keyed_random


class PromptOrder:
    """The endless sequence of prompt indices of a run; position n is the same whoever asks, whenever."""

    def __init__(self, num_prompts: int, seed: int) -> None:
        assert num_prompts > 0
        self.num_prompts = num_prompts
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def at(self, position: int) -> int:
        epoch, place = divmod(position, self.num_prompts)
        return self._epoch(epoch)[place]

    def _shuffled(self, epoch: int) -> array[int]:
        indices = array("q", range(self.num_prompts))  # eight bytes each, where a list takes 36
        keyed_random(self._seed, "epoch", epoch).shuffle(indices)
        return indices
