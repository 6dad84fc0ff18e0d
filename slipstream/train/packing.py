"""Samples into micro-batches by their token count, and a micro-batch into flat lists. Pure: no tensors.

Invariants: every sample is in exactly one micro-batch; a micro-batch holds at most `max_tokens`, or one single longer
sample; the result depends on the lengths and their order only. First-fit decreasing needs at most 11/9 of the optimal
number of bins plus 6/9 (Dosa 2007).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Documents one after another. T: tokens of all documents; N: response tokens of all documents, in order."""

    token_ids_T: list[int]
    lengths: list[int]
    """Tokens of each document: prompt and response without its last token, which predicts nothing."""
    positions_N: list[int]
    """Where in T the hidden state lies that predicts each response token."""
    targets_N: list[int]
    response_lengths: list[int]


def document_tokens(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> int:
    """Tokens that a sample takes in a micro-batch."""
    return len(prompt_ids) + len(response_ids) - 1


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the samples of each micro-batch: first-fit decreasing, ties by order, members in the given order."""
    bins: list[list[int]] = []
    space: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        for number, free in enumerate(space):
            if lengths[index] <= free:
                bins[number].append(index)
                space[number] -= lengths[index]
                break
        else:
            bins.append([index])
            space.append(max_tokens - lengths[index])
    return [sorted(members) for members in bins]


def pack(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PackedTokens:
    """Lay (prompt_ids, response_ids) of one micro-batch one after another."""
    packed = PackedTokens([], [], [], [], [])
    for prompt_ids, response_ids in pairs:
        assert prompt_ids and response_ids, "a sample needs prompt tokens and response tokens"
        first = len(packed.token_ids_T) + len(prompt_ids) - 1
        packed.positions_N.extend(range(first, first + len(response_ids)))
        packed.targets_N.extend(response_ids)
        packed.token_ids_T.extend((*prompt_ids, *response_ids[:-1]))
        packed.lengths.append(document_tokens(prompt_ids, response_ids))
        packed.response_lengths.append(len(response_ids))
    return packed
