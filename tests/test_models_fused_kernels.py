"""The kernels of fused layers against their plain twins, on a GPU, in Triton's interpreter and on the CPU."""

from __future__ import annotations

import math
from typing import Any

import numba
import pytest
import torch
from fused_models import (
    DEVICE,
    FEW,
    NUM_PAGES,
    PADDING,
    PAGE_TOKENS,
    ROUNDINGS,
    TOLERANCE,
    build,
    error_with_kernels,
    pack,
    relative_error,
    rounding,
)

from slipstream.models import cpu_layers, fused
from slipstream.models.cached import PackedRows
from slipstream.models.fused import Heads, Norm
from slipstream.models.recognise import fuse
from slipstream.models.rotary import Rotary

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def layers() -> Any:
    """The kernels' module."""
    pytest.importorskip("triton")
    from slipstream.models import triton_layers

    return triton_layers


@pytest.fixture(params=["triton", "cpu"])
def either(request: pytest.FixtureRequest) -> Any:
    """The kernels' module of a GPU, and that of the CPU."""
    if request.param == "cpu":
        return cpu_layers
    return request.getfixturevalue("layers")


def skip_unless_served(module: Any, dtype: torch.dtype) -> None:
    if module is cpu_layers and (dtype != torch.float32 or DEVICE != "cpu"):
        pytest.skip("the CPU's kernels are for float32")


NORMS = {
    "llama": {},
    "gemma": {"rounds_first": False, "plus_one": True},
    "olmo2": {"rounds_first": False},
    "olmo": {"centred": True},
}
# The interpreter rounds float16 to the nearest, but cuts bfloat16 off, in each of several steps.
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 3e-2}


def some_norm(kind: str, size: int, dtype: torch.dtype) -> Norm:
    weight = None if kind == "olmo" else (torch.randn(size) * 0.3 + 1).to(DEVICE, dtype)
    return Norm(weight, 1e-5, **NORMS[kind])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("size", [72, 8000])
def test_the_add_norm_kernel_equals_its_twin(kind: str, dtype: torch.dtype, size: int, either: Any) -> None:
    skip_unless_served(either, dtype)
    torch.manual_seed(0)
    x, delta = (torch.randn(5, size).to(DEVICE, dtype) * factor for factor in (3, 1))
    after, before = some_norm(kind, size, dtype), some_norm(kind, size, dtype)
    cases = [
        (None, None, 1.0, before),
        (delta, None, 1.0, before),
        (delta, after, 1.0, before),
        (delta, after, 1.0, None),
        (delta, None, 0.7, before),
        (delta, None, 1.0, None),
    ]
    for case in cases:
        for got, wanted in zip(either.add_norm(x, *case), fused.add_norm_plainly(x, *case), strict=True):
            assert (got is None) == (wanted is None)
            if got is not None and wanted is not None:
                assert got.dtype == dtype and relative_error(got, wanted) < 2 * DTYPES[dtype]  # two roundings


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_activation_kernel_equals_its_twin(activation: fused.Activation, dtype: torch.dtype, layers: Any) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(3, 2 * 1100) * 4).to(DEVICE, dtype)
    gate_up[0, :6] = torch.tensor([-200.0, 200.0, -20.0, 20.0, 0.0, -1e-4], dtype=dtype)
    got = layers.act_mul(gate_up, activation)
    assert relative_error(got, fused.act_mul_plainly(gate_up, activation)) < DTYPES[dtype]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_activation_on_a_cpu_is_what_torch_computes(activation: fused.Activation) -> None:
    torch.manual_seed(0)
    gate = torch.cat([torch.linspace(-60, 60, 100_001), torch.tensor([0.0, -1e-30, 1e30, -1e30, -100.0, 100.0])])
    up = torch.randn_like(gate)
    wide = gate.double()
    act = torch.nn.functional.silu(wide) if activation == "silu" else torch.nn.functional.gelu(wide, approximate="tanh")
    for num_rows in (1, 3):  # by one thread, and by all
        got = cpu_layers.act_mul(torch.cat([gate, up]).repeat(num_rows, 1), activation)
        error = (got.double() - act * up.double()).abs()
        # Rounding an exponent of 20 is what most of it is; and torch's tanh near -1 has few digits left.
        within = 5e-7 if activation == "silu" else 5e-6
        assert (error <= within * (act * up.double()).abs() + 1e-14).all() and got.shape == (num_rows, len(gate))
    broken = torch.tensor([[math.nan, 1.0, 1.0, 1.0], [1.0, 1.0, math.nan, 1.0]])
    assert cpu_layers.act_mul(broken, activation).isnan().tolist() == [[True, False], [True, False]]


