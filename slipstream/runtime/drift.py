"""Whether rollouts that are a step old are too old to learn from: pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

STEPS = 5
MUCH = 0.003
"""Of mismatch_kl, nats a token. In the quickstart rollouts a step old taught less than fresh ones at 0.005, and as much
at half the learning rate, where it was 0.001 (docs/log.md)."""


class Drift:
    """Told of each step, it says once what to do about it."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=STEPS)
        self._is_told = False

    def after_step(self, row: Mapping[str, float]) -> str | None:
        if self._is_told or row.get("rollout/staleness", 0.0) <= 0 or "mismatch_kl" not in row:
            return None
        self._recent.append(row["mismatch_kl"])
        typical = statistics.median(self._recent)
        if len(self._recent) < STEPS or typical < MUCH:
            return None
        self._is_told = True
        return (
            f"rollouts are a step old, and a step changes the policy much (mismatch_kl {typical:.3f} a token): a lower "
            "train.lr may learn faster, or mode=sync"
        )
