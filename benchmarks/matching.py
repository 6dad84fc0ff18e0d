"""How long drafting takes in a step: the search alone, with widths and sharing out, and learning from the result.

    python benchmarks/matching.py --out benchmarks/results/matching.json

Texts are drawn like words, a few kinds often and most rarely, so that a row's last token occurs all over its shelf.
Rows are in groups that share a shelf of past rollouts, and stand in the middle of their own texts, each a past one so
far.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.draft.history import HistoryDrafter
from slipstream.draft.shelves import Text, shelf_tokens
from slipstream.engine.packing import DraftSizes
from slipstream.engine.sequences import Running, Seat, StepPlan
from slipstream.engine.state import StepState
from slipstream.rng import derive_seed
from slipstream.runtime.benches import describe_machine
from slipstream.types import Request, SamplingParams

PROMPT, MAX_DRAFTS, KINDS, REPEATS = 64, 16, 50_000, 50


def prepare(rows: int, group: int, past: int, length: int, device: torch.device) -> tuple[HistoryDrafter, StepState]:
    """Every slot taken, half of its text said."""
    dice = np.random.default_rng(0)
    chance = 1 / (np.arange(KINDS) + 3.7)  # the likeliest 3 %, as the comma has
    chance /= chance.sum()
    shelf = shelf_tokens(PROMPT, past + group, length)
    texts: dict[tuple[int, ...], list[Text]] = {}
    drafter = HistoryDrafter(
        num_slots=rows,
        max_drafts=MAX_DRAFTS,
        library_tokens=shelf * -(-rows // group),
        longest_shelf=shelf,
        device=device,
        past=lambda prompt: texts[prompt],
    )
    state = StepState(
        num_slots=rows,
        max_length=PROMPT + length,
        num_table_pages=1,
        trash_page=1,
        device=device,
        max_drafts=MAX_DRAFTS,
    )
    seats = []
    for first in range(0, rows, group):
        prompt, *said = (dice.choice(KINDS, size, p=chance).tolist() for size in (PROMPT, *[length] * past))
        texts[tuple(prompt)] = [Text(tuple(text), 1) for text in said]
        requests = [
            Request(str(slot), str(first), tuple(prompt), derive_seed(slot), SamplingParams(max_new_tokens=length))
            for slot in range(first, min(first + group, rows))
        ]
        drafter.expect(requests)
        for member, request in enumerate(requests):
            own = said[member % past][: length // 2]
            seats.append(Seat(first + member, Running(request, own), (*prompt, *own), 0))
    state.apply(StepPlan(seats=tuple(seats)))
    drafter.follow(seats)
    state["computed"].copy_(state["known"] - 1)
    state["allotted"].fill_(1 + MAX_DRAFTS)
    return drafter, state


def median_us(work: Callable[[], Any], device: torch.device) -> float:
    work()
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(REPEATS):
            begin.record()
            for _ in range(10):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 100)
        return float(np.median(times))
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e6)
    return float(np.median(times))


def measure(rows: int, group: int, past: int, length: int, device: torch.device) -> dict[str, Any]:
    drafter, state = prepare(rows, group, past, length, device)
    width_S = torch.full((rows + 1,), MAX_DRAFTS, dtype=torch.int32, device=device)
    width_S[-1] = 0
    room = torch.tensor(rows * MAX_DRAFTS, dtype=torch.int32, device=device)
    found_S = drafter._find(state, width_S)
    state.report[:-1, :2] = torch.tensor([2, 1], dtype=torch.int32)  # each had one draft, which was right
    return {
        "rows": rows,
        "group": group,
        "past": past,
        "length": length,
        "drafts_found": float(found_S[:-1].float().mean()),
        "search_us": median_us(lambda: drafter._find(state, width_S), device),
        "draft_us": median_us(lambda: drafter.draft(state, room, DraftSizes(rows)), device),
        "learn_us": median_us(lambda: drafter.learn_texts(state), device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--group", type=int, default=8, help="rows that share a shelf")
    parser.add_argument("--past", default="16", help="past rollouts on a shelf")
    parser.add_argument("--lengths", default="512,8192", help="tokens of a rollout")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = describe_machine(device, torch.int32) | {"what": "benchmarks/matching.py", "rows": []}
    for length in map(int, arguments.lengths.split(",")):
        for past in map(int, arguments.past.split(",")):
            for rows in map(int, arguments.rows.split(",")):
                row = measure(rows, min(rows, arguments.group), past, length, device)
                record["rows"].append(row)
                print(json.dumps(row), flush=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
