"""What a run tells whoever watches it, once, from the metrics of its steps: pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from slipstream.observe.metrics import draft_share_name
from slipstream.types import MODEL_ORIGIN

STEPS = 5
MUCH = 0.003
"""Of mismatch_kl, nats a token. In the quickstart rollouts a step old taught less than fresh ones at 0.005, and as much
at half the learning rate, where it was 0.001 (docs/log.md)."""
LESSONS = 20
"""Steps, by which a drafter should have begun to pay."""
DEAR = 0.03
"""Of the time of these steps, for teaching it."""
LITTLE = 0.02
"""Of their tokens, from it."""


class Drift:
    """Whether rollouts that are a step old are too old to learn from."""

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


class Lessons:
    """Whether a drafter that learns takes time and gives next to nothing."""

    def __init__(self, source: str) -> None:
        """`source`: draft.source."""
        self._instead = {"both": "history", "drafter": "off"}.get(source)
        self._recent = deque[tuple[float, float, float, float]](maxlen=LESSONS)
        """Of each step: seconds of teaching, and of all else; tokens of the drafter, and all."""

    def after_step(self, row: Mapping[str, float]) -> str | None:
        if self._instead is None or "timing_s/update_drafter" not in row:
            return None
        teaching_s, num_tokens = row["timing_s/update_drafter"], row["rollout/tokens"]
        num_drafted = row.get(draft_share_name(MODEL_ORIGIN), 0.0) * num_tokens
        other_s = row["timing_s/gen"] + row.get("timing_s/update_actor", 0.0)
        self._recent.append((teaching_s, other_s, num_drafted, num_tokens))
        teaching_s, other_s, num_drafted, num_tokens = (sum(of_steps) for of_steps in zip(*self._recent, strict=True))
        share, given = teaching_s / (teaching_s + other_s), num_drafted / num_tokens
        if len(self._recent) < LESSONS or share < DEAR or given > LITTLE:
            return None
        instead, self._instead = self._instead, None
        return (
            f"in the last {LESSONS} steps teaching the drafter took {share:.0%} of sampling and training, and "
            f"{given:.1%} of the tokens were its drafts: draft.source={instead} does without it, and with a lower "
            "drafter.updates it learns less at a time; it may still learn"
        )
