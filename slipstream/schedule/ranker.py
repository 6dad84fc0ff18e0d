"""How long rollouts of a prompt nobody has sampled yet will be: a regression on what is known of the prompt. Pure.

Ridge regression of the logarithm of lengths, learned online: each step adds its prompts, and what older steps said
fades, since the policy moves on. Once some were forecast before their step, differences between prompts are forecast as
far as those came true: hardly where prompts tell nothing of lengths. Features are whatever describes a prompt: the
policy's own representation of it (the mean of its hidden states), or, where there is none, its token ids
(`token_features`). The order of prompts is what dispatch needs; it comes right long before the lengths do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

FADING = 0.7
"""Of what was learned before, what is left after another step."""
RIDGE = 0.1
"""Pull towards the mean, relative to the features' own scale: prompts are few, features many."""
TOKEN_BITS = 8
TOKEN_FEATURES = 1 << TOKEN_BITS
SCATTERING, PAIRING = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x2545F4914F6CDD1D)
"""Odd, so that products modulo 2 ** 64 scatter tokens, and pairs of them, over the features."""

Features = NDArray[np.float64]


class LengthRanker:
    def __init__(self) -> None:
        self._num_prompts = 0.0
        self._feature_sums: Features | None = None
        self._products: Features | None = None
        """Of features with one another, summed over prompts."""
        self._with_length: Features | None = None
        self._length_sum = 0.0
        self._solved: tuple[Features, Features, float] | None = None
        self._level = 0.0
        """Added to all logarithms, so that the newest step's forecasts add up to its lengths: what older steps said of
        differences between prompts holds longer than what they said of lengths."""
        self._foreseen, self._came_true = 0.0, 0.0
        """Of differences between prompts that were forecast before their step: the sum of their squares, and of their
        products with those that came. Where prompts tell nothing of lengths the second is none."""

    @property
    def has_learned(self) -> bool:
        return self._num_prompts > 0

    def learn_step(
        self,
        features: Mapping[str, Features],
        lengths: Mapping[str, Sequence[float]],
        seen: Collection[str] = (),
    ) -> None:
        """The prompts of one step, each with the lengths of its samples. `seen`: those that it has learned from before,
        so that to have forecast them says nothing."""
        known = [prompt for prompt in lengths if prompt in features and lengths[prompt]]
        if not known:
            return
        rows = np.stack([np.asarray(features[prompt], np.float64) for prompt in known])
        logs = np.array(
            [sum(math.log(max(1.0, one)) for one in lengths[prompt]) / len(lengths[prompt]) for prompt in known]
        )
        new = [place for place, prompt in enumerate(known) if prompt not in seen]
        if self.has_learned and new:
            weights, centre, _ = self._solve()
            foreseen = (rows[new] - centre) @ weights
            foreseen -= foreseen.mean()
            self._foreseen = FADING * self._foreseen + float(foreseen @ foreseen)
            self._came_true = FADING * self._came_true + float(foreseen @ logs[new])
        if self._products is None:
            width = rows.shape[1]
            self._feature_sums, self._with_length = np.zeros(width), np.zeros(width)
            self._products = np.zeros((width, width))
        assert self._feature_sums is not None and self._with_length is not None
        self._num_prompts = FADING * self._num_prompts + len(known)
        self._length_sum = FADING * self._length_sum + float(logs.sum())
        self._feature_sums = FADING * self._feature_sums + rows.sum(0)
        self._products = FADING * self._products + rows.T @ rows
        self._with_length = FADING * self._with_length + rows.T @ logs
        self._solved, self._level = None, 0.0
        actual = sum(sum(lengths[prompt]) / len(lengths[prompt]) for prompt in known)
        self._level = math.log(actual / sum(self.forecast(row) for row in rows))

    def forecast(self, features: Features) -> float:
        """Tokens of a typical rollout; ask `has_learned` first."""
        weights, centre, mean = self._solve()
        trusted = min(1.0, max(0.0, self._came_true / self._foreseen)) if self._foreseen else 1.0
        difference = trusted * float((np.asarray(features, np.float64) - centre) @ weights)
        return math.exp(min(20.0, mean + self._level + difference))

    def _solve(self) -> tuple[Features, Features, float]:
        if self._solved is None:
            assert self._products is not None and self._feature_sums is not None and self._with_length is not None
            count = self._num_prompts
            centre, mean = self._feature_sums / count, self._length_sum / count
            spread = self._products / count - np.outer(centre, centre)
            along = self._with_length / count - centre * mean
            scale = max(float(np.trace(spread)) / len(centre), 1e-12)
            weights: Features = np.linalg.solve(spread + RIDGE * scale * np.eye(len(centre)), along).astype(np.float64)
            self._solved = weights, centre, mean
        return self._solved


def token_features(token_ids: Sequence[int]) -> Features:
    """Which tokens and pairs of tokens a prompt has, in TOKEN_FEATURES numbers, and how many it has."""
    tokens = np.asarray(token_ids, np.uint64)
    pairs = tokens[:-1] * PAIRING + tokens[1:]
    mixed = np.concatenate([tokens, pairs + PAIRING]) * SCATTERING
    places = (mixed ^ mixed >> np.uint64(29)) * SCATTERING >> np.uint64(64 - TOKEN_BITS)
    found = np.bincount(places.astype(np.int64), minlength=TOKEN_FEATURES).astype(np.float64)
    found /= max(1.0, float(np.linalg.norm(found)))
    return np.append(found, math.log1p(len(tokens)) / 4)
