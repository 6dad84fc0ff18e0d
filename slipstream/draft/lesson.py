"""What a learned drafter is taught: to say what the target says, from its features and from its own hidden states.

A sample is a text with the target's features of each token and its last hidden state, from which the target's
distributions follow. The first pass sees the features, as at the first draft after a step; each further pass sees what
the pass before made of the token before, as further drafts do, with the keys of the features behind it and of the
passes before beside it. Targets are the target's distributions, not the tokens: they say more.

No shape and no branch depends on the texts, and nothing is read by the host, so that an update can be a CUDA graph.

Axes: T packed tokens, D hidden size, F features, N positions that are asked about, C of them at a time, V vocabulary,
H heads, J passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from slipstream.draft.eagle import DraftModel
from slipstream.models.packed import AfterHead

FADING = 0.8
"""Of a pass's weight, in the next one: drafts further ahead are needed less often."""
MASKED = -1e9
LOGIT_BYTES = 128 << 20
"""Of the float32 logits of all passes that exist at a time; about four tensors of that size do."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a text."""

    ids_T: Tensor
    features_TF: Tensor
    last_TD: Tensor
    """The target's hidden states before its head."""
    first: int
    """The position in its text at which it begins."""
    num_prompt: int
    """Tokens of the text that were given, not sampled."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Room for windows packed one after another; what they leave is a text of its own that is never asked about."""

    ids_T: Tensor
    features_TF: Tensor
    last_TD: Tensor
    places_4T: Tensor
    """Of each token: where its window starts, its position in its text, whether the next but one can be asked for
    there, and a number of its own by which those are chosen that are."""

    @classmethod
    def room(cls, num_tokens: int, num_features: int, width: int, dtype: torch.dtype, device: torch.device) -> Lesson:
        return cls(
            ids_T=torch.zeros(num_tokens, dtype=torch.long, device=device),
            features_TF=torch.zeros(num_tokens, num_features, dtype=dtype, device=device),
            last_TD=torch.zeros(num_tokens, width, dtype=dtype, device=device),
            places_4T=torch.zeros(4, num_tokens, dtype=torch.long, device=device),
        )

    def fill(self, windows: Sequence[Window], seed: int) -> None:
        """In place, on the current stream, without waiting for it. `seed`: of what is asked about."""
        end = 0
        for window in windows:
            part = slice(end, end + len(window.ids_T))
            end = part.stop
            for own, given in (
                (self.ids_T, window.ids_T),
                (self.features_TF, window.features_TF),
                (self.last_TD, window.last_TD),
            ):
                own[part].copy_(_near(given, own.device), non_blocking=True)
        assert end <= len(self.ids_T), "more than the lesson has room for"
        places_4T = torch.from_numpy(_places(windows, len(self.ids_T), seed))
        self.places_4T.copy_(_near(places_4T, self.places_4T.device), non_blocking=True)


class Taught(NamedTuple):
    loss: Tensor
    right_J: Tensor
    """Positions at which the likeliest token is the target's."""
    asked_J: Tensor


def lesson_loss(
    draft: DraftModel,
    embed: torch.nn.Module,
    head: torch.nn.Linear,
    lesson: Lesson,
    *,
    passes: int,
    inverse_temperature: float = 1.0,
    most_positions: int = 512,
    after_head: AfterHead = AfterHead(),
) -> Taught:
    """`embed`, `head` and what comes after it are the target's. All passes are asked about the same positions, where
    they can answer."""
    shared = (*embed.parameters(), *head.parameters())
    assert not any(parameter.requires_grad for parameter in shared), "the target would be given gradients"
    start_T, position_T, can_ask_T, number_T = lesson.places_4T
    at_N = torch.where(can_ask_T > 0, number_T, -1).topk(min(most_positions, len(number_T))).indices
    place_N = at_N - start_T[at_N]
    asked_JN = torch.stack([can_ask_T[at_N] * (place_N >= number) for number in range(passes)]).float()
    asked_J = asked_JN.sum(1)
    shares_JN = asked_JN / asked_J.clamp(min=1.0).unsqueeze(1)
    weight_JN = torch.stack([share_N * FADING**number for number, share_N in enumerate(shares_JN)])
    with torch.no_grad():
        embeds_TD = embed(lesson.ids_T.roll(-1))
        embeds_TD = embeds_TD.to(torch.promote_types(embeds_TD.dtype, lesson.features_TF.dtype))
    hidden_TD = draft.fuse(lesson.features_TF)
    keys: list[tuple[Tensor, Tensor]] = []
    said = []
    for number in range(passes):
        if number:
            hidden_TD = hidden_TD.roll(1, 0)  # a text's first token gets another's last: it is not asked from here on
        residual_TD, query, key, value = draft.begin(embeds_TD, hidden_TD, position_T)
        keys.append((key, value))
        hidden_TD = draft.finish(residual_TD, _attend(query, keys, start_T, draft.form.scaling))
        said.append(draft.head_input(hidden_TD[at_N]))
    # At t the drafter has seen the token at t + 1, and is asked about the next: what the target says at t + 1.
    wanted_ND = lesson.last_TD[(at_N + 1).clamp(max=len(number_T) - 1)]
    from_head = head.weight, head.bias, after_head
    arguments = torch.stack(said), wanted_ND, weight_JN, inverse_temperature, *from_head
    loss, right_JN = _Distilled.apply(*arguments)  # type: ignore[no-untyped-call]
    return Taught(loss, (right_JN * asked_JN).sum(1), asked_J)


