"""Models that are fused, and a step over them: prefill, then decode and verify."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES as TINY
from tiny_models import VOCABULARY, build_family, family_config, packed_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.models import fused
from slipstream.models.attention import ATTENTION_NAME, attending
from slipstream.models.cached import CachedRows, KVPages, PackedRows
from slipstream.models.recognise import fuse

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


TOLERANCE = 2e-6
"""Of planted errors, which must be 100 times as large."""
ROUNDINGS = 4.0
"""Between two computations in float32 that each err by one `rounding`, by .4 to 1.6 of it in all families here."""
NUM_PAGES, PAGE_TOKENS, WIDTH = 12, 16, 4
LENGTHS = (40, 21, 33)
SEQUENCES = [torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
PREFILL = [(0, 0, 35), (1, 0, 16), (2, 0, 27)]
MIXED = [(1, 16, 5), (0, 35, 1), (2, 27, 6)]  # verify, decode, verify
FEW = [(1, 16, 2), (0, 35, 1)]
"""For Triton's interpreter, which takes milliseconds a program."""
PADDING = 2


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
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def rounding(model: PreTrainedModel) -> float:
    """Error of the model's logits in float32, on this processor: against float64, with Hugging Face's own attention."""
    wide = copy.deepcopy(model).double()
    wide.set_attn_implementation("eager")
    exact = [wide(input_ids=ids.unsqueeze(0), use_cache=False).logits[0] for ids in SEQUENCES]
    cut = [exact[which][start : start + length] for cuts in (PREFILL, MIXED) for which, start, length in cuts]
    return relative_error(logits(model), torch.cat(cut))


def error_with_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> float:
    pages, model = KVPages(NUM_PAGES, PAGE_TOKENS), build(name).to(DEVICE)  # type: ignore[arg-type]
    forward(model, pages, PREFILL)
    wanted = forward(model, pages, FEW)
    fuse(model)
    monkeypatch.setattr(fused, "KERNEL_DEVICES", {DEVICE})
    return relative_error(forward(model, pages, FEW), wanted)
