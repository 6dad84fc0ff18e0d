"""What an RL algorithm is: rewards to advantages, the level of its probability ratio, its objective, its averaging.

Owns the table ALGORITHMS, the token weights of each aggregation, and the learning rate of a step. Pure: no tensors.
Standard deviations are population ones (divide by n). A group may be smaller than samples_per_prompt, because
unscored samples are dropped; a group of one has nothing to compare with and gets advantage 0, except in REINFORCE++,
whose baseline is the whole batch. Equal rewards give advantages of exactly 0.

Invariant: the loss of an update is the sum over its tokens of weight x token loss, divided by one total of the whole
update. A weight depends on its own sample only, so gradient sums can begin before the update's last sample is known,
and micro-batching and packing cannot change them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.config import Training

STD_FLOOR = 1e-6
"""Added to a standard deviation before dividing by it."""

Rewards = Sequence[Sequence[float]]
"""Rewards of each sample of each group."""
Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True, slots=True)
class Recipe:
    advantages: Callable[[Rewards], list[list[float]]]
    """Groups of rewards to groups of advantages, in the same order."""
    ratio_level: Literal["token", "sequence"]
    """sequence: one ratio per response, the geometric mean of its token ratios."""
    objective: Literal["clip", "cispo"]
    aggregation: Aggregation
    clip_low: float = 0.2
    """Own value of algorithm.clip_low: the ratio is clipped below 1 - clip_low. 1.0 clips nothing: no ratio is < 0."""
    clip_high: float = 0.2
    """Own value of algorithm.clip_high: the ratio is clipped above 1 + clip_high."""


def standardised_in_group(groups: Rewards) -> list[list[float]]:
    """(r - mean) / (std + 1e-6) in each group. GRPO: DeepSeekMath, arXiv 2402.03300."""
    return [_standardised(group) for group in groups]


def centred_in_group(groups: Rewards) -> list[list[float]]:
    """r - mean in each group. Dr. GRPO: Understanding R1-Zero-Like Training, arXiv 2503.20783."""
    return [_centred(group) for group in groups]


def leave_one_out(groups: Rewards) -> list[list[float]]:
    """r minus the mean of the OTHER samples of its group. RLOO: Back to Basics, arXiv 2402.14740.

    r_i - (sum - r_i) / (n - 1) = (r_i - mean) n / (n - 1).
    """
    return [[value * len(group) / max(1, len(group) - 1) for value in _centred(group)] for group in groups]


def standardised_in_batch(groups: Rewards) -> list[list[float]]:
    """(r - mean) / (std + 1e-6) over all samples of the step. REINFORCE++, arXiv 2501.03262."""
    flat = iter(_standardised([reward for group in groups for reward in group]))
    return [[next(flat) for _ in group] for group in groups]


ALGORITHMS: dict[str, Recipe] = {
    # GRPO, arXiv 2402.03300. With aggregation token_mean and clip_high 0.28 it is DAPO's loss (arXiv 2503.14476).
    "grpo": Recipe(standardised_in_group, "token", "clip", "sequence_mean"),
    # Dr. GRPO, arXiv 2503.20783: no division by the response's length nor by the group's deviation.
    "dr_grpo": Recipe(centred_in_group, "token", "clip", "constant"),
    # RLOO, arXiv 2402.14740.
    "rloo": Recipe(leave_one_out, "token", "clip", "token_mean"),
    # REINFORCE++, arXiv 2501.03262.
    "reinforce++": Recipe(standardised_in_batch, "token", "clip", "token_mean"),
    # GSPO, arXiv 2507.18071. Its ratios stay near 1: the paper clips at 3e-4 and 4e-4, not at 0.2.
    "gspo": Recipe(standardised_in_group, "sequence", "clip", "sequence_mean", clip_low=3e-4, clip_high=4e-4),
    # CISPO: MiniMax-M1, arXiv 2506.13585: the clipped ratio is a constant weight of the log-probability. The paper has
    # no lower clip and gives no number for the upper one; a weight of at most 5 is ScaleRL's (arXiv 2510.13786), and
    # what TRL recommends.
    "cispo": Recipe(standardised_in_group, "token", "cispo", "token_mean", clip_low=1.0, clip_high=4.0),
}


def token_weight(length: int, aggregation: Aggregation, max_new_tokens: int) -> float:
    """Weight of EACH token of a sample with so many response tokens, before the division by `update_total`.

    token_mean: every token alike. sequence_mean: every sample alike. constant: every token 1 / max_new_tokens, so that
    a long answer is neither favoured nor spared.
    """
    assert length > 0, "a sample without response tokens has no weight"
    return {"token_mean": 1.0, "sequence_mean": 1.0 / length, "constant": 1.0 / max_new_tokens}[aggregation]


def update_total(lengths: Sequence[int], aggregation: Aggregation) -> float:
    """What the weighted sum over an update is divided by: its response tokens for token_mean, else its samples."""
    return float(sum(lengths) if aggregation == "token_mean" else len(lengths))


def learning_rate(training: Training, step: int) -> float:
    """Of step 0, 1, ...: linear warm-up that reaches lr at step lr_warmup_steps - 1, then constant, or falling so that
    it would be 0 at training.steps, which is one past the last step."""
    warmup = training.lr_warmup_steps
    if step < warmup:
        return training.lr * (step + 1) / warmup
    if training.lr_schedule == "constant":
        return training.lr
    done = min(1.0, (step - warmup) / max(1, training.steps - warmup))
    if training.lr_schedule == "linear":
        return training.lr * (1.0 - done)
    return training.lr * 0.5 * (1.0 + math.cos(math.pi * done))


def _centred(rewards: Sequence[float]) -> list[float]:
    # Equal rewards have no signal; the rounding of their mean must not become one.
    if not rewards or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _standardised(rewards: Sequence[float]) -> list[float]:
    centred = _centred(rewards)
    deviation = math.sqrt(math.fsum(value * value for value in centred) / max(1, len(centred)))
    return [value / (deviation + STD_FLOOR) for value in centred]
