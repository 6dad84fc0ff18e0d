"""Keyed sampling: race, Triton kernels, torch and `rng.py` agree; the tokens follow softmax; the cuts, by hand.

Without a CUDA device the Triton kernels run in Triton's interpreter, on small inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine import sampling
from slipstream.engine.sampling import (
    SamplingRows,
    gumbel_noise,
    sample_by_race,
    sample_plainly,
    sample_rows,
    scaled,
    thresholds,
)
from slipstream.rng import MASK32, derive_seed, gumbel, noise_bits, row_keys
from slipstream.types import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the Triton kernels run."""
PLAIN = SamplingParams()
GREEDY = SamplingParams(temperature=0.0)
MANNERS = (
    PLAIN,
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.9, temperature=2.5),
    SamplingParams(min_p=0.1),
    GREEDY,
    SamplingParams(top_k=40, top_p=0.7, min_p=0.02, temperature=1.3),
    SamplingParams(top_k=3, temperature=0.0),
)
NOISE_SEEDS = [0, 1, 2**64 - 1, *(derive_seed("noise", number) for number in range(5))]
NOISE_POSITIONS = [0, 1, 4095, 7, 2**20, 0, 2**32 - 1, 2]

Sampler = Callable[[Tensor, SamplingRows, Tensor], tuple[Tensor, Tensor]]


