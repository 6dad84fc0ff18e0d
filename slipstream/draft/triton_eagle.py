# mypy: disable-error-code="no-untyped-def"
"""What the drafter's layer multiplies, in one kernel: each token's follower looked up, both norms, side by side.

The plain twin is `fast_eagle.join_plainly`.

Axes: T packed tokens, D hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.fused import Norm
from slipstream.models.launching import await_inputs, overlap


def join(ids_T: Tensor, embeddings_VD: Tensor, hidden_TD: Tensor, of_embeds: Norm, of_hidden: Norm) -> Tensor:
    """[T, 2 D]: the norm of each id's embedding, and that of its hidden state."""
    num_tokens, size = hidden_TD.shape
    assert ids_T.is_contiguous() and embeddings_VD.is_contiguous() and hidden_TD.is_contiguous()
    out = torch.empty(num_tokens, 2 * size, dtype=hidden_TD.dtype, device=hidden_TD.device)
    _join[(num_tokens, 2)](
        ids_T, embeddings_VD, hidden_TD, of_embeds.weight, of_hidden.weight, out, of_embeds.eps,
        SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=4, **overlap(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _join(
    ids_ptr, embeddings_ptr, hidden_ptr, embeds_weight_ptr, hidden_weight_ptr, out_ptr, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    token, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, BLOCK)
    here = dim < SIZE
    if half == 0:
        row = embeddings_ptr + tl.load(ids_ptr + token).to(tl.int64) * SIZE
        weight = tl.load(embeds_weight_ptr + dim, here, other=0.0)
    else:
        row = hidden_ptr + token * SIZE
        weight = tl.load(hidden_weight_ptr + dim, here, other=0.0)
    x = tl.load(row + dim, here, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    x = x.to(out_ptr.dtype.element_ty) * weight
    tl.store(out_ptr + (2 * token + half) * SIZE + dim, x, here)


def followers(tokens_SL: Tensor, slot_T: Tensor, position_T: Tensor) -> Tensor:
    out = torch.empty_like(slot_T)
    num = len(slot_T)
    _followers[(triton.cdiv(num, 128),)](
        tokens_SL, slot_T, position_T, out, num, tokens_SL.shape[1], BLOCK=128, **overlap(out.device)
    )
    return out


@triton.jit(do_not_specialize=["num"])
def _followers(tokens_ptr, slot_ptr, position_ptr, out_ptr, num, longest, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    await_inputs(OVERLAPS)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = index < num
    slot = tl.load(slot_ptr + index, here, other=0)
    position = tl.minimum(tl.load(position_ptr + index, here, other=0) + 1, longest - 1)
    token = tl.load(tokens_ptr + slot * longest + position, here, other=0)
    tl.store(out_ptr + index, tl.maximum(token, 0).to(tl.int64), here)
