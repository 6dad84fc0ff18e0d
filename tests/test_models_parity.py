"""The parity check refuses what packed rows would serve wrongly, by name, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCABULARY, build_family
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.loading import load_model, refuse_unserved
from slipstream.models.parity import bound, check_parity, difference

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DECODER = {
    "vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "max_position_embeddings": 128,
    "is_decoder": True, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3,
}  # fmt: skip
ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 128, "is_decoder": True, "pad_token_id": 1,
}  # fmt: skip
# Positions of their own; some count them from the token after the padding.
REFUSED = {
    **dict.fromkeys(
        ("bart", "mbart", "marian", "pegasus", "plbart", "blenderbot", "blenderbot-small", "bigbird_pegasus"), DECODER
    ),
    "roberta": ENCODER,
    "xlm-roberta": ENCODER,
}


def build(family: str, sizes: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """As transformers initialises it: its positions show least there."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes), dtype=dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval()


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_models_that_count_positions_themselves_are_refused_by_name(family: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"'mine' \({family}\) gives other logits in a packed batch than alone"):
        check_parity(build(family, REFUSED[family], dtype), "mine")


def test_loading_refuses_what_the_check_refuses(tmp_path: Path) -> None:
    build("bart", REFUSED["bart"]).save_pretrained(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"mine' \(bart\) gives other logits .* choose another model"):
        load_model(str(tmp_path / "mine"), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_served_family_is_refused_in_any_number_format(family: str, dtype: torch.dtype) -> None:
    model = build_family(family, ATTENTION_NAME).to(dtype)
    refuse_unserved(model.config, family)
    check_parity(model, family)


@pytest.mark.parametrize(
    ("sizes", "is_served"), [({}, True), ({"sliding_window": 6}, False), ({"sliding_window": 128}, True)]
)
def test_a_window_that_layers_keep_to_themselves_is_noticed_where_it_matters(
    sizes: dict[str, int], is_served: bool
) -> None:
    """phimoe puts its window into the mask and does not pass it on. The probed sequences are no longer than 6."""
    model = build_family("phimoe", ATTENTION_NAME, num_local_experts=4, num_experts_per_tok=2, **sizes)
    if is_served:
        check_parity(model, "mine")
        return
    with pytest.raises(ValueError, match=r"attends from position \d+ to positions .* but its layers pass no window"):
        check_parity(model, "mine")


class _TokenShift(nn.Module):
    """A state outside of attention: half of each token's hidden state is that of the token before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]  # type: ignore[no-any-return]


def test_a_state_outside_of_attention_is_noticed() -> None:
    model = build_family("llama", ATTENTION_NAME)
    model.model.layers[1].mlp = _TokenShift(model.model.layers[1].mlp)  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match=r"or it keeps a state outside of attention"):
        check_parity(model, "mine")


def test_weights_that_are_not_numbers_are_refused() -> None:
    model = build_family("llama", ATTENTION_NAME)
    with torch.no_grad():
        model.lm_head.weight[3, 5] = torch.nan  # type: ignore[union-attr, operator, index]
    with pytest.raises(ValueError, match=r"gives logits that are not numbers .* its weights are damaged"):
        check_parity(model, "mine")


def test_a_model_that_cannot_be_called_packed_is_refused_with_what_it_said() -> None:
    model = build_family("llama", ATTENTION_NAME)
    forward = model.forward

    def without_positions(input_ids: torch.Tensor, use_cache: bool, logits_to_keep: Any = 0) -> Any:
        return forward(input_ids=input_ids, use_cache=use_cache, logits_to_keep=logits_to_keep)

    model.forward = without_positions  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"the packed forward fails \(TypeError: .*position_ids"):
        check_parity(model, "mine")


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = build_family("gemma2", ATTENTION_NAME).train()
    check_parity(model, "mine")
    assert model.training and model.config._attn_implementation == ATTENTION_NAME
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_changes_no_bit_of_the_weights(dtype: torch.dtype) -> None:
    model = build_family("qwen3_moe", ATTENTION_NAME).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_parity(model, "mine")
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name


def test_the_bound_lies_far_between_rounding_and_another_position() -> None:
    model = build_family("llama", "eager")
    ids_BL = torch.arange(4, 16).view(2, 6)
    with torch.no_grad():
        own, shifted = (model(input_ids=ids_BL, position_ids=torch.arange(6)[None] * step).logits for step in (1, 3))
        wide = model.double()(input_ids=ids_BL).logits
    off = [max(difference(*pair) for pair in zip(other, own, strict=True)) for other in (wide, shifted)]
    assert 100 * off[0] < bound(own) < off[1] / 100
