"""Log-probabilities in chunks, and the policy loss of one micro-batch from per-token numbers.

Owns the arithmetic of every objective; knows neither samples nor optimizer. Logits exist for `chunk_tokens` tokens at a
time, in the forward and in the backward pass (each chunk is recomputed there). A metric is a pair (sum, weight) that
merges over micro-batches by addition, or by the maximum if its name ends in `_max`; no metric waits for the device.

Axes: N response tokens of the micro-batch, sample after sample; C tokens of a chunk; D hidden; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from slipstream.models.packed import head_logits
from slipstream.train.algorithms import Recipe

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here: exp would overflow, and infinity times a zero gradient is NaN."""

Metrics = dict[str, tuple[Tensor, float]]


def logprobs_and_entropy(
    model: PreTrainedModel, hidden_ND: Tensor, targets_N: Tensor, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(logits / temperature), and that distribution's entropy in nats.

    The entropy carries no gradient. Give only the hidden states that predict response tokens.
    """

    def of_chunk(hidden_CD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = head_logits(model, hidden_CD)
        if temperature != 1.0:
            logits_CV = logits_CV / temperature
        normaliser_C = logits_CV.logsumexp(-1)
        logprobs_C = logits_CV.gather(-1, targets_C[:, None])[:, 0] - normaliser_C
        with torch.no_grad():
            entropy_C = normaliser_C - (logits_CV.softmax(-1) * logits_CV).sum(-1)
        return logprobs_C, entropy_C

    parts: list[tuple[Tensor, Tensor]] = []
    # split, not slices: its backward joins the chunks' gradients once instead of adding one full-size tensor per chunk.
    for hidden_CD, targets_C in zip(hidden_ND.split(chunk_tokens), targets_N.split(chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(of_chunk, hidden_CD, targets_C, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(of_chunk(hidden_CD, targets_C))
    return torch.cat([logprobs_C for logprobs_C, _ in parts]), torch.cat([entropy_C for _, entropy_C in parts])


def policy_loss(
    logprobs_N: Tensor,
    *,
    old_logprobs_N: Tensor,
    behaviour_logprobs_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    lengths: Sequence[int],
    recipe: Recipe,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
    log_kept_N: Tensor | None = None,
    ref_logprobs_N: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """This micro-batch's part of the update's loss: sum of weight x (surrogate + kl_coef x KL to the reference).

    old: the trainer's log-probabilities before the step's first update. behaviour: the engine's, when it sampled. Both
    are over the whole vocabulary, so that `mismatch_kl` measures numerics and staleness alone, and the clipped ratio of
    logprobs to old is that of two policies with one support. log_kept: the log of the mass that top-k, top-p and min-p
    kept, if they were used. A token was drawn with probability exp(behaviour - log_kept), so its importance weight is
    exp(old - behaviour + log_kept), capped (truncated importance sampling: Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"). It makes the gradient, token for token, that of the uncut
    policy with an advantage of 0 for tokens that cannot be drawn. A cap of 0 turns it off. The gradient flows through
    logprobs_N only. `lengths` are the response lengths, in order.
    """
    num_tokens = float(len(logprobs_N))
    log_ratio_N = logprobs_N - old_logprobs_N
    if recipe.ratio_level == "sequence":
        log_ratio_N = torch.cat([part.mean().expand(len(part)) for part in log_ratio_N.split(list(lengths))])
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    if recipe.objective == "cispo":
        surrogate_N = -clipped_N.detach() * advantages_N * logprobs_N
        is_clipped_N = clipped_N != ratio_N
    else:
        surrogate_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
        is_clipped_N = clipped_N * advantages_N < ratio_N * advantages_N

    metrics: Metrics = {"actor/clipfrac": (is_clipped_N.float().sum(), num_tokens)}
    with torch.no_grad():
        difference_N = old_logprobs_N - behaviour_logprobs_N
        mismatch_N = difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # Tokens come from the engine, so this estimates KL(engine || trainer).
        metrics["mismatch_kl"] = (_k3(mismatch_N).sum(), num_tokens)
        metrics["mismatch/logprob_diff_max"] = (difference_N.abs().max(), 1.0)
        drawn_N = mismatch_N
        if log_kept_N is not None:
            drawn_N = mismatch_N + log_kept_N
            metrics["rollout/kept_mass"] = (log_kept_N.exp().sum(), num_tokens)
        if importance_cap > 0:
            importance_N = drawn_N.exp().clamp(max=importance_cap)
            metrics["rollout/importance_weight"] = (importance_N.sum(), num_tokens)
    if importance_cap > 0:
        surrogate_N = surrogate_N * importance_N

    loss = (weights_N * surrogate_N).sum()
    # A total over the update, not a mean over tokens: the trainer adds its weight, 1 for each update.
    metrics["actor/pg_loss"] = (loss.detach(), 0.0)
    if ref_logprobs_N is not None:
        kl_N = _k3((ref_logprobs_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        loss = loss + kl_coef * (weights_N * kl_N).sum()
        metrics["actor/kl"] = (kl_N.detach().sum(), num_tokens)
    return loss, metrics


def merge_metrics(into: Metrics, new: Mapping[str, tuple[Tensor, float]]) -> None:
    for name, (value, weight) in new.items():
        if name not in into:
            into[name] = (value, weight)
        elif name.endswith("_max"):
            into[name] = (torch.maximum(into[name][0], value), 1.0)
        else:
            into[name] = (into[name][0] + value, into[name][1] + weight)


def summed_metrics(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """The pairs as numbers; waits for the device once."""
    values = torch.stack([value.float() for value, _ in metrics.values()]).tolist()
    return {name: (value, weight) for (name, (_, weight)), value in zip(metrics.items(), values, strict=True)}


def mean_metrics(parts: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """What all parts come to; a part need not have every name."""
    named: dict[str, list[tuple[float, float]]] = {}
    for part in parts:
        for name, pair in part.items():
            named.setdefault(name, []).append(pair)
    return {
        name: max(value for value, _ in pairs)
        if name.endswith("_max")
        else sum(value for value, _ in pairs) / sum(weight for _, weight in pairs)
        for name, pairs in named.items()
    }


def _k3(log_ratio_N: Tensor) -> Tensor:
    """r - 1 - log r for r = p/q at samples of q: unbiased for KL(q || p), never negative (Schulman 2020)."""
    # expm1 keeps the digits that exp - 1 loses near 0; the clamp removes the last rounding below 0.
    return (torch.expm1(log_ratio_N) - log_ratio_N).clamp(min=0.0)
