"""How long a run takes to its first rollout, and how much memory, by the rows of its data set.

    python benchmarks/data_size.py --rows 300000 1000000 --json benchmarks/results/data_size.json

Rows of about 140 bytes (1,000,000 of them: 142 MB of jsonl), 100 others as an evaluation set, the tiny model, a reward
function of the user's that needs a column. Seconds are from the start of `slipstream train` to its first action that
samples; the peak is of that process, over a run of one step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from slipstream.observe.store import RunStore

TRAIN = [sys.executable, "-c", "from slipstream.cli import main; main()", "train"]
REWARD = "def right(completions, answer, **columns):\n    return [float(a in c) for c, a in zip(completions, answer)]\n"


def make_rows(num_rows: int, seed: int) -> list[dict[str, Any]]:
    dice = random.Random(seed)
    rows = []
    for number in range(num_rows):
        first, second = dice.randint(1, 9999), dice.randint(1, 9999)
        question = (
            f"What is {first} plus {second}? Write the number only, nothing before or after it ({seed}/{number})."
        )
        rows.append({"prompt": question, "answer": str(first + second), "id": number})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def start(folder: Path, data: Path) -> dict[str, Any]:
    recipe = {
        "model": "tiny",
        "device": "cpu",
        "run": {"dir": str(folder / "run")},
        "tasks": {"train": [{"source": str(data)}], "eval": {"held": {"source": str(folder / "held.jsonl")}}},
        "reward": {"functions": [{"function": f"{folder / 'reward.py'}:right"}]},
        "sampling": {"max_new_tokens": 8},
        "train": {"steps": 1, "prompts_per_step": 4, "samples_per_prompt": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    began_s = time.time()
    log = (folder / "log.txt").open("w")
    seen: list[tuple[float, float, float]] = []
    """Time, peak in MB and CPU seconds so far."""
    line_s = None
    command = [*TRAIN, str(folder / "recipe.yaml"), "--overwrite"]
    with log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            if found:
                cpu_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
                seen.append((time.time(), int(found[1]) / 1e3, cpu_s))
            if line_s is None and "from the start" in (folder / "log.txt").read_text():
                line_s = time.time()
            time.sleep(0.05)
    assert process.returncode == 0, (folder / "log.txt").read_text()
    with RunStore(folder / "run", read_only=True) as store:
        first_s = min(event.at_s for name in ("Generate", "Evaluate") for event in store.events(name))
    assert line_s is not None, "the run has not said that it begins"
    result: dict[str, Any] = {"load": round(os.getloadavg()[0], 1)}
    for name, at_s in (("first_line", line_s), ("first_rollout", first_s)):
        _, peak_mb, cpu_s = next(one for one in reversed(seen) if one[0] <= at_s)
        result |= {f"{name}_s": round(at_s - began_s, 1), f"{name}_cpu_s": round(cpu_s, 1)}
        result[f"{name}_peak_mb"] = round(peak_mb)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 300_000, 1_000_000])
    parser.add_argument("--formats", nargs="+", default=["jsonl", "json", "parquet"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/slipstream-data-size"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write-only", action="store_true", help="write the data and measure nothing")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "reward.py").write_text(REWARD)
    write_rows(options.folder / "held.jsonl", make_rows(100, 1))
    results = []
    for num_rows in options.rows:
        for suffix in options.formats:
            data = options.folder / f"rows-{num_rows}.{suffix}"
            if not data.exists():
                write_rows(data, make_rows(num_rows, 0))
            if options.write_only:
                continue
            measured = [start(options.folder, data) for _ in range(options.repeats)]
            size_mb = round(data.stat().st_size / 1e6, 1)
            results.append({"rows": num_rows, "format": suffix, "file_mb": size_mb, "starts": measured})
            print(json.dumps(results[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"what": "data_size", "starts": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
