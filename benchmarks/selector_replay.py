"""The selector among ways of drafting whose steps were recorded on a GPU: what it would have made of them.

    python benchmarks/selector_replay.py benchmarks/results/draft_steps-*-h200.json.gz --out selector_replay.json

Every way went through the same texts (`drafter_arms.py --steps`), so a place in them is the share of all tokens that
came before. The selector chooses, the step of that way at this place happens, and the place moves on; as the engine on
a GPU it is told of a step when two more have begun. Some rounds of the texts, begun at twelve places; against the best
of all ways that were recorded. Also with a drafter that is never right ("poisoned"), without one ("history"), and where
no draft is ever right ("nothing"). A model that was not fed in the step before has no drafts, as in the engine, which
goes on feeding it in stretches. What is not in it: what that costs there, how large steps are made, and graphs to be
captured.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.draft.selector import Selector
from slipstream.engine.strategy import MATCHING, OFF, StepResult, Strategy

Step = tuple[int, float, float]
"""Sequences, tokens of each, microseconds."""
STARTS, STEPS_AHEAD = 12, 2
WORLDS = ("as recorded", "poisoned", "history", "nothing")
COPY = Strategy(8.0, 1)
"""Shows where texts repeat others."""


class Walk:
    """The steps of one way, by place."""

    def __init__(self, steps: Sequence[Step], start: float = 0.0) -> None:
        self.steps = list(steps)
        if start:
            first = bisect_left(Walk(steps).places, start)
            self.steps = self.steps[first:] + self.steps[:first]
        self.num_tokens = sum(batch * tokens for batch, tokens, _ in self.steps)
        self.places, before = list[float](), 0.0
        for batch, tokens, _ in self.steps:
            self.places.append(before / self.num_tokens)
            before += batch * tokens

    def at(self, place: float) -> Step:
        return self.steps[bisect_right(self.places, place) - 1]


def world_of(recorded: dict[Strategy, list[Step]], world: str) -> dict[Strategy, list[Step]]:
    if world == "as recorded":
        return recorded
    ways = {}
    for way, steps in recorded.items():
        if world == "history" and way.depth:
            continue
        texts = steps
        if world == "nothing" or (way.depth and not way.min_match):
            texts = [(batch, 1.0, 0.0) for batch, _, _ in recorded[OFF]]
        elif way.depth:
            texts = recorded[Strategy(way.drafts_each, 1)]
        ways[way] = [(*text[:2], steps[number % len(steps)][2]) for number, text in enumerate(texts)]
    return ways


def rounds(
    walks: dict[Strategy, Walk], ways: Sequence[Strategy], batch: int, num_rounds: int, world: str
) -> list[float]:
    """Microseconds of each."""
    selector, is_matching, taken = Selector(ways, has_price=True, preparing=math.inf), False, []
    unread: deque[tuple[Strategy, float, float, bool, bool]] = deque()
    is_fed = False
    for _ in range(num_rounds):
        place, took = 0.0, 0.0
        while place < 1:
            way = selector.choose(batch, is_matching)
            size, tokens, microseconds = walks[way].at(place)
            # A way with few drafts is taken to see as much of a stretch, but for what goes beyond its drafts.
            copied = min(walks[COPY].at(place)[1] - 1, way.drafts_each)
            matches = way.looks_for_matches and copied >= MATCHING
            total = walks[way].num_tokens
            if way.depth and not is_fed:
                instead = walks[COPY if matches else OFF]
                (size, tokens, _), total = instead.at(place), instead.num_tokens
            is_fed = way.depth > 0 or (is_matching and is_fed)
            unread.append((way, tokens, microseconds / 1e6, is_matching, matches))
            if len(unread) > STEPS_AHEAD:
                *seen, was_matching, is_matching = unread.popleft()
                # How often the model was right is not in the recordings, but where it never is that is known.
                of_model = 0.0 if seen[0].depth and world in ("poisoned", "nothing") else None
                selector.observe(StepResult(batch, *seen, was_matching, of_model))
            took += microseconds
            place += size * tokens / total
        taken.append(took)
    return taken


def is_choice(way: Strategy, recorded: Container[Strategy]) -> bool:
    """Whether a run that remembers texts has it. Ways that copy from four matching tokens on stand for those from eight
    on where these were not recorded."""
    if way.depth and way.min_match == 4:
        return replace(way, min_match=8) not in recorded
    return way == OFF or way.looks_for_matches


def replay(recorded: dict[Strategy, list[Step]], batch: int, world: str, num_rounds: int) -> dict[str, Any]:
    ways = world_of(recorded, world)
    times = {way: sum(step[2] for step in steps) for way, steps in ways.items()}
    best = min(times, key=lambda way: times[way])
    choices = [way for way in ways if is_choice(way, ways)]
    shares = [
        [
            times[best] / took
            for took in rounds(
                {way: Walk(s, start / STARTS) for way, s in ways.items()}, choices, batch, num_rounds, world
            )
        ]
        for start in range(STARTS)
    ]
    return {
        "world": world,
        "batch": batch,
        "best": str(best),
        "times_off": times[OFF] / times[best],
        "share_of_best": [statistics.fmean(line) for line in zip(*shares, strict=True)],
        "worst_share": [min(line) for line in zip(*shares, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=4, help="times that the texts are gone through")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    record: dict[str, Any] = {"what": "benchmarks/selector_replay.py", "rows": []}
    for file in arguments.files:
        for case in json.loads(gzip.decompress(file.read_bytes())):
            recorded = {Strategy(*one["way"]): [tuple(step) for step in one["steps"]] for one in case["ways"]}
            # Fewer sequences than half of the batch are judged apart.
            recorded = {way: [one for one in steps if one[0] > case["batch"] // 2] for way, steps in recorded.items()}
            for world in WORLDS:
                row = {"file": file.name} | replay(recorded, case["batch"], world, arguments.rounds)
                record["rows"].append(row)
                print(
                    f"{file.name}, batch {row['batch']}, {world}: best {row['best']}, {row['times_off']:.2f} times "
                    f"off; the selector has {', '.join(f'{share:.3f}' for share in row['share_of_best'])} of it, "
                    f"at worst {', '.join(f'{share:.3f}' for share in row['worst_share'])}",
                    flush=True,
                )
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
