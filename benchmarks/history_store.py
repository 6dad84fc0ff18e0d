"""The history store with a million rollouts: how fast it takes them, how fast it gives them back, how large it is.

    python benchmarks/history_store.py --out benchmarks/results/history_store.json

Rollouts of 100 to 300 tokens, drawn by Zipf's law from a vocabulary of 49,152 (so two bytes a token, as with a real one
of that size), in batches of 512. Making them is not timed. `fetch` reads the 16 rollouts of prompts chosen at random,
without the store's memory cache unless it says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.history.store import HistoryStore, PastRollout

BATCH, GROUP, NUM_FETCHES = 512, 16, 5_000
Row = dict[str, Any]


def make_texts(num_texts: int, seed: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    share = 1 / (np.arange(49_152) + 5)
    lengths = rng.integers(100, 301, num_texts)
    return [tuple(rng.choice(len(share), length, p=share / share.sum()).tolist()) for length in lengths]


def batches(
    keys: Sequence[str], group: int, step: int, texts: Sequence[tuple[int, ...]], rng: random.Random
) -> Iterator[list[PastRollout]]:
    """Every prompt of `keys` once, in random order, with `group` rollouts."""
    order = rng.sample(keys, len(keys))
    for start in range(0, len(order), BATCH // group):
        yield [
            PastRollout(key, rng.choice(texts), float(rng.random() < 0.5), step, step - 1, step)
            for key in order[start : start + BATCH // group]
            for _ in range(group)
        ]


def time_adds(what: str, store: HistoryStore, work: Iterator[list[PastRollout]]) -> Row:
    seconds, num_rollouts = [], 0
    for batch in work:
        start = time.perf_counter()
        store.add(batch)
        seconds.append(time.perf_counter() - start)
        num_rollouts += len(batch)
    rate = {"rollouts": num_rollouts, "rollouts_per_s": num_rollouts / sum(seconds)}
    return {"what": what, **rate, **percentiles("batch_ms", seconds)}


def time_reads(what: str, read: Callable[[str], Sequence[Any]], keys: Sequence[str]) -> Row:
    seconds = []
    for key in keys:
        start = time.perf_counter()
        found = read(key)
        seconds.append(time.perf_counter() - start)
        assert len(found) == GROUP, f"{key}: {len(found)} rollouts"
    return {"what": what, "reads": len(keys), **percentiles("read_ms", seconds)}


def time_once(what: str, act: Callable[[], object]) -> Row:
    start = time.perf_counter()
    act()
    return {"what": what, "seconds": time.perf_counter() - start}


def percentiles(name: str, seconds: Sequence[float]) -> Row:
    p50, p99 = np.percentile(seconds, [50, 99])
    return {name: {"p50": 1e3 * p50, "p99": 1e3 * p99, "max": 1e3 * max(seconds)}}


def leave_page_cache(path: Path) -> None:
    """The next reads of the file come from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, num_rollouts: int) -> tuple[list[Row], Row]:
    rng = random.Random(0)
    texts = make_texts(4096, seed=0)
    keys = [f"{rng.getrandbits(64):016x}" for _ in range(num_rollouts // GROUP)]
    chosen = rng.choices(keys, k=NUM_FETCHES)
    path = folder / "history.db"
    rows = []
    with HistoryStore(path, memory_bytes=0) as store:
        rows.append(time_adds("add: 32 new prompts, 16 rollouts each", store, batches(keys, GROUP, 1, texts, rng)))
        assert store.num_rollouts == len(keys) * GROUP
    num_bytes = path.stat().st_size
    num_tokens = sum(map(len, texts)) / len(texts) * len(keys) * GROUP
    size = {"rollouts": len(keys) * GROUP, "file_mb": num_bytes / 1e6, "file_bytes_per_token": num_bytes / num_tokens}
    with HistoryStore(path, memory_bytes=0) as store:
        rows.append(time_reads("fetch", store.of_prompt, chosen))
        rows.append(time_reads("fetch lengths only", store.lengths, chosen))
        rows.append(time_once("count rollouts", lambda: store.num_rollouts))
        rows.append(time_once("forget_after, nothing to forget", lambda: store.forget_after(1)))
    leave_page_cache(path)
    with HistoryStore(path, memory_bytes=0) as store:
        rows.append(time_reads("fetch, file not in the page cache", store.of_prompt, chosen[:1000]))
    with HistoryStore(path, memory_bytes=1 << 30) as store:
        again = chosen[:1000]
        for key in again:
            store.of_prompt(key)
        rows.append(time_reads("fetch from the memory cache", store.of_prompt, again))
    with HistoryStore(folder / "new" / "history.db") as new:
        rows.append(time_once("warm_from, all of it", lambda: new.warm_from(folder)))
        assert new.num_rollouts == len(keys) * GROUP
    with HistoryStore(path, memory_bytes=0) as store:
        again = rng.sample(keys, len(keys) // 4)
        rows.append(time_adds("add: 32 full prompts, 16 rollouts each", store, batches(again, GROUP, 2, texts, rng)))
        rows.append(time_adds("add: 512 full prompts, 1 rollout each", store, batches(again, 1, 3, texts, rng)))
        rows.append(time_reads("fetch, after prompts were added to", store.of_prompt, chosen))
        limit = store.num_bytes
    with HistoryStore(path, memory_bytes=0, disk_bytes=limit) as store:
        others = [f"{rng.getrandbits(64):016x}" for _ in range(len(keys) // 4)]
        rows.append(time_adds("add: as the first, on a full disk", store, batches(others, GROUP, 4, texts, rng)))
        rows[-1]["file_over_limit"] = path.stat().st_size / limit
        assert store.num_bytes <= limit
    return rows, size


def show(rows: Sequence[Row], size: Row) -> None:
    for row in rows:
        rate = f"{row['rollouts_per_s']:,.0f} rollouts/s" if "rollouts_per_s" in row else ""
        spread = row.get("batch_ms") or row.get("read_ms") or {"once": 1e3 * row.get("seconds", 0)}
        print(f"{row['what']:42}{rate:>22}   " + "  ".join(f"{name} {ms:.3f} ms" for name, ms in spread.items()))
    print(", ".join(f"{name} {value:,.2f}" for name, value in size.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--dir", type=Path, help="where to write the files; by default the temporary folder")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/history_store.json"))
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        rows, size = measure(Path(folder), options.rollouts)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average_before": load_before,
        "versions": {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version},
        "batch": BATCH,
        "rollouts_per_prompt": GROUP,
        "size": size,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    show(rows, size)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
