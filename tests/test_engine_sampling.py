"""Keyed sampling: the numba race, the torch noise and `rng.py` agree; the tokens follow softmax; the cuts, by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine import sampling
from slipstream.engine.sampling import cut_tail, gumbel_noise, pick_on_cpu, pick_plainly, sample
from slipstream.rng import derive_seed, gumbel
from slipstream.types import SamplingParams

CPU = torch.device("cpu")
PLAIN = SamplingParams()


def seeds_for(num_rows: int, salt: int = 0) -> list[int]:
    return [derive_seed("row", salt, row) for row in range(num_rows)]


def random_logprobs(kind: str, num_rows: int, vocabulary: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    logits = torch.randn(num_rows, vocabulary)
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
            logits[:, seed % vocabulary] = 0.0
        case "one left":
            logits.fill_(-math.inf)[:, seed % vocabulary] = 1.0
        case "far":
            logits[:, ::2] -= 200.0
    return logits.log_softmax(-1)


KINDS = ("usual", "peaked", "flat", "equal", "tied", "holes", "one left", "far")


def disagreements(pick: Callable[..., Tensor]) -> int:
    """Rows in which a way to pick differs from the plain twin, over many kinds of logits."""
    wrong = 0
    for number, kind in enumerate(KINDS):
        for vocabulary in (1, 2, 97, 5000):
            logprobs = random_logprobs(kind, 64, vocabulary, seed=number + vocabulary)
            seeds, positions = seeds_for(64, number), [row * 31 for row in range(64)]
            wrong += int((pick(logprobs, seeds, positions) != pick_plainly(logprobs, seeds, positions)).sum())
    return wrong


def test_the_race_picks_what_its_plain_twin_picks() -> None:
    assert disagreements(pick_on_cpu) == 0


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_race_agrees_on_a_large_vocabulary(temperature: float) -> None:
    torch.manual_seed(5)
    logprobs = (torch.randn(12, 151_936) * 3 / temperature).log_softmax(-1)
    assert torch.equal(*(pick(logprobs, seeds_for(12), range(12)) for pick in (pick_on_cpu, pick_plainly)))


def race_with_slack(slack: float) -> Callable[..., Tensor]:
    """The race as it stands, with another factor of slack."""

    @numba.njit
    def race(logprobs_NV, probs_NV, likeliest_N, keys_N2, tokens_N):  # type: ignore[no-untyped-def]
        for row in range(logprobs_NV.shape[0]):
            k0, k1 = keys_N2[row, 0], keys_N2[row, 1]
            winner = likeliest_N[row]
            best = sampling._score(logprobs_NV[row, winner], sampling._bits(winner, k0, k1))
            for token in range(logprobs_NV.shape[1]):
                bits = sampling._bits(token, k0, k1)
                factor = np.float32(slack * math.exp(-best) * 2.0**32)
                if np.float32(np.uint32(0xFFFFFFFF) - bits) < probs_NV[row, token] * factor + np.float32(1.0):
                    score = sampling._score(logprobs_NV[row, token], bits)
                    if score > best or (score == best and token < winner):
                        best, winner = score, token
            tokens_N[row] = winner

    def pick(logprobs: Tensor, seeds: list[int], positions: list[int]) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_race", race)
            return pick_on_cpu(logprobs, seeds, positions)

    return pick


def test_too_little_slack_in_the_race_is_noticed() -> None:
    assert disagreements(race_with_slack(1.001)) == 0
    assert disagreements(race_with_slack(0.5)) > 0


def test_noise_keyed_by_rank_is_noticed() -> None:
    def by_rank(logprobs: Tensor, seeds: list[int], positions: list[int]) -> Tensor:
        ranked = logprobs.sort(descending=True)
        return ranked.indices.gather(1, pick_plainly(ranked.values, seeds, positions).unsqueeze(1)).squeeze(1)

    assert disagreements(by_rank) > 0


def test_the_torch_noise_is_the_noise_of_rng_to_the_bit() -> None:
    seeds, positions = [0, 1, 2**64 - 1, *seeds_for(5)], [0, 1, 4095, 7, 2**20, 0, 1, 2]
    noise = gumbel_noise(seeds, positions, 700, CPU)
    wanted = [[np.float32(gumbel(s, p, v)) for v in range(700)] for s, p in zip(seeds, positions, strict=True)]
    assert np.array_equal(noise.numpy(), np.array(wanted))


def test_tokens_follow_softmax() -> None:
    """Chi-square over 20,000 draws at new seeds and positions; 7 degrees of freedom, 0.1 % point 24.3."""
    logits, num_draws = torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -1.0, -2.0, -3.0]), 20_000
    for temperature in (1.0, 0.7):
        params = SamplingParams(temperature=temperature)
        tokens, _ = sample(logits.expand(num_draws, -1), seeds_for(num_draws), range(num_draws), [params] * num_draws)
        counts, wanted = Counter(tokens), (logits / temperature).softmax(-1) * num_draws
        assert sum((counts[v] - float(w)) ** 2 / float(w) for v, w in enumerate(wanted)) < 24.3


def test_log_probabilities_are_those_of_the_scaled_distribution_before_cuts() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    params = [PLAIN, SamplingParams(temperature=0.5), SamplingParams(top_k=2), SamplingParams(min_p=0.5),
              SamplingParams(top_p=0.3, temperature=2.0), SamplingParams(temperature=0.0)]  # fmt: skip
    tokens, logprobs = sample(logits, seeds_for(6), range(6), params)
    for row, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        scaled = logits[row] / (params[row].temperature or 1.0)
        assert logprob == pytest.approx(float(scaled.log_softmax(-1)[token]), abs=1e-6)


def test_temperature_zero_takes_the_likeliest_and_of_equals_the_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]])
    tokens, _ = sample(logits, seeds_for(2), [5, 6], [SamplingParams(temperature=0.0)] * 2)
    assert tokens == [1, 0]


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
    logprobs = torch.tensor([PROBABILITIES]).log()
    cut = cut_tail(logprobs, [params])[0]
    assert {token for token in range(6) if math.isfinite(cut[token])} == support
    assert all(cut[token] == logprobs[0, token] for token in support), "what is kept is not changed"
    tokens, _ = sample(logprobs.expand(400, -1), seeds_for(400), range(400), [params] * 400)
    assert set(tokens) <= support and (len(support) < 5 or len(set(tokens)) >= 5)


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(3)
    logits = torch.randn(40, 3000) * 3
    choices = [PLAIN, SamplingParams(temperature=0.6), SamplingParams(top_k=5), SamplingParams(top_p=0.9),
               SamplingParams(min_p=0.1), SamplingParams(temperature=0.0)]  # fmt: skip
    params, seeds = [choices[row % 6] for row in range(40)], seeds_for(40)
    tokens, logprobs = sample(logits, seeds, range(40), params)
    for row in range(40):
        assert sample(logits[row : row + 1], seeds[row : row + 1], [row], [params[row]]) == (
            [tokens[row]],
            [logprobs[row]],
        )