def make_rows(seeds: list[int], positions: list[int], params: list[SamplingParams], device: str) -> SamplingRows:
    def put(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingRows(
        seed_N2=put([(seed & MASK32, seed >> 32) for seed in seeds], torch.int64).view(-1, 2),
        position_N=put(positions, torch.int64),
        inverse_temperature_N=put([1.0 / (p.temperature or 1.0) for p in params], torch.float32),
        greedy_N=put([p.temperature == 0 for p in params], torch.bool),
        top_k_N=put([p.top_k for p in params], torch.int64),
        top_p_N=put([p.top_p for p in params], torch.float32),
        min_p_N=put([p.min_p for p in params], torch.float32),
    )


def rows_for(params: list[SamplingParams], salt: int = 0, device: str = "cpu") -> SamplingRows:
    numbers = range(len(params))
    return make_rows([derive_seed("row", salt, n) for n in numbers], [n * 31 for n in numbers], params, device)


def row_thresholds(logits: Tensor, rows: SamplingRows) -> Tensor:
    return thresholds(scaled(logits, rows), rows.top_k_N, rows.top_p_N, rows.min_p_N)[0]


def random_logits(kind: str, num_rows: int, vocab_size: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size)
    match kind:
        case "peaked":
            logits *= 12
        case "flat":
            logits *= 1e-3
        case "equal":
            logits.zero_()
        case "tied":
            logits = logits.round()
        case "holes":
            logits[torch.rand_like(logits) < 0.7] = -math.inf
            logits[:, seed % vocab_size] = 0.0
        case "one left":
            logits.fill_(-math.inf)[:, seed % vocab_size] = 1.0
        case "far":
            logits[:, ::2] -= 200.0
        case "loud":  # so large that rounding the score is felt in its probability
            logits += torch.tensor([30.0, -3e3, 3e4, -3e5, 3e6, -3e7, 3e8, -3e9]).repeat(num_rows)[:num_rows, None]
        case "bf16":
            logits = (logits * 4).bfloat16()
        case "fp16":
            logits = (logits * 4).half()
    return logits


KINDS = ("usual", "peaked", "flat", "equal", "tied", "holes", "one left", "far", "loud", "bf16", "fp16")


def disagreements(sampler: Sampler, num_rows: int = 64, sizes: tuple[int, ...] = (1, 2, 97, 5000)) -> int:
    """Rows whose token differs from the plain twin's, over many kinds of logits; log-probabilities to 1e-5."""
    wrong = 0
    for number, kind in enumerate(KINDS):
        for vocab_size in sizes:
            logits = random_logits(kind, num_rows, vocab_size, seed=number + vocab_size)
            rows = rows_for([MANNERS[(row + number) % len(MANNERS)] for row in range(num_rows)], number)
            threshold = row_thresholds(logits, rows)
            threshold[::2] = -math.inf
            wanted, wanted_logprobs = sample_plainly(logits, rows, threshold)
            tokens, logprobs = sampler(logits, rows, threshold)
            assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
            differs = tokens != wanted
            wrong += int(differs.sum())
            assert torch.allclose(logprobs[~differs], wanted_logprobs[~differs], rtol=1e-6, atol=1e-5), kind
    return wrong


def sample_by_kernels(logits: Tensor, rows: SamplingRows, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The Triton kernels, from and to CPU tensors."""
    pytest.importorskip("triton")
    from slipstream.engine.triton_sampling import sample_by_triton

    moved = SamplingRows(*(getattr(rows, name).to(DEVICE) for name in SamplingRows.__slots__))
    tokens, logprobs = sample_by_triton(logits.to(DEVICE), moved, threshold.to(DEVICE))
    return tokens.cpu(), logprobs.cpu()


def some_rows(rows: SamplingRows, wanted: slice) -> SamplingRows:
    return SamplingRows(*(getattr(rows, name)[wanted] for name in SamplingRows.__slots__))


EVERY_WAY = pytest.mark.parametrize("sampler", [sample_by_race, sample_plainly, sample_by_kernels])


# The twins agree.


def test_the_race_is_its_plain_twin_to_the_bit() -> None:
    def bitwise(logits: Tensor, rows: SamplingRows, threshold: Tensor) -> tuple[Tensor, Tensor]:
        tokens, logprobs = sample_by_race(logits, rows, threshold)
        assert torch.equal(logprobs, sample_plainly(logits, rows, threshold)[1])
        return tokens, logprobs

    assert disagreements(bitwise) == 0


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_race_agrees_on_a_large_vocabulary(temperature: float) -> None:
    logits = random_logits("usual", 6, 151_936, seed=5) * 3
    rows = rows_for([SamplingParams(temperature=temperature)] * 6)
    tokens, logprobs, log_kept = sample_rows(logits, rows, with_cuts=False)
    assert not log_kept.any()
    wanted, wanted_logprobs = sample_plainly(logits, rows, torch.full((6,), -math.inf))
    assert torch.equal(tokens, wanted) and torch.equal(logprobs, wanted_logprobs)
    exact = scaled(logits, rows).double().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert (logprobs - exact).abs().max() < 2e-6


def test_the_kernels_pick_what_the_plain_twin_picks() -> None:
    num_rows = 9 if torch.cuda.is_available() else 4  # Triton's interpreter goes through them one by one
    assert disagreements(sample_by_kernels, num_rows, sizes=(1500,)) == 0
    assert disagreements(sample_by_kernels, num_rows=1, sizes=(1, 1024)) == 0


def test_the_kernels_agree_on_a_large_vocabulary() -> None:
    num_rows, vocab_size = (256, 151_936) if torch.cuda.is_available() else (2, 50_257)
    logits = random_logits("bf16", num_rows, vocab_size, seed=6)
    rows, threshold = rows_for([PLAIN, GREEDY] * (num_rows // 2)), torch.full((num_rows,), -math.inf)
    tokens, logprobs = sample_by_kernels(logits, rows, threshold)
    wanted, wanted_logprobs = sample_plainly(logits, rows, threshold)
    assert torch.equal(tokens, wanted)
    assert torch.allclose(logprobs, wanted_logprobs, atol=1e-5)


def test_the_kernels_take_logits_whose_rows_lie_apart() -> None:
    wide = random_logits("usual", 4, 300, seed=7)
    rows, threshold = rows_for([PLAIN] * 4), torch.full((4,), -math.inf)
    for logits in (wide[:, 100:], wide.T.contiguous().T, wide[:1].expand(4, -1)):
        assert torch.equal(sample_by_kernels(logits, rows, threshold)[0], sample_plainly(logits, rows, threshold)[0])


@pytest.mark.parametrize("lead", [5.0, 200.0])
def test_a_likely_token_with_the_least_noise_still_wins(lead: float) -> None:
    """Where u is nearly 0, an estimate of its logarithm by way of 1 - u would take the token for hopeless."""
    seed, position, token, vocab_size = 12345, 155, 77536, 131_072
    assert noise_bits(seed, position, token) < 128
    logits = torch.zeros(1, vocab_size)
    logits[0, token] = math.log(vocab_size) + lead
    rows, threshold = make_rows([seed], [position], [PLAIN], "cpu"), torch.full((1,), -math.inf)
    wanted, wanted_logprobs = sample_plainly(logits, rows, threshold)
    tokens, logprobs = sample_by_kernels(logits, rows, threshold)
    assert tokens.tolist() == wanted.tolist() == [token] and torch.allclose(logprobs, wanted_logprobs, atol=1e-5)


def test_estimates_of_arrivals_are_good_to_a_hundred_thousandth() -> None:
    """The formula of the kernels' `arrival`, in numpy."""
    bits = np.concatenate([np.arange(3000), 2**32 - 1 - np.arange(3000), np.arange(0, 2**32, 99_991)]).astype(np.uint64)
    uniform = ((bits + 0.5) * 2.0**-32).astype(np.float32)
    exact = -np.log((bits + 0.5) * 2.0**-32)
    rest = ((2**32 - 1 - bits).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    series = rest * (1 + rest * (0.5 + rest * (0.33333333 + rest * 0.25)))
    estimate = np.where(rest < 0.015625, series, -np.log(uniform))
    assert np.abs(estimate / exact - 1).max() < 1e-5


# The comparison can fail.


def test_too_little_slack_in_the_race_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "RACE_SLACK", 0.5)
    assert disagreements(sample_by_race) > 0


def test_noise_keyed_by_rank_is_noticed() -> None:
    def by_rank(logits: Tensor, rows: SamplingRows, threshold: Tensor) -> tuple[Tensor, Tensor]:
        ranked = logits.sort(descending=True)
        tokens, logprobs = sample_plainly(ranked.values, rows, threshold)
        return ranked.indices.gather(1, tokens.unsqueeze(1)).squeeze(1), logprobs

    assert disagreements(by_rank, sizes=(97,)) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiled kernel does not see the planted constant")
def test_a_wrong_hash_in_the_kernels_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tl = pytest.importorskip("triton.language")
    from slipstream.engine import triton_sampling as kernels

    monkeypatch.setattr(kernels, "GOLDEN", tl.constexpr(12345))
    assert disagreements(sample_by_kernels, num_rows=4, sizes=(97,)) > 0


# The noise is that of rng.py.


def wanted_noise(vocab_size: int) -> np.ndarray:
    pairs = zip(NOISE_SEEDS, NOISE_POSITIONS, strict=True)
    return np.array([[np.float32(gumbel(s, p, v)) for v in range(vocab_size)] for s, p in pairs])


def noise_rows() -> SamplingRows:
    return make_rows(NOISE_SEEDS, NOISE_POSITIONS, [PLAIN] * len(NOISE_SEEDS), "cpu")


def test_the_torch_noise_is_the_noise_of_rng_to_the_bit() -> None:
    rows = noise_rows()
    assert np.array_equal(gumbel_noise(rows.seed_N2, rows.position_N, 700).numpy(), wanted_noise(700))
    keys = torch.cat(sampling.row_keys(rows.seed_N2, rows.position_N), 1)
    assert keys.tolist() == [list(row_keys(s, p)) for s, p in zip(NOISE_SEEDS, NOISE_POSITIONS, strict=True)]


def test_the_numba_noise_is_the_noise_of_rng_to_the_bit() -> None:
    for seed, position, wanted in zip(NOISE_SEEDS, NOISE_POSITIONS, wanted_noise(200), strict=True):
        k0, k1 = (np.uint32(key) for key in row_keys(seed, position))
        assert [sampling._noise(sampling._bits(token, k0, k1)) for token in range(200)] == wanted.tolist()


def test_the_kernels_noise_is_the_noise_of_rng_to_the_bit() -> None:
    triton = pytest.importorskip("triton")
    import triton.language as tl

    from slipstream.engine import triton_sampling as kernels

    @triton.jit
    def write_noise(seed_ptr, position_ptr, noise_ptr, keys: tl.constexpr, noise: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0)
        token = tl.arange(0, 512)
        k0, k1 = keys(tl.load(seed_ptr + 2 * row), tl.load(seed_ptr + 2 * row + 1), tl.load(position_ptr + row))
        tl.store(noise_ptr + row * 512 + token, noise(token, k0, k1))

    rows, noise = noise_rows(), torch.empty(len(NOISE_SEEDS), 512, device=DEVICE)
    write_noise[(len(NOISE_SEEDS),)](
        rows.seed_N2.to(DEVICE), rows.position_N.to(DEVICE), noise, kernels.row_keys, kernels.gumbel
    )
    assert np.array_equal(noise.cpu().numpy(), wanted_noise(512))


# What is sampled.


def test_tokens_follow_softmax() -> None:
    """Chi-square over 20,000 draws at new seeds and positions; 7 degrees of freedom, 0.1 % point 24.3."""
    logits, num_draws = torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -1.0, -2.0, -3.0]), 20_000
    for temperature in (1.0, 0.7):
        rows = rows_for([SamplingParams(temperature=temperature)] * num_draws)
        tokens, *_ = sample_rows(logits.expand(num_draws, -1), rows, with_cuts=False)
        counts, wanted = Counter(tokens.tolist()), (logits / temperature).softmax(-1) * num_draws
        assert sum((counts[v] - float(w)) ** 2 / float(w) for v, w in enumerate(wanted)) < 24.3


