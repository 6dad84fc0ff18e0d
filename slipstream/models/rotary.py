"""Cosines and sines of the rotary embedding: in the engine looked up by position, not computed in every step.

What they are is Hugging Face's to say, whatever the scaling: a table is what its module gives for all positions at
once. Frequencies that follow the longest sequence are refused when a model is loaded.

Axes: T packed tokens, P positions, R rotated part of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.attention import current_attention
from slipstream.models.cached import CachedRows


@dataclass(frozen=True, slots=True)
class Rotary:
    """Of each token, or of each position."""

    cosines: Tensor
    """[T, R]; or [P, R]"""
    sines: Tensor
    position_T: Tensor | None = None
    """Of each token, if the others are of positions."""

    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """[T, R] both."""
        if self.position_T is None:
            return self.cosines, self.sines
        return self.cosines[self.position_T], self.sines[self.position_T]


class RotaryTables:
    """In place of a module's forward. Without positions to know, or for anything but rows of pages, the same."""

    def __init__(self, module: nn.Module) -> None:
        self._compute = module.forward
        self._num_positions = 0
        self._tables: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self._outgrown: list[dict[tuple[Any, ...], tuple[Tensor, Tensor]]] = []
        """Another engine's CUDA graphs may read them."""

    def know(self, num_positions: int) -> None:
        """All positions below this, from now on. A table is made in the first forward that asks for it, which no CUDA
        graph is captured of, or here."""
        if num_positions > self._num_positions:
            self._outgrown.append(self._tables)
            self._num_positions = num_positions
            self._tables = {key: self._table(*key) for key in self._tables}

    def __call__(self, hidden_states: Tensor, position_ids: Tensor, *which: Any) -> Rotary | tuple[Tensor, Tensor]:
        """`which`: of several in one model."""
        if not self._num_positions or not isinstance(current_attention(), CachedRows):
            given: tuple[Tensor, Tensor] = self._compute(hidden_states, position_ids, *which)
            return given
        key = hidden_states.dtype, hidden_states.device, *which
        if key not in self._tables:
            self._tables[key] = self._table(*key)
        found = Rotary(*self._tables[key], position_ids[0])
        # Only a GPU's kernel looks up: elsewhere every layer would.
        return found if hidden_states.is_cuda else Rotary(*found.of_tokens())

    def _table(self, dtype: torch.dtype, device: torch.device, *which: Any) -> tuple[Tensor, Tensor]:
        positions = torch.arange(self._num_positions, device=device)
        like = torch.empty(1, 1, 1, dtype=dtype, device=device)  # the module looks at nothing else of hidden states
        cosines, sines = self._compute(like, positions.unsqueeze(0), *which)
        return cosines[0].contiguous(), sines[0].contiguous()
