"""What the engine asks of a drafter: guesses of the tokens that come next, which it verifies and never trusts.

A drafter lives in the step: `draft` and `learn` are tensor code without a host read, held by the step's CUDA graph.
Whatever it guesses, the tokens are the same; only their number a step changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from slipstream.engine.packing import DraftSizes
from slipstream.engine.sequences import Seat
from slipstream.engine.state import StepState
from slipstream.engine.strategy import Feeding, Strategy
from slipstream.engine.trees import KeptPath
from slipstream.models.cached import KVPages, PackedRows
from slipstream.types import Request


class Drafter(Protocol):
    max_drafts: int
    """Of one sequence in one step."""

    @property
    def has_model(self) -> bool:
        """Whether there is one that has to be told what is said."""

    num_unserved: int
    """Groups so far that it had no room for: they are sampled without drafts."""
    spent_s: float
    """Seconds of drafting and learning so far, where a host's clock can tell: 0 on a GPU, which has them in a graph."""

    def attach(self, target: PreTrainedModel, pages: KVPages, max_length: int) -> None:
        """Once, to the engine that it drafts for, whose sequences have so many tokens at most."""

    def draft(self, state: StepState, room: Tensor, sizes: DraftSizes) -> None:
        """Write `drafted` for every slot, and for slots that decode `drafts` and their `sources` (from 1 on); and their
        `parents` in a step of trees.

        At most `room` drafts of all slots together, a number on the device, and none beyond what is `allotted`.
        """

    def learn(self, state: StepState, rows: PackedRows, kept: KeptPath | None, feeding: Feeding) -> None:
        """Look at the report of the step that has just been committed, which ran these rows; and in a step of trees
        kept these of them. `feeding`: what a model that drafts gets of it."""

    def tune(self, strategy: Strategy) -> None:
        """On the host, before the step is launched."""

    def expect(self, requests: Sequence[Request]) -> None:
        """On the host: these were submitted, one group."""

    def follow(self, seats: Sequence[Seat]) -> None:
        """On the host, before the step is launched: who takes a slot."""

    def forget(self, uid: str) -> None:
        """On the host: this sequence has ended or left."""
