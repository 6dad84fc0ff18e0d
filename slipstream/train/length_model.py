"""How long rollouts of a prompt nobody has sampled yet will be: a small language model that learns it as the run goes.

The other way beside the regression of `schedule/ranker.py`: the top layers of a causal language model, and a linear
head on the mean of their hidden states over a prompt, are tuned to the logarithm of the mean length of its rollouts.
All that it runs is a copy: the model it was made from is not changed, and may itself be trained on. Layers below the
top ones stay as they were copied, so what they make of a prompt is computed once and kept.

Invariants: the same model, seed and calls give the same forecasts on a CPU; no layer below the top ones ever changes.
Axes: T packed tokens, P prompts, D hidden size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.models.attention import Documents, attending
from slipstream.models.packed import document_hidden
from slipstream.models.weights import cast_weights
from slipstream.rng import keyed_random
from slipstream.train.packing import plan_micro_batches

BATCH_TOKENS = 4096
"""Of prompts that go through the layers together."""
KEPT_TOKENS = 65_536
"""Of prompts whose hidden states below the top layers are kept; the oldest go first."""
UPDATE_PROMPTS = 16
"""Of one update of the weights."""
HEAD_LR_TIMES = 10.0
"""The head begins at zero, the layers know a language already: it learns so much faster."""
LEAST_SPREAD = 0.05
"""Of hidden states, relative to their size, where the first step has too few prompts to tell."""
MAX_GRAD_NORM = 1.0
MOST_LOG = 20.0
"""Of a forecast: exp must not overflow."""
COMPOSES = 0.02
"""By how much the two parts of a model may differ from the whole, relative to its largest number."""


class LengthModel:
    def __init__(
        self, model: PreTrainedModel, *, num_layers: int = 2, lr: float = 3e-5, passes: int = 4, seed: int = 0
    ) -> None:
        """`num_layers`: how many on top learn; `passes`: over the prompts of each step. ValueError if the model cannot
        be cut below them."""
        self._below, self._top = _cut(model, num_layers)
        self._device = model.device
        self._head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False, device=self._device)
        nn.init.zeros_(self._head.weight)
        # Of the prompts of the first step. They share a template: what differs is small beside what does not.
        self._centre_D = torch.zeros(self._head.in_features, device=self._device)
        self._spread, self._level = 1.0, 0.0
        self._passes, self._seed, self._steps_done = passes, seed, 0
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._kept_tokens = 0
        self._optimizer = torch.optim.AdamW(
            [
                {"params": list(self._top.parameters()), "lr": lr},
                {"params": list(self._head.parameters()), "lr": HEAD_LR_TIMES * lr},
            ]
        )

    @property
    def has_learned(self) -> bool:
        return self._steps_done > 0

    def learn_step(self, prompts: Mapping[str, Sequence[int]], lengths: Mapping[str, Sequence[float]]) -> None:
        """The lengths of a step's rollouts, by prompt, and the token ids of these prompts, among others."""
        known = [prompt for prompt in lengths if lengths[prompt] and prompt in prompts]
        if not known:
            return
        ids = [prompts[prompt] for prompt in known]
        means = [math.fsum(lengths[prompt]) / len(lengths[prompt]) for prompt in known]
        logs_P = torch.tensor([math.log(mean) for mean in means], device=self._device)
        if not self.has_learned:
            states_PD = self._states_in_batches(ids)
            self._centre_D = states_PD.mean(0)
            spread, size = (states_PD - self._centre_D).square().mean().sqrt(), states_PD.square().mean().sqrt()
            self._spread = float(torch.maximum(spread, LEAST_SPREAD * size))
        for number in range(self._passes):
            order = list(range(len(ids)))
            keyed_random("length model", self._seed, self._steps_done, number).shuffle(order)
            for start in range(0, len(order), UPDATE_PROMPTS):
                members = order[start : start + UPDATE_PROMPTS]
                self._update([ids[member] for member in members], logs_P[members])
        with torch.no_grad():
            self._level = float((logs_P - self._above_level(self._states_in_batches(ids))).mean())
        self._steps_done += 1

    def forecast(self, token_ids: Sequence[int]) -> float:
        """Tokens of a typical rollout; ask `has_learned` first."""
        return self.score({"": token_ids})[""]

    @torch.no_grad()
    def score(self, prompts: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """The forecasts of many prompts, by name: those of a step, or a whole set at once."""
        assert self.has_learned, "no lengths were learned yet: ask has_learned first"
        logs = self._above_level(self._states_in_batches(list(prompts.values()))).tolist()
        return {prompt: math.exp(min(MOST_LOG, self._level + log)) for prompt, log in zip(prompts, logs, strict=True)}

    def _update(self, ids: Sequence[Sequence[int]], logs_P: Tensor) -> None:
        # The level is taken from the step as a whole: lengths drift together, faster than small steps would follow,
        # and layers that chase it move all prompts, those of other steps too.
        errors_P = self._above_level(self._states(ids)) - logs_P
        loss = errors_P.var(correction=0)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        learning = [*self._top.parameters(), *self._head.parameters()]
        nn.utils.clip_grad_norm_(learning, MAX_GRAD_NORM, error_if_nonfinite=True)
        self._optimizer.step()

    def _above_level(self, states_PD: Tensor) -> Tensor:
        """[P]: logarithms of lengths, but for the level that is common to all."""
        logs_P: Tensor = self._head((states_PD - self._centre_D) / self._spread)[:, 0]
        return logs_P

    @torch.no_grad()
    def _states_in_batches(self, ids: Sequence[Sequence[int]]) -> Tensor:
        states_PD = torch.empty(len(ids), self._head.in_features, device=self._device)
        for members in plan_micro_batches([len(one) for one in ids], BATCH_TOKENS):
            states_PD[members] = self._states([ids[member] for member in members])
        return states_PD

    def _states(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """[P, D]: means over each prompt of the last hidden states."""
        below = self._below_top([tuple(one) for one in ids])
        lengths = [len(one) for one in below]
        hidden_TD = _through_top(self._top, torch.cat(below), lengths)
        return torch.stack([hidden.mean(0) for hidden in hidden_TD.split(lengths)])

    @torch.no_grad()
    def _below_top(self, keys: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """[T, D] of each prompt: what the top layers are given."""
        assert all(keys), "a prompt has at least one token"
        new = [key for key in dict.fromkeys(keys) if key not in self._kept]
        if new:
            lengths = [len(key) for key in new]
            ids_T = torch.tensor([token for key in new for token in key], device=self._device)
            states = document_hidden(self._below, ids_T, lengths).float().split(lengths)
            # clone: a view would keep the states of its whole batch.
            self._kept |= {key: one.clone() for key, one in zip(new, states, strict=True)}
            self._kept_tokens += sum(lengths)
        found = [self._kept[key] for key in keys]
        while self._kept_tokens > KEPT_TOKENS:
            oldest = next(iter(self._kept))
            self._kept_tokens -= len(self._kept.pop(oldest))
        return found


def _cut(model: PreTrainedModel, num_layers: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Copies of a model without its top layers, and of these, in float32. Both are the family's own module with fewer
    layers; the second is given hidden states for embeddings."""
    kind = model.config.model_type
    below, top = copy.deepcopy(model.base_model).eval(), copy.deepcopy(model.base_model).eval()
    assert isinstance(below, PreTrainedModel) and isinstance(top, PreTrainedModel)
    low, high = getattr(below, "layers", None), getattr(top, "layers", None)
    if not isinstance(low, nn.ModuleList) or not isinstance(high, nn.ModuleList) or not hasattr(below, "norm"):
        raise ValueError(f"a model of type {kind} has no `layers` and `norm`: it cannot be cut to learn lengths")
    if not 1 <= num_layers <= len(low):
        raise ValueError(f"the model has {len(low)} layers: {num_layers} on top cannot learn")
    middle = len(low) - num_layers
    below.layers, below.norm = low[:middle], nn.Identity()
    top.layers = high[middle:]
    top.set_input_embeddings(nn.Identity())
    below.requires_grad_(False)
    top.requires_grad_(True)
    cast_weights(top, torch.float32)
    # Families that scale embeddings on their way in would do so twice, others know their layers by number.
    ids_T = torch.arange(1, 3, device=model.device)
    with torch.no_grad():
        whole = document_hidden(model, ids_T, [2]).float()
        parts = _through_top(top, document_hidden(below, ids_T, [2]).float(), [2])
    if (parts - whole).abs().max() > COMPOSES * whole.abs().max():
        raise ValueError(f"a model of type {kind} cannot be cut between two layers: choose another to learn lengths")
    return below, top


def _through_top(top: PreTrainedModel, states_TD: Tensor, lengths: Sequence[int]) -> Tensor:
    positions = torch.cat([torch.arange(length, device=states_TD.device) for length in lengths])
    with attending(Documents(lengths)):
        out = top(inputs_embeds=states_TD.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
    hidden_TD: Tensor = out.last_hidden_state[0]
    return hidden_TD
