"""What a model folder must hold, found out from its files alone: no weight is read, no library of models is needed.

Owns the sentences about folders that are no model folder, or not whole. Whether the weights fit the config is found out
when they are loaded (`loading.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from slipstream.files import read_json

BUILT_IN = ("tiny", "smollm2")
"""Names that are neither a folder nor a hub id."""
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
COPY_AGAIN = "copy the folder again from where it came from"


def is_folder(name: str) -> bool:
    """Whether a model of this name is on this machine, or should be: looking at it costs no download."""
    return name not in BUILT_IN and (name.startswith((".", "/", "~")) or folder_of(name) is not None)


def folder_of(name: str) -> Path | None:
    """The folder that has this name, if there is one."""
    try:
        folder = Path(name).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, of a user nobody knows, with a zero byte: no folder's name
        return None


def check_config(folder: Path, again: str) -> None:
    """ValueError names what is missing or damaged, and what to do, as in all of these. `again`: how to get the folder
    again."""
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} is no model folder: it has no {CONFIG}; give a folder written by save_pretrained, "
            "the name of a model on the hub, smollm2 or tiny"
        )
    config = _read_object(folder / CONFIG, again)
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"{folder / CONFIG} does not say which model it is (no model_type); {again}")
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"the weights in {folder} are quantized ({method}), which Slipstream can neither train nor serve; give the "
            "model that they were made from"
        )
    if (folder / GENERATION_CONFIG).is_file():
        _read_object(folder / GENERATION_CONFIG, again)


def check_weights(folder: Path, again: str) -> None:
    """The files are there, and as long as their headers say."""
    for file in _weight_files(folder, again):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            size = file.stat().st_size
            raise ValueError(f"{file} is damaged or cut off at {size} bytes ({error}); {again}") from error


def check_tokenizer_files(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{folder} has no tokenizer; save the model's own beside it: AutoTokenizer.from_pretrained(MODEL)"
            f".save_pretrained({str(folder)!r})"
        )


def _read_object(file: Path, again: str) -> dict[str, Any]:
    content = read_json(file, again)
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__} in place of settings: {again}")
    return content


def _weight_files(folder: Path, again: str) -> list[Path]:
    """The safetensors files that are loaded; none if the weights are pickled."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / WEIGHTS_INDEX).is_file():
        shards = _read_object(folder / WEIGHTS_INDEX, again).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"{folder / WEIGHTS_INDEX} is damaged (no weight_map); {again}")
        files = [folder / name for name in sorted(set(shards.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(
                f"{folder} lacks {len(missing)} of {len(files)} files of its weights ({missing[0]}); {again}"
            )
        return files
    if any((folder / name).is_file() for name in PICKLED):
        return []
    raise ValueError(f"{folder} has no weights ({WEIGHTS}); {again}")
