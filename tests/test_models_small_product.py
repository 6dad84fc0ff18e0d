"""The kernel for few rows against torch's own product; on a GPU to the bit, which exactness rests on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

pytest.importorskip("triton")
from slipstream.models import small_product as module
from slipstream.models.fused import Activation
from slipstream.models.precision import use_batch_invariant_products
from slipstream.models.products import MOST_FEW_ROWS
from slipstream.models.shapes import SHAPES
from slipstream.models.small_product import agrees, small_product, tiling
from slipstream.models.triton_layers import act_mul

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_rows", [1, 3, MOST_FEW_ROWS])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(40, 32), (16, 560), (33, 272)])
def test_a_product_of_few_rows_is_torchs(num_rows: int, has_bias: bool, num_outputs: int, num_inputs: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, num_inputs, device=DEVICE), torch.randn(num_outputs, num_inputs, device=DEVICE)
    bias = torch.randn(num_outputs, device=DEVICE) if has_bias else None
    got = small_product(x.half(), weight.half(), None if bias is None else bias.half())
    wanted = linear(x.half().double(), weight.half().double(), None if bias is None else bias.half().double())
    torch.testing.assert_close(got.double(), wanted, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_in_the_same_kernel_change_no_bit(activation: Activation, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size, device=DEVICE).half() for size in ((5, 272), (2 * 40, 272), (2 * 40,)))
    got = small_product(x, weight, bias if has_bias else None, activation)
    assert torch.equal(got, act_mul(small_product(x, weight, bias if has_bias else None), activation))


def test_only_shapes_that_gain_are_cut() -> None:
    assert tiling(960, 576) and tiling(1536, 8960) and tiling(17920, 1536)
    assert tiling(8192, 8192) is None and tiling(3584, 18944) is None and tiling(960, 570) is None


def test_a_device_whose_products_differ_does_not_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    module.agrees.cache_clear()

    def differing(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias) * torch.where(torch.arange(len(x), device=x.device) < 4, 1.0, 1.01).unsqueeze(1)

    monkeypatch.setattr(module, "small_product", lambda *arguments: linear(*arguments))
    assert agrees(32, 32, False, torch.float16, DEVICE)
    module.agrees.cache_clear()
    monkeypatch.setattr(module, "linear", differing)
    assert not agrees(32, 32, False, torch.float16, DEVICE)
    module.agrees.cache_clear()
    assert not agrees(32, 32, False, torch.float32, DEVICE), "float32 has no such kernel"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_cublas_for_every_weight_of_a_layer(shape: str) -> None:
    use_batch_invariant_products()
    config = SHAPES[shape]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    qkv = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * head
    for num_outputs, num_inputs, bias in (
        (qkv, hidden, True),
        (hidden, hidden, False),
        (2 * inner, hidden, False),
        (hidden, inner, False),
        (config["vocab_size"], hidden, False),
    ):
        if tiling(num_outputs, num_inputs) is not None:
            assert agrees(num_outputs, num_inputs, bias, torch.bfloat16, DEVICE), (num_outputs, num_inputs)
