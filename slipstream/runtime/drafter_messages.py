"""What `drafter_session.py` and rollout workers say to each other about the drafter, over the links they have anyway.
Pure; small, since weights lie in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TrainDrafter:
    """A round, from this version, before anything else; what comes of it goes to `share_folder`."""

    round: int
    version: int
    num_updates: int
    share_folder: Path


@dataclass(frozen=True, slots=True)
class AverageShares:
    """Publish the average of (folder, updates) as the newest version."""

    round: int
    shares: tuple[tuple[Path, int], ...]


@dataclass(frozen=True, slots=True)
class StopDrafter:
    """Whatever it does about the drafter, at once."""


@dataclass(frozen=True, slots=True)
class TakeDrafter:
    """There is a newer version to draft with."""

    version: int


ToMember = TrainDrafter | AverageShares | StopDrafter | TakeDrafter


@dataclass(frozen=True, slots=True)
class DrafterTrained:
    """Its share is in the folder it was told, if it made an update."""

    round: int
    num_updates: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of these updates, on the mean."""


@dataclass(frozen=True, slots=True)
class SharesAveraged:
    round: int
    version: int
    num_updates: int
    """That it took in all."""


@dataclass(frozen=True, slots=True)
class DrafterStopped:
    """As it was told."""

    num_updates: int
    """That it had made in the round, which are given up; 0 if it was in none."""


@dataclass(frozen=True, slots=True)
class DrafterTaken:
    version: int


@dataclass(frozen=True, slots=True)
class DrafterFailed:
    """Training, averaging or taking in a version; it samples as before."""

    round: int | None
    reason: str


FromMember = DrafterTrained | SharesAveraged | DrafterStopped | DrafterTaken | DrafterFailed
