"""Where a response ends by its text: the first token that completes a stop text. Pure.

The host looks, after the device has gone on: what it sampled beyond the end is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

PART_OF_SIGN = "\ufffd"
MARGIN = 8
"""Tokens before those a stop text can span: characters may be cut between tokens."""


class StopTexts:
    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def reach(self, stops: Sequence[str]) -> int:
        """Tokens before new ones that have to be known to say whether these complete a stop text."""
        return max(map(len, stops)) + MARGIN

    def end_of(self, token_ids: Sequence[int], num_old: int, stops: Sequence[str]) -> int | None:
        """The number of tokens up to the one that completes a stop text, if that is not among the first `num_old`."""
        # A token alone may decode without the spaces at its edges, or to a part of a sign, but shows all other signs.
        last_signs = None if any(stop[-1].isspace() for stop in stops) else {stop[-1] for stop in stops}
        window = self.reach(stops)
        for end in range(num_old + 1, len(token_ids) + 1):
            piece = self._piece(token_ids[end - 1])
            if last_signs is not None and not last_signs.intersection(piece) and PART_OF_SIGN not in piece:
                continue
            tail = self._decode(token_ids[max(0, end - window) : end])
            if any(stop in tail for stop in stops):
                return end
        return None

    def _piece(self, token_id: int) -> str:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._decode([token_id])
        return self._pieces[token_id]
