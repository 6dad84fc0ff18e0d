"""How much the engine drafts, who decides it, and what came of it. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Strategy:
    drafts_each: float
    """Drafts that a step may verify, a sequence on average; 0: none are made."""
    min_match: int = 2
    """Tokens that must match before what followed them is a draft."""

    def __str__(self) -> str:
        """Short enough for a table: 4 drafts each where 2 or more tokens match."""
        return f"{self.drafts_each:g} drafts, {self.min_match}+" if self.drafts_each else "off"


OFF = Strategy(0.0)


class DraftPolicy(Protocol):
    def choose(self, batch: int) -> Strategy:
        """For a step of so many sequences."""

    def observe(self, batch: int, strategy: Strategy, num_tokens: int, seconds: float) -> None:
        """A step of `batch` sequences and nothing else gave `num_tokens` in `seconds`."""


class Always:
    """The policy of one strategy, for measurements and tests."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def choose(self, batch: int) -> Strategy:
        return self._strategy

    def observe(self, batch: int, strategy: Strategy, num_tokens: int, seconds: float) -> None:
        pass


@dataclass(slots=True)
class DraftCounts:
    """What came of drafts in some steps."""

    num_rows: int = 0
    """Sequences that sampled, summed over the steps."""
    num_tokens: int = 0
    """What they sampled."""
    drafted_at: Counter[int] = field(default_factory=Counter)
    """Drafts that were verified, by their place after the last known token, from 0 on."""
    accepted_at: Counter[int] = field(default_factory=Counter)
    accepted_from: Counter[int] = field(default_factory=Counter)
    """By source."""

    @property
    def num_drafted(self) -> int:
        return self.drafted_at.total()

    @property
    def num_accepted(self) -> int:
        return self.accepted_at.total()

    def add(self, num_drafted: int, origins: list[int]) -> None:
        """One sequence's step: how many drafts it had, and where its tokens came from (0: sampled)."""
        self.num_rows += 1
        self.num_tokens += len(origins)
        if num_drafted:
            self.drafted_at.update(range(num_drafted))
            for place, origin in enumerate(origins):
                if origin:
                    self.accepted_at[place] += 1
                    self.accepted_from[origin] += 1
