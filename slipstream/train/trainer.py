"""The optimizer of one policy: samples in, updated weights and metrics out. Knows per-token numbers, no algorithm.

Owns AdamW's state and the step count; not the rollouts, nor when to save. Master weights and moments are float32; the
forward may run in bfloat16 under autocast. The model stays in the mode it came in (no dropout: the ratio to the
engine's probabilities wants one function).

Invariants: the weights never take a step from a loss or gradient that is not finite; micro-batch size, packing and the
order of groups do not change an update beyond rounding; state_dict, load_state_dict and the same samples in the same
order, fed together or apart, give the same bits on a CPU, and on a GPU if the recipe asks for it.
Axes: T packed tokens, N response tokens, D hidden.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.config import Algorithm, Training
from slipstream.models.packed import document_hidden
from slipstream.models.precision import resolve_precision
from slipstream.train.algorithms import ALGORITHMS, learning_rate, token_weight, update_total
from slipstream.train.loss import Metrics, logprobs_and_entropy, mean_metrics, merge_metrics, policy_loss
from slipstream.train.packing import StreamPacker, document_tokens, pack, plan_micro_batches
from slipstream.types import TrainSample

Pair = tuple[Sequence[int], Sequence[int]]
"""Prompt token ids and response token ids."""
Stage = Literal["supervised", "policy"]
Progress = Callable[[int, int], None]
"""Told (done, total): response tokens that have given their gradient, and those that the step was given so far."""


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
    """Some samples on the device, one after another."""

    token_ids_T: Tensor
    lengths: list[int]
    positions_N: Tensor
    targets_N: Tensor
    response_lengths: list[int]

    def spread(self, values: Sequence[float]) -> Tensor:
        """One value of each sample, repeated for each of its response tokens."""
        pairs = zip(values, self.response_lengths, strict=True)
        flat = [value for value, length in pairs for _ in range(length)]
        return torch.tensor(flat, dtype=torch.float32, device=self.targets_N.device)


@dataclass(slots=True)
class _Sums:
    """Gradient sums of one update under way."""

    packer: StreamPacker[TrainSample]
    """Holds back what does not fill a micro-batch yet."""
    old: Mapping[str, Tensor] | None
    """By uid, the log-probabilities before the step. None: they are the current ones, and come with the forward."""
    metrics: Metrics = field(default_factory=dict)


@dataclass(slots=True)
class _OpenStep:
    """A step between its begin and its end."""

    sums: _Sums
    """Of its only update; with several, its packer fills the forwards that give `old`."""
    old: dict[str, Tensor] = field(default_factory=dict)
    samples: list[TrainSample] = field(default_factory=list)
    num_done: int = 0
    """Response tokens that have given their gradient."""

    def told_to(self, on_progress: Progress | None) -> Callable[[int], None]:
        """What to call with the tokens of each micro-batch."""
        total = sum(len(sample.response_ids) for sample in self.samples)

        def advance(num_tokens: int) -> None:
            self.num_done += num_tokens
            if on_progress is not None:
                on_progress(self.num_done, total)

        return advance


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
        self._open: _OpenStep | None = None
        self.stage: Stage = "policy"
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

    def step(self, samples: Sequence[TrainSample], on_progress: Progress | None = None) -> dict[str, float]:
        """One RL step of samples that are all there, with the bits of one that was fed its groups in this order."""
        self.begin_step()
        self.feed(samples, on_progress)
        return self.finish_step(on_progress)

    def begin_step(self) -> None:
        """From here to `finish_step` groups are fed as they are scored."""
        assert self._open is None, "a step is under way: finish_step or abandon_step comes first"
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._open = _OpenStep(self._no_sums(None))

    def feed(self, samples: Sequence[TrainSample], on_progress: Progress | None = None) -> None:
        """Whole groups, with their advantages. Adds the gradient of every micro-batch that is full; the rest waits.

        With several updates it only computes the log-probabilities before the step: which groups share an update is
        known when all are there. After an exception the step is abandoned.
        """
        step = self._opened()
        with self._or_abandon(), self._as_promised():
            step.samples += samples
            full = self._full(step.sums.packer, samples)
            if self.training.updates_per_step == 1:
                self._add_gradients(step.sums, full, step.told_to(on_progress))
            else:
                self._add_old(step, full)

    def finish_step(self, on_progress: Progress | None = None) -> dict[str, float]:
        """`updates_per_step` optimizer updates, each on its share of the groups in the order they were fed.

        Metrics of tokens (entropy, mismatch) are means over the samples that were computed, see `_teaches`.
        """
        step = self._opened()
        with self._or_abandon(), self._as_promised():
            if not step.samples:
                raise ValueError("a step needs at least one sample")
            assert len({sample.uid for sample in step.samples}) == len(step.samples), "a sample was fed twice"
            several = self.training.updates_per_step > 1
            updates = split_by_group(step.samples, self.training.updates_per_step)
            if several:
                idle = [update[:1] for update in updates if not any(map(self._teaches, update))]
                self._add_old(step, [*step.sums.packer.rest(), *idle])
            self._enter("policy")
            lr = learning_rate(self.training, self.steps_done)
            metrics: Metrics = {}
            advance = step.told_to(on_progress)
            for update in updates:
                if several:
                    merge_metrics(metrics, self.accumulate_gradients(update, step.old, advance))
                else:
                    merge_metrics(metrics, self._conclude(step.sums, update, advance))
                norm = self._update(lr, [sample.uid for sample in update])
                merge_metrics(metrics, {"actor/grad_norm": (norm, 1.0)})
        num_left = sum(len(sample.response_ids) for sample in step.samples) - step.num_done
        advance(num_left)
        self._open = None
        self.steps_done += 1
        named = {**mean_metrics(metrics), "actor/lr": lr}
        if self.device.type == "cuda":
            named["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        return named

    def abandon_step(self) -> None:
        """Forget what was fed since `begin_step`: weights, moments and counters stay as they are."""
        self._open = None
        self.optimizer.zero_grad(set_to_none=True)

    def skip_step(self) -> None:
        """Count a step that had nothing to train on: the weights stay, the learning-rate schedule goes on."""
        self.steps_done += 1

    def _opened(self) -> _OpenStep:
        assert self._open is not None, "no step is under way: begin_step comes first"
        return self._open

    @contextmanager
    def _or_abandon(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon_step()
            raise

    def _no_sums(self, old: Mapping[str, Tensor] | None) -> _Sums:
        return _Sums(StreamPacker(self.training.micro_batch_tokens), old)

    def _full(self, packer: StreamPacker[TrainSample], samples: Sequence[TrainSample]) -> Iterator[list[TrainSample]]:
        """Micro-batches that these samples complete."""
        for sample in filter(self._teaches, samples):
            members = packer.add(sample, document_tokens(sample.prompt_ids, sample.response_ids))
            if members is not None:
                yield members

    def _rest(self, packer: StreamPacker[TrainSample], update: Sequence[TrainSample]) -> list[list[TrainSample]]:
        """Micro-batches of an update that did not fill."""
        if not any(map(self._teaches, update)):
            return [[update[0]]]  # one gives the zero gradient with which AdamW's momentum goes on
        return packer.rest()

    def _teaches(self, sample: TrainSample) -> bool:
        """Whether it has a gradient. With advantage 0 it has none (every objective multiplies by it) unless there is a
        KL penalty: its forward and backward are spared, its tokens still count in the update's total."""
        return sample.advantage != 0 or self.algorithm.kl_coef > 0

    def _add_old(self, step: _OpenStep, micro_batches: Iterable[list[TrainSample]]) -> None:
        for members in micro_batches:
            step.old |= self._logprobs_by_uid(members)

    def accumulate_gradients(
        self,
        update: Sequence[TrainSample],
        old: Mapping[str, Tensor] | None,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
    ) -> Metrics:
        """Add the gradient of the loss of one update whose samples are all there. For `old` see `_Sums`."""
        sums = self._no_sums(old)
        self._add_gradients(sums, self._full(sums.packer, update), on_tokens)
        return self._conclude(sums, update, on_tokens)

    def _conclude(self, sums: _Sums, update: Sequence[TrainSample], on_tokens: Callable[[int], None]) -> Metrics:
        """Take in what is left, and make the gradient of the update's mean loss out of the sums."""
        self._add_gradients(sums, self._rest(sums.packer, update), on_tokens)
        total = update_total([len(sample.response_ids) for sample in update], self.aggregation)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(total)
        return sums.metrics | {"actor/pg_loss": (sums.metrics["actor/pg_loss"][0] / total, 1.0)}

    def _add_gradients(
        self, sums: _Sums, micro_batches: Iterable[list[TrainSample]], on_tokens: Callable[[int], None]
    ) -> None:
        """Add the gradients of weight x token loss, not divided yet by the update's total."""
        for members in micro_batches:
            batch = self._micro_batch([(sample.prompt_ids, sample.response_ids) for sample in members])
            merge_metrics(sums.metrics, self._add_gradient(batch, members, sums.old))
            on_tokens(len(batch.targets_N))

    def _add_gradient(
        self, batch: MicroBatch, members: Sequence[TrainSample], old: Mapping[str, Tensor] | None
    ) -> Metrics:
        behaviour = [value for sample in members for value in sample.behaviour_logprobs]
        assert len(behaviour) == len(batch.targets_N), f"behaviour log-probabilities do not match: {members[0].uid}"
        ref_logprobs_N = None
        if self.algorithm.kl_coef > 0:
            assert self.reference is not None, "algorithm.kl_coef > 0, and trainer.reference was not set"
            with torch.no_grad():
                ref_logprobs_N, _ = self._logprobs(self.reference, batch, self.temperature)
        logprobs_N, entropy_N = self._logprobs(self.model, batch, self.temperature)
        weights = [token_weight(n, self.aggregation, self.max_new_tokens) for n in batch.response_lengths]
        loss, metrics = policy_loss(
            logprobs_N,
            old_logprobs_N=logprobs_N.detach() if old is None else torch.cat([old[s.uid] for s in members]),
            behaviour_logprobs_N=torch.tensor(behaviour, dtype=torch.float32, device=self.device),
            advantages_N=batch.spread([sample.advantage for sample in members]),
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
        self._backward(loss, logprobs_N, [sample.uid for sample in members], batch.response_lengths, "policy")
        return metrics

    def logprobs_of(self, samples: Sequence[TrainSample]) -> dict[str, Tensor]:
        """Log-probabilities of each sample's response tokens under the current weights, by uid."""
        lengths = [document_tokens(sample.prompt_ids, sample.response_ids) for sample in samples]
        found: dict[str, Tensor] = {}
        for members in plan_micro_batches(lengths, self.training.micro_batch_tokens):
            found |= self._logprobs_by_uid([samples[index] for index in members])
        assert len(found) == len(samples), "two samples have the same uid"
        return found

    @torch.no_grad()
    def _logprobs_by_uid(self, members: Sequence[TrainSample]) -> dict[str, Tensor]:
        batch = self._micro_batch([(sample.prompt_ids, sample.response_ids) for sample in members])
        logprobs_N, _ = self._logprobs(self.model, batch, self.temperature)
        uids = [sample.uid for sample in members]
        return dict(zip(uids, logprobs_N.split(batch.response_lengths), strict=True))

    def supervised_step(self, pairs: Sequence[Pair], lr: float) -> dict[str, float]:
        """One update on the mean cross-entropy of the response tokens, at temperature 1."""
        if not pairs:
            raise ValueError("a supervised step needs at least one pair")
        assert self._open is None, "a step is under way: its gradients are in the way"
        self.optimizer.zero_grad(set_to_none=True)
        self._enter("supervised")
        num_tokens = sum(len(response_ids) for _, response_ids in pairs)
        metrics: Metrics = {}
        with self._as_promised():
            lengths = [document_tokens(prompt_ids, response_ids) for prompt_ids, response_ids in pairs]
            for members in plan_micro_batches(lengths, self.training.micro_batch_tokens):
                batch = self._micro_batch([pairs[index] for index in members])
                logprobs_N, _ = self._logprobs(self.model, batch, 1.0)
                loss = -logprobs_N.sum() / num_tokens
                names = [f"pair {index}" for index in members]
                self._backward(loss, logprobs_N, names, batch.response_lengths, "supervised")
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

    def _enter(self, stage: Stage) -> None:
        """Before an update."""
        # Moments of one loss are the wrong scale for the other's first steps.
        if stage != self.stage:
            self.optimizer.state.clear()
            self.stage = stage

    def _micro_batch(self, pairs: Sequence[Pair]) -> MicroBatch:
        packed = pack(pairs)
        flat = (packed.token_ids_T, packed.positions_N, packed.targets_N)
        token_ids_T, positions_N, targets_N = (torch.tensor(ids, device=self.device) for ids in flat)
        return MicroBatch(token_ids_T, packed.lengths, positions_N, targets_N, packed.response_lengths)

    def _logprobs(self, model: PreTrainedModel, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        # One autocast context for each forward: casts cached under no_grad would cut the gradient of a later forward.
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden_TD = document_hidden(model, batch.token_ids_T, batch.lengths)
            if self.on_hidden is not None and model is self.model and torch.is_grad_enabled():
                self.on_hidden(batch, hidden_TD.detach())
            return logprobs_and_entropy(
                model, hidden_TD[batch.positions_N], batch.targets_N, temperature, self.training.logprob_chunk_tokens
            )

    def _backward(
        self, loss: Tensor, logprobs_N: Tensor, uids: Sequence[str], lengths: list[int], stage: Stage
    ) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        # Asked after the backward is under way: the answer waits for the device.
        if not torch.isfinite(loss):
            self.optimizer.zero_grad(set_to_none=True)
            parts = zip(uids, logprobs_N.detach().split(lengths), strict=True)
            culprits = [uid for uid, part in parts if not torch.isfinite(part).all()]
            raise self._non_finite("the loss", culprits or uids, stage)

    def _update(self, lr: float, uids: Sequence[str]) -> Tensor:
        """Clip, step, and forget the gradients; gives the norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise self._non_finite("the gradient", uids, self.stage)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _non_finite(self, what: str, uids: Sequence[str], stage: Stage) -> NonFiniteLoss:
        if stage == "supervised":
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
