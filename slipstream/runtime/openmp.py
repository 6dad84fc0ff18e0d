"""How long OpenMP's threads spin at a barrier before they sleep, in every process of a run.

GNU OpenMP spins for milliseconds by default. That is fast on a quiet machine; beside another busy process the spinning
thread keeps the one it waits for off its core, and a step takes several times as long (benchmarks/busy_machine.py).
The library reads its environment once, when torch or numba loads it; processes that a run starts inherit it. Imports
neither.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = 3_000
"""Turns of the spinning loop: longer than the gap between two operations of a forward pass, and far shorter than a time
slice of the scheduler."""
SETTINGS_OF_USERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets GNU OpenMP's spin count unless the user chose one. Call before torch is imported."""
    if not any(name in environment for name in SETTINGS_OF_USERS):
        environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