def test_log_probabilities_are_those_of_the_scaled_distribution_before_cuts() -> None:
    logits = random_logits("usual", len(MANNERS), 50, seed=0)
    tokens, logprobs, _ = sample_rows(logits, rows_for(list(MANNERS)), with_cuts=True)
    for row, params in enumerate(MANNERS):
        wanted = (logits[row] / (params.temperature or 1.0)).log_softmax(-1)
        assert float(logprobs[row]) == pytest.approx(float(wanted[tokens[row]]), abs=1e-6)


@EVERY_WAY
def test_temperature_zero_takes_the_likeliest_and_of_equals_the_first(sampler: Sampler) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]])
    tokens, _ = sampler(logits, rows_for([GREEDY] * 2), torch.full((2,), -math.inf))
    assert tokens.tolist() == [1, 0]


@EVERY_WAY
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_a_broken_row_gives_no_token_and_leaves_the_others_alone(sampler: Sampler) -> None:
    good = random_logits("usual", 1, 1500, seed=1)
    logits = good.repeat(10, 1)
    logits[1, 1400] = math.nan
    logits[2, 0] = math.inf
    logits[3] = math.nan
    logits[4] = -math.inf
    logits[5, ::2] = -math.inf  # masked tokens, legal
    logits[6, 3], logits[6, 1300] = math.nan, math.inf
    logits[7, 1024:] = -math.inf  # a block without tokens, legal
    logits[8, 9] = 3e38  # scaled beyond float32
    params = [PLAIN] * 8 + [SamplingParams(temperature=0.5), SamplingParams(top_k=4)]
    for greedy in (False, True):
        rows = rows_for([GREEDY if greedy and row < 8 else p for row, p in enumerate(params)])
        threshold = row_thresholds(logits, rows)
        tokens, logprobs = sampler(logits, rows, threshold)
        broken = [row for row in range(10) if tokens[row] == -1]
        assert broken == [1, 2, 3, 4, 6, 8]
        assert [row for row in range(10) if logprobs[row].isnan()] == broken
        alone = sampler(good, some_rows(rows, slice(1)), threshold[:1])
        assert tokens[0] == alone[0] and logprobs[0] == alone[1]


