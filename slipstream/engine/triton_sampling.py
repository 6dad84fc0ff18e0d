"""The GPU's way to sample: two Triton kernels that give the tokens of `sampling.sample_plainly`.

The first reads each logit once and leaves three numbers a block of the vocabulary, among them an estimate of its best
score, with noise in single precision. The second looks again at the blocks that can win, usually one, and computes the
noise as the twin does, in double precision, for the few tokens that can.
Launches and shapes depend on N, V and the dtype of the logits alone, so a CUDA graph can hold them.
Blocks are cut in the same way whatever N is: a row's bits do not depend on the rows beside it.
Under TRITON_INTERPRET=1 the same kernels run on CPU tensors, for the tests.

Axes: N rows, V vocabulary, B blocks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream import rng
from slipstream.engine.sampling import SamplingRows
from slipstream.models.launching import await_inputs, overlap

BLOCK_TOKENS, BLOCK_WARPS = 1024, 2
MIX_A = tl.constexpr(rng.MIX_A)
MIX_B = tl.constexpr(rng.MIX_B)
GOLDEN = tl.constexpr(rng.GOLDEN)


def sample_by_triton(logits_NV: Tensor, rows: SamplingRows, threshold_N: Tensor) -> tuple[Tensor, Tensor]:
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    assert all(getattr(rows, name).is_contiguous() for name in SamplingRows.__slots__) and threshold_N.is_contiguous()
    num_rows, vocab_size = logits_NV.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK_TOKENS)
    numbers_N3B = torch.empty(num_rows, 3, num_blocks, dtype=torch.float32, device=logits_NV.device)
    tokens_N = torch.empty(num_rows, dtype=torch.int64, device=logits_NV.device)
    logprobs_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
    facts = (
        logits_NV, rows.seed_N2, rows.position_N, rows.inverse_temperature_N, rows.greedy_N, threshold_N, numbers_N3B,
        logits_NV.stride(0), vocab_size, num_blocks,
    )  # fmt: skip
    # x is a rounded product and the score a rounded sum: fused into one operation they would round once, and a near tie
    # could fall otherwise than on the CPU.
    options = {"enable_fp_fusion": False, **overlap(logits_NV.device)}
    _survey_blocks[(num_rows, num_blocks)](*facts, BLOCK=BLOCK_TOKENS, num_warps=BLOCK_WARPS, **options)
    _pick_winners[(num_rows,)](
        *facts, tokens_N, logprobs_N, BLOCK=BLOCK_TOKENS, BLOCKS=triton.next_power_of_2(num_blocks), **options
    )
    return tokens_N, logprobs_N


@triton.jit
def _survey_blocks(  # type: ignore[no-untyped-def]
    logits_ptr, seed_ptr, position_ptr, inverse_temperature_ptr, greedy_ptr, threshold_ptr, numbers_ptr,
    row_stride, vocab_size, num_blocks, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Of a block of a row: its largest x, the sum of exp(x - largest), and the best score, by an estimate."""
    await_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token, x = _load_x(logits_ptr + row * row_stride, inverse_temperature_ptr + row, block, vocab_size, BLOCK)
    top = tl.max(x, 0)
    weight = tl.exp(x - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weight, 0)

    k0, k1 = row_keys(tl.load(seed_ptr + 2 * row), tl.load(seed_ptr + 2 * row + 1), tl.load(position_ptr + row))
    # -log(u) / exp(x - top) is the time at which a token arrives: the first has the largest x + noise.
    first = tl.min(tl.where(x >= tl.load(threshold_ptr + row), arrival(token, k0, k1) / weight, float("inf")), 0)
    lead = tl.where(tl.load(greedy_ptr + row), top, top - tl.log(first))

    numbers = numbers_ptr + row * 3 * num_blocks + block
    tl.store(numbers, top)
    tl.store(numbers + num_blocks, total)
    tl.store(numbers + 2 * num_blocks, lead)


