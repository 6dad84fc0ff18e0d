"""Reports of a step by hand: lines that a person can read, and the columns that the engine has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from slipstream.engine.sequences import Report
from slipstream.engine.slots import read_report

Line = tuple[list[int], list[float], list[int], int]
"""Of a slot: tokens, their log-probabilities and origins, and how many drafts were verified."""


def report_of(lines: Mapping[int, Line], num_slots: int = 100) -> Report:
    """What is beyond a line's tokens is anything, as on a device: here broken tokens from the history."""
    width = max((max(len(line[0]), line[3] + 1) for line in lines.values()), default=1)
    parts = [np.full((num_slots, width), filling, np.int32) for filling in (-1, 0, 2, 0)]
    numbers = np.zeros((num_slots, 2), np.int32)
    for slot, (tokens, logprobs, origins, num_drafted) in lines.items():
        numbers[slot] = len(tokens), num_drafted
        values = tokens, np.array(logprobs, np.float32).view(np.int32), origins, [0] * len(tokens)
        for part, value in zip(parts, values, strict=True):
            part[slot, : len(tokens)] = value
    return read_report(np.concatenate([numbers, *parts], 1))


def report_from(origins: list[list[int]], drafted: list[int] | None = None) -> Report:
    """By where the tokens of each slot came from."""
    drafted = drafted or [0] * len(origins)
    return report_of(
        {slot: ([7] * len(line), [0.0] * len(line), line, drafted[slot]) for slot, line in enumerate(origins)}
    )


def lines_of(report: Report) -> dict[int, Line]:
    width = (report.lines.shape[1] - 2) // 4
    lines = {}
    for slot in report.lines[:, 0].nonzero()[0].tolist():
        count, num_drafted, *rest = report.lines[slot].tolist()
        logprobs = report.lines[slot].view(np.float32)[2 + width :][:count].tolist()
        lines[slot] = rest[:count], logprobs, rest[2 * width :][:count], num_drafted
    return lines


def log_kept_of(report: Report) -> dict[int, list[float]]:
    width = (report.lines.shape[1] - 2) // 4
    counts = report.lines[:, 0]
    kept = report.lines.view(np.float32)[:, 2 + 3 * width :]
    return {slot: kept[slot, : counts[slot]].tolist() for slot in counts.nonzero()[0].tolist()}
