"""The CPU's kernels that add up have the same bits in the process that compiled them as in those that load them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

WIDTHS = (31, 100, 128)
"""Also some of which the last numbers are computed one by one."""


def tell() -> None:
    """What the kernels give, as bytes in hexadecimal."""
    from slipstream.models import cpu_layers
    from slipstream.models.cpu_attention import attend_tokens
    from slipstream.models.fused import Norm

    cpu_layers.SERIAL_NUMBERS = 0
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    for size in WIDTHS:
        x_TN, delta_TN, weight_N = torch.randn(40, size), torch.randn(40, size), torch.randn(size)
        for out_TN in cpu_layers.add_norm(x_TN, delta_TN, Norm(weight_N, 1e-6), 1.0, Norm(weight_N, 1e-6)):
            assert out_TN is not None
            print("norm", size, out_TN.numpy().tobytes().hex())
        query_THD, *cache = (
            draw.standard_normal(shape, dtype=np.float32) for shape in ((40, 4, size), *[(6, 2, 64, size)] * 2)
        )
        out_THD, places = np.zeros_like(query_THD), np.arange(40)
        table_SW = np.arange(6, dtype=np.int32).reshape(2, 3)
        none, no_path, no_sinks = np.zeros(0, np.int64), np.zeros((0, 0), np.int64), np.zeros(0, np.float32)
        where = table_SW, places % 2, places * 4, none, no_path
        attend_tokens(query_THD, *cache, *where, np.float32(0.2), 0, np.float32(0), no_sinks, out_THD)
        print("attention", size, out_THD.tobytes().hex())


def test_compiled_and_loaded_kernels_have_the_same_bits(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    compiled, loaded = (
        subprocess.run([sys.executable, __file__], env=environment, check=True, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    assert len(compiled.stdout.splitlines()) == 3 * len(WIDTHS) and compiled.stdout == loaded.stdout


if __name__ == "__main__":
    tell()