@EVERY_WAY
def test_a_row_does_not_depend_on_the_other_rows(sampler: Sampler) -> None:
    num_rows = 8 if sampler is sample_by_kernels else 40
    logits = random_logits("usual", num_rows, 2999, seed=3) * 3  # odd: rows begin at every alignment
    rows = rows_for([MANNERS[row % len(MANNERS)] for row in range(num_rows)])

    def sample(wanted: slice) -> tuple[Tensor, Tensor]:
        some = some_rows(rows, wanted)
        return sampler(logits[wanted], some, row_thresholds(logits[wanted], some))

    tokens, logprobs = sample(slice(None))
    for wanted in (*(slice(row, row + 1) for row in range(num_rows)), slice(3), slice(2, 7)):
        some_tokens, some_logprobs = sample(wanted)
        assert torch.equal(some_tokens, tokens[wanted]) and torch.equal(some_logprobs, logprobs[wanted])


def test_no_rows_give_no_tokens() -> None:
    tokens, logprobs, log_kept = sample_rows(torch.empty(0, 7), rows_for([]), with_cuts=True)
    assert tokens.shape == logprobs.shape == log_kept.shape == (0,)


# Cuts.


def row_threshold(x: Tensor, params: SamplingParams) -> float:
    """The plain twin of `thresholds`, for one row."""
    kept = x.double()
    if params.top_k:
        kept = kept[kept >= kept.topk(min(params.top_k, kept.numel())).values[-1]]
    if params.top_p < 1:
        ranked = kept.sort(descending=True).values
        probs = ranked.softmax(-1)
        inside = ranked[probs.cumsum(-1) - probs < float(np.float32(params.top_p))]
        kept = kept[kept >= inside[-1]]
    if params.min_p > 0:
        kept = kept[kept >= (x.max() + np.float32(math.log(np.float32(params.min_p)))).double()]
    return float(kept.min())


