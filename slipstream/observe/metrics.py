"""From records to the field's metric names; pure arithmetic, no clock, file or tensor.

Owns what each `reward/`, `response_length/`, `rollout/`, `logged/` and `eval/` name means. Invariants:
- a rollout that could not be scored has a length and tokens but no reward: it is counted, never taken for a zero;
- a number that does not exist (the mean of nothing) is left out of the dict, never replaced by 0 or NaN;
- results do not depend on the order of the records.
Percentiles: linear interpolation between the two nearest ranks, position (n - 1) * q / 100 (numpy's default).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from slipstream.types import ORIGIN_NAMES, Rollout, Scored, Unscored

PASS_REWARD = 1.0
"""A sample passes when its reward reaches this: the verifiers that come with Slipstream give 1.0 for a right answer."""

_ROUNDING = 1e-9
"""Weights such as 0.7 + 0.2 + 0.1 sum to a hair under 1.0 in floating point; that must still be a pass."""


def draft_share_name(origin: int) -> str:
    """The metric of the tokens that were drafts of this source (types.ORIGIN_NAMES), as a share of all."""
    return f"rollout/spec_share_{ORIGIN_NAMES[origin].replace(' ', '_')}"


def rollout_metrics(
    scored: Sequence[Scored], unscored: Sequence[Unscored], samples_per_prompt: int
) -> dict[str, float]:
    """Metrics of one step's training rollouts.

    `reward/zero_spread_groups` is the share of groups whose scored samples all have the same reward, hence teach
    nothing; a group with no scored sample is not counted, and with one sample a prompt the name is left out.
    `reward/stderr` is the standard error of reward/mean, by the spread of the prompts' means: samples of one prompt are
    alike. With fewer than two prompts it is left out. `eval/<set>/stderr` likewise.
    """
    metrics = {"reward/unscored": float(len(unscored))}
    if scored:
        metrics |= _spread("reward", [item.reward for item in scored], ("mean", "std", "max", "min"))
        for name, values in sorted(_parts_by_name(scored).items()):
            metrics[f"reward/{name}/mean"] = _mean(values)
        if samples_per_prompt > 1:
            groups = _rewards_by_group(scored).values()
            metrics["reward/zero_spread_groups"] = _mean([float(min(rewards) == max(rewards)) for rewards in groups])
        metrics |= _standard_error("reward", _rewards_by_group(scored).values())
    rollouts = _rollouts(scored, unscored)
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    metrics["rollout/tokens"] = float(sum(lengths))
    metrics |= _logged("logged", scored, unscored)
    if rollouts:
        metrics |= _spread("response_length", lengths, ("mean", "median", "p99", "max", "min"))
        clipped = [float(rollout.finish_reason == "length") for rollout in rollouts]
        metrics["response_length/clip_ratio"] = _mean(clipped)
    return metrics


def evaluation_metrics(
    set_name: str, scored: Sequence[Scored], unscored: Sequence[Unscored], k: int
) -> dict[str, float]:
    """Metrics of one evaluation set with k samples a prompt; a prompt is a group.

    avg@k: mean over prompts of the mean reward of its samples. pass@k: share of prompts with at least one sample whose
    reward is PASS_REWARD or more. Both are over the samples that were scored, and over prompts that have one.
    The reward is the weighted sum of the reward functions: when their weights sum to less than PASS_REWARD, no sample
    of a 0-to-1 verifier can pass and pass@k is always 0.
    """
    metrics = {f"eval/{set_name}/unscored": float(len(unscored))}
    groups = _rewards_by_group(scored).values()
    if groups:
        metrics[f"eval/{set_name}/avg@{k}"] = _mean([_mean(rewards) for rewards in groups])
        passed = [float(max(rewards) >= PASS_REWARD - _ROUNDING) for rewards in groups]
        metrics[f"eval/{set_name}/pass@{k}"] = _mean(passed)
        metrics |= _standard_error(f"eval/{set_name}", groups)
    lengths = [float(len(rollout.token_ids)) for rollout in _rollouts(scored, unscored)]
    if lengths:
        metrics[f"eval/{set_name}/response_length"] = _mean(lengths)
    return metrics | _logged(f"eval/{set_name}/logged", scored, unscored)


def percentile(values: Iterable[float], q: float) -> float:
    """The q-th percentile (0 to 100), by the rule in the module head; the values must not be empty."""
    return float(np.percentile(np.fromiter(values, dtype=np.float64), q))


def _spread(prefix: str, values: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    array = np.asarray(sorted(values), dtype=np.float64)
    known = {
        "mean": lambda: _mean(values),
        "std": lambda: float(array.std()),
        "median": lambda: percentile(array, 50),
        "p99": lambda: percentile(array, 99),
        "max": lambda: float(array[-1]),
        "min": lambda: float(array[0]),
    }
    return {f"{prefix}/{name}": known[name]() for name in names}


def _standard_error(prefix: str, groups: Collection[Sequence[float]]) -> dict[str, float]:
    if len(groups) < 2:
        return {}
    means = np.asarray(sorted(_mean(rewards) for rewards in groups))
    return {f"{prefix}/stderr": float(means.std(ddof=1)) / math.sqrt(len(means))}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)  # fsum: exact, so the order of the records cannot show


def _rollouts(scored: Sequence[Scored], unscored: Sequence[Unscored]) -> list[Rollout]:
    return [item.rollout for item in scored] + [item.rollout for item in unscored]


def _logged(prefix: str, scored: Sequence[Scored], unscored: Sequence[Unscored]) -> dict[str, float]:
    """What reward functions logged, as the mean over the samples of the calls that logged it."""
    values: dict[str, list[float]] = defaultdict(list)
    results: list[Scored | Unscored] = [*scored, *unscored]
    for item in results:
        for name, value in item.logged.items():
            values[name].append(value)
    return {f"{prefix}/{name}": _mean(found) for name, found in sorted(values.items())}


def _rewards_by_group(scored: Sequence[Scored]) -> Mapping[str, list[float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for item in scored:
        groups[item.rollout.request.group].append(item.reward)
    return groups


def _parts_by_name(scored: Sequence[Scored]) -> Mapping[str, list[float]]:
    parts: dict[str, list[float]] = defaultdict(list)
    for item in scored:
        for name, value in item.parts.items():
            parts[name].append(value)
    return parts
