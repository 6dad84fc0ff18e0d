"""Whole rollouts with a learned drafter, replayed from a GPU's records: how long until the last sequence ends.

    python benchmarks/rollout_replay.py benchmarks/results/draft_rollouts-h200.json.gz --out rollout_replay.json

Recorded were the length of every sequence in the steps of an RL run, how often drafts for it were right, and how long
the engine's steps took, by batch and way. Replayed are the selector, the sizes of steps and how drafts are shared out,
as they are in the engine; the drafts of a sequence are right with its own odds. Three times: with all sequences counted
and served alike; with those counted that are behind; and with their drafts first as well. Against a run without drafts.
What is not in it: graphs to be made, prompts, sequences that wait for a slot, updates of the drafter beside the tail,
and that a step with fewer drafts than its way may have takes less time.
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
import torch
from numpy.typing import NDArray

from slipstream.draft import cpu_widths, widths
from slipstream.draft.selector import MODEL_STRATEGIES, Selector
from slipstream.engine.batcher import BEHIND_STEPS
from slipstream.engine.fitting import fitted
from slipstream.engine.slots import are_behind
from slipstream.engine.strategy import OFF, Demand, Feeding, StepDrafts, StepResult, Strategy, size_of

CHAINS = tuple(way for way in MODEL_STRATEGIES if way.branches == 1)
"""Of trees too few steps were recorded."""
STEPS_AHEAD, NOISE = 2, 0.04
LEAST_DRAFTS = 15
"""Of a sequence, for its own odds; with fewer it has those of another that is about as long."""
EPOCH = 4
VARIANTS = {"all alike": (False, False), "those behind counted": (True, False), "and served first": (True, True)}


class Times:
    """Milliseconds of a step. A way that was not recorded with so many sequences costs as much more than none as with
    the next number of them; and none without telling the drafter as much less than with."""

    def __init__(self, rows: list[list[Any]]) -> None:
        self._known = {(size, (Strategy(*way), feeding)): ms for size, *way, feeding, _, ms in rows}
        kinds = [(OFF, Feeding.NOTHING), (OFF, Feeding.KEYS), *((way, Feeding.ALL) for way in CHAINS if way != OFF)]
        self._all = {(size, *kind): self._of(size, kind) for size, _ in self._known for kind in kinds}

    def _of(self, size: int, kind: tuple[Strategy, Feeding]) -> float:
        told = OFF, Feeding.KEYS
        sizes = [other for other, one in self._known if one == kind]
        nearest = min(sizes, key=lambda other: abs(math.log(other / size)))
        return self._known[size, told] * self._known[nearest, kind] / self._known[nearest, told]

    def of(self, batch: int, way: Strategy, feeding: Feeding) -> float:
        return self._all[size_of(batch), way, feeding]


def odds_of(rollout: list[list[int]], dice: np.random.Generator) -> NDArray[np.float64]:
    known = [(length, (right + 1) / (tried + 2)) for length, right, tried in rollout if tried >= LEAST_DRAFTS]
    lengths, odds = np.array([length for length, _ in known]), np.array([one for _, one in known])
    result = []
    for length, right, tried in rollout:
        alike = np.flatnonzero((lengths <= 2 * length) & (length <= 2 * lengths)) if known else []
        if tried >= LEAST_DRAFTS:
            result.append((right + 1) / (tried + 2))
        elif len(alike):
            result.append(odds[dice.choice(alike)])
        else:
            result.append(0.3)  # of a drafter that has hardly begun
    return np.array(result)


class Sharing:
    """Who gets how many drafts of a step, as in the engine, and what comes of them."""

    def __init__(self) -> None:
        self._demand = Demand()

    def right(
        self,
        way: Strategy,
        left: NDArray[Any],
        odds: NDArray[Any],
        record: Sequence[NDArray[Any]],
        behind: NDArray[Any],
        dice: np.random.Generator,
    ) -> NDArray[Any]:
        """Drafts of each sequence that are right. `record`: its window, hits and tries, which learn from it."""
        drafted = self._share_out(way, left, *record, behind)
        right = (dice.random((len(left), max(1, way.depth))) < odds[:, None]).cumprod(1).sum(1)
        right = np.minimum(right, drafted)
        if way.depth:
            widths.learn_widths(*map(torch.from_numpy, (drafted, right, *record)), max_drafts=way.depth)
        return right

    def _share_out(
        self,
        way: Strategy,
        left: NDArray[Any],
        window: NDArray[Any],
        hits: NDArray[Any],
        tries: NDArray[Any],
        behind: NDArray[Any],
    ) -> NDArray[np.int32]:
        drafted = np.zeros(len(left), np.int32)
        if way.depth:
            wanted = self._demand.room(way, len(left))
            room = fitted(len(left), wanted)
            found = np.minimum(way.depth, left - 1).astype(np.int32)
            cpu_widths.share_out(False, found, window, hits, tries, behind.astype(np.int32), room, drafted)
            self._demand.observe(StepDrafts(len(left), False, way, wanted), room, int(drafted.sum()))
        return drafted


class Run:
    """Rollouts one after another; the selector goes on."""

    def __init__(self, times: Times, max_new_tokens: int, seed: int, variant: str | None) -> None:
        self._times, self._max_new_tokens, self._seed = times, max_new_tokens, seed
        self._dice, self._num_rollouts = np.random.default_rng(seed), 0
        self._counts_behind, self._serves_behind = VARIANTS[variant] if variant else (False, False)
        self._selector = Selector(CHAINS, has_price=True, has_model=False) if variant else None
        self._sharing = Sharing()

    def rollout(self, recorded: list[list[int]], *, has_model: bool) -> float:
        """Seconds until the last one has ended."""
        if self._selector is not None and has_model:
            self._selector.note_new_model()
        self._num_rollouts += 1  # of which each has the same odds, however it is drafted for
        odds = odds_of(recorded, np.random.default_rng((self._seed, self._num_rollouts)))
        left = np.array([length for length, _, _ in recorded])
        may_have = np.full(len(left), self._max_new_tokens)
        window, hits, tries = np.full(len(left), widths.START_WIDTH), *np.zeros((2, len(left)), np.float32)
        behind = np.zeros(len(left), np.int32)
        unread: deque[StepResult] = deque()
        seconds, num_steps = 0.0, 0
        while (here := np.flatnonzero(left > 0)).size:
            way = self._selector.choose(len(here)) if self._selector else OFF
            feeding = self._selector.feed(len(here)) if self._selector else Feeding.NOTHING
            feeding = Feeding.ALL if way.depth else feeding
            num_steps += 1
            if num_steps % BEHIND_STEPS == 0:
                behind[here] = are_behind(may_have[here])
            record = tuple(line[here] for line in (window, hits, tries))
            served = behind[here] * self._serves_behind
            right = self._sharing.right(way, left[here], odds[here], record, served, self._dice)
            window[here], hits[here], tries[here] = record
            tokens = np.minimum(right + 1, left[here])
            left[here] -= tokens
            may_have[here] -= tokens
            step_s = self._times.of(len(here), way, feeding) * math.exp(self._dice.normal(0, NOISE)) / 1e3
            seconds += step_s
            if self._selector is not None:
                of_model = float(right.mean()) if way.depth else None
                of_behind = None
                if self._counts_behind and behind[here].any():
                    of_behind = float(tokens[behind[here] > 0].mean())
                told = {"of_model": of_model, "tokens_behind": of_behind, "is_fed": feeding > Feeding.NOTHING}
                unread.append(StepResult(len(here), way, float(tokens.mean()), step_s, **told))  # type: ignore[arg-type]
                while len(unread) > STEPS_AHEAD:
                    self._selector.observe(unread.popleft())
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    record = json.loads(gzip.decompress(arguments.record.read_bytes()))
    times, rollouts = Times(record["times"]), record["rollouts"]

    def seconds_of(variant: str | None) -> NDArray[np.float64]:
        """By seed and rollout."""
        lines = []
        for seed in range(arguments.seeds):
            run = Run(times, record["max_new_tokens"], seed, variant)
            lines.append([run.rollout(rollout, has_model=number > 0) for number, rollout in enumerate(rollouts)])
        return np.array(lines)

    off = seconds_of(None)
    print(f"off: {off.sum(1).mean():.2f} s in {len(rollouts)} rollouts")
    results = {}
    for variant in VARIANTS:
        taken = seconds_of(variant)
        gains = off.sum(1) / taken.sum(1)
        epochs = [
            float((off[:, first : first + EPOCH].sum(1) / taken[:, first : first + EPOCH].sum(1)).mean())
            for first in range(0, len(rollouts), EPOCH)
        ]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
        worst = float((off.mean(0) / taken.mean(0)).min())
        results[variant] = {"gain": float(gains.mean()), "error": error, "epochs": epochs, "worst_rollout": worst}
        by_epoch = ", ".join(f"{one:.3f}" for one in epochs)
        spread = "" if error is None else f" +- {error:.3f}"
        print(f"{variant}: {gains.mean():.3f}{spread} times as fast, by epoch {by_epoch}; worst {worst:.3f}")
    if arguments.out:
        line = {"what": "benchmarks/rollout_replay.py", "record": arguments.record.name, "seeds": arguments.seeds}
        arguments.out.write_text(json.dumps(line | {"off_s": float(off.sum(1).mean()), **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
