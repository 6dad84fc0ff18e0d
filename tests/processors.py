"""The tests as on other processors, as far as one with AVX-512 can stand in for them: `make test-processors`.

    python tests/processors.py avx2 tests/test_engine.py -k company

Each library that chooses its kernels by processor is told to take those of an older one. That shows what depends on
kernels: bits that differ from one number of rows to another, and tolerances that only one library's rounding meets. On
ARM nothing can be chosen, and the tests run as they are.
"""

from __future__ import annotations

import os
import platform
import sys

PROCESSORS: dict[str, dict[str, str]] = {
    # Without AVX-512: AMD before Zen 4, and most desktops and laptops.
    "avx2": {
        "OPENBLAS_CORETYPE": "Haswell",  # numpy's products
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",  # numpy's other loops
        "ATEN_CPU_CAPABILITY": "avx2",  # torch's own kernels
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",  # its products in float32
        "ONEDNN_MAX_CPU_ISA": "AVX2",  # its packed products, and those in bfloat16
        "NUMBA_CPU_NAME": "haswell",  # our own kernels
        "NUMBA_CPU_FEATURES": "",
    },
    # With what every x86-64 has.
    "sse": {
        "OPENBLAS_CORETYPE": "Prescott",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": "",
    },
}


def environment(processor: str) -> dict[str, str]:
    """Of a process that computes as on this processor."""
    chosen = PROCESSORS[processor] if platform.machine().lower() in ("x86_64", "amd64") else {}
    return {**os.environ, **chosen}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in PROCESSORS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(PROCESSORS)} [what pytest takes]")
    command = [sys.executable, "-m", "pytest", *sys.argv[2:]]
    os.execve(sys.executable, command, environment(sys.argv[1]))
