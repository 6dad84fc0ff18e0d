"""Packed products: torch's numbers, the same bits at every height, and never those of old weights."""

from __future__ import annotations

import pytest
import torch
from tiny_models import small_llama
from torch import Tensor, nn
from torch.nn.functional import linear

from slipstream.models import products
from slipstream.models.products import MOST_ROWS, Product
from slipstream.models.recognise import fuse
from slipstream.models.weights import named_weights, write_weights


def layers(*sizes: int, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(48, size, bias=bias).requires_grad_(False) for size in sizes]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_a_product_is_its_layers_side_by_side(bias: bool, num_rows: int) -> None:
    linears = layers(32, 16, 16, bias=bias)
    x = torch.randn(num_rows, 48)
    wanted = torch.cat([layer(x) for layer in linears], -1)
    torch.testing.assert_close(Product(linears)(x), wanted, rtol=1e-5, atol=1e-5)


def test_a_packed_product_has_the_same_bits_at_every_height() -> None:
    product = Product(layers(80, bias=False))
    if not product.is_packed:
        pytest.skip("this processor's packed products depend on the height, so they are not used")
    x = torch.randn(MOST_ROWS, 48)
    whole = product(x)
    assert all(torch.equal(product(x[:n]), whole[:n]) for n in range(1, MOST_ROWS))
    assert torch.equal(product(x.unsqueeze(0))[0], whole), "the head is asked with one dimension more"


def test_packing_that_depends_on_the_height_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_height(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, packed, bias) + (1e-6 if len(x) < 16 else 0.0)

    monkeypatch.setattr(products, "_pack", lambda weight: weight)
    monkeypatch.setattr(products, "_packed_product", by_height)
    products._packing_keeps_bits.cache_clear()
    assert not Product(layers(64, bias=False)).is_packed
    products._packing_keeps_bits.cache_clear()


def test_weights_that_are_written_are_packed_again() -> None:
    model, other = small_llama(0), small_llama(1)
    fusion = fuse(model)
    assert fusion.has_head and len(fusion.products) == 4 * 2 + 1
    write_weights(model, named_weights(other))
    x = torch.randn(3, 32)
    torch.testing.assert_close(fusion.products[-1](x), other.lm_head(x), rtol=1e-5, atol=1e-5)


def test_a_released_product_goes_on_without_its_copy() -> None:
    product = Product(layers(64, bias=False))
    x = torch.randn(16, 48)
    before = product(x)
    product.release()
    torch.testing.assert_close(product(x), before, rtol=1e-5, atol=1e-5)