@pytest.mark.parametrize("act_mul", [cpu_layers.act_mul, fused.act_mul_plainly])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [352, 1536, 40_000])
def test_an_activation_on_a_cpu_is_the_same_in_any_company(
    size: int, activation: fused.Activation, act_mul: Any
) -> None:
    """Whatever threads make of it: rows of tiny, of SmolLM2, and of more numbers than one thread gets. Both in float32,
    where every bit shows."""
    torch.manual_seed(0)
    before, mine = torch.get_num_threads(), numba.get_num_threads()
    gate_up = torch.randn(128, 2 * size)
    try:
        for num_threads in (1, 2, 3, 5):
            torch.set_num_threads(num_threads)
            numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
            alone = torch.cat([act_mul(row, activation) for row in gate_up.split(1)])
            for num_rows in (16, 47, 93, 128):
                assert torch.equal(act_mul(gate_up[:num_rows], activation), alone[:num_rows])
    finally:
        numba.set_num_threads(mine)
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize(
    ("kind", "at_once", "rotary_size", "wide_rotary"),
    [
        (None, False, 12, False),
        (None, False, 8, False),
        (None, False, 0, False),
        (None, False, 12, True),
        ("llama", False, 12, False),
        ("gemma", False, 12, False),
        ("olmo2", True, 12, True),
    ],
)
def test_the_rope_kernel_equals_its_twin(
    kind: str | None,
    at_once: bool,
    rotary_size: int,
    wide_rotary: bool,
    looks_up: bool,
    dtype: torch.dtype,
    either: Any,
) -> None:
    skip_unless_served(either, dtype)
    torch.manual_seed(0)
    num_query, num_key, size = 6, 3, 12
    lengths = (num_query * size, num_key * size) if at_once else (size, size)
    norms = [] if kind is None else [some_norm(kind, length, dtype) for length in lengths]
    heads = Heads(num_query, num_key, size, *norms)
    rows = pack(FEW, DEVICE)
    num_tokens = len(rows.slot_T)
    qkv = torch.randn(num_tokens, (num_query + 2 * num_key) * size).to(DEVICE, dtype)
    angles = torch.rand(num_tokens, rotary_size, device=DEVICE) * 6
    rotary = (angles.cos(), angles.sin()) if wide_rotary else (angles.cos().to(dtype), angles.sin().to(dtype))
    given = Rotary(*rotary) if rotary_size else None
    query, key, value = fused.norm_rope_plainly(qkv, heads, given)
    if looks_up and given is not None:  # the same rows of a table that has them in another order
        order = torch.randperm(2 * num_tokens, device=DEVICE)[:num_tokens]
        tables = [torch.full((2 * num_tokens, rotary_size), 7.0, dtype=x.dtype, device=DEVICE) for x in rotary]
        for table, x in zip(tables, rotary, strict=True):
            table[order] = x
        given = Rotary(tables[0], tables[1], order)
        assert all(torch.equal(a, b) for a, b in zip(given.of_tokens(), rotary, strict=True))
    keys, values = torch.zeros(2, NUM_PAGES + 1, num_key, PAGE_TOKENS, size, dtype=dtype, device=DEVICE)
    got = either.norm_rope_write(qkv, heads, given, rows, keys, values)
    assert relative_error(got, query) < DTYPES[dtype]
    page = rows.table_SW[rows.slot_T, rows.position_T // PAGE_TOKENS].long()
    for pages, wanted in ((keys, key), (values, value)):
        written = pages[page, :, rows.position_T % PAGE_TOKENS]
        assert relative_error(written[:-PADDING], wanted[:-PADDING]) < DTYPES[dtype]
        pages[page, :, rows.position_T % PAGE_TOKENS] = 0
        assert not pages.any(), "written elsewhere too"


@pytest.mark.parametrize(
    "name", ["llama-gelu", "qwen3", "gemma3_text", "olmo", "olmo2", "granite", "phi3-partial-rope"]
)
def test_a_fused_model_gives_the_same_logits_with_its_kernels(
    name: str, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    within = ROUNDINGS * rounding(build(name)) if DEVICE == "cpu" else 50 * TOLERANCE
    assert error_with_kernels(name, monkeypatch) < within


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch, layers: Any) -> None:
    """The parity of whole models sees a key written one position late."""
    whole = layers.norm_rope_write

    def late(qkv, heads, rotary, rows, keys, values):  # type: ignore[no-untyped-def]
        fields = {name: getattr(rows, name) for name in PackedRows.__slots__}
        wrong = PackedRows(**fields | {"position_T": rows.position_T + 1})
        return whole(qkv, heads, rotary, wrong, keys, values)

    monkeypatch.setattr(layers, "norm_rope_write", late)
    assert error_with_kernels("llama", monkeypatch) > 100 * TOLERANCE


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_kernels_row_has_the_same_bits_in_any_company(num_rows: int, layers: Any) -> None:
    torch.manual_seed(0)
    x, delta = torch.randn(2, 5, 576, device=DEVICE, dtype=torch.float16).unbind()
    norm = some_norm("llama", 576, torch.float16)
    whole = *layers.add_norm(x, delta, norm, 1.0, norm), layers.act_mul(x, "silu")
    x, delta = x[:num_rows].clone(), delta[:num_rows].clone()
    part = *layers.add_norm(x, delta, norm, 1.0, norm), layers.act_mul(x, "silu")
    assert all(torch.equal(a, b[:num_rows]) for a, b in zip(part, whole, strict=True))


def test_a_products_row_has_the_same_bits_in_any_company() -> None:
    """Between 16 and 128 packed tokens, where the engine pads to, in float32 on the CPU."""
    torch.manual_seed(0)
    model = build("llama")
    fuse(model)
    layer, x = model.base_model.layers[0].forward, torch.randn(128, 32)
    for product in (layer.qkv, layer.gate_up):
        whole = product(x)
        for num_rows in (16, 17, 31, 64, 100):
            assert torch.equal(product(x[:num_rows]), whole[:num_rows]), num_rows


@pytest.mark.skipif(DEVICE != "cpu", reason="the CPU's kernels")
def test_the_cpus_kernels_give_a_row_the_same_bits_serial_and_parallel() -> None:
    torch.manual_seed(0)
    x, delta = torch.randn(2, 120, 576).unbind()
    norm = some_norm("llama", 576, torch.float32)
    whole = cpu_layers.add_norm(x, delta, norm, 1.0, norm)
    assert x[:7].numel() < cpu_layers.SERIAL_NUMBERS < x.numel()
    part = cpu_layers.add_norm(x[:7].clone(), delta[:7].clone(), norm, 1.0, norm)
    assert all(torch.equal(a, b[:7]) for a, b in zip(part, whole, strict=True))
