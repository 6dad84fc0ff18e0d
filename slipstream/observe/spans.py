"""A rollout's text in pieces, each as it was sampled or drafted.

Tokens may end in the middle of a character, so a piece ends where the text of all tokens so far agrees with the whole.
The tokenizer is the one that the run's newest checkpoint holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

Decode = Callable[[Sequence[int]], str]
STEP_FOLDER = re.compile(r"step_\d+")
MOST_TOKENS = 1000
"""Of a rollout that are shown: for every piece the text so far is decoded anew."""


def find_decoder(run_dir: Path) -> Decode | None:
    """None if no checkpoint has a tokenizer that can be read (a run may be writing or removing one)."""
    found = [
        path for path in run_dir.glob("checkpoints/step_*/tokenizer.json") if STEP_FOLDER.fullmatch(path.parent.name)
    ]
    if not found:
        return None
    from tokenizers import Tokenizer  # only a report needs it

    newest = max(found, key=lambda path: int(path.parent.name.removeprefix("step_")))
    try:
        tokenizer = Tokenizer.from_file(str(newest))
    except Exception:  # the library raises nothing more special; a report must not end a run
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def spans(token_ids: Sequence[int], origins: Sequence[int], decode: Decode) -> list[tuple[str, int]]:
    """(text, origin) of the first MOST_TOKENS tokens, neighbours of one origin together; the texts make the whole."""
    token_ids, origins = token_ids[:MOST_TOKENS], origins[:MOST_TOKENS]
    whole = decode(token_ids)
    pieces: list[tuple[str, int]] = []
    done, num_tokens = 0, 0
    for origin, tokens in groupby(origins):
        num_tokens += len(list(tokens))
        end = len(whole)
        if num_tokens < len(token_ids):
            end = _agreement(whole, decode(token_ids[:num_tokens]), done)
        if end > done:
            pieces.append((whole[done:end], origin))
            done = end
    return pieces


def _agreement(whole: str, beginning: str, start: int) -> int:
    """Characters up to the first from `start` on that differs."""
    end = start
    while end < min(len(whole), len(beginning)) and whole[end] == beginning[end]:
        end += 1
    return end
