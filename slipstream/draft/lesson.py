"""What a learned drafter is taught: to say what the target says, from its features and from its own hidden states.

A sample is a text with the target's features of each token and its last hidden state, from which the target's
distributions follow. The first pass sees the features, as at the first draft after a step; each further pass sees what
the pass before made of the token before, as further drafts do, with the keys of the features behind it and of the
passes before beside it. Targets are the target's distributions, not the tokens: they say more.

Axes: T packed tokens, D hidden size, F features, N positions that count, V vocabulary, H heads, J passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from slipstream.draft.eagle import DraftModel

FADING = 0.8
"""Of a pass's weight, in the next one: drafts further ahead are needed less often."""
MASKED = -1e9


@dataclass(frozen=True, slots=True)
class Lesson:
    """Texts packed one after another."""

    ids_T: Tensor
    features_TF: Tensor
    last_TD: Tensor
    """The target's hidden states before its head."""
    lengths: tuple[int, ...]
    num_prompt: tuple[int, ...]
    """Of each text: tokens that were given, not sampled."""


def lesson_loss(
    draft: DraftModel,
    embed: torch.nn.Module,
    head: torch.nn.Module,
    lesson: Lesson,
    *,
    passes: int,
    inverse_temperature: float = 1.0,
    most_positions: int = 512,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, list[float]]:
    """The loss, and for each pass how often the likeliest token is the target's, whose embedding and head these are."""
    shared = (*embed.parameters(), *head.parameters())
    assert not any(parameter.requires_grad for parameter in shared), "the target would be given gradients"
    device = lesson.ids_T.device
    position_T, start_T = _places(lesson.lengths, device)
    sizes = torch.tensor(lesson.lengths, device=device)
    length_T = sizes.repeat_interleave(sizes)
    prompt_T = torch.tensor(lesson.num_prompt, device=device).repeat_interleave(sizes)
    with torch.no_grad():
        embeds_TD = embed(lesson.ids_T.roll(-1))
    hidden_TD = draft.fuse(lesson.features_TF)
    keys: list[tuple[Tensor, Tensor]] = []
    total = torch.zeros((), device=device)
    hits = []
    weight = 1.0
    for number in range(passes):
        residual_TD, query, key, value = draft.begin(embeds_TD, hidden_TD, position_T)
        keys.append((key, value))
        hidden_TD = draft.finish(residual_TD, _attend(query, keys, position_T, start_T, draft.form.scaling))
        # At t the drafter has seen the token at t + 1, and is asked about the next: what the target says at t + 1.
        counts_T = (position_T + 1 < length_T) & (position_T - number >= 0) & (position_T + 2 >= prompt_T)
        at_N = counts_T.nonzero().squeeze(1)
        if len(at_N) > most_positions:
            at_N = at_N[torch.randperm(len(at_N), generator=generator)[:most_positions].to(device)]
        if not len(at_N):
            break
        with torch.no_grad():
            wanted_NV = (head(lesson.last_TD[at_N + 1]).float() * inverse_temperature).softmax(-1)
        said_NV = head(draft.head_input(hidden_TD[at_N])).float() * inverse_temperature
        total = total + weight * cross_entropy(said_NV, wanted_NV)
        hits.append((said_NV.argmax(-1) == wanted_NV.argmax(-1)).float().mean().item())
        weight *= FADING
        hidden_TD = hidden_TD.roll(1, 0)  # a text's first token gets another's last: it does not count from here on
    return total, hits


def _places(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each packed token: its position, and where its text starts."""
    position_T = torch.cat([torch.arange(length, device=device) for length in lengths])
    return position_T, torch.arange(len(position_T), device=device) - position_T


def _attend(
    query: Tensor, keys: Sequence[tuple[Tensor, Tensor]], position_T: Tensor, start_T: Tensor, scaling: float
) -> Tensor:
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
