# mypy: disable-error-code="no-untyped-def"
"""What growing a tree does for each token it takes, in one kernel; the plain twin is `growing.take_plainly`.

Axes: N rows, V vocabulary, B branches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.engine.sampling import SamplingRows
from slipstream.engine.triton_sampling import gumbel, row_keys
from slipstream.models.launching import await_inputs, overlap


def take(
    logits_NV: Tensor, rows: SamplingRows, token_N: Tensor, number: int, tokens_NB: Tensor, scores_NB: Tensor
) -> None:
    _take[(len(token_N),)](
        logits_NV, rows.seed_N2, rows.position_N, rows.inverse_temperature_N, rows.greedy_N, token_N,
        tokens_NB, scores_NB, logits_NV.stride(0), tokens_NB.shape[1], number, num_warps=1,
        **overlap(logits_NV.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["branches", "number"])
def _take(
    logits_ptr, seed_ptr, position_ptr, inverse_temperature_ptr, greedy_ptr, token_ptr, tokens_out, scores_out,
    row_stride, branches, number, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    token = tl.maximum(tl.load(token_ptr + row), 0)
    at = logits_ptr + row * row_stride + token
    score = tl.load(at).to(tl.float32) * tl.load(inverse_temperature_ptr + row)
    k0, k1 = row_keys(tl.load(seed_ptr + 2 * row), tl.load(seed_ptr + 2 * row + 1), tl.load(position_ptr + row))
    score += tl.where(tl.load(greedy_ptr + row), 0.0, gumbel(token, k0, k1))
    tl.store(tokens_out + row * branches + number, token)
    sound = (score == score) & (score > -1.0e4) & (score < 1.0e4)
    tl.store(scores_out + row * branches + number, tl.where(sound, score, -1.0e4))
    tl.store(at, -float("inf"))
