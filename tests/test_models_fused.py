"""Fused layers against Hugging Face's own, family by family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fused_models import LENGTHS, RECOGNISED, ROUNDINGS, SEQUENCES, TOLERANCE, build, logits, relative_error, rounding
from tiny_models import build_family, family_config
from torch import nn
from transformers import AutoModelForCausalLM

from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.packed import document_hidden
from slipstream.models.recognise import fuse, is_fused
from slipstream.models.weights import fingerprint, named_weights, write_weights

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


pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_fused_model_gives_the_same_logits_and_keeps_its_parameters(name: str) -> None:
    model = build(name)
    wanted, within = logits(model), ROUNDINGS * rounding(model)
    names, version = [n for n, _ in model.named_parameters()], fingerprint(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    done = fuse(model)
    assert done.fused == tuple(range(4)) and not done.reasons, str(done)
    assert relative_error(logits(model), wanted) < within
    assert [n for n, _ in model.named_parameters()] == names
    assert fingerprint(model) == version
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "olmo2"])
def test_packed_documents_are_served_too(name: str) -> None:
    model, ids = build(name), torch.cat(SEQUENCES)
    wanted, within = document_hidden(model, ids, LENGTHS), ROUNDINGS * rounding(model)
    fuse(model.requires_grad_(False))
    assert relative_error(document_hidden(model, ids, LENGTHS), wanted) < within


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
    wanted, within = logits(model), ROUNDINGS * rounding(model)
    done = fuse(model)
    assert done.fused == (0, 1, 3) and len(done.reasons) == 1
    assert relative_error(logits(model), wanted) < within
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
    assert relative_error(logits(model), logits(other)) < ROUNDINGS * rounding(other)
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
    wanted, within = logits(model), ROUNDINGS * rounding(model)
    fuse(model)
    assert relative_error(logits(model), wanted) < within


def test_hooks_of_a_layer_still_run_and_may_change_its_output() -> None:
    model = build("llama")
    model.base_model.layers[1].register_forward_hook(lambda module, given, out: out * 2)
    wanted, within = logits(model), ROUNDINGS * rounding(model)
    fuse(model)
    assert relative_error(logits(model), wanted) < within


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
