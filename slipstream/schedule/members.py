"""What a fleet knows of a rollout and of a worker. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from slipstream.schedule.dispatch import WorkerSpec


@dataclass(slots=True, eq=False)
class FleetRollout:
    uid: str
    prompt: str
    group: str
    """Its prompt; in a step that it was moved into, where the prompt may have come up again, a name of its own."""
    step: int
    forecast: float
    order: int
    num_tokens: int = 0
    worker: FleetWorker | None = None
    bound_for: FleetWorker | None = None
    """Where it goes on once it is handed back."""
    load: float = 0.0
    """What it adds to its worker's."""
    tell_at: int = 0
    """Tokens at which it was to be told of last."""
    num_moves: int = 0
    has_outgrown: bool = False
    """It is much longer than was forecast."""
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class FleetWorker:
    spec: WorkerSpec
    running: dict[str, FleetRollout] = field(default_factory=dict)
    queue: deque[FleetRollout] = field(default_factory=deque)
    """What a plan gave it."""
    num_expected: int = 0
    """Rollouts on their way to it, for which slots are kept."""
    load: float = 0.0
    """About how long what it has would take it from the start: what balances workers that get new work."""
    stamp: int = 0
    """Of its newest entry in the heaps."""
    is_here: bool = True
    is_lent: bool = False

    @property
    def num_free(self) -> int:
        return self.spec.slots - len(self.running) - self.num_expected

    @property
    def has_nothing(self) -> bool:
        return not (self.running or self.queue or self.num_expected)
