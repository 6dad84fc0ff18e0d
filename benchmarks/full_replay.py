"""Every size of batch kept full, replayed from a GPU's records: the selector against the best way that never changes.

    python benchmarks/full_replay.py benchmarks/results/draft_rollouts-h200.json.gz --out full_replay.json

As `rollout_replay.py`, but for that others take the slots that get free: by size, tokens a second of each chain of a
learned drafter throughout, of no drafts, and of a selector that has learned for as long as `drafter_arms.py` lets it;
also with a drafter that is never right. Where a GPU has not timed a way with so many sequences, what it costs more than
none is that of the nearest size it has.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rollout_replay import CHAINS, NOISE, STEPS_AHEAD, Sharing, Times, odds_of

from slipstream.draft import widths
from slipstream.draft.selector import Selector
from slipstream.engine.strategy import OFF, Always, DraftPolicy, Feeding, StepResult

LEARNING, TIMED = 5000, 5000
"""Steps of each: a selector learns in the first, and what never changes has the same texts in the others."""
LAST = 4
"""Rollouts whose sequences are drafted for: those of the drafter that has learned most."""
SIZES = [1 << power for power in range(10)]


class Queue:
    """Sequences as they were recorded, one after another, in an order of chance, again and again."""

    def __init__(self, rollouts: Sequence[list[list[int]]], seed: int, worth: float) -> None:
        dice = np.random.default_rng(seed)
        lengths = np.array([length for rollout in rollouts for length, _, _ in rollout])
        odds = np.concatenate([odds_of(rollout, dice) for rollout in rollouts]) * worth
        order = dice.permutation(len(lengths))
        self._lengths, self._odds, self._taken = lengths[order], odds[order], 0

    def take(self, count: int) -> tuple[Any, Any]:
        """Tokens and odds of the next."""
        at = np.arange(self._taken, self._taken + count) % len(self._lengths)
        self._taken += count
        return self._lengths[at], self._odds[at]


def rate(times: Times, queue: Queue, size: int, policy: DraftPolicy, has_model: bool, seed: int) -> float:
    """Tokens a second once it has learned."""
    dice, sharing, unread = np.random.default_rng(seed), Sharing(), deque[StepResult]()
    left, odds = queue.take(size)
    window, hits, tries = np.full(size, widths.START_WIDTH), *np.zeros((2, size), np.float32)
    num_tokens, seconds, nobody = 0.0, 0.0, np.zeros(size, np.int32)
    for step in range(LEARNING + TIMED):
        way = policy.choose(size)
        feeding = Feeding.ALL if way.depth else policy.feed(size) if has_model else Feeding.NOTHING
        right = sharing.right(way, left, odds, (window, hits, tries), nobody, dice)
        tokens = np.minimum(right + 1, left)
        left = left - tokens
        step_s = times.of(size, way, feeding) * math.exp(dice.normal(0, NOISE)) / 1e3
        of_model = float(right.mean()) if way.depth else None
        is_fed = feeding > Feeding.NOTHING
        unread.append(StepResult(size, way, float(tokens.mean()), step_s, of_model=of_model, is_fed=is_fed))
        while len(unread) > STEPS_AHEAD:
            policy.observe(unread.popleft())
        if step >= LEARNING:
            num_tokens, seconds = num_tokens + tokens.sum(), seconds + step_s
        ended = np.flatnonzero(left <= 0)
        if ended.size:
            left[ended], odds[ended] = queue.take(ended.size)
            window[ended], hits[ended], tries[ended] = widths.START_WIDTH, 0.0, 0.0
    return num_tokens / seconds


def row_of(record: dict[str, Any], size: int, worth: float, num_seeds: int) -> dict[str, Any]:
    """`worth`: of the drafter; its drafts are right so many times as often."""
    times, rollouts = Times(record["times"]), record["rollouts"][-LAST:]
    rates: dict[str, list[float]] = {}
    for seed in range(num_seeds):
        policies: dict[str, DraftPolicy] = {str(way): Always(way) for way in CHAINS if way != OFF}
        policies |= {"selector": Selector(CHAINS, has_price=True, preparing=math.inf), "off": Always(OFF)}
        for name, policy in policies.items():
            queue = Queue(rollouts, seed, worth)
            rates.setdefault(name, []).append(rate(times, queue, size, policy, name != "off", seed))
    means = {name: statistics.fmean(of_one) for name, of_one in rates.items()}
    best = max(means.keys() - {"selector"}, key=lambda name: means[name])

    def shares_of(other: str) -> list[float]:
        return [one / two for one, two in zip(rates["selector"], rates[other], strict=True)]

    row: dict[str, Any] = {"size": size, "worth": worth, "best": best, "rates": means}
    for what, other in (("of_best", best), ("of_off", "off")):
        shares = shares_of(other)
        row[what] = statistics.fmean(shares), statistics.stdev(shares) / math.sqrt(num_seeds)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("one seed says nothing about the next: at least 2 --seeds")
    record = json.loads(gzip.decompress(arguments.record.read_bytes()))
    rows = []
    for size in map(int, arguments.sizes.split(",")):
        for worth in (1.0, 0.0):
            row = row_of(record, size, worth, arguments.seeds)
            rows.append(row)
            shares = (f"{mean:.3f} +- {error:.3f}" for mean, error in (row["of_best"], row["of_off"]))
            drafter = "a drafter" if worth else "one that is never right"
            print(
                f"batch {size}, {drafter}: best {row['best']}; the selector has {' and '.join(shares)} of it and of off"
            )
            if arguments.out:
                line = {"what": "benchmarks/full_replay.py", "record": arguments.record.name, "seeds": arguments.seeds}
                arguments.out.write_text(json.dumps(line | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
