"""Which number format a device computes in: the one place that turns `auto` into a dtype.

bfloat16 only where the processor has instructions for it. torch runs it everywhere, but emulated it is up to 200 times
slower than float32.
"""

from __future__ import annotations

import platform
from typing import Literal

import torch

Precision = Literal["auto", "float32", "bfloat16"]


def resolve_precision(setting: Precision, device: torch.device | str) -> torch.dtype:
    """The dtype of `train.precision` or `engine.dtype` on `device`."""
    if setting == "auto":
        return torch.bfloat16 if has_native_bfloat16(torch.device(device)) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[setting]


def has_native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    if platform.machine().lower() in ("aarch64", "arm64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # On x86 the mkldnn question is also answered yes by AVX-512 without bf16 instructions, which converts in software.
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
