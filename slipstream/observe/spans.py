"""A rollout's text in pieces, each as it was sampled or drafted.

Tokens may end in the middle of a character, so a piece ends where the text of all tokens so far agrees with the whole.
The tokenizer is the one that the run's newest checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

Decode = Callable[[Sequence[int]], str]


def find_decoder(run_dir: Path) -> Decode | None:
    """None if the run has no checkpoint with a tokenizer yet."""
    found = sorted(run_dir.glob("checkpoints/step_*/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        return None
    from tokenizers import Tokenizer  # only a report needs it

    tokenizer = Tokenizer.from_file(str(found[-1]))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def spans(token_ids: Sequence[int], origins: Sequence[int], decode: Decode) -> list[tuple[str, int]]:
    """(text, origin), neighbours of one origin together; the texts make the whole."""
    whole = decode(token_ids)
    pieces: list[tuple[str, int]] = []
    done, num_tokens = 0, 0
    for origin, tokens in groupby(origins):
        num_tokens += len(list(tokens))
        end = len(whole) if num_tokens == len(token_ids) else _agreement(whole, decode(token_ids[:num_tokens]))
        if end > done:
            pieces.append((whole[done:end], origin))
            done = end
    return pieces


def _agreement(whole: str, beginning: str) -> int:
    """Characters up to the first that differs."""
    differing = (place for place, (one, other) in enumerate(zip(whole, beginning, strict=False)) if one != other)
    return next(differing, min(len(whole), len(beginning)))
