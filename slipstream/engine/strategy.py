"""How much the engine drafts, and who decides it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Strategy:
    drafts_each: float
    """Drafts that a step may verify, a sequence on average; 0: none are made."""
    min_match: int = 2
    """Tokens that must match before what followed them is a draft."""

    def __str__(self) -> str:
        return f"{self.drafts_each:g} drafts, match {self.min_match}" if self.drafts_each else "off"


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
