"""A product's heights on a CPU: found by trial, padded to, and the same bits at each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slipstream.models import heights
from slipstream.models.heights import (
    MOST_ROWS,
    SOME_HEIGHTS,
    Form,
    StepHeights,
    common_heights,
    height_for,
    heights_of,
    multiply_at,
)
from slipstream.models.threads import threads

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

    def of(multiply: Multiply) -> tuple[int, ...]:
        monkeypatch.setattr(heights, "linear", lambda x, weight, bias: multiply(x, weight))
        heights._tried.cache_clear()
        return heights_of(Form(3, 40, has_bias=False, dtype=torch.bfloat16))

    yield of
    heights._tried.cache_clear()


def test_what_cancels_shows_another_order_in_every_second_number_of_16_bits() -> None:
    """Numbers drawn freely show it in one of hundreds."""
    weight_NK, row_1K = heights._what_cancels(Form(500, 576, has_bias=False, dtype=torch.bfloat16))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heights_at_which_a_sum_begins_with_the_bias_are_not_those_at_which_it_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def multiply(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        bias_N1 = torch.zeros(len(weight_NK), 1) if bias_N is None else bias_N.float().unsqueeze(1)
        terms_NK = weight_NK.float() * x_MK[:1].float()
        terms = [bias_N1, terms_NK] if len(x_MK) <= 32 else [terms_NK, bias_N1]
        sums_N = torch.from_numpy(np.cumsum(torch.cat(terms, 1).numpy(), 1)[:, -1])
        return sums_N.to(dtype).expand(len(x_MK), -1)

    monkeypatch.setattr(heights, "linear", multiply)
    heights._tried.cache_clear()
    assert heights_of(Form(9, 40, has_bias=False, dtype=dtype))[0] == 1
    assert heights_of(Form(9, 40, has_bias=True, dtype=dtype))[0] == 33
    heights._tried.cache_clear()


@pytest.mark.parametrize("shape", [(1, 8), (5, 8), (33, 8), (1, 7, 8), (0, 8), (129, 8)])
def test_rows_are_padded_to_a_height_or_cut(shape: tuple[int, ...]) -> None:
    seen: list[int] = []

    def multiply(x_MK: Tensor) -> Tensor:
        seen.append(len(x_MK))
        return 2 * x_MK[:, :3]

    x = torch.randn(shape)
    assert torch.equal(multiply_at((4, 6, 12), multiply, x), 2 * x[..., :3])
    assert seen == {1: [4], 5: [6], 33: [12, 12, 12], 0: [4], 7: [12], 129: [129]}[x.shape[-2]]
    assert height_for((4, 6, 12), 4) == 4 and height_for((4, 6, 12), 5) == 6


def test_steps_are_padded_for_all_linear_layers_that_nobody_pads_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(nn.Linear):
        pass

    of_width = {8: (1, 20, 30, 40), 16: (16, 20, 40, 60)}
    monkeypatch.setattr(heights, "heights_of", lambda form: of_width[form.num_inputs])
    model = nn.Sequential(nn.Linear(8, 3), Other(16, 3))
    assert common_heights(model[:1], least=16) == (20, 30, 40) and common_heights(model, least=16) == (20, 40)
    assert common_heights(model, least=21) == (40,)
    model[0].forward = lambda x: x  # one that looks after it itself
    assert common_heights(model, least=16) == (16, 20, 40, 60)
    monkeypatch.setitem(of_width, 16, (7,))
    with pytest.raises(ValueError, match=r"engine\.exact cannot hold here"):
        common_heights(model, least=16)


def test_layers_whose_weights_stand_inputs_first_are_tried_in_their_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Form] = []
    monkeypatch.setattr(heights, "heights_of", lambda form: tried.append(form) or (20,))
    assert common_heights(nn.Sequential(Conv1D(3, 8)), least=16) == (20,)
    assert tried == [Form(3, 8, has_bias=True, dtype=torch.float32, way="transposed")]


def test_an_engine_does_not_go_on_with_another_number_of_threads_than_it_was_built_with() -> None:
    with threads(1):
        steps = StepHeights((16, 20))
        assert steps.pad(17) == steps.most == 20
    with threads(2), pytest.raises(RuntimeError, match="torch has 2 threads now and had 1"):
        steps.pad(17)


IN_A_NEW_PROCESS = """
import torch
from slipstream.models.threads import use_threads
assert torch.get_num_threads() == 1
assert use_threads() == 1
import numba, numpy as np
@numba.njit(parallel=True)
def count(places):
    for place in numba.prange(len(places)):
        places[place] = place
count(np.zeros(100))
assert torch.get_num_threads() == 1, torch.get_num_threads()
"""


def test_the_engines_own_kernels_leave_torch_the_threads_it_had() -> None:
    """Even where a machine was told one, and numba's would raise it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], env=environment, check=True)


@pytest.mark.parametrize("way", ["linear", "packed", "transposed"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(576, 1536), (960, 576), (37, 65)])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_this_processors_products_keep_what_the_trial_found(
    num_outputs: int, num_inputs: int, dtype: torch.dtype, has_bias: bool, way: Any
) -> None:
    """Of other numbers, those that cancel too: a row at random places of steps of all sizes."""
    if way == "packed" and not heights.can_pack(dtype):
        pytest.skip("no packed products here")
    form = Form(num_outputs, num_inputs, has_bias, dtype, way)
    known = heights_of(form)
    weight_NK, row_1K = heights._what_cancels(form)
    row_1K = row_1K.flip(1) * 3
    bias_N = torch.randn(num_outputs).to(dtype) * 1e-2 if has_bias else None
    multiply = heights._multiplier(form, weight_NK.flip(1).contiguous(), bias_N)
    draw = torch.Generator().manual_seed(1)
    alone = multiply_at(known, multiply, row_1K)[0]
    assert alone.count_nonzero() > num_outputs / 20
    for height in (2, 11, 16, 17, 31, 32, 33, 35, 36, 37, 57, 64, 99, 128):
        x_MK = torch.randn(height, num_inputs, generator=draw).to(dtype)
        place = int(torch.randint(height, (1,), generator=draw))
        x_MK[place] = row_1K[0]
        assert torch.equal(multiply_at(known, multiply, x_MK)[place], alone), (height, place)
