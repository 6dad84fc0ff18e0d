"""The optimizer of one policy: samples in, updated weights and metrics out. Knows per-token numbers, no algorithm.

Owns AdamW's state and the step count; not the rollouts, nor when to save. Master weights and moments are float32; the
forward may run in bfloat16 under autocast. The model stays in the mode it came in (no dropout: the ratio to the
engine's probabilities wants one function).

Invariants: the weights never take a step from a loss or gradient that is not finite; micro-batch size and packing do
not change an update beyond rounding; state_dict, load_state_dict and the same samples give the same bits on a CPU, and
on a GPU if the recipe asks for it.
Axes: T packed tokens, N response tokens, D hidden.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.config import Algorithm, Training
from slipstream.models.packed import document_hidden
from slipstream.models.precision import resolve_precision
from slipstream.train.algorithms import ALGORITHMS, learning_rate, token_weights
from slipstream.train.loss import Metrics, logprobs_and_entropy, mean_metrics, merge_metrics, policy_loss
from slipstream.train.packing import document_tokens, pack, plan_micro_batches
from slipstream.types import TrainSample

Pair = tuple[Sequence[int], Sequence[int]]
"""Prompt token ids and response token ids."""


class NonFiniteLoss(ArithmeticError):
    """A loss or gradient was NaN or infinite. The weights are as they were before the update that failed."""

    def __init__(self, what: str, during: str, uids: Sequence[str], lr_setting: str) -> None:
        shown = ", ".join(uids[:8]) + (f" and {len(uids) - 8} more" if len(uids) > 8 else "")
        super().__init__(
            f"{what} is not finite in {during}, samples {shown}; the optimizer was not stepped. "
            f"Try a lower {lr_setting}, a lower train.max_grad_norm or train.precision=float32"
        )
        self.uids = tuple(uids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some of an update's samples on the device."""

    members: list[int]
    """Which samples, by index."""
    token_ids_T: Tensor
    lengths: list[int]
    positions_N: Tensor
    targets_N: Tensor
    response_lengths: list[int]

    def spread(self, values: Sequence[float]) -> Tensor:
        """One value of each of the update's samples, repeated for each response token of those in here."""
        pairs = zip(self.members, self.response_lengths, strict=True)
        flat = [values[member] for member, length in pairs for _ in range(length)]
        return torch.tensor(flat, dtype=torch.float32, device=self.targets_N.device)


