"""A product's heights on a CPU: found by trial, padded to, and the same bits at each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slipstream.models import heights
from slipstream.models.heights import MOST_ROWS, SOME_HEIGHTS, common_heights, height_for, heights_of, multiply_at

Multiply = Callable[[Tensor, Tensor], Tensor]


def in_order(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """A row at a time, its terms from the first to the last."""
    terms = (weight_NK.float() * row.float() for row in x_MK)
    return torch.stack([torch.from_numpy(np.cumsum(term.numpy(), 1)[:, -1]) for term in terms]).to(x_MK.dtype)


def backwards(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    return in_order(x_MK.flip(1), weight_NK.flip(1))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Multiply], tuple[int, ...]]]:
    """The heights of a processor that multiplies in this way."""

    def of(multiply: Multiply, num_outputs: int = 3) -> tuple[int, ...]:
        monkeypatch.setattr(heights, "linear", lambda x, weight, bias: multiply(x, weight))
        heights_of.cache_clear()
        return heights_of(num_outputs, 40, False, torch.bfloat16, packs=False, num_threads=1)

    yield of
    heights_of.cache_clear()


def test_what_cancels_shows_another_order_in_every_second_number_of_16_bits() -> None:
    """Numbers drawn freely show it in one of hundreds."""
    weight_NK, row_1K = heights._what_cancels(500, 576, torch.bfloat16)
    terms = weight_NK.double() * row_1K.double()
    assert terms.abs().max() > 1e3 and terms.sum(1).abs().max() < 1e-9 * terms.abs().max()
    assert (in_order(row_1K, weight_NK) != backwards(row_1K, weight_NK)).float().mean() > 0.5
    draw = torch.Generator().manual_seed(0)
    free, row = (torch.randn(n, 576, generator=draw).bfloat16() for n in (500, 1))
    assert (in_order(row, free) != backwards(row, free)).float().mean() < 0.01


def test_all_heights_have_the_bits_of_the_largest(found: Callable[[Multiply], tuple[int, ...]]) -> None:
    assert found(in_order) == tuple(range(1, MOST_ROWS + 1))
    few = lambda x, weight: in_order(x, weight) if len(x) > 32 else backwards(x, weight)  # noqa: E731
    assert found(few) == tuple(range(33, MOST_ROWS + 1))
    by_fours = lambda x, weight: in_order(x, weight) if len(x) % 4 == 0 else backwards(x, weight)  # noqa: E731
    assert found(by_fours) == tuple(range(4, MOST_ROWS + 1, 4))


def test_a_height_at_which_rows_depend_on_their_place_is_none(found: Callable[[Multiply], tuple[int, ...]]) -> None:
    def last_otherwise(x: Tensor, weight: Tensor) -> Tensor:
        if len(x) <= 100:
            return in_order(x, weight)
        return torch.cat([in_order(x[:100], weight), backwards(x[100:], weight)])

    assert found(last_otherwise) == tuple(range(1, 101)), "so larger steps are cut"


def test_of_many_weights_only_some_heights_are_tried(
    found: Callable[[Multiply], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heights, "SMALL", 100)
    assert found(in_order) == SOME_HEIGHTS


@pytest.mark.parametrize("shape", [(1, 8), (5, 8), (33, 8), (1, 7, 8), (0, 8)])
def test_rows_are_padded_to_a_height_or_cut(shape: tuple[int, ...]) -> None:
    seen: list[int] = []

    def multiply(x_MK: Tensor) -> Tensor:
        seen.append(len(x_MK))
        return 2 * x_MK[:, :3]

    x = torch.randn(shape)
    assert torch.equal(multiply_at((4, 6, 12), multiply, x), 2 * x[..., :3])
    assert seen == {1: [4], 5: [6], 33: [12, 12, 12], 0: [4], 7: [12]}[x.shape[-2]]
    assert height_for((4, 6, 12), 4) == 4 and height_for((4, 6, 12), 5) == 6


def test_steps_are_padded_for_all_linear_layers_that_nobody_pads_for(monkeypatch: pytest.MonkeyPatch) -> None:
    of_width = {8: (1, 20, 30, 40), 16: (16, 20, 40, 60)}
    monkeypatch.setattr(heights, "heights_of", lambda outputs, inputs, *form, **options: of_width[inputs])
    model = nn.Sequential(nn.Linear(8, 3), nn.Linear(16, 3))
    assert common_heights(model[:1], least=16) == (20, 30, 40) and common_heights(model, least=16) == (20, 40)
    assert common_heights(model, least=21) == (40,)
    model[0].forward = lambda x: x  # one that looks after it itself
    assert common_heights(model, least=16) == (16, 20, 40, 60)
    monkeypatch.setitem(of_width, 16, (7,))
    with pytest.raises(ValueError, match=r"engine\.exact cannot hold here"):
        common_heights(model, least=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(576, 1536), (960, 576), (37, 65)])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_this_processors_products_keep_what_the_trial_found(
    num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> None:
    """Of other numbers, those that cancel too: a row at random places of steps of all sizes."""
    packs = heights.can_pack(dtype)
    form = (num_outputs, num_inputs, False, dtype)
    known = heights_of(*form, packs=packs, num_threads=torch.get_num_threads())
    weight_NK, row_1K = heights._what_cancels(*form[:2], dtype)
    weight_NK, packed = weight_NK.flip(1), heights.pack(weight_NK.flip(1)) if packs else None
    row_1K = row_1K.flip(1) * 3
    multiply = lambda x: heights.packed_product(x, packed, None) if packs else heights.linear(x, weight_NK)  # noqa: E731
    draw = torch.Generator().manual_seed(1)
    alone = multiply_at(known, multiply, row_1K)[0]
    assert alone.count_nonzero() > num_outputs / 20
    for height in (2, 11, 16, 17, 31, 32, 33, 35, 36, 37, 57, 64, 99, 128):
        x_MK = torch.randn(height, num_inputs, generator=draw).to(dtype)
        place = int(torch.randint(height, (1,), generator=draw))
        x_MK[place] = row_1K[0]
        assert torch.equal(multiply_at(known, multiply, x_MK)[place], alone), (height, place)
