"""What a drafter is worth on a recorded rollout: the steps in which the engine would have walked it.

The engine accepts a draft exactly if it is the token that the target draws, and the drafter draws with the same noise.
So of a rollout whose seed is known it can be said for each place which drafts are right: a chain is followed only while
it is right, and then what it has drafted is the text itself. With the policy that sampled the text this is what the
engine does, step for step, if it makes `depth` drafts each time (`tests/test_draft_offline.py`); with a later policy it
is an estimate, since that would have said something else here and there.

Axes: T tokens of one text, J drafts of a chain, N rows of logits, F features, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import PreTrainedModel

from slipstream.draft.eagle import DraftModel
from slipstream.engine.sampling import SamplingRows, sample_rows
from slipstream.models.packed import head_logits
from slipstream.rng import MASK32

ROWS_AT_ONCE = 256
"""Of logits."""


@torch.no_grad()
def right_drafts(
    draft: DraftModel,
    target: PreTrainedModel,
    ids_T: Tensor,
    features_TF: Tensor,
    *,
    seed: int,
    depth: int,
    temperature: float,
) -> Tensor:
    """[J, T], bool: at (j, t) whether draft j of a chain, that of the token at t + 2, is the token of the text."""
    at_T = torch.arange(len(ids_T), device=ids_T.device)
    # As it is taught and asked: without what some families do to embeddings of their own.
    weight = target.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    embeds_TD = embedding(ids_T.roll(-1), weight)
    hidden_TD = draft.fuse(features_TF)
    keys, values, right = list[Tensor](), list[Tensor](), list[Tensor]()
    for place in range(depth):
        residual_TD, query, key, value = draft.begin(embeds_TD, hidden_TD, at_T)
        keys.append(key)
        values.append(value)
        # A chain sees the features' keys up to where it began, `place` tokens ago, and its own from there on.
        began_T = at_T - place
        seen = [at_T <= began_T.unsqueeze(1), *(at_T == (began_T + own).unsqueeze(1) for own in range(1, place + 1))]
        attended = scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            torch.cat(keys).transpose(0, 1).unsqueeze(0),
            torch.cat(values).transpose(0, 1).unsqueeze(0),
            attn_mask=torch.cat(seen, 1) | (began_T < 0).unsqueeze(1),  # no chain began there: anything but nothing
            scale=draft.form.scaling,
            enable_gqa=True,
        )
        hidden_TD = draft.finish(residual_TD, attended[0].transpose(0, 1))
        tokens_T = _draw(target, draft.head_input(hidden_TD), at_T + 2, seed, temperature)
        right.append((tokens_T == ids_T.roll(-2)) & (at_T + 2 < len(ids_T)))
        hidden_TD = hidden_TD.roll(1, 0)
    return torch.stack(right)


def num_steps(right_JT: Tensor, num_prompt: int) -> int:
    """Of the engine, from the prompt to the end of the text. The first token comes without drafts."""
    right, length = right_JT.tolist(), right_JT.shape[1]
    known, steps = num_prompt + 1, 1
    while known < length:
        accepted = 0
        while accepted < len(right) and known + accepted < length and right[accepted][known - 2 + accepted]:
            accepted += 1
        known += accepted + 1
        steps += 1
    return steps


def _draw(target: PreTrainedModel, hidden_TD: Tensor, position_T: Tensor, seed: int, temperature: float) -> Tensor:
    """Tokens, with the noise with which the target draws at these positions."""
    drawn = []
    for hidden_ND, position_N in zip(hidden_TD.split(ROWS_AT_ONCE), position_T.split(ROWS_AT_ONCE), strict=True):
        ones = torch.ones(len(position_N), device=position_N.device)
        rows = SamplingRows(
            seed_N2=torch.tensor([seed & MASK32, seed >> 32], device=ones.device).repeat(len(ones), 1),
            position_N=position_N,
            inverse_temperature_N=ones / (temperature or 1.0),
            greedy_N=torch.full_like(ones, temperature == 0, dtype=torch.bool),
            top_k_N=torch.zeros_like(position_N),
            top_p_N=ones,
            min_p_N=torch.zeros_like(ones),
        )
        drawn.append(sample_rows(head_logits(target, hidden_ND), rows, with_cuts=False)[0])
    return torch.cat(drawn)
