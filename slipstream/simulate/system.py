"""What is simulated: a system, what its steps cost, and what happens to its workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slipstream.schedule.rules import Rules
from slipstream.schedule.speeds import SpeedCurve
from slipstream.simulate.pace import Pace


@dataclass(frozen=True, slots=True)
class System:
    """Who does what when."""

    rules: Rules = field(default_factory=Rules)
    colocated: bool = False
    """Generation and training take turns on all GPUs; else each has its own."""
    streams: bool = False
    """Groups are trained as they are done; else a step at once."""
    in_order: bool = False
    """Of these, in the order in which they were asked for (train.deterministic)."""
    drafts: tuple[tuple[int, float], ...] = ()
    """(sequences, times the tokens a second with drafts, all told); none if empty."""
    pace: Pace = field(default_factory=Pace)
    """How much better or worse drafts are early and late in a rollout."""
    foresees: bool = False
    """Lengths are known, not forecast: nobody has that, and it shows what forecasts could be worth."""

    def __post_init__(self) -> None:
        if self.colocated and (self.streams or self.rules.staleness):
            raise ValueError("what shares its GPUs can neither stream nor overlap: leave out streams and staleness")


@dataclass(frozen=True, slots=True)
class Costs:
    curve: SpeedCurve
    """Of one worker without drafts."""
    slots: int
    gpus_a_worker: int
    train_gpu_s: float
    """GPU-seconds of training a token."""
    weights_s: float = 0.0
    """From the end of training until all workers have the weights."""
    prefill_share: float = 0.005
    """Of the time of decoding a token: that of computing its keys again when a rollout goes on elsewhere."""
    update_s: float = 0.0
    """Of training, beside its tokens: the update of the weights, once a step."""
    micro_batch_tokens: float = 0.0
    """Where groups are trained as they come: so many tokens are computed together, once they are there."""
    grading_s: float = 0.0
    """From the end of a group to where the trainer has it."""
    hand_back_s: float = 0.0
    """Between taking a rollout from a worker and telling the fleet, which may hear other things meanwhile."""


@dataclass(frozen=True, slots=True)
class Change:
    """A worker dies or is given back, or another one comes."""

    at_s: float
    kind: Literal["join", "leave"]
    worker: str