def test_thresholds_keep_what_the_plain_twin_keeps() -> None:
    choices = [
        SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
        for top_k in (0, 1, 3, 50, 10_000)
        for top_p in (0.05, 0.5, 0.9, 0.999, 1.0)
        for min_p in (0.0, 1e-4, 0.1, 1.0)
    ]
    rows = rows_for(choices)
    for number, kind in enumerate(KINDS):
        for vocab_size in (1, 2, 97, 3000):
            x = random_logits(kind, len(choices), vocab_size, seed=number + vocab_size).float()
            found, log_kept = thresholds(x, rows.top_k_N, rows.top_p_N, rows.min_p_N)
            assert found.dtype == log_kept.dtype == torch.float32
            assert found.shape == log_kept.shape == (len(choices),)
            for row, params in enumerate(choices):
                wanted = row_threshold(x[row], params)
                assert torch.equal(x[row] >= found[row], x[row].double() >= wanted), (kind, vocab_size, params)
                mass = float(x[row].double().softmax(-1)[x[row].double() >= wanted].sum())
                assert log_kept[row].exp() == pytest.approx(mass, rel=1e-5), (kind, vocab_size, params)


# Probabilities of tokens 0..5; token 2 and 3 are equal.
PROBABILITIES = (0.4, 0.25, 0.1, 0.1, 0.09, 0.06)