@triton.jit
def _pick_winners(  # type: ignore[no-untyped-def]
    logits_ptr, seed_ptr, position_ptr, inverse_temperature_ptr, greedy_ptr, threshold_ptr, numbers_ptr,
    row_stride, vocab_size, num_blocks, tokens_ptr, logprobs_ptr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Of a row: the token with the best score and its log-probability. Only where the estimates are near the best are
    scores computed as the plain twin does."""
    await_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    real = index < num_blocks
    numbers = numbers_ptr + row * 3 * num_blocks + index
    top_B = tl.load(numbers, mask=real, other=-float("inf"))
    total_B = tl.load(numbers + num_blocks, mask=real, other=0.0)
    lead_B = tl.load(numbers + 2 * num_blocks, mask=real, other=-float("inf"))
    top = tl.max(top_B, 0)
    total = tl.sum(total_B * tl.exp(top_B - top), 0)
    sound = (top > -float("inf")) & (top < float("inf"))

    k0, k1 = row_keys(tl.load(seed_ptr + 2 * row), tl.load(seed_ptr + 2 * row + 1), tl.load(position_ptr + row))
    greedy = tl.load(greedy_ptr + row)
    threshold = tl.load(threshold_ptr + row)
    # An estimate is off by a hundred-thousandth, and rounding to single precision moves a score by less than this.
    reach = tl.max(lead_B, 0) - tl.where(greedy, 0.0, 0.001 + tl.abs(top) * 4.8e-7)
    best = -float("inf")
    winner = vocab_size
    winner_x = -float("inf")
    open_B = lead_B >= reach
    block = tl.min(tl.where(open_B, index, BLOCKS), 0)
    while sound & (block < BLOCKS):
        token, x = _load_x(logits_ptr + row * row_stride, inverse_temperature_ptr + row, block, vocab_size, BLOCK)
        lead = tl.where(greedy, x, x - tl.log(arrival(token, k0, k1)))
        racing = (x >= threshold) & (lead >= reach)
        runner = tl.min(tl.where(racing, token, vocab_size), 0)
        while runner < vocab_size:
            runner_x = tl.max(tl.where(token == runner, x, -float("inf")), 0)
            score = runner_x + tl.where(greedy, 0.0, gumbel(runner, k0, k1))
            if score > best:  # of equals the lowest id, which comes first
                best, winner, winner_x = score, runner, runner_x
            racing = racing & (token != runner)
            # Without noise all that race are equals, and the first has won.
            runner = tl.where(greedy, vocab_size, tl.min(tl.where(racing, token, vocab_size), 0))
        open_B = open_B & (index != block)
        block = tl.min(tl.where(open_B, index, BLOCKS), 0)
    tl.store(tokens_ptr + row, tl.where(sound, winner, -1).to(tl.int64))
    tl.store(logprobs_ptr + row, tl.where(sound, (winner_x - top) - tl.log(total), float("nan")))


@triton.jit
def _load_x(row_ptr, inverse_temperature_ptr, block, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens of a block, and for each its logit over the temperature."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(row_ptr + token, mask=token < vocab_size, other=-float("inf"))
    x = logit.to(tl.float32) * tl.load(inverse_temperature_ptr)
    # Reductions drop NaN; as +inf it shows in the maximum, where a broken row is told by it.
    return token, tl.where(x != x, float("inf"), x)


@triton.jit
def gumbel(token, k0, k1):  # type: ignore[no-untyped-def]
    """`rng.gumbel` as float32, for a block of token ids."""
    uniform = (noise_bits(token, k0, k1).to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def arrival(token, k0, k1):  # type: ignore[no-untyped-def]
    """-log(u) of the same u in single precision, to a hundred-thousandth: small where the noise is large."""
    bits = noise_bits(token, k0, k1)
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u
    # Where u is nearly 1, its logarithm would have lost its digits; the series has them.
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333333 + rest * 0.25)))
    return tl.where(rest < 0.015625, series, -tl.log(uniform))


@triton.jit
def noise_bits(token, k0, k1):  # type: ignore[no-untyped-def]
    """`rng.noise_bits` of tokens in a row with these keys."""
    return mix(mix(tl.add(token.to(tl.uint32), k0, sanitize_overflow=False)) ^ k1)


@triton.jit
def row_keys(low, high, position):  # type: ignore[no-untyped-def]
    high = high.to(tl.uint32)
    k0 = mix(tl.add(mix(position.to(tl.uint32) ^ low.to(tl.uint32)), high, sanitize_overflow=False))
    k1 = mix(k0 ^ high ^ GOLDEN)
    return k0, k1


@triton.jit
def mix(x):  # type: ignore[no-untyped-def]
    """`rng.mix`: products of uint32 wrap around, by intent."""
    x = x ^ (x >> 16)
    x = tl.mul(x, MIX_A, sanitize_overflow=False)
    x = x ^ (x >> 15)
    x = tl.mul(x, MIX_B, sanitize_overflow=False)
    return x ^ (x >> 16)
