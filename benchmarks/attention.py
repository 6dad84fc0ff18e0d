"""The paged attention kernel: error against float64 for many head layouts, and bandwidth by batch and length.

    python benchmarks/attention.py --out benchmarks/results/attention.json

Needs a CUDA device. Times are of one CUDA graph with many calls; the bandwidth counts
keys and values read once, whatever the number of query heads and tokens that share them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.models.attention import AttentionForm
from slipstream.models.cached import PackedRows, attend_rows_plainly
from slipstream.models.paged_attention import attend_paged

PAGE_TOKENS = 64
# Query heads, key/value heads, head size: what models have, and ratios that are no power of two.
LAYOUTS = (
    (9, 3, 64), (12, 2, 128), (28, 4, 128), (32, 8, 128), (32, 32, 128), (16, 8, 256),
    (64, 8, 64), (71, 1, 64), (24, 8, 96), (14, 2, 64), (40, 10, 128), (8, 1, 256),
)  # fmt: skip
TIMED_LAYOUTS = LAYOUTS[:3]
LENGTHS = (1, 2, 17, 63, 64, 65, 511, 513, 1024, 4097, 32768)
WIDTHS = (1, 4, 8)
CALLS = 20


def case(
    heads: tuple[int, int, int], batch: int, length: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, PackedRows, AttentionForm]:
    """`batch` rows of `width` tokens, each over `length` keys in pages of its own."""
    num_query, num_key, size = heads
    pages_each = -(-length // PAGE_TOKENS)
    num_pages = batch * pages_each
    keys, values = (
        torch.randn(num_pages + 1, num_key, PAGE_TOKENS, size, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    query = torch.randn(batch * width, num_query, size, device=device, dtype=torch.bfloat16)
    table = torch.full((batch + 1, pages_each), num_pages, dtype=torch.int32, device=device)
    table[:batch] = torch.randperm(num_pages, device=device).view(batch, pages_each)
    slots = torch.arange(batch, device=device)
    rows = PackedRows(
        slot_T=slots.repeat_interleave(width),
        position_T=(length - width + torch.arange(width, device=device)).repeat(batch),
        slot_R=slots,
        start_R1=torch.arange(0, batch * width + 1, width, device=device, dtype=torch.int32),
        length_R=torch.full((batch,), length, dtype=torch.int32, device=device),
        table_SW=table,
    )
    return query, keys, values, rows, AttentionForm(size**-0.5)


def graph_s(call: Callable[[], object]) -> float:
    """Seconds of one call, the best of several replays of a graph of CALLS."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best / CALLS


def errors(device: torch.device) -> list[dict[str, Any]]:
    """Largest difference from float64 relative to the largest number, three rows of a length at a time."""
    results: list[dict[str, Any]] = []
    for heads in LAYOUTS:
        for length in LENGTHS:
            for width in WIDTHS:
                if width > length:
                    continue
                query, keys, values, rows, form = case(heads, 3, length, width, device)
                out = attend_paged(query, keys, values, rows, form)
                wide = attend_rows_plainly(query.double(), keys.double(), values.double(), rows, form)
                error = float((out - wide).abs().max() / wide.abs().max())
                results.append({"heads": heads, "length": length, "tokens_per_row": width, "relative_error": error})
        print(heads, "largest error", max(r["relative_error"] for r in results if r["heads"] == heads), flush=True)
    return results


def bandwidths(device: torch.device) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for heads in TIMED_LAYOUTS:
        for batch, length in (
            (1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 8192), (32, 8192), (1, 32768), (8, 32768),
        ):  # fmt: skip
            for width in WIDTHS:
                inputs = case(heads, batch, length, width, device)
                seconds = graph_s(lambda inputs=inputs: attend_paged(*inputs))  # type: ignore[misc]
                num_bytes = 2 * batch * length * heads[1] * heads[2] * 2
                row = {
                    "heads": heads, "batch": batch, "length": length, "tokens_per_row": width,
                    "us": seconds * 1e6, "tb_per_s": num_bytes / seconds / 1e12,
                }  # fmt: skip
                results.append(row)
                print(json.dumps(row), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(0)
    worst = errors(device)
    record = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "errors": worst, "bandwidths": bandwidths(device),
    }  # fmt: skip
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    largest = max(row["relative_error"] for row in worst)
    sys.exit(f"largest relative error {largest:.4f}, above 0.01" if largest > 1e-2 else 0)


if __name__ == "__main__":
    main()