@pytest.mark.parametrize(
    ("params", "support"),
    [
        (SamplingParams(), {0, 1, 2, 3, 4, 5}),
        (SamplingParams(top_k=1), {0}),
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_k=3), {0, 1, 2, 3}),  # a tie with the threshold stays in
        (SamplingParams(top_k=99), {0, 1, 2, 3, 4, 5}),
        (SamplingParams(top_p=0.01), {0}),  # never empty
        (SamplingParams(top_p=0.39), {0}),
        (SamplingParams(top_p=0.41), {0, 1}),
        (SamplingParams(top_p=0.7), {0, 1, 2, 3}),
        (SamplingParams(top_p=0.93), {0, 1, 2, 3, 4}),
        (SamplingParams(min_p=0.5), {0, 1}),  # 0.5 x 0.4 = 0.2
        (SamplingParams(min_p=0.24), {0, 1, 2, 3}),  # 0.096
        (SamplingParams(min_p=1.0), {0}),
        (SamplingParams(top_k=2, top_p=0.6), {0}),  # of the two left, token 0 has 0.4 / 0.65 = 0.615
        (SamplingParams(top_k=4, min_p=0.5), {0, 1}),
    ],
)
def test_cuts_keep_the_support_worked_out_by_hand(params: SamplingParams, support: set[int]) -> None:
    x = torch.tensor([PROBABILITIES]).log()
    rows = rows_for([params])
    threshold, log_kept = thresholds(x, rows.top_k_N, rows.top_p_N, rows.min_p_N)
    assert {token for token in range(6) if x[0, token] >= float(threshold)} == support
    assert float(log_kept.exp()) == pytest.approx(sum(PROBABILITIES[token] for token in support))
    assert len(support) < 6 or float(log_kept) == 0, "nothing is cut: exactly"
    tokens, *_ = sample_rows(x.expand(400, -1), rows_for([params] * 400), with_cuts=params != PLAIN)
    assert set(tokens.tolist()) <= support and (len(support) < 5 or len(set(tokens.tolist())) >= 5)


def test_a_row_keeps_the_same_mass_in_every_company() -> None:
    logits = random_logits("usual", 40, 2999, seed=3) * 3
    rows = rows_for([MANNERS[row % len(MANNERS)] for row in range(40)])

    def kept(wanted: slice) -> Tensor:
        return sample_rows(logits[wanted], some_rows(rows, wanted), with_cuts=True).log_kept_N

    together = kept(slice(None))
    assert (together < 0).sum() >= 10
    for wanted in (*(slice(row, row + 1) for row in range(40)), slice(3), slice(2, 7), slice(5, 38)):
        assert torch.equal(kept(wanted), together[wanted])


def test_tokens_are_drawn_with_their_log_probability_less_that_of_the_kept_mass() -> None:
    """Chi-square over 20,000 draws; four tokens are kept, 3 degrees of freedom, 0.1 % point 16.3."""
    logits, num_draws = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0]), 20_000
    params = SamplingParams(temperature=0.9, top_k=5, top_p=0.97)
    rows = rows_for([params] * num_draws)
    samples = sample_rows(logits.expand(num_draws, -1), rows, with_cuts=True)
    drawn = dict(zip(samples.tokens_N.tolist(), (samples.logprobs_N - samples.log_kept_N).exp().tolist(), strict=True))
    assert sorted(drawn) == [0, 1, 2, 3] and sum(drawn.values()) == pytest.approx(1.0)
    counts = Counter(samples.tokens_N.tolist())
    assert sum((counts[v] - p * num_draws) ** 2 / (p * num_draws) for v, p in drawn.items()) < 16.3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("with_cuts", [False, True])
def test_a_cuda_graph_holds_the_sampler(with_cuts: bool) -> None:
    rows = rows_for([PLAIN] * 8, device="cuda") if not with_cuts else rows_for(list(MANNERS), device="cuda")
    logits = torch.empty(8, 151_936, dtype=torch.bfloat16, device="cuda")
    logits.copy_(random_logits("bf16", 8, 151_936, seed=0))
    sample_rows(logits, rows, with_cuts=with_cuts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logprobs, log_kept = sample_rows(logits, rows, with_cuts=with_cuts)
    on_cpu = SamplingRows(*(getattr(rows, name).cpu() for name in SamplingRows.__slots__))
    for seed in (1, 2):
        fresh = random_logits("bf16", 8, 151_936, seed=seed)
        logits.copy_(fresh)
        graph.replay()
        wanted, wanted_logprobs, wanted_kept = sample_rows(fresh, on_cpu, with_cuts=with_cuts)
        assert torch.allclose(log_kept.cpu(), wanted_kept, atol=1e-6)
        assert torch.equal(tokens.cpu(), wanted)
        assert torch.allclose(logprobs.cpu(), wanted_logprobs, atol=1e-5)
