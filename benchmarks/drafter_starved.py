"""How much worse a learned drafter drafts after steps that told it nothing, and how soon it recovers.

    python benchmarks/drafter_starved.py runs/smollm2 --batches 8 --out drafter_starved.json

A drafter that is of no use is fed nothing, and is kept up to date again some steps before it is asked whether it has
become useful: by then the keys of most of what was said are missing, and what it answers decides whether it is used.
Here it is asked for six steps at a time, over and over, on the run's own prompts: after it was kept up to date
throughout, and after steps that told it nothing and 0, 8, 32 or 128 that kept it up to date.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from drafter_arms import Bench

from slipstream.draft.trials import TRIAL
from slipstream.engine.strategy import OFF, Always, Feeding, StepResult, Strategy
from slipstream.runtime.benches import describe_machine

WAYS = (Strategy(1.0, 0, 1), Strategy(4.0, 0, 4))
FED_STEPS = (0, 8, 32, 128)
CYCLE = 200
"""Steps from one asking to the next."""
WALKS = 4


class Starving(Always):
    """Asks every CYCLE steps, and feeds before that for as long as it is told."""

    def __init__(self, strategy: Strategy, fed_steps: int) -> None:
        super().__init__(strategy)
        self.fed_steps, self.place = fed_steps, 0
        self.right: list[float] = []
        """Drafts a sequence and step that were right, of each asking."""
        self._of_asking: list[float] = []

    def choose(self, batch: int, is_matching: bool = False) -> Strategy:
        self.place = (self.place + 1) % CYCLE
        return self.strategy if self.place < TRIAL + 1 else OFF

    def feed(self, batch: int) -> Feeding:
        return Feeding.KEYS if self.place >= CYCLE - self.fed_steps else Feeding.NOTHING

    def observe(self, step: StepResult) -> None:
        if step.of_model is not None:
            self._of_asking.append(step.of_model)
        else:
            if len(self._of_asking) > 1:
                self.right.append(statistics.fmean(self._of_asking[1:]))  # before the first it was not ready
            self._of_asking = []


def measure(bench: Bench, batch: int, way: Strategy, fed_steps: int) -> dict[str, Any]:
    policy = Starving(way, fed_steps)
    engine = bench.engine(batch, policy, bench.taught)
    for number in range(WALKS):
        bench.walk(engine, batch, number)
    if len(policy.right) < 2:
        raise SystemExit(f"asked {len(policy.right)} times, which says nothing: raise --waves or --new-tokens")
    error = statistics.stdev(policy.right) / len(policy.right) ** 0.5
    return {"right": statistics.fmean(policy.right), "error": error, "askings": len(policy.right)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--batches", default="8")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--waves", type=int, default=16, help="sequences for each place in the batch")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments.run, "both", arguments.new_tokens, arguments.waves)
    record = describe_machine(bench.model.device, bench.dtype)
    record |= {"what": "benchmarks/drafter_starved.py", "kind": bench.kind, "rows": []}
    for batch in map(int, arguments.batches.split(",")):
        for way in WAYS:
            for fed_steps in (CYCLE, *FED_STEPS):
                row = measure(bench, batch, way, fed_steps)
                record["rows"].append({"batch": batch, "way": str(way), "fed_steps": fed_steps} | row)
                fed = "always fed" if fed_steps == CYCLE else f"fed for {fed_steps} steps"
                print(
                    f"batch {batch}, {way}, {fed}: {row['right']:.3f} +- {row['error']:.3f} right drafts a sequence "
                    f"and step, {row['askings']} askings",
                    flush=True,
                )
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
