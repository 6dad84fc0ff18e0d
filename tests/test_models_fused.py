"""Fused layers against Hugging Face's own, family by family; the Triton kernels against their plain twins."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES as TINY
from tiny_models import VOCABULARY, build_family, family_config, packed_rows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.models import cpu_layers, fused
from slipstream.models.attention import ATTENTION_NAME, attending
from slipstream.models.cached import CachedRows, KVPages, PackedRows
from slipstream.models.fused import Heads, Norm
from slipstream.models.packed import document_hidden
from slipstream.models.recognise import fuse, is_fused
from slipstream.models.weights import fingerprint, named_weights, write_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the Triton kernels run here: without a GPU, in Triton's interpreter (conftest.py)."""

WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}

# What the fused forward shall know; with the features that tiny_models leaves out.
RECOGNISED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
    "llama-yarn-rope": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "llama-gelu": {"hidden_act": "gelu_pytorch_tanh", "head_dim": 12, "num_key_value_heads": 1},
    "mistral": {},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, **WINDOW},
    "qwen3": {},
    "qwen3-odd": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12, "attention_bias": True},
    "smollm3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "granite": {},
    "phi3": {},
    "phi3-partial-rope": {"partial_rotary_factor": 0.5, "sliding_window": 6},
}  # fmt: skip

LEFT_ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "mixtral": ({}, "MixtralSparseMoeBlock has no act_fn, down_proj, gate_proj, up_proj"),
    "qwen3_moe": ({}, "Qwen3MoeSparseMoeBlock has no"),
    "gpt_oss": ({}, "GptOssAttention has sinks"),
    "cohere": ({}, "CohereDecoderLayer has no post_attention_layernorm"),
    "glm4": ({}, "post_self_attn_layernorm, unknown"),
    "glm": ({"head_dim": 8}, "GlmDecoderLayer is of no family"),
    "helium": ({"head_dim": 8}, "HeliumDecoderLayer is of no family"),
    "gpt_neox": ({}, "GPTNeoXLayer has no"),
    "gpt2": ({"n_embd": 32, "n_head": 4, "n_layer": 2}, "GPT2Model has no list of layers"),
    "olmo": ({"clip_qkv": 0.5}, "OlmoAttention clips queries, keys and values"),
    "llama": ({"hidden_act": "gelu"}, "LlamaMLP has the activation GELUActivation"),
    "phi3": ({"resid_pdrop": 0.1}, "Phi3DecoderLayer has dropout"),
}

