"""Packed products: torch's numbers, the same bits at every height, and never those of old weights."""

from __future__ import annotations

import pytest
import torch
from tiny_models import small_llama
from torch import Tensor, nn
from torch.nn.functional import linear

from slipstream.models import heights, products
from slipstream.models.heights import MOST_ROWS
from slipstream.models.products import Product
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


def test_a_product_has_the_same_bits_at_every_height() -> None:
    product = Product(layers(80, bias=False))
    x = torch.randn(MOST_ROWS, 48)
    whole = product(x)
    assert product.serves_any_height
    assert all(torch.equal(product(x[:n]), whole[:n]) for n in range(1, MOST_ROWS))
    assert torch.equal(product(x.unsqueeze(0))[0], whole), "the head is asked with one dimension more"
    twice = product(torch.cat([x, x]))
    torch.testing.assert_close(twice, torch.cat([whole, whole]), rtol=1e-5, atol=1e-5, msg="of more than a step has")


def test_rows_are_padded_to_heights_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def by_height(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(len(x))
        return linear(x, packed, bias) + (1e-6 if len(x) < 16 else 0.0)

    for module in (products, heights):
        monkeypatch.setattr(module, "can_pack", lambda dtype: True)
        monkeypatch.setattr(module, "pack", lambda weight: weight)
        monkeypatch.setattr(module, "packed_product", by_height)
    heights._tried.cache_clear()
    product, x = Product(layers(64, bias=False)), torch.randn(3, 48)
    seen.clear()
    assert torch.equal(product(x[:1]), product(x)[:1]) and min(seen) >= 16
    heights._tried.cache_clear()


def test_weights_that_are_written_are_packed_again() -> None:
    model, other = small_llama(0), small_llama(1)
    fusion = fuse(model)
    assert fusion.has_head and len(fusion.products) == 4 * 2 + 1
    write_weights(model, named_weights(other))
    x = torch.randn(3, 32)
    torch.testing.assert_close(fusion.products[-1](x), other.lm_head(x), rtol=1e-5, atol=1e-5)


def test_a_product_that_need_not_be_exact_is_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "heights_of", lambda form: (16, MOST_ROWS))
    linears, x = layers(64, 32, bias=True), torch.randn(1, 3, 48)
    seen: list[int] = []
    for exact in (True, False):
        product = Product(linears, exact=exact)
        multiply = product._multiply
        monkeypatch.setattr(product, "_multiply", lambda x_MK, go=multiply: seen.append(len(x_MK)) or go(x_MK))
        wanted = torch.cat([layer(x) for layer in linears], -1)
        torch.testing.assert_close(product(x), wanted, rtol=1e-5, atol=1e-5)
    assert seen == [16, 3]


def test_a_released_product_is_none_until_its_weights_are_packed_again() -> None:
    product = Product(layers(64, bias=False))
    x = torch.randn(16, 48)
    before = product(x)
    product.release()
    if product._packs:
        with pytest.raises(AssertionError, match="released"):
            product(x)
    product.refresh()
    assert torch.equal(product(x), before)
