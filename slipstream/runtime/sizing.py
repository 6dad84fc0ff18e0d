"""How many rollout workers a run has: as somebody asked with `slipstream scale`, or as it finds by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from slipstream.config import Config
from slipstream.runtime.control import workers_asked_for
from slipstream.runtime.pool import Pool
from slipstream.schedule.allocation import Allocator, StepSeen, times_as_long
from slipstream.schedule.events import Item, WorkersWanted
from slipstream.schedule.rules import MODES
from slipstream.schedule.speeds import Paces, curve_of_paces

LOOK_S = 1.0
"""Between two looks at what the run was asked for."""


class Sizing:
    def __init__(self, config: Config, pool: Pool, note: Callable[[Item], None], say: Callable[[str], None]) -> None:
        """`note`: into the event log."""
        self._config, self._pool, self._note, self._say = config, pool, note, say
        scale = config.rollout.scale
        self._allocator = Allocator(scale.min, scale.max) if scale is not None else None
        self._wish: int | None = None
        """How many were asked for last."""
        self._looked_s = 0.0

    def look(self) -> None:
        """Whether somebody has asked for another number."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        wanted = workers_asked_for(self._config.run.dir)
        if wanted is not None and wanted != self._wish:
            self._wish = wanted
            self._allocator = None  # who asks knows better, from then on
            self._resize(wanted, "as was asked for")

    def after_step(self, row: Mapping[str, float], busy_s: float, paces: Paces) -> None:
        """A worker more or one fewer, if the run may choose. `busy_s`: of all workers, sampling."""
        if self._allocator is None or "timing_s/step" not in row or not paces or not self._pool.num_joined:
            return
        num_workers = self._pool.num_joined
        seen = StepSeen(
            step_s=row["timing_s/step"] - row.get("timing_s/eval", 0.0),
            num_tokens=row["rollout/tokens"],
            busy_s=busy_s,
            train_s=row.get("timing_s/update_actor", 0.0),
            num_workers=num_workers,
            num_wanted=self._pool.num_workers,
        )
        curve, batch = curve_of_paces(paces), sum(one[1] for one in paces) / sum(one[0] for one in paces)
        ahead = 1 + MODES[self._config.mode].staleness
        sizes = {"slots": self._config.engine.max_sequences, "num_rollouts": ahead * self._config.samples_per_step}
        wish = self._allocator.observe(seen, lambda other: times_as_long(curve, batch, num_workers, other, **sizes))
        if wish is not None:
            self._resize(wish.num_workers, wish.reason)

    def _resize(self, num_workers: int, reason: str) -> None:
        self._say(f"rollout workers: {num_workers} instead of {self._pool.num_workers}, {reason}")
        self._note(WorkersWanted(num_workers, reason))
        self._pool.resize(num_workers)
