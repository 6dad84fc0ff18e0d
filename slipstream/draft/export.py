"""A drafter as other engines load it: a folder with config.json and model.safetensors.

Names and shapes are those of `eagle.py`, so the work is in the config. Read in the sources of vLLM 0.32 and SGLang:
- no `d2t` or `t2d`: the draft vocabulary is the target's, and vLLM has no place for a mapping then;
- eagle3 has the target's head written beside it: earlier vLLM and SGLang do not share it; eagle has not: vLLM's class
  has no place for it. The embedding is the target's in all of them;
- layers whose hidden states are taken are left out where they are what both engines take unasked: vLLM counts them from
  1 (2 is after the second layer), SGLang from 0. Targets of fewer than seven layers have others, as vLLM counts them;
- SGLang's class for eagle has a bias of `fc` that nothing here sets: eagle is for vLLM.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from slipstream.draft.eagle import draft_config, feature_layers
from slipstream.files import open_to_readers

FORMATS = {"eagle3": "eagle3", "eagle": "eagle1"}
"""As other engines call them: the kind of drafter that each holds."""
ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "eagle": "EagleLlamaForCausalLM"}
DEFAULT_LAYERS_FROM = 7
"""Layers of a target from which on other engines take features where we do."""


def export_drafter(
    folder: Path,
    *,
    file_format: str,
    weights: Mapping[str, Tensor],
    target: PretrainedConfig,
    head_VD: Tensor,
    dtype: torch.dtype,
) -> None:
    """Write the folder, whole or not at all. ValueError if it is there and holds something."""
    config = exported_config(file_format, target, dtype)
    refuse_filled(folder)
    tensors = dict(weights)
    if file_format == "eagle3":
        tensors["lm_head.weight"] = head_VD
    tensors = {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in tensors.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        partial.mkdir()
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        open_to_readers(partial / "model.safetensors")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def exported_config(file_format: str, target: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json. ValueError if no engine could load it."""
    text, layer = target.get_text_config(), draft_config(target)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[file_format]],
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "hidden_act": layer.hidden_act,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope_parameters["rope_theta"],  # type: ignore[index]
        "rope_scaling": None,
        "max_position_embeddings": layer.max_position_embeddings,
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": layer.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    scale = getattr(text, "logit_scale", None) or 1.0 / (getattr(text, "logits_scaling", None) or 1.0)
    if scale != 1.0:  # of the logits, after the head: Cohere, Granite
        config["logit_scale"] = scale
    if file_format == "eagle3" and not works_in_sglang(file_format, target):
        layers = feature_layers(text.num_hidden_layers)
        if len(set(layers)) < len(layers):
            raise ValueError(f"a target of {text.num_hidden_layers} layer(s) has too few for vLLM's eagle3")
        config["eagle_aux_hidden_state_layer_ids"] = list(layers)
    return config


def works_in_sglang(file_format: str, target: PretrainedConfig) -> bool:
    return file_format == "eagle3" and target.get_text_config().num_hidden_layers >= DEFAULT_LAYERS_FROM


def refuse_filled(folder: Path, otherwise: str = "") -> None:
    """`otherwise`: what else can be done about it."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; give another one{otherwise}")
