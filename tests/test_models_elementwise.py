"""Elementwise operations of models that are not wholly fused: the same bits wherever in a step a row is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2CLS, ACT2FN

from slipstream.models.elementwise import VECTOR_NUMBERS, AlikeEverywhere
from slipstream.models.threads import threads

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": lambda x: functional.glu(torch.cat([x, 1.5 * x], -1)),
    "log_sigmoid": functional.logsigmoid,
    "softplus": functional.softplus,
    "elu": functional.elu,
    "selu": functional.selu,
    "tanhshrink": functional.tanhshrink,
    "softsign": functional.softsign,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "power": lambda x: (x.abs() + 0.1) ** 1.7,
    "cube": lambda x: torch.pow(x, 3.0),
    "base": lambda x: torch.pow(2.0, x),
    "by a tensor": lambda x: (x.abs() + 0.1) ** torch.tensor(0.3),
    "of two tensors": lambda x: torch.logaddexp(x, x[..., :1]),
    "scaled sum": lambda x: torch.add(x, x.exp(), alpha=0.3),
    "written over": lambda x: functional.silu(x.clone(), inplace=True),
    "transposed": lambda x: torch.sigmoid(x.t().contiguous().t()),
    "of every second": lambda x: torch.sigmoid(x.repeat_interleave(2, -1)[..., ::2]),
}

pytestmark = pytest.mark.usefixtures("without_gradients")


def function(name: str, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Tensor]:
    return FUNCTIONS[name] if name in FUNCTIONS else ACT2FN[name].to(dtype)


@pytest.fixture
def tailed() -> Iterator[Any]:
    """An operation that every processor rounds otherwise at the end of a tensor than before it."""
    library = torch.library.Library("slipstream_tests", "DEF")
    tags = (torch.Tag.pointwise,)
    library.define("tailed(Tensor x) -> Tensor", tags=tags)
    library.define("tailed_(Tensor(a!) x) -> Tensor(a!)", tags=tags)
    library.define("tailed.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=tags)

    def tailed(x: Tensor) -> Tensor:
        flat = (2 * x).flatten()
        if rest := len(flat) % VECTOR_NUMBERS:
            flat[-rest:] += 1e-3
        return flat.view(x.shape)

    library.impl("tailed", tailed, "CPU")
    library.impl("tailed_", lambda x: x.copy_(tailed(x)), "CPU")
    library.impl("tailed.out", lambda x, out: out.resize_(x.shape).copy_(tailed(x)), "CPU")
    yield torch.ops.slipstream_tests
    library._destroy()


@pytest.mark.parametrize("name", [*ACT2CLS, *FUNCTIONS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_the_same_alone_and_among_others_at_any_width(name: str, dtype: torch.dtype) -> None:
    """Widths of no whole vectors, and enough numbers that threads share them, cut within a row."""
    apply = function(name, dtype)
    draw = torch.Generator().manual_seed(0)
    for size, num_rows in ((1, 130), (37, 21), (96, 5), (1001, 75)):
        x = (3 * torch.randn(num_rows, size, generator=draw)).to(dtype)
        with AlikeEverywhere():
            alone = torch.cat([apply(row) for row in x[-9:].split(1)])
            for num_threads in (1, 2, 3):
                with threads(num_threads):
                    assert torch.equal(apply(x)[-9:], alone), (size, num_threads)
        assert not alone.isnan().any()


@pytest.mark.parametrize("name", [*ACT2CLS, *FUNCTIONS])
def test_results_are_those_of_torch(name: str) -> None:
    x = 3 * torch.randn(7, 37, generator=torch.Generator().manual_seed(0))
    with AlikeEverywhere():
        found = function(name)(x)
    wanted = function(name)(x)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_an_operation_that_rounds_otherwise_at_the_end_is_seen_and_mended(tailed: Any) -> None:
    x = torch.randn(5, 37)
    for apply in (
        tailed.tailed,
        lambda x: tailed.tailed_(x.clone()),
        lambda x: tailed.tailed.out(x, out=torch.empty(0)),
    ):
        assert not torch.equal(apply(x)[:2], apply(x[:2])), "this test would see nothing"
        with AlikeEverywhere():
            assert torch.equal(apply(x), 2 * x) and torch.equal(apply(x[:2]), 2 * x[:2])


def test_what_it_is_written_into_is_the_tensor_that_was_given(tailed: Any) -> None:
    x = torch.randn(3, 5)
    wanted = 2 * x
    with AlikeEverywhere():
        assert tailed.tailed_(x) is x
    assert torch.equal(x, wanted)


def test_formats_and_threads_stay_as_they_were() -> None:
    half, number = torch.randn(3, 5).bfloat16(), torch.tensor(0.3)
    before = torch.get_num_threads()
    with threads(2), AlikeEverywhere():
        assert (half.abs() ** number).dtype == torch.bfloat16, "a number does not decide the format"
        assert (half.float() + half).dtype == torch.float32
        assert torch.sigmoid(torch.arange(3)).dtype == torch.float32
        assert torch.sigmoid(torch.randn(0, 5)).shape == (0, 5)
        assert torch.get_num_threads() == 2
        with pytest.raises(RuntimeError):
            torch.pow(torch.randn(3), torch.randn(4))
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before
