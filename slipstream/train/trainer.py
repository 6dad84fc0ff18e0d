"""The optimizer of one policy: samples in, updated weights and metrics out. Knows per-token numbers, no algorithm.

Owns AdamW's state, the step count and which samples are computed together; not the forward (`policy.py`), the rollouts,
nor when to save. Master weights and moments are float32. With several ranks all are given the same samples and make the
same micro-batches of them; they are dealt in turn, one to each rank a round.

Invariants: the weights never take a step from a loss or gradient that is not finite; micro-batch size, packing, the
order of groups and the number of ranks do not change an update beyond rounding; state_dict, load_state_dict and the
same samples in the same order, fed together or apart, give the same bits on a CPU, and on a GPU if the recipe asks for
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.config import Algorithm, Training
from slipstream.train.algorithms import learning_rate, update_total
from slipstream.train.loss import Metrics, mean_metrics, merge_metrics, summed_metrics
from slipstream.train.packing import StreamPacker, document_tokens, in_rounds, plan_micro_batches
from slipstream.train.policy import MicroBatch, NonFiniteLoss, Pair, Policy, Where
from slipstream.train.ranks import Ranks
from slipstream.train.sharding import cut_like, whole, whole_on_first
from slipstream.types import TrainSample

Stage = Literal["supervised", "policy"]
Progress = Callable[[int, int], None]
"""Told (done, total): response tokens that have given their gradient, and those that the step was given so far."""


@dataclass(slots=True)
class _Sums:
    """Gradient sums of one update under way."""

    packer: StreamPacker[TrainSample]
    """Holds back what does not fill a micro-batch yet."""
    old: Mapping[str, Tensor] | None
    """By uid, the log-probabilities before the step. None: they are the current ones, and come with the forward."""
    metrics: Metrics = field(default_factory=dict)
    round_of: list[list[TrainSample]] = field(default_factory=list)
    """Micro-batches that wait until there is one for each rank."""


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
        ranks: Ranks | None = None,
    ) -> None:
        """`model`: with several ranks it is sharded already."""
        if temperature <= 0 and training.steps > 0:
            raise ValueError("greedy rollouts have no probabilities to train on: set sampling.temperature above 0")
        # parameters() gives tied weights once.
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if any(parameter.dtype != torch.float32 for parameter in self.parameters):
            raise ValueError("the trainer keeps float32 master weights: load its model with dtype float32")
        self.model, self.training, self.ranks = model, training, ranks or Ranks()
        self.policy = Policy(
            model,
            training,
            algorithm,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            ranks=self.ranks,
        )
        self.device = self.policy.device
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

    @property
    def reference(self) -> PreTrainedModel | None:
        """The model that algorithm.kl_coef pulls towards; to be set before the first step if that is above 0."""
        return self.policy.reference

    @reference.setter
    def reference(self, model: PreTrainedModel | None) -> None:
        self.policy.reference = model

    @property
    def on_hidden(self) -> Callable[[MicroBatch, Tensor], None] | None:
        """Is shown the hidden states of every forward of the policy that has a gradient: each sample's once a step, on
        the rank that computes it."""
        return self.policy.on_hidden

    @on_hidden.setter
    def on_hidden(self, show: Callable[[MicroBatch, Tensor], None] | None) -> None:
        self.policy.on_hidden = show

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
                self._add_old(step, in_rounds(step.sums.round_of, full, self.ranks.size))

    def finish_step(self, on_progress: Progress | None = None) -> dict[str, float]:
        """`updates_per_step` optimizer updates, each on its share of the groups in the order they were fed.

        Metrics of tokens (entropy, mismatch) are means over the samples that were computed, see `Policy.teaches`.
        """
        step = self._opened()
        with self._or_abandon(), self._as_promised():
            if not step.samples:
                raise ValueError("a step needs at least one sample")
            self._check_fed(step.samples)
            several = self.training.updates_per_step > 1
            updates = split_by_group(step.samples, self.training.updates_per_step)
            if several:
                idle = [update[:1] for update in updates if not any(map(self.policy.teaches, update))]
                rest = [*step.sums.packer.rest(), *idle]
                self._add_old(step, in_rounds(step.sums.round_of, rest, self.ranks.size, is_last=True))
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
        advance(sum(len(sample.response_ids) for sample in step.samples) - step.num_done)
        self._open = None
        self.steps_done += 1
        if self.device.type == "cuda":
            allocated = torch.tensor(torch.cuda.max_memory_allocated(self.device) / 1e9)
            metrics["perf/allocated_gb_max"] = (allocated.to(self.device), 1.0)
        named = {**self._told(metrics), "actor/lr": lr}
        if "perf/allocated_gb_max" in named:
            named["perf/max_memory_allocated_gb"] = named.pop("perf/allocated_gb_max")
        return named

    def abandon_step(self) -> None:
        """Forget what was fed since `begin_step`: weights, moments and counters stay as they are."""
        self._open = None
        self.optimizer.zero_grad(set_to_none=True)

    def let_go(self) -> None:
        """Of all tensors, so that their memory is free once the model lets go of them too; it cannot train any more."""
        self.reference = None
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()
        self.parameters.clear()

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

    def _check_fed(self, samples: Sequence[TrainSample]) -> None:
        uids = [sample.uid for sample in samples]
        assert len(set(uids)) == len(uids), "a sample was fed twice"
        digest = hashlib.blake2b("\n".join(uids).encode(), digest_size=16).hexdigest()
        assert len(set(self.ranks.gather(digest))) == 1, "ranks were fed other samples, or in another order"

    def _no_sums(self, old: Mapping[str, Tensor] | None) -> _Sums:
        return _Sums(StreamPacker(self.training.micro_batch_tokens), old)

    def _full(self, packer: StreamPacker[TrainSample], samples: Sequence[TrainSample]) -> Iterator[list[TrainSample]]:
        """Micro-batches that these samples complete."""
        for sample in filter(self.policy.teaches, samples):
            members = packer.add(sample, document_tokens(sample.prompt_ids, sample.response_ids))
            if members is not None:
                yield members

    def _rest(self, packer: StreamPacker[TrainSample], update: Sequence[TrainSample]) -> list[list[TrainSample]]:
        """Micro-batches of an update that did not fill."""
        if not any(map(self.policy.teaches, update)):
            return [[update[0]]]  # one gives the zero gradient with which AdamW's momentum goes on
        return packer.rest()

    def _add_old(self, step: _OpenStep, rounds: Iterable[list[list[TrainSample]]]) -> None:
        for round_of in rounds:
            mine = self.policy.logprobs_by_uid(self.ranks.share_of(round_of))
            for part in self.ranks.gather(mine if self.ranks.size == 1 else _on_host(mine)):
                step.old |= {uid: logprobs_N.to(self.device) for uid, logprobs_N in part.items()}

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
        self._add_gradients(sums, self._rest(sums.packer, update), on_tokens, is_last=True)
        total = update_total([len(sample.response_ids) for sample in update], self.policy.aggregation)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(total)
        nothing = (torch.zeros((), device=self.device), 0.0)
        loss, _ = sums.metrics.get("actor/pg_loss", nothing)
        # The sum over the ranks is one update's.
        return sums.metrics | {"actor/pg_loss": (loss / total, 1.0 if self.ranks.is_first else 0.0)}

    def _add_gradients(
        self,
        sums: _Sums,
        micro_batches: Iterable[list[TrainSample]],
        on_tokens: Callable[[int], None],
        *,
        is_last: bool = False,
    ) -> None:
        """Add the gradients of weight x token loss, not divided yet by the update's total."""
        for round_of in in_rounds(sums.round_of, micro_batches, self.ranks.size, is_last=is_last):
            mine = self.ranks.share_of(round_of)
            merge_metrics(sums.metrics, self.policy.add_gradient(mine, sums.old, self._where("policy")))
            on_tokens(sum(len(sample.response_ids) for members in round_of for sample in members))

    def logprobs_of(self, samples: Sequence[TrainSample]) -> dict[str, Tensor]:
        """Log-probabilities of each sample's response tokens under the current weights, by uid."""
        lengths = [document_tokens(sample.prompt_ids, sample.response_ids) for sample in samples]
        plan = plan_micro_batches(lengths, self.training.micro_batch_tokens)
        step = _OpenStep(self._no_sums(None))
        batches = [[samples[index] for index in members] for members in plan]
        self._add_old(step, in_rounds([], batches, self.ranks.size, is_last=True))
        assert len(step.old) == len(samples), "two samples have the same uid"
        return step.old

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
            plan = plan_micro_batches(lengths, self.training.micro_batch_tokens)
            for round_of in in_rounds([], plan, self.ranks.size, is_last=True):
                mine = self.ranks.share_of(round_of)
                merge_metrics(
                    metrics,
                    self.policy.add_supervised_gradient(
                        None if mine is None else [pairs[index] for index in mine],
                        [f"pair {index}" for index in mine or ()],
                        num_tokens,
                        self._where("supervised"),
                    ),
                )
            norm = self._update(lr, [f"pair {index}" for index in range(len(pairs))])
        return {**self._told({**metrics, "warmup/grad_norm": (norm, 1.0)}), "warmup/lr": lr}

    def state_dict(self) -> dict[str, Any]:
        """The optimizer and the counters; the weights are the model's to save. Of whole tensors, so that any number of
        ranks can go on from it; only the first rank gets them."""
        optimizer = self.optimizer.state_dict()
        if self.ranks.size > 1:
            optimizer = whole_on_first(optimizer, self.ranks)
        return {"optimizer": optimizer, "steps_done": self.steps_done, "stage": self.stage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What any number of ranks saved; every rank is given all of it."""
        settings = [(group["betas"], group["weight_decay"]) for group in self.optimizer.param_groups]
        optimizer = state["optimizer"]
        if self.ranks.size > 1:
            by_number = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            cut = {
                number: {key: cut_like(value, by_number[number]) for key, value in moments.items()}
                for number, moments in optimizer["state"].items()
            }
            optimizer = optimizer | {"state": cut}
        self.optimizer.load_state_dict(optimizer)
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

    def _update(self, lr: float, uids: Sequence[str]) -> Tensor:
        """Clip, step, and forget the gradients; gives the norm before clipping."""
        norm = whole(nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm))
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteLoss("the gradient", self._where(self.stage), uids)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _where(self, stage: Stage) -> Where:
        if stage == "supervised":
            return Where("a warm-start step", "warmup.lr")
        return Where(f"step {self.steps_done + 1}", "train.lr")

    def _told(self, metrics: Metrics) -> dict[str, float]:
        """Metrics of all ranks as numbers; waits for the device."""
        return mean_metrics(self.ranks.gather(summed_metrics(metrics)))


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


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
