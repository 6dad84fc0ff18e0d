"""What a run and the process that trains say to each other. Pure: records that travel between processes as they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.types import TrainSample, WeightVersion


@dataclass(frozen=True, slots=True)
class FeedSamples:
    """Whole groups of this step: add their gradient."""

    step: int
    samples: tuple[TrainSample, ...]


@dataclass(frozen=True, slots=True)
class FinishStep:
    """All of the step is there: update the weights; if nothing was fed, count the step."""

    step: int
    grading_s: float = 0.0
    """For so long all rollouts had ended and grades were missing, until a moment ago."""


@dataclass(frozen=True, slots=True)
class PublishWeights:
    number: int


@dataclass(frozen=True, slots=True)
class SaveState:
    """A checkpoint of the weights as they are, with this beside them."""

    step: int
    run_state: dict[str, Any]
    files: dict[str, bytes]
    """By name; only the first rank, which writes them, is given any."""


ToTrainer = FeedSamples | FinishStep | PublishWeights | SaveState


@dataclass(frozen=True, slots=True)
class TrainerReady:
    """It has loaded the checkpoint it was told, and met the other ranks."""


@dataclass(frozen=True, slots=True)
class Working:
    """It does: said between two micro-batches, two weights that are published, and when there is nothing to do."""

    step: int | None
    """That groups have been fed to, if any have."""
    done_tokens: int = 0
    """Of responses that have given their gradient."""
    fed_tokens: int = 0
    """Of responses that it was given so far."""
    busy_s: float = 0.0
    """Spent on the step since it last said so."""


@dataclass(frozen=True, slots=True)
class StepFinished:
    step: int
    metrics: dict[str, float]
    busy_s: float
    """Spent on this step's groups and on the update."""
    untold_s: float
    """Of these, what it had not told of yet."""
    reward_wait_s: float = 0.0
    """With nothing to do while only grades were missing."""


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    version: WeightVersion
    seconds: float


@dataclass(frozen=True, slots=True)
class StateSaved:
    step: int
    path: Path
    seconds: float
    problem: str = ""
    """With something that the run can do without."""


@dataclass(frozen=True, slots=True)
class TookPart:
    """In what the first rank tells of."""

    account: str
    """Of the ledger."""
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainerBroke:
    """It ends, by an error of its own: starting it again would end the same."""

    kind: str
    reason: str


FromTrainer = TrainerReady | Working | StepFinished | WeightsPublished | StateSaved | TookPart | TrainerBroke
