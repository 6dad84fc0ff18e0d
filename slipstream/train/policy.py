"""A model and the losses it is trained with: log-probabilities and gradients, one micro-batch at a time. No optimizer.

Owns the forward, the backward and what is told of them; not which samples come together, nor when weights change. The
forward may run in bfloat16 under autocast. The model stays in the mode it came in (no dropout: the ratio to the
engine's probabilities wants one function).

With several ranks every method is called by all of them at the same time, because each forward and backward of a
sharded model gathers its weights from all. A rank that has no samples for a call gives None and takes part with one
token that has no weight.
Axes: T packed tokens, N response tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.config import Algorithm, Training
from slipstream.models.packed import document_hidden
from slipstream.models.precision import precision_of
from slipstream.train.algorithms import ALGORITHMS, token_weight
from slipstream.train.loss import Metrics, logprobs_and_entropy, policy_loss
from slipstream.train.packing import pack
from slipstream.train.ranks import Ranks
from slipstream.train.recompute import recomputing
from slipstream.train.sharding import decoder_layers, inside_forward
from slipstream.types import TrainSample

Pair = tuple[Sequence[int], Sequence[int]]
"""Prompt token ids and response token ids."""
STAND_IN = TrainSample(uid="", prompt_ids=(0,), response_ids=(0,), behaviour_logprobs=(0.0,), advantage=0.0)


@dataclass(frozen=True, slots=True)
class Where:
    """What a fault happened in, and the setting that may be to blame."""

    during: str
    lr_setting: str


class NonFiniteLoss(ArithmeticError):
    """A loss or gradient was NaN or infinite. The weights are as they were before the update that failed."""

    def __init__(self, what: str, where: Where, uids: Sequence[str]) -> None:
        shown = ", ".join(uids[:8]) + (f" and {len(uids) - 8} more" if len(uids) > 8 else "")
        super().__init__(
            f"{what} is not finite in {where.during}, samples {shown}; the optimizer was not stepped. "
            f"Try a lower {where.lr_setting}, a lower train.max_grad_norm or train.precision=float32"
        )
        self.uids = tuple(uids)
        self._made_of = (what, where, self.uids)

    def __reduce__(self) -> tuple[Any, ...]:
        return NonFiniteLoss, self._made_of  # it travels from the rank that meets it


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some samples on the device, one after another."""

    names: list[str]
    token_ids_T: Tensor
    lengths: list[int]
    positions_N: Tensor
    targets_N: Tensor
    response_lengths: list[int]
    counts: bool
    """False: it stands in for samples that this rank does not have, and nothing may come of it."""

    def spread(self, values: Sequence[float]) -> Tensor:
        """One value of each sample, repeated for each of its response tokens."""
        pairs = zip(values, self.response_lengths, strict=True)
        flat = [value for value, length in pairs for _ in range(length)]
        return torch.tensor(flat, dtype=torch.float32, device=self.targets_N.device)