class _Distilled(torch.autograd.Function):
    """The weighted cross-entropy with the target's distributions, and where the likeliest tokens agree. Logits of a few
    positions exist at a time, and none are kept: the gradient is computed at once."""

    @staticmethod
    def forward(
        ctx: Any,
        said_JND: Tensor,
        wanted_ND: Tensor,
        weight_JN: Tensor,
        inverse_temperature: float,
        head_VD: Tensor,
        bias_V: Tensor | None,
        after_head: AfterHead,
    ) -> tuple[Tensor, Tensor]:
        dtype = wanted_ND.dtype
        head_VD, said = head_VD.to(dtype), said_JND.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
        gradient_JND = torch.empty_like(said)
        right_JN = torch.empty_like(weight_JN)
        loss = torch.zeros((), device=said.device)
        at_a_time = max(1, LOGIT_BYTES // (4 * len(head_VD) * len(said)))
        for first in range(0, len(wanted_ND), at_a_time):
            part = slice(first, first + at_a_time)
            wanted_CV = after_head(linear(wanted_ND[part], head_VD, bias_V).float())
            wanted_CV = wanted_CV.mul_(inverse_temperature).softmax(-1)
            said_JCV = after_head(linear(said[:, part], head_VD, bias_V).float())
            slope = after_head.slope(said_JCV)
            said_JCV = said_JCV.mul_(inverse_temperature).log_softmax(-1)
            right_JN[:, part] = (said_JCV.argmax(-1) == wanted_CV.argmax(-1)).float()
            loss -= (weight_JN[:, part] * (said_JCV * wanted_CV).sum(-1)).sum()
            factor = weight_JN[:, part].unsqueeze(-1) * inverse_temperature * slope
            said_JCV = said_JCV.exp_().sub_(wanted_CV).mul_(factor)
            gradient_JND[:, part] = said_JCV.to(dtype) @ head_VD
        ctx.save_for_backward(gradient_JND.to(said_JND.dtype))
        ctx.mark_non_differentiable(right_JN)
        return loss, right_JN

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_JND,) = ctx.saved_tensors
        return gradient_JND * upstream[0].to(gradient_JND.dtype), *[None] * 6


def _near(given: Tensor, device: torch.device) -> Tensor:
    """Where a copy to the device need not wait for the host."""
    return given.pin_memory() if device.type == "cuda" and given.device.type == "cpu" else given


def _places(windows: Sequence[Window], num_tokens: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    places = np.zeros((4, num_tokens), dtype=np.int64)
    start = 0
    for window in windows:
        size = len(window.ids_T)
        place = np.arange(size)
        places[0, start : start + size] = start
        places[1, start : start + size] = window.first + place
        places[2, start : start + size] = (place + 1 < size) & (window.first + place + 2 >= window.num_prompt)
        start += size
    places[0, start:] = start
    places[1, start:] = np.arange(num_tokens - start)
    places[3] = np.random.default_rng(seed).permutation(num_tokens)
    return places


def _attend(query: Tensor, keys: Sequence[tuple[Tensor, Tensor]], start_T: Tensor, scaling: float) -> Tensor:
    """Of pass j at t: the first pass's keys up to t - j, and of each pass m from 1 on that of t - j + m."""
    last = len(keys) - 1
    group = query.shape[1] // keys[0][0].shape[1]
    wide = [tuple(one.repeat_interleave(group, 1) for one in pair) for pair in keys]
    at_T = torch.arange(len(query), device=query.device)
    seen_TT = (at_T.unsqueeze(0) <= at_T.unsqueeze(1) - last) & (at_T.unsqueeze(0) >= start_T.unsqueeze(1))
    scores = torch.einsum("thd,shd->hts", query, wide[0][0]) * scaling
    parts = [scores.masked_fill(~seen_TT, MASKED)]
    values = []
    for number in range(1, last + 1):
        key, value = (one.roll(last - number, 0) for one in wide[number])
        parts.append((query * key).sum(-1).T.unsqueeze(-1) * scaling)
        values.append(value)
    weights = torch.cat(parts, -1).float().softmax(-1).to(query.dtype)
    out = torch.einsum("hts,shd->thd", weights[..., : len(query)], wide[0][1])
    for number, value in enumerate(values):
        out = out + weights[..., len(query) + number].T.unsqueeze(-1) * value
    return out
