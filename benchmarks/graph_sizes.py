"""What a step that decodes takes in a CUDA graph of its own size, and in the next of the coarse sizes: needs a GPU.

    python benchmarks/graph_sizes.py --shapes smollm2-135m,qwen2.5-1.5b --out graph_sizes.json

For each number of sequences whose two sizes differ, in turns: milliseconds of a step in both, the median of all rounds.
Where the larger takes no longer, a graph of its own is worth nothing (`engine/fitting.py`), however often it is met.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.fitting import coarsely, padded
from slipstream.engine.measure import PROMPT_TOKENS, time_decoding
from slipstream.engine.packing import Launch
from slipstream.runtime.benches import check_shape, describe_machine, load_shape
from slipstream.runtime.heap import still_heap


def own(launches: list[Launch], coarser: Callable[[], list[Launch]]) -> list[Launch]:
    return launches


def larger(launches: list[Launch], coarser: Callable[[], list[Launch]]) -> list[Launch]:
    return coarser()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="smollm2-135m")
    parser.add_argument("--most", type=int, default=512, help="sequences")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU: without one, steps have no graphs")
    shapes = arguments.shapes.split(",")
    for shape in shapes:
        check_shape(shape)
    device = torch.device("cuda")
    dtype = torch.bfloat16
    sizes = sorted({padded(count) for count in range(1, arguments.most + 1) if padded(count) != coarsely(count)})
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        model = load_shape(shape, dtype, device)
        engine = Engine(model, max_sequences=arguments.most, max_length=PROMPT_TOKENS + arguments.new_tokens)
        assert engine._graphs is not None
        for size in sizes:
            step_ms: dict[str, list[float]] = {"own": [], "larger": []}
            for turn in range(2 * arguments.rounds):
                fit = (own, larger)[turn % 2]
                engine._graphs.fit = fit  # type: ignore[method-assign]
                with still_heap():
                    timing = time_decoding(engine, size, arguments.new_tokens, bytes_per_s=1.0)
                step_ms[fit.__name__].append(timing.step_ms)
            medians = {f"{name}_ms": statistics.median(values) for name, values in step_ms.items()}
            rows.append({"shape": shape, "size": size, "larger": coarsely(size), **medians, "step_ms": step_ms})
            ratio = medians["larger_ms"] / medians["own_ms"]
            print(f"{shape}: {size} in {size} {medians['own_ms']:.3f} ms, in {coarsely(size)} {ratio:.3f} times that")
        del engine, model
        torch.cuda.empty_cache()
    if arguments.out:
        record = describe_machine(device, dtype) | {"what": "benchmarks/graph_sizes.py", "rounds": arguments.rounds}
        arguments.out.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
