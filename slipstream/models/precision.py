"""How a device computes: the one place that turns `auto` into a dtype, and that makes matrix products batch-invariant.

bfloat16 only where the processor has instructions for it. torch runs it everywhere, but emulated it is up to 200 times
slower than float32. And on a CPU only for models wide enough: between products values are converted to and fro.
"""

from __future__ import annotations

import os
import platform
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

HEIGHTS = (1, 2, 17, 64, 200, 512, 2048)
"""Rows of a product that are compared with each other."""

WIDE = 256
"""Hidden states from which bfloat16 gains on a CPU. On a Xeon with AMX it decodes .8 to 1.1 times as fast as float32 at
192, .6 to 1.1 at 256, 1.0 to 1.3 at 320 and 1.3 to 1.7 at 576, and trains 1.0 times at 128, 1.9 at 256
(benchmarks/precision.py)."""

Precision = Literal["auto", "float32", "bfloat16"]


def precision_of(setting: Precision, model: PreTrainedModel) -> torch.dtype:
    """What `train.precision` or `engine.dtype` means for this model, where it lies."""
    return resolve_precision(setting, model.device, model.config.get_text_config().hidden_size)


def resolve_precision(setting: Precision, device: torch.device | str, width: int) -> torch.dtype:
    """The same before there is a model: `width` will be that of its hidden states."""
    if setting != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[setting]
    device = torch.device(device)
    gains = device.type != "cpu" or width >= WIDE
    return torch.bfloat16 if gains and has_native_bfloat16(device) else torch.float32


def has_native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    if platform.machine().lower() in ("aarch64", "arm64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # On x86 the mkldnn question is also answered yes by AVX-512 without bf16 instructions, which converts in software.
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def use_batch_invariant_products() -> None:
    """Make cuBLAS give a row the same bits whatever the number of rows: no split reductions, which need a workspace.

    Not cuBLASLt, whose bits are the same: it looks for its kernel in every call, which is four times the host's work
    and counts wherever there is no CUDA graph yet (docs/log.md). Must come before the first product, with which torch
    may have settled on a size.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "0"  # products with a bias are its
    if torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublaslt:
        torch.backends.cuda.preferred_blas_library("cublas")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@torch.no_grad()
def check_batch_invariance(model: nn.Module) -> None:
    """Ask the device whether a row has the same bits at every height, for each shape of weight in the model."""
    shapes = {
        (module.weight.shape, module.weight.dtype, module.bias is not None): module
        for module in model.modules()
        if isinstance(module, nn.Linear)
    }
    for (shape, dtype, _), module in shapes.items():
        draw = torch.Generator(module.weight.device).manual_seed(0)
        x = torch.randn(HEIGHTS[-1], shape[1], generator=draw, device=module.weight.device).to(dtype)
        whole = linear(x, module.weight, module.bias)
        for height in HEIGHTS[:-1]:
            if not torch.equal(linear(x[:height], module.weight, module.bias), whole[:height]):
                raise ValueError(
                    f"engine.exact cannot hold here: products with a weight of {tuple(shape)} in {dtype} have other "
                    f"bits for {height} rows than for {HEIGHTS[-1]} (cuBLAS was set up before, or this GPU's kernels "
                    "split the reduction); write engine.exact: false to go on without it"
                )
