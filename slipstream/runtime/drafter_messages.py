"""What `drafter_session.py` and worker processes say to each other about the drafter. Pure; small, so that nobody waits
for a pipe: weights lie in files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Train:
    """A round, from this version; what comes of it goes to `share_folder`."""

    round: int
    version: int
    num_updates: int
    share_folder: Path


@dataclass(frozen=True, slots=True)
class Average:
    """Publish the average of (folder, updates) as the newest version."""

    round: int
    shares: tuple[tuple[Path, int], ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Whatever it does about the drafter, at once."""


@dataclass(frozen=True, slots=True)
class Take:
    """There is a newer version to draft with."""

    version: int


@dataclass(frozen=True, slots=True)
class Work:
    """Something to sample."""

    work: Any


ToWorker = Train | Average | Stop | Take | Work


@dataclass(frozen=True, slots=True)
class Here:
    """It has started, and drafts with this version."""

    version: int
    num_lessons: int
    """Texts that it can learn from."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Its share is in the folder it was told, if it made an update."""

    round: int
    num_updates: int


@dataclass(frozen=True, slots=True)
class Averaged:
    round: int
    version: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """As it was told."""

    num_updates: int
    """That it had made in the round, which are given up; 0 if it was in none."""


@dataclass(frozen=True, slots=True)
class Taken:
    version: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Training, averaging or taking in a version; it samples as before."""

    round: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """Something was sampled."""

    result: Any


FromWorker = Here | Trained | Averaged | Stopped | Taken | Failed | Result
