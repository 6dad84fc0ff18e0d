"""Where the time of a steady decoding step goes on a GPU: its kernels, and the gaps between them.

    python benchmarks/step_profile.py --shapes qwen2.5-1.5b --batches 1,64 --out benchmarks/results/step_profile.json

Random weights, temperature 1. A gap is a stretch of the step in which no kernel runs. Kernels are launched before the
one before has ended, so a kernel's time counts from that end on.

The profiler slows the host, which then keeps a small model waiting between two steps. So gaps are measured twice: those
within a step by the profiler, and those between steps, where the host may be late, by two events around each step and
no profiler.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.engine.engine import Engine
from slipstream.engine.packing import StepSizes
from slipstream.models.shapes import random_model
from slipstream.rng import derive_seed
from slipstream.runtime.heap import still_heap
from slipstream.types import Request, SamplingParams

STEPS = 40
TIMED_STEPS = 160
CONTEXT = 300
"""Tokens each sequence has when profiling begins."""


def profile_decoding(engine: Engine, batch: int) -> dict[str, Any]:
    sampling = SamplingParams(max_new_tokens=CONTEXT + 2 * STEPS + TIMED_STEPS)
    for number in range(batch):
        prompt = tuple(100 + derive_seed(number, place) % 40000 for place in range(16))
        engine.submit([Request(f"{batch}/{number}", f"{batch}/{number}", prompt, derive_seed(number), sampling)])
    for _ in range(CONTEXT):
        engine.step()
    between = gaps_between_steps(engine)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_work:
        engine.step()
    kernels = sorted(
        ((e.time_range.start, e.time_range.end, e.name) for e in trace.events() if e.device_type.name == "CUDA"),
    )
    time_us: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    gaps_us: list[float] = []
    done, was_copy = kernels[0][0], False
    for start, end, name in kernels:
        if not was_copy:  # a step ends with the copy of its report
            gaps_us.append(start - done)
        was_copy = name.startswith("Memcpy DtoH")
        short = re.sub(r"<.*|\(.*", "", name)[:60]
        time_us[short] += max(0.0, end - max(start, done))
        calls[short] += 1
        done = max(done, end)
    step_us = between["step_us"]
    return {
        "batch": batch,
        "busy_us": sum(time_us.values()) / STEPS,
        "kernels_per_step": len(kernels) / STEPS,
        "largest_gap_within_us": max(gaps_us),
        "largest_gap_within_share": max(gaps_us) / step_us,
        **between,
        "kernels": [
            {"name": name, "us_per_step": us / STEPS, "calls_per_step": calls[name] / STEPS}
            for name, us in time_us.most_common(14)
        ],
    }


def gaps_between_steps(engine: Engine) -> dict[str, Any]:
    """From the end of each step's kernels to the start of the next one's, without a profiler."""
    graphs = engine._graphs
    assert graphs is not None
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    run = graphs.run

    def timed(sizes: StepSizes, body: Callable[[], None]) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(sizes, body)
        end.record()
        marks.append((begin, end))

    graphs.run = timed  # type: ignore[method-assign]
    try:
        for _ in range(TIMED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    finally:
        del graphs.run
    step_us = marks[0][1].elapsed_time(marks[-1][1]) * 1e3 / (len(marks) - 1)
    gaps_us = sorted(end.elapsed_time(begin) * 1e3 for (_, end), (begin, _) in pairwise(marks))
    return {
        "step_us": step_us,
        "median_gap_between_us": gaps_us[len(gaps_us) // 2],
        "largest_gap_between_us": gaps_us[-1],
        "largest_gap_between_share": gaps_us[-1] / step_us,
        "gaps_above_5_percent": sum(gap > 0.05 * step_us for gap in gaps_us),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="smollm2-135m,qwen2.5-1.5b,qwen2.5-7b")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--steps-ahead", type=int, help="steps launched before one is read; by default as the engine")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    rows = []
    for shape in arguments.shapes.split(","):
        model = random_model(shape, dtype=torch.bfloat16, device=torch.device("cuda"))
        engine = Engine(
            model,
            max_sequences=max(batches),
            max_length=CONTEXT + 2 * STEPS + TIMED_STEPS + 16,
            steps_ahead=arguments.steps_ahead,
        )
        for batch in batches:
            with still_heap():
                row = {"shape": shape} | profile_decoding(engine, batch)
            rows.append(row)
            print(json.dumps({name: value for name, value in row.items() if name != "kernels"}))
            for kernel in row["kernels"]:
                print(f"  {kernel['us_per_step']:9.1f} us  x{kernel['calls_per_step']:<6.1f} {kernel['name']}")
        del engine, model
        torch.cuda.empty_cache()
    arguments.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
