"""What drafts of a learned model cost, whatever they give: seconds of a step with and without, by batch and depth.

    python benchmarks/drafter_cost.py --shapes qwen2.5-1.5b,qwen2.5-7b --batches 1,8,64 --out drafter_cost.json

Random weights and an untaught drafter, scripted texts: hardly a draft is right, so that steps are many and alike. A
step's cost is its median time by device events, against that of an engine that has no drafter at all. What it must give
to pay is the same number: tokens a step. At the end: memory of the CUDA graphs of all ways in one engine, against one
engine for each.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from slipstream.draft.history import HistoryDrafter
from slipstream.draft.learned import ModelGuesser
from slipstream.engine.engine import Engine
from slipstream.engine.strategy import OFF, Always, StepResult, Strategy
from slipstream.models.precision import resolve_precision
from slipstream.runtime.benches import describe_machine, load_shape, shape_width
from slipstream.runtime.engines import choose_device
from slipstream.runtime.heap import still_heap
from slipstream.types import Request, SamplingParams

CHAINS = tuple(Strategy(float(depth), 0, depth) for depth in (1, 2, 4, 6))
TREES = (Strategy(8.0, 0, 4, 3), Strategy(16.0, 0, 5, 4))
TREE_BATCH = 8
PROMPT = 24
SETTLED = 20
"""Steps of a way before those that count."""


class Recorder(Always):
    """Keeps how long steps took."""

    def __init__(self) -> None:
        super().__init__(OFF)
        self.seconds: dict[Strategy, list[float]] = defaultdict(list)

    def observe(self, step: StepResult) -> None:
        self.seconds[step.strategy].append(step.seconds)


def build(model: PreTrainedModel, batch: int, new_tokens: int, *, drafts: bool) -> tuple[Engine, Recorder]:
    recorder = Recorder()
    drafter = HistoryDrafter(
        num_slots=batch,
        max_drafts=16,
        library_tokens=0,
        device=model.device,
        rule="aimd",
        guesser=ModelGuesser(num_slots=batch) if drafts else None,
    )
    return Engine(
        model, max_sequences=batch, max_length=PROMPT + new_tokens, drafter=drafter, policy=recorder
    ), recorder


def walk(engine: Engine, batch: int, new_tokens: int, vocab_size: int) -> None:
    dice = random.Random(batch)
    for number in range(batch):
        prompt, text = (tuple(dice.choices(range(5, vocab_size), k=count)) for count in (PROMPT, new_tokens))
        sampling = SamplingParams(max_new_tokens=new_tokens)
        engine.submit([Request(f"{number}", f"{number}", prompt, number, sampling, script_ids=text)])
    while engine.has_work:
        engine.step()


def measure(model: PreTrainedModel, batch: int, new_tokens: int) -> dict[str, Any]:
    vocab_size = model.config.get_text_config().vocab_size
    plain, plain_times = build(model, batch, new_tokens, drafts=False)
    engine, times = build(model, batch, new_tokens, drafts=True)
    ways = [*CHAINS, *(TREES if batch <= TREE_BATCH else ())]
    with still_heap():
        walk(plain, batch, new_tokens, vocab_size)
        for way in (OFF, *ways):
            times.strategy = way
            walk(engine, batch, new_tokens, vocab_size)
        walk(plain, batch, new_tokens, vocab_size)
    without_s = statistics.median(plain_times.seconds[OFF][SETTLED:])
    with_s = {str(way): statistics.median(found[SETTLED:]) for way, found in times.seconds.items()}
    row = {
        "batch": batch,
        "off_ms": 1e3 * without_s,
        "cost": {way: seconds / without_s for way, seconds in with_s.items()},
        "graphs": engine.facts().num_graphs,
        "graph_mb": engine.facts().graph_bytes / 1e6,
    }
    del engine
    singles = []  # all at once: one that is gone would leave its memory to the next
    for way in (OFF, *ways):
        single, one = build(model, batch, new_tokens, drafts=True)
        one.strategy = way
        for _ in range(2):  # as in the one above, prompts have a graph from the second time on
            walk(single, batch, new_tokens, vocab_size)
        singles.append(single)
    return row | {"graph_mb_apart": sum(single.facts().graph_bytes for single in singles) / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="smollm2-135m")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = choose_device("auto")
    shapes = arguments.shapes.split(",")
    dtypes = {shape: resolve_precision("auto", device, shape_width(shape)) for shape in shapes}
    record = describe_machine(device, *dtypes.values()) | {"what": "benchmarks/drafter_cost.py", "rows": []}
    for shape in shapes:
        model = load_shape(shape, dtypes[shape], device)
        for batch in map(int, arguments.batches.split(",")):
            row = {"shape": shape} | measure(model, batch, arguments.new_tokens)
            record["rows"].append(row)
            print(shape, f"batch {batch}: off {row['off_ms']:.2f} ms;", end=" ")
            print(", ".join(f"{way} {cost:.2f}" for way, cost in row["cost"].items()), end="; ")
            print(f"graphs {row['graphs']}, {row['graph_mb']:.0f} MB, apart {row['graph_mb_apart']:.0f} MB", flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
