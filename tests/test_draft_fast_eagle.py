"""The drafter's own kernels against their plain twins; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from slipstream.draft.fast_eagle import join_plainly
from slipstream.draft.growing import NO_SCORE, take_plainly
from slipstream.draft.triton_eagle import followers, join
from slipstream.draft.triton_growing import take
from slipstream.engine.sampling import SamplingRows
from slipstream.models.fused import Norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 96), (5, 64), (7, 100)])
def test_embedding_and_hidden_state_are_normed_side_by_side(num_tokens: int, size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    embeddings, hidden, weights = (torch.randn(rows, size, generator=draw).to(DEVICE) for rows in (11, num_tokens, 2))
    ids = torch.randint(11, (num_tokens,), generator=draw).to(DEVICE)
    norms = [Norm(weight.contiguous(), 1e-5) for weight in weights]
    wanted, got = (way(ids, embeddings, hidden, *norms) for way in (join_plainly, join))
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(join(ids.flip(0) + 1 - ids.flip(0) // 10, embeddings, hidden, *norms), wanted, atol=1e-3)


def test_followers_are_the_tokens_after_and_the_last_follows_itself() -> None:
    tokens = torch.arange(300, dtype=torch.int32, device=DEVICE).view(3, 100)
    tokens[1, 5] = -1
    slots, positions = (torch.tensor(numbers, device=DEVICE) for numbers in ([0, 1, 2, 2, 1], [0, 4, 98, 99, 7]))
    assert followers(tokens, slots, positions).tolist() == [1, 0, 299, 299, 108]


def test_a_token_is_taken_with_its_score_and_ruled_out() -> None:
    num_rows, vocab_size = 6, 50
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(num_rows, vocab_size, generator=draw).to(DEVICE)
    logits[2, 7], logits[3, 8] = float("nan"), float("inf")
    rows = SamplingRows(
        seed_N2=torch.randint(2**32, (num_rows, 2), generator=draw).to(DEVICE),
        position_N=torch.arange(num_rows, device=DEVICE),
        inverse_temperature_N=torch.linspace(0.5, 2.0, num_rows, device=DEVICE),
        greedy_N=torch.arange(num_rows, device=DEVICE) == 4,
        top_k_N=torch.zeros(num_rows, dtype=torch.long, device=DEVICE),
        top_p_N=torch.ones(num_rows, device=DEVICE),
        min_p_N=torch.zeros(num_rows, device=DEVICE),
    )
    tokens = torch.tensor([3, 9, 7, 8, 0, -1], device=DEVICE)
    results = []
    for way in (take_plainly, take):
        left, taken, scores = logits.clone(), torch.zeros(6, 3, dtype=torch.long), torch.zeros(6, 3)
        taken, scores = taken.to(DEVICE), scores.to(DEVICE)
        way(left, rows, tokens, 1, taken, scores)
        results.append((left, taken, scores))
    (left, taken, scores), (other_left, other_taken, other_scores) = results
    assert torch.equal(left, other_left) and torch.equal(taken, other_taken)
    assert torch.allclose(scores, other_scores, atol=1e-4)
    assert taken[:, 1].tolist() == [3, 9, 7, 8, 0, 0] and not taken[:, ::2].any()
    assert scores[2, 1] == scores[3, 1] == -NO_SCORE and scores[4, 1] == logits[4, 0] * rows.inverse_temperature_N[4]
    assert left.isneginf().sum() == num_rows