TOLERANCE = 2e-6
NUM_PAGES, PAGE_TOKENS, WIDTH = 12, 16, 4
LENGTHS = (40, 21, 33)
SEQUENCES = [torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
PREFILL = [(0, 0, 35), (1, 0, 16), (2, 0, 27)]
MIXED = [(1, 16, 5), (0, 35, 1), (2, 27, 6)]  # verify, decode, verify
FEW = [(1, 16, 2), (0, 35, 1)]
"""For Triton's interpreter, which takes milliseconds a program."""
PADDING = 2


@pytest.fixture(autouse=True)
def without_gradients():  # type: ignore[no-untyped-def]
    with torch.no_grad():
        yield


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


def build(name: str) -> PreTrainedModel:
    family = name.split("-")[0]
    if name == family and family in TINY:
        return build_family(family, ATTENTION_NAME)
    torch.manual_seed(0)
    config = family_config(family, **RECOGNISED.get(name, {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval()


def table() -> Tensor:
    """Four pages for each of three slots, in no order; a last line of trash pages."""
    pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(5)).view(3, WIDTH)
    return torch.cat([pages, torch.full((1, WIDTH), NUM_PAGES)]).int()


def pack(cuts: Sequence[tuple[int, int, int]], device: str | torch.device = "cpu") -> PackedRows:
    return packed_rows(cuts, table().to(device), num_padding=PADDING)


def forward(model: PreTrainedModel, pages: KVPages, cuts: Sequence[tuple[int, int, int]]) -> Tensor:
    rows = pack(cuts, model.device)
    ids = [SEQUENCES[which][start : start + length] for which, start, length in cuts]
    ids_T = torch.cat([*ids, torch.zeros(PADDING, dtype=torch.long)]).to(model.device)
    with attending(CachedRows(pages, rows)):
        out = model(input_ids=ids_T.unsqueeze(0), position_ids=rows.position_T.unsqueeze(0), use_cache=False)
    return out.logits[0, :-PADDING]


def logits(model: PreTrainedModel) -> Tensor:
    """Prefill, then decode and verify over what it left in the pages."""
    pages = KVPages(NUM_PAGES, PAGE_TOKENS)
    return torch.cat([forward(model, pages, PREFILL), forward(model, pages, MIXED)])


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_fused_model_gives_the_same_logits_and_keeps_its_parameters(name: str) -> None:
    model = build(name)
    wanted, names, version = logits(model), [n for n, _ in model.named_parameters()], fingerprint(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    done = fuse(model)
    assert done.fused == tuple(range(4)) and not done.reasons, str(done)
    assert relative_error(logits(model), wanted) < TOLERANCE
    assert [n for n, _ in model.named_parameters()] == names
    assert fingerprint(model) == version
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def error_with_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> float:
    pages, model = KVPages(NUM_PAGES, PAGE_TOKENS), build(name).to(DEVICE)  # type: ignore[arg-type]
    forward(model, pages, PREFILL)
    wanted = forward(model, pages, FEW)
    fuse(model)
    monkeypatch.setattr(fused, "KERNEL_DEVICES", {DEVICE})
    return relative_error(forward(model, pages, FEW), wanted)


@pytest.mark.parametrize(
    "name", ["llama-gelu", "qwen3", "gemma3_text", "olmo", "olmo2", "granite", "phi3-partial-rope"]
)
def test_a_fused_model_gives_the_same_logits_with_its_kernels(
    name: str, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error_with_kernels(name, monkeypatch) < (TOLERANCE if DEVICE == "cpu" else 50 * TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "olmo2"])
def test_packed_documents_are_served_too(name: str) -> None:
    model, ids = build(name), torch.cat(SEQUENCES)
    wanted = document_hidden(model, ids, LENGTHS)
    fuse(model.requires_grad_(False))
    assert relative_error(document_hidden(model, ids, LENGTHS), wanted) < TOLERANCE


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_layers_are_left_alone_and_named(name: str) -> None:
    changes, reason = LEFT_ALONE[name]
    config = family_config(name, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.set_attn_implementation(ATTENTION_NAME)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    done = fuse(model)
    assert done.fused == () and reason in str(done) and str(done).startswith("not fused: "), str(done)
    assert not any("forward" in vars(module) for module in model.modules())
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def planted(change: str) -> str:
    """What `fuse` says of a Llama whose third layer was tampered with."""
    model = build("llama")
    layer = model.base_model.layers[2]
    if change == "parameter":
        layer.self_attn.extra = nn.Parameter(torch.zeros(1))
    elif change == "submodule":
        layer.extra = nn.Identity()
    elif change == "adapter":
        layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj)
    elif change == "hook":
        layer.mlp.register_forward_hook(lambda *_: None)
    elif change == "forward":
        layer.self_attn.forward = layer.self_attn.forward
    elif change == "subclass":
        layer.__class__ = type("LlamaDecoderLayer", (type(layer),), {"__module__": "mine"})
    elif change == "bias":
        layer.self_attn.q_proj.bias = nn.Parameter(torch.zeros(32))
    wanted = logits(model)
    done = fuse(model)
    assert done.fused == (0, 1, 3) and len(done.reasons) == 1
    assert relative_error(logits(model), wanted) < TOLERANCE
    return str(done)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("parameter", "LlamaAttention has extra, unknown"),
        ("submodule", "LlamaDecoderLayer has extra, unknown"),
        ("adapter", "LlamaAttention.q_proj is a Sequential, not a plain Linear"),
        ("hook", "LlamaMLP has hooks"),
        ("forward", "LlamaAttention has hooks or a forward from outside"),
        ("subclass", "LlamaDecoderLayer is of no family"),
        ("bias", "q_proj, k_proj, v_proj that do not stack"),
    ],
)
def test_one_unknown_layer_among_fused_ones_still_computes_the_same(change: str, reason: str) -> None:
    said = planted(change)
    assert said.startswith("3 of 4 layers fused (llama); others not: ") and reason in said


def test_the_report_is_one_line() -> None:
    assert str(fuse(build("gemma2"))) == "4 of 4 layers fused (gemma2)"


def test_fusing_twice_is_noticed() -> None:
    model = build("llama")
    assert not is_fused(model)
    first, forwards = fuse(model), [layer.forward for layer in model.model.layers]
    assert fuse(model) is first and is_fused(model)
    assert [layer.forward for layer in model.model.layers] == forwards, "they are fused once"


def test_a_model_with_another_attention_is_left_alone() -> None:
    assert "'eager'" in str(fuse(build_family("llama", "eager")))


@pytest.mark.parametrize("name", ["llama-biased", "qwen2", "gemma3_text", "phi3"])
def test_weights_written_in_place_are_seen(name: str) -> None:
    model, other = build(name), build(name)
    for parameter in other.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    before = logits(model)
    fuse(model)
    write_weights(model, [(key, value.clone()) for key, value in named_weights(other)])
    assert fingerprint(model) == fingerprint(other)
    assert relative_error(logits(model), logits(other)) < TOLERANCE
    assert relative_error(logits(model), before) > 1e-2


def test_tied_embeddings_stay_tied() -> None:
    model = build("llama-biased")
    fuse(model)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_stacked_product_holds_no_second_copy() -> None:
    model = build("qwen2")
    fuse(model)
    attention = model.base_model.layers[0].self_attn
    storages = {getattr(attention, name).weight.untyped_storage().data_ptr() for name in ("q_proj", "k_proj", "v_proj")}
    assert len(storages) == 1


def test_weights_moved_after_fusing_are_noticed() -> None:
    model = build("llama")
    fuse(model)
    model.to(torch.bfloat16)
    with pytest.raises(AssertionError, match="moved or cast"):
        logits(model)


def test_a_copy_of_a_fused_model_is_noticed() -> None:
    model = build("qwen3")
    fuse(model)
    with pytest.raises(AssertionError, match="fuse last"):
        copy.deepcopy(model)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_norm_computed_for_one_module_is_not_taken_by_another(name: str) -> None:
    """A model cut short goes from a layer to the last norm, for which that layer did not compute."""
    model = build(name)
    model.config.num_hidden_layers = 2
    wanted = logits(model)
    fuse(model)
    assert relative_error(logits(model), wanted) < TOLERANCE


def test_hooks_of_a_layer_still_run_and_may_change_its_output() -> None:
    model = build("llama")
    model.base_model.layers[1].register_forward_hook(lambda module, given, out: out * 2)
    wanted = logits(model)
    fuse(model)
    assert relative_error(logits(model), wanted) < TOLERANCE


def test_a_fused_model_refuses_a_backward() -> None:
    model = build("llama")
    fuse(model)
    with torch.enable_grad(), pytest.raises(AssertionError, match="no backward"):
        logits(model)


# ---- planted errors: what the comparison above would see


@pytest.mark.parametrize(
    ("name", "where", "wrong"),
    [
        ("mistral", "form", {"sliding_window": None}),
        ("gemma2", "form", {"softcap": None}),
        ("gemma2", "form", {"scaling": 8**-0.5}),
        ("granite", "layer", {"residual_scale": 1.0}),
        ("smollm3", "layer", {"uses_rope": True}),
        ("llama", "layer", {"activation": "gelu_tanh"}),
        ("gemma", "layer", {"before_mlp": None}),
        ("olmo2", "layer", {"after_attention": None}),
        ("qwen3", "heads", {"query_norm": None}),
    ],
)
def test_a_dropped_feature_is_noticed(name: str, where: str, wrong: dict[str, Any]) -> None:
    model = build(name)
    wanted = logits(model)
    fuse(model)
    for layer in model.base_model.layers:
        target = layer.forward if where == "layer" else getattr(layer.forward, where)
        for field, value in wrong.items():
            object.__setattr__(target, field, value)
    assert relative_error(logits(model), wanted) > 100 * TOLERANCE


# ---- the kernels alone

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


@pytest.mark.parametrize("dtype", DTYPES)
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
    kind: str | None, at_once: bool, rotary_size: int, wide_rotary: bool, dtype: torch.dtype, either: Any
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
    given = rotary if rotary_size else None
    query, key, value = fused.norm_rope_plainly(qkv, heads, given)
    keys, values = torch.zeros(2, NUM_PAGES + 1, num_key, PAGE_TOKENS, size, dtype=dtype, device=DEVICE)
    got = either.norm_rope_write(qkv, heads, given, rows, keys, values)
    assert relative_error(got, query) < DTYPES[dtype]
    page = rows.table_SW[rows.slot_T, rows.position_T // PAGE_TOKENS].long()
    for pages, wanted in ((keys, key), (values, value)):
        written = pages[page, :, rows.position_T % PAGE_TOKENS]
        assert relative_error(written[:-PADDING], wanted[:-PADDING]) < DTYPES[dtype]
        pages[page, :, rows.position_T % PAGE_TOKENS] = 0
        assert not pages.any(), "written elsewhere too"


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
