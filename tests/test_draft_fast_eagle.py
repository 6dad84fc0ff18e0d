"""The drafter's own kernels against their plain twins; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from slipstream.draft.fast_eagle import join_plainly
from slipstream.draft.triton_eagle import followers, join
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