class Policy:
    def __init__(
        self,
        model: PreTrainedModel,
        training: Training,
        algorithm: Algorithm,
        *,
        temperature: float,
        max_new_tokens: int,
        ranks: Ranks,
    ) -> None:
        self.model = model
        self.reference: PreTrainedModel | None = None
        self.on_hidden: Callable[[MicroBatch, Tensor], None] | None = None
        self.device = next(model.parameters()).device
        self.dtype = precision_of(training.precision, model)
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        self.recipe = ALGORITHMS[algorithm.name]
        self.clip_low = self.recipe.clip_low if algorithm.clip_low is None else algorithm.clip_low
        self.clip_high = self.recipe.clip_high if algorithm.clip_high is None else algorithm.clip_high
        self.aggregation = self.recipe.aggregation if algorithm.aggregation == "auto" else algorithm.aggregation
        self._recomputed = decoder_layers(model) if training.gradient_checkpointing else []
        self._algorithm, self._chunk_tokens, self._ranks = algorithm, training.logprob_chunk_tokens, ranks

    def teaches(self, sample: TrainSample) -> bool:
        """Whether it has a gradient. With advantage 0 it has none (every objective multiplies by it) unless there is a
        KL penalty: its forward and backward are spared, its tokens still count in the update's total."""
        return sample.advantage != 0 or self._algorithm.kl_coef > 0

    def add_gradient(
        self, members: Sequence[TrainSample] | None, old: Mapping[str, Tensor] | None, where: Where
    ) -> Metrics:
        """Add the gradient of weight x token loss, not divided yet by the update's total.

        `old`: by uid, the log-probabilities before the step; None if they are the current ones.
        """
        batch = self._micro_batch(members)
        members, old = (members, old) if members is not None else ([STAND_IN], None)
        behaviour = [value for sample in members for value in sample.behaviour_logprobs]
        assert len(behaviour) == len(batch.targets_N), f"behaviour log-probabilities do not match: {members[0].uid}"
        log_kept_N = None
        if any(sample.log_kept for sample in members):
            log_kept = [value for sample in members for value in sample.log_kept or (0.0,) * len(sample.response_ids)]
            assert len(log_kept) == len(behaviour), f"kept masses do not match: {members[0].uid}"
            log_kept_N = torch.tensor(log_kept, dtype=torch.float32, device=self.device)
        ref_logprobs_N = None
        if self._algorithm.kl_coef > 0:
            assert self.reference is not None, "algorithm.kl_coef > 0, and trainer.reference was not set"
            with torch.no_grad():
                ref_logprobs_N, _ = self._logprobs(self.reference, batch, self.temperature)
        logprobs_N, entropy_N = self._logprobs(self.model, batch, self.temperature)
        weights = [token_weight(n, self.aggregation, self.max_new_tokens) for n in batch.response_lengths]
        loss, metrics = policy_loss(
            logprobs_N,
            old_logprobs_N=logprobs_N.detach() if old is None else torch.cat([old[s.uid] for s in members]),
            behaviour_logprobs_N=torch.tensor(behaviour, dtype=torch.float32, device=self.device),
            log_kept_N=log_kept_N,
            advantages_N=batch.spread([sample.advantage for sample in members]),
            weights_N=batch.spread(weights),
            lengths=batch.response_lengths,
            recipe=self.recipe,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            importance_cap=self._algorithm.importance_cap,
            ref_logprobs_N=ref_logprobs_N,
            kl_coef=self._algorithm.kl_coef,
        )
        metrics["actor/entropy"] = (entropy_N.sum(), float(len(entropy_N)))
        self._backward(loss, logprobs_N, batch, where)
        return metrics if batch.counts else {}

    def add_supervised_gradient(
        self, pairs: Sequence[Pair] | None, names: list[str], num_tokens: int, where: Where
    ) -> Metrics:
        """Add the gradient of the cross-entropy of the response tokens at temperature 1, summed and divided by
        `num_tokens`."""
        batch = self._pack(pairs, names)
        logprobs_N, _ = self._logprobs(self.model, batch, 1.0)
        self._backward(-logprobs_N.sum() / num_tokens, logprobs_N, batch, where)
        return {"warmup/loss": (-logprobs_N.detach().sum(), float(len(logprobs_N)))} if batch.counts else {}

    @torch.no_grad()
    def logprobs_by_uid(self, members: Sequence[TrainSample] | None) -> dict[str, Tensor]:
        """Of the response tokens, under the current weights."""
        batch = self._micro_batch(members)
        logprobs_N, _ = self._logprobs(self.model, batch, self.temperature)
        parts = logprobs_N.split(batch.response_lengths)
        return dict(zip(batch.names, parts, strict=True)) if batch.counts else {}

    def _micro_batch(self, members: Sequence[TrainSample] | None) -> MicroBatch:
        if members is None:
            return self._pack(None, [])
        return self._pack([(s.prompt_ids, s.response_ids) for s in members], [s.uid for s in members])

    def _pack(self, pairs: Sequence[Pair] | None, names: list[str]) -> MicroBatch:
        packed = pack([(STAND_IN.prompt_ids, STAND_IN.response_ids)] if pairs is None else pairs)
        flat = (packed.token_ids_T, packed.positions_N, packed.targets_N)
        token_ids_T, positions_N, targets_N = (torch.tensor(ids, device=self.device) for ids in flat)
        return MicroBatch(
            names, token_ids_T, packed.lengths, positions_N, targets_N, packed.response_lengths, pairs is not None
        )

    def _logprobs(self, model: PreTrainedModel, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        has_gradient = model is self.model and torch.is_grad_enabled()

        def compute() -> tuple[Tensor, Tensor]:
            with recomputing(self._recomputed if has_gradient else ()):
                hidden_TD = document_hidden(model, batch.token_ids_T, batch.lengths)
            if self.on_hidden is not None and has_gradient and batch.counts:
                self.on_hidden(batch, hidden_TD.detach())
            return logprobs_and_entropy(
                model, hidden_TD[batch.positions_N], batch.targets_N, temperature, self._chunk_tokens
            )

        with self._autocast():
            return inside_forward(model, compute)

    @torch.no_grad()
    def hidden(self, ids_T: Tensor, lengths: Sequence[int]) -> Tensor:
        """Last hidden states [T, D] of documents packed one after another, as a gradient's forward computes them."""
        with self._autocast():
            return inside_forward(self.model, lambda: document_hidden(self.model, ids_T, lengths))

    def _autocast(self) -> torch.autocast:
        """One for each forward: casts cached under no_grad would cut the gradient of a later forward."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def _backward(self, loss: Tensor, logprobs_N: Tensor, batch: MicroBatch, where: Where) -> None:
        if not batch.counts:
            loss = loss * 0.0
        loss.backward()  # type: ignore[no-untyped-call]
        # Asked after the backward is under way: the answer waits for the device. All ranks must stop at the same call.
        fine = bool(torch.isfinite(loss))
        if self._ranks.all_say(fine):
            return
        parts = zip(batch.names, logprobs_N.detach().split(batch.response_lengths), strict=False)
        culprits = [uid for uid, part in parts if not torch.isfinite(part).all()]
        named = self._ranks.gather([] if fine else culprits or batch.names)
        raise NonFiniteLoss("the loss", where, [uid for uids in named for uid in uids])
