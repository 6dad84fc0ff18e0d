"""What a data file holds, found by looking at all of its rows: prompt, answer and solution columns, lengths, a reward.

Owns the guesses behind `slipstream init`; how a row is read stays with `rows.py`. Lengths are estimates, on the
high side for the tokenizers of common models, since no tokenizer is loaded here. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.config import TaskSet
from slipstream.tasks.procedural import ANSWER_MARK, final_answer
from slipstream.tasks.rows import GROUND_TRUTH_HOLDERS
from slipstream.tasks.sources import read_file
from slipstream.tasks.verifiers import NUMBER, is_math

RewardGuess = Literal["math_verify", "exact_match", "own"]

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "messages", "conversation", "input", "text")
ANSWER_COLUMNS = ("answer", "final_answer", "ground_truth", "expected_answer", "target", "label", "gold", "reference")
"""Names that are looked for, in this order."""
FORMAT_WORDS = (ANSWER_MARK, "\\boxed", "<answer>")
"""A prompt that has one of these says by itself where the answer is to stand."""
LONGEST_EXACT = 100
"""Characters of an answer that a response can be expected to repeat."""
PARSED = 200
"""Answers that are parsed to see whether they are mathematics: all, or this many from all over the file."""
TEMPLATE_TOKENS = 64
"""What a chat template puts around a prompt."""
_PIECE = re.compile(r"[a-z]{1,3}|[A-Z][a-z]{0,2}|[0-9]| (?=[0-9])|[^\w\s]|_|\s\s+|\n|\t", re.ASCII)
"""Of ASCII text: no tokenizer of a common model makes more than about this many tokens of it."""


@dataclass(frozen=True, slots=True)
class DataLook:
    """What was found in a data file."""

    path: Path
    num_rows: int
    prompt_column: str
    prompts_are_messages: bool
    answer_column: str | None
    """None: no column has a reference answer."""
    answer_note: str
    """Where the answer is, in words."""
    has_solutions: bool
    """Every row has a worked solution in the column `solution`."""
    reward: RewardGuess
    says_format: bool
    """Prompts say where the answer is to stand."""
    prompt_texts: tuple[str, ...]
    """What each row asks, for lengths and for rows that ask the same."""
    longest_solution: str


def look_at(path: Path, *, prompt: str | None = None, answer: str | None = None) -> DataLook:
    """Look at all rows of a data file. ValueError names what is missing; `prompt` and `answer` name columns."""
    wanted = {*PROMPT_COLUMNS, *ANSWER_COLUMNS, *GROUND_TRUTH_HOLDERS, "solution", prompt, answer}
    names: dict[str, None] = {}
    rows: list[Mapping[str, Any]] = []
    for row in read_file(path):
        names |= dict.fromkeys(row)
        rows.append({name: value for name, value in row.items() if name in wanted})
    if not rows:
        raise ValueError(f"{path} has no rows")
    prompt_column = _prompt_column(rows, names, prompt, path)
    answer_column, note, answers = _answers(rows, names, answer, path)
    prompts = [row[prompt_column] for row in rows]
    texts = tuple(_text(value) for value in prompts)
    solutions = [row.get("solution") for row in rows]
    has_solutions = all(isinstance(value, str) and value.strip() for value in solutions)
    return DataLook(
        path=path,
        num_rows=len(rows),
        prompt_column=prompt_column,
        prompts_are_messages=not isinstance(prompts[0], str),
        answer_column=answer_column,
        answer_note=note,
        has_solutions=has_solutions,
        reward=_guess_reward(answers),
        says_format=sum(any(word in text for word in FORMAT_WORDS) for text in texts) * 2 > len(texts),
        prompt_texts=texts,
        longest_solution=max((str(value) for value in solutions), key=len) if has_solutions else "",
    )


def estimate_tokens(text: str, *, by_character: bool = False) -> int:
    """About how many tokens a text has, on the high side; `by_character`: one each, as with model=tiny."""
    if by_character:
        return len(text)
    beyond_ascii = sum(len(character.encode("utf-8", "replace")) for character in text if ord(character) > 127)
    return round(1.25 * len(_PIECE.findall(text))) + beyond_ascii


def _prompt_column(rows: Sequence[Mapping[str, Any]], names: Collection[str], named: str | None, path: Path) -> str:
    if named is not None:
        if named not in names:
            raise ValueError(f"{path} has no column {named!r}; it has {', '.join(names)}")
        return named
    for name in PROMPT_COLUMNS:
        if name in names and all(_is_prompt(row.get(name)) for row in rows[:PARSED]):
            return name
    if "messages" in names and all(_is_conversation(row.get("messages")) for row in rows[:PARSED]):
        raise ValueError(
            f"{path}: the conversations in column 'messages' do not end with the user's question: a prompt does, and "
            "the model answers it. Write a column `prompt` with all messages but the last"
        )
    raise ValueError(
        f"{path}: none of the columns {', '.join(names)} reads as a prompt (a text, or messages that end with the "
        "user's); name the one with the question: --prompt COLUMN"
    )


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return _is_conversation(value) and value[-1]["role"] == "user"


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(one, Mapping) and isinstance(one.get("content"), str) and "role" in one for one in value)
    )


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt or ())


def _answers(
    rows: Sequence[Mapping[str, Any]], names: Collection[str], named: str | None, path: Path
) -> tuple[str | None, str, list[Any]]:
    """The column with reference answers, where that is in words, and the answers."""
    if named is not None:
        if named not in names:
            raise ValueError(f"{path} has no column {named!r}; it has {', '.join(names)}")
        return named, f"column {named}", [row.get(named) for row in rows]
    for name in ANSWER_COLUMNS:
        found = [row.get(name) for row in rows]
        if _most_are_there(found, f"column {name}", path):
            return name, f"column {name}", found
    for holder in GROUND_TRUTH_HOLDERS:
        held = [row.get(holder) for row in rows]
        truths = [value.get("ground_truth") if isinstance(value, Mapping) else None for value in held]
        if _most_are_there(truths, f"{holder}.ground_truth", path):
            return TaskSet.model_fields["answer_column"].default, f"{holder}.ground_truth", truths
    solutions = [row.get("solution") for row in rows]
    if all(isinstance(value, str) and "\\boxed" in value for value in solutions):
        return "solution", "the \\boxed{} part of column solution", solutions
    return None, "none found", []


def _most_are_there(answers: Sequence[Any], where: str, path: Path) -> bool:
    """Whether this is where the answers are; ValueError if it is, and a row has none."""
    missing = [number for number, answer in enumerate(answers) if answer is None]
    if len(missing) * 2 > len(answers):
        return False
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} of {len(answers)} rows have no answer in {where}, first row {missing[0]}: leave "
            "such rows out, or name another column: --answer COLUMN"
        )
    return True


def _guess_reward(answers: Sequence[Any]) -> RewardGuess:
    """What can judge a response against these answers."""
    if not answers or not all(isinstance(answer, str | int | float) for answer in answers):
        return "own"
    texts = [str(answer).strip() for answer in answers]
    if all("\\boxed" in text for text in texts):
        return "math_verify"
    short = [final_answer(text) or text for text in texts]
    if all(ANSWER_MARK in text for text in texts):  # GSM8K: math_verify would read the worked solution before the mark
        return "exact_match" if max(map(len, short)) <= LONGEST_EXACT else "own"
    if all(map(NUMBER.fullmatch, texts)):
        return "math_verify"
    spread = texts[:: max(1, len(texts) // PARSED)]
    if all(is_math(text) for text in spread):
        return "math_verify"
    return "exact_match" if all(0 < len(text) <= LONGEST_EXACT and "\n" not in text for text in texts) else "own"


def count_repeated(texts: Iterable[str], held_out: Iterable[str]) -> int:
    """How many of the prompts are also among those that are held out."""
    kept_apart = set(held_out)
    return sum(text in kept_apart for text in texts)