class Trainer:
    def __init__(
        self,
        model: PreTrainedModel,
        training: Training,
        algorithm: Algorithm,
        *,
        temperature: float,
        max_new_tokens: int,
    ) -> None:
        if temperature <= 0 and training.steps > 0:
            raise ValueError("greedy rollouts have no probabilities to train on: set sampling.temperature above 0")
        # parameters() gives tied weights once.
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if any(parameter.dtype != torch.float32 for parameter in self.parameters):
            raise ValueError("the trainer keeps float32 master weights: load its model with dtype float32")
        self.model = model
        self.reference: PreTrainedModel | None = None
        """The model that algorithm.kl_coef pulls towards; to be set before the first step if that is above 0."""
        self.on_hidden: Callable[[MicroBatch, Tensor], None] | None = None
        """Is shown the hidden states of every forward of the policy that has a gradient: each sample's once a step."""
        self.training, self.algorithm = training, algorithm
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        self.recipe = ALGORITHMS[algorithm.name]
        self.clip_low = self.recipe.clip_low if algorithm.clip_low is None else algorithm.clip_low
        self.clip_high = self.recipe.clip_high if algorithm.clip_high is None else algorithm.clip_high
        self.aggregation = self.recipe.aggregation if algorithm.aggregation == "auto" else algorithm.aggregation
        self.device = self.parameters[0].device
        if training.deterministic and self.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it before it promises anything
        self.dtype = resolve_precision(training.precision, self.device)
        self.steps_done = 0
        self.stage: Literal["supervised", "policy"] = "policy"
        # Decay pulls matrices towards zero; a norm's gain or a bias has no business there.
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
                {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=training.lr,
            betas=training.betas,
            fused=self.device.type in ("cpu", "cuda"),
        )

    def step(
        self, samples: Sequence[TrainSample], on_progress: Callable[[int, int], None] | None = None
    ) -> dict[str, float]:
        """One RL step: `updates_per_step` optimizer updates, each on its share of the groups, in the given order.

        on_progress(done, total) counts response tokens that have given their gradient. Metrics of tokens (entropy,
        mismatch) are means over the samples that were computed, see `_teaching`.
        """
        if not samples:
            raise ValueError("a step needs at least one sample")
        self._enter("policy")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        updates = split_by_group(samples, self.training.updates_per_step)
        # With one update the old policy is the current one, so its log-probabilities come with the forward.
        old = self.logprobs_of(samples) if len(updates) > 1 else {}
        lr = learning_rate(self.training, self.steps_done)
        total, done = sum(len(sample.response_ids) for sample in samples), 0
        metrics: Metrics = {}
        for update in updates:
            with self._as_promised():
                for part, num_tokens in self.accumulate_gradients(update, old):
                    merge_metrics(metrics, part)
                    done += num_tokens
                    if on_progress is not None:
                        on_progress(done, total)
                norm = self._update(lr, [sample.uid for sample in update])
            one_update: Metrics = {"actor/pg_loss": (torch.zeros_like(norm), 1.0), "actor/grad_norm": (norm, 1.0)}
            merge_metrics(metrics, one_update)
        if on_progress is not None:
            on_progress(total, total)
        self.steps_done += 1
        named = {**mean_metrics(metrics), "actor/lr": lr}
        if self.device.type == "cuda":
            named["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        return named

    def skip_step(self) -> None:
        """Count a step that had nothing to train on: the weights stay, the learning-rate schedule goes on."""
        self.steps_done += 1

    def accumulate_gradients(
        self, update: Sequence[TrainSample], old: dict[str, Tensor]
    ) -> Iterator[tuple[Metrics, int]]:
        """Add the gradient of the update's loss; yields each micro-batch's metrics and its number of response tokens.

        `old` maps uids to the log-probabilities before the step; empty: they are the current ones.
        """
        lengths = [len(sample.response_ids) for sample in update]
        weights = token_weights(lengths, self.aggregation, self.max_new_tokens)
        teaching = self._teaching(update)
        update, weights = [update[index] for index in teaching], [weights[index] for index in teaching]
        advantages = [sample.advantage for sample in update]
        for batch in self._micro_batches([(sample.prompt_ids, sample.response_ids) for sample in update]):
            members = [update[index] for index in batch.members]
            behaviour = [value for sample in members for value in sample.behaviour_logprobs]
            assert len(behaviour) == len(batch.targets_N), f"behaviour log-probabilities do not match: {members[0].uid}"
            ref_logprobs_N = None
            if self.algorithm.kl_coef > 0:
                assert self.reference is not None, "algorithm.kl_coef > 0, and trainer.reference was not set"
                with torch.no_grad():
                    ref_logprobs_N, _ = self._logprobs(self.reference, batch, self.temperature)
            logprobs_N, entropy_N = self._logprobs(self.model, batch, self.temperature)
            loss, metrics = policy_loss(
                logprobs_N,
                old_logprobs_N=torch.cat([old[s.uid] for s in members]) if old else logprobs_N.detach(),
                behaviour_logprobs_N=torch.tensor(behaviour, dtype=torch.float32, device=self.device),
                advantages_N=batch.spread(advantages),
                weights_N=batch.spread(weights),
                lengths=batch.response_lengths,
                recipe=self.recipe,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                importance_cap=self.algorithm.importance_cap,
                ref_logprobs_N=ref_logprobs_N,
                kl_coef=self.algorithm.kl_coef,
            )
            metrics["actor/entropy"] = (entropy_N.sum(), float(len(entropy_N)))
            self._backward(loss, logprobs_N, [sample.uid for sample in members], batch.response_lengths)
            yield metrics, len(batch.targets_N)

    def _teaching(self, update: Sequence[TrainSample]) -> list[int]:
        """Samples that have a gradient. One whose advantage is 0 has none (every objective multiplies by it) unless
        there is a KL penalty: its forward and backward are spared, its tokens still count in the weights."""
        if self.algorithm.kl_coef > 0:
            return list(range(len(update)))
        with_advantage = [index for index, sample in enumerate(update) if sample.advantage != 0]
        return with_advantage or [0]  # one gives the zero gradient with which AdamW's momentum goes on

    def logprobs_of(self, samples: Sequence[TrainSample]) -> dict[str, Tensor]:
        """Log-probabilities of each sample's response tokens under the current weights, by uid."""
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for batch in self._micro_batches([(sample.prompt_ids, sample.response_ids) for sample in samples]):
                logprobs_N, _ = self._logprobs(self.model, batch, self.temperature)
                uids = [samples[index].uid for index in batch.members]
                found.update(zip(uids, logprobs_N.split(batch.response_lengths), strict=True))
        assert len(found) == len(samples), "two samples have the same uid"
        return found

    def supervised_step(self, pairs: Sequence[Pair], lr: float) -> dict[str, float]:
        """One update on the mean cross-entropy of the response tokens, at temperature 1."""
        if not pairs:
            raise ValueError("a supervised step needs at least one pair")
        self._enter("supervised")
        num_tokens = sum(len(response_ids) for _, response_ids in pairs)
        metrics: Metrics = {}
        with self._as_promised():
            for batch in self._micro_batches(pairs):
                logprobs_N, _ = self._logprobs(self.model, batch, 1.0)
                loss = -logprobs_N.sum() / num_tokens
                names = [f"pair {index}" for index in batch.members]
                self._backward(loss, logprobs_N, names, batch.response_lengths)
                merge_metrics(metrics, {"warmup/loss": (-logprobs_N.detach().sum(), float(len(logprobs_N)))})
            norm = self._update(lr, [f"pair {index}" for index in range(len(pairs))])
        return {**mean_metrics({**metrics, "warmup/grad_norm": (norm, 1.0)}), "warmup/lr": lr}

    def state_dict(self) -> dict[str, Any]:
        """The optimizer and the counters; the weights are the model's to save."""
        return {"optimizer": self.optimizer.state_dict(), "steps_done": self.steps_done, "stage": self.stage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        settings = [(group["betas"], group["weight_decay"]) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        # torch restores the saved run's settings too; a recipe changed for the resumed run must win.
        for group, (betas, weight_decay) in zip(self.optimizer.param_groups, settings, strict=True):
            group["betas"], group["weight_decay"] = betas, weight_decay
        self.steps_done, self.stage = state["steps_done"], state["stage"]

    @contextmanager
    def _as_promised(self) -> Iterator[None]:
        """If asked for, without the kernels whose sums come out in the order of chance; only here, since the engine has
        none of them, and torch's promise would slow it down."""
        if not self.training.deterministic or self.device.type != "cuda":
            yield
            return
        before, only_warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=only_warns)

    def _enter(self, stage: Literal["supervised", "policy"]) -> None:
        # Moments of one loss are the wrong scale for the other's first steps.
        if stage != self.stage:
            self.optimizer.state.clear()
            self.stage = stage
        self.optimizer.zero_grad(set_to_none=True)

    def _micro_batches(self, pairs: Sequence[Pair]) -> Iterator[MicroBatch]:
        lengths = [document_tokens(prompt_ids, response_ids) for prompt_ids, response_ids in pairs]
        for members in plan_micro_batches(lengths, self.training.micro_batch_tokens):
            packed = pack([pairs[index] for index in members])
            flat = (packed.token_ids_T, packed.positions_N, packed.targets_N)
            token_ids_T, positions_N, targets_N = (torch.tensor(ids, device=self.device) for ids in flat)
            yield MicroBatch(members, token_ids_T, packed.lengths, positions_N, targets_N, packed.response_lengths)

    def _logprobs(self, model: PreTrainedModel, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        # One autocast context for each forward: casts cached under no_grad would cut the gradient of a later forward.
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden_TD = document_hidden(model, batch.token_ids_T, batch.lengths)
            if self.on_hidden is not None and model is self.model and torch.is_grad_enabled():
                self.on_hidden(batch, hidden_TD.detach())
            return logprobs_and_entropy(
                model, hidden_TD[batch.positions_N], batch.targets_N, temperature, self.training.logprob_chunk_tokens
            )

    def _backward(self, loss: Tensor, logprobs_N: Tensor, uids: Sequence[str], lengths: list[int]) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        # Asked after the backward is under way: the answer waits for the device.
        if not torch.isfinite(loss):
            self.optimizer.zero_grad(set_to_none=True)
            parts = zip(uids, logprobs_N.detach().split(lengths), strict=True)
            culprits = [uid for uid, part in parts if not torch.isfinite(part).all()]
            raise self._non_finite("the loss", culprits or uids)

    def _update(self, lr: float, uids: Sequence[str]) -> Tensor:
        """Clip, step, and forget the gradients; gives the norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise self._non_finite("the gradient", uids)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _non_finite(self, what: str, uids: Sequence[str]) -> NonFiniteLoss:
        if self.stage == "supervised":
            return NonFiniteLoss(what, "a warm-start step", uids, "warmup.lr")
        return NonFiniteLoss(what, f"step {self.steps_done + 1}", uids, "train.lr")


def split_by_group(samples: Sequence[TrainSample], num_updates: int) -> list[list[TrainSample]]:
    """Whole groups (uid without its last part) to updates, in order, numbers of groups differing by at most one.

    Fewer groups than updates give one update each.
    """
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.uid.rpartition("/")[0], []).append(sample)
    members, count = list(groups.values()), min(num_updates, len(groups))
    bounds = [len(members) * number // count for number in range(count + 1)]
    return [[sample for group in members[start:end] for sample in group] for start, end in pairwise(bounds)]
