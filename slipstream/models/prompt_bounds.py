"""What is known of a prompt's tokens without tokenizing it, which a data set of a million rows has no time for.

Two statements, each on the safe side: an upper bound of its tokens (`PromptBound`), and two prompts may have the
same tokens (`PromptTwins`). Where they say "maybe", the caller tokenizes.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from slipstream.types import Problem

MARK = "SLIPSTREAM"
SPARE_TOKENS = 8
"""A prefix space and special tokens that a tokenizer adds by itself; the token that ends a solution."""
WIDENED = 3
"""Times the bytes that a non-ASCII text may have once it is normalized: the largest growth under NFC and NFD, which
tokenizers use. One that uses NFKC can grow further: such a prompt is measured when it is drawn."""
ODD_CHARACTERS = "ΩжéΘ漢ぁ🧿ᚠꙮ"
LONG_WORD = 500 * "a"
"""A tokenizer of whole words gives up on one that is so long."""
_LOWER = bytes(range(256)).lower()
_NO_LETTERS = bytes(byte for byte in range(256) if byte > 127 or not chr(byte).isalnum())


class PromptBound:
    """An upper bound of a prompt's tokens: each stands for at least one byte of the rendered text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added: dict[tuple[str, ...], float] = {}
        """By the roles of the messages: bytes of the template around them; infinite where it repeats a message."""

    def __call__(self, problem: Problem) -> float:
        roles, most = tuple([message["role"] for message in problem.messages]), 0.0
        if roles not in self._added:
            self._added[roles] = self._around(roles)
        for message in problem.messages:
            most += text_bound(message["content"])
        return self._added[roles] + most

    def _around(self, roles: tuple[str, ...]) -> float:
        marks = [f"{MARK}{number};" for number in range(len(roles))]
        if not self._tokenizer.chat_template:
            return len(roles) + SPARE_TOKENS  # a newline after each message
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # the template refuses these roles, as it will when the prompt itself is rendered
            return float("inf")
        assert isinstance(text, str)
        if any(text.count(mark) > 1 for mark in marks):
            return float("inf")
        return len(text.encode()) + SPARE_TOKENS


def text_bound(text: str) -> int:
    """The most tokens that a text can have."""
    return len(text) if text.isascii() else WIDENED * len(text.encode())


class PromptTwins:
    """Which problems may have the same tokens as one of `problems`.

    Compared are the letters and digits of the last user message, without case and accents: what templates strip and
    tokenizers normalize differs in other characters only. Characters, and words, that the tokenizer does not know look
    all alike to it, so a text that may have any is a twin of all.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, problems: Iterable[Problem]) -> None:
        lower, upper = string.digits + string.ascii_lowercase, string.digits + string.ascii_uppercase
        self._knows_ascii = _tells_apart(tokenizer, lower) and _tells_apart(tokenizer, upper)
        self._knows_ascii &= _knows(tokenizer, [*string.punctuation, LONG_WORD])
        self._knows_others = self._knows_ascii and _tells_apart(tokenizer, ODD_CHARACTERS)
        self._keys: set[bytes] = set()
        for problem in problems:
            text = _question(problem)
            self._keys |= {_letters(text), _folded(text), _letters(unicodedata.normalize("NFKD", text))}

    def __contains__(self, problem: Problem) -> bool:
        if not self._keys:
            return False
        text = _question(problem)
        if text.isascii():
            return not self._knows_ascii or _letters(text) in self._keys
        return not self._knows_others or _folded(text) in self._keys


def _question(problem: Problem) -> str:
    for message in reversed(problem.messages):
        if message["role"] == "user":
            return message["content"]
    raise AssertionError("a prompt without a user message")


def _letters(text: str) -> bytes:
    """ASCII letters and digits, without case."""
    return text.encode("utf-8", "surrogatepass").translate(_LOWER, _NO_LETTERS)


def _folded(text: str) -> bytes:
    """Letters and digits of any script, without case, accents and variants of width."""
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join([one for one in plain if one.isalnum()]).encode("utf-8", "surrogatepass")


def _tells_apart(tokenizer: PreTrainedTokenizerBase, characters: str) -> bool:
    found = {tuple(_ids(tokenizer, one)) for one in characters}
    return _knows(tokenizer, characters) and len(found) == len(characters)


def _knows(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> bool:
    """Whether each has tokens, and none of these is the one for what is unknown."""
    return all(ids and tokenizer.unk_token_id not in ids for ids in (_ids(tokenizer, text) for text in texts))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
