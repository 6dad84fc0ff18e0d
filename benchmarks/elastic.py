"""A rollout worker joins a run and another leaves it: where the seconds of each step went before, between and after.

    python benchmarks/elastic.py --out elastic.json

A small model is trained with mode=sync and train.deterministic=true, undisturbed with one worker and then once more:
`slipstream scale` asks for a second worker, and some steps after that has joined for one again. Each row is a step: who
sampled in it, and seconds of each process by account, from the run's own ledger. Both runs must end with the same
weights to the bit and the same rollouts, none lost and none there twice; exits with 1 if not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from drills import Run

from slipstream.observe.ledger import ACCOUNTS
from slipstream.observe.store import RunStore

WORDS = {"wording": "terse", "min_length": 3, "max_length": 6, "max_value": 9}
CHANGES: dict[str, Any] = {
    "rollout": {"workers": 1, "threads": 1},
    "tasks": {"train": [{"source": "sorting", "size": 2000, "seed": 1, "params": WORDS}]},
    "warmup": {"steps": 30, "sequences_per_step": 16, "lr": 4e-3},
    "sampling": {"max_new_tokens": 128},
    "engine": {"max_sequences": 64, "max_prompt_tokens": 32},
    "train": {"prompts_per_step": 16, "samples_per_prompt": 8, "lr": 4e-4, "threads": 1, "deterministic": True},
}
"""Of the recipe of `drills.py`. A checkpoint comes at the end only: it would be a part of some steps' time."""
ALONE = 3
"""Steps with one worker before another is asked for, and with two before one goes."""


def num_joined(run: Run) -> int:
    with RunStore(run.dir, read_only=True) as store:
        return len(store.events("WorkerJoined"))


def scale(run: Run, num_workers: int) -> None:
    command = [sys.executable, "-m", "slipstream.cli", "scale", str(run.dir), "--rollout", str(num_workers)]
    subprocess.run(command, check=True)


def weights(run: Run) -> bytes:
    return (run.last_checkpoint() / "model.safetensors").read_bytes()


def wait_until(process: subprocess.Popen[bytes], run: Run, is_so: Any) -> None:
    while not is_so():
        if process.poll() is not None:
            raise SystemExit(f"the run ended before all changes were made: give more --steps; see {run.log.name}")
        time.sleep(0.05)


def disturb(run: Run) -> None:
    process = run.start("--overwrite")
    wait_until(process, run, lambda: run.recorded() >= ALONE)
    scale(run, 2)
    wait_until(process, run, lambda: num_joined(run) == 2)
    joined_in = run.recorded()
    wait_until(process, run, lambda: run.recorded() >= joined_in + ALONE + 1)
    scale(run, 1)
    if process.wait() != 0:
        raise SystemExit(f"the run failed; its words: {run.log.name}")


def rows_of(run: Run) -> list[dict[str, Any]]:
    """By step: seconds by process and account, how many workers sampled, and what part of it they were there."""
    with RunStore(run.dir, read_only=True) as store:
        ledger, metrics = store.ledger(), store.metrics_by_name()
        stays = {name: [event.at_s for event in store.events(name)] for name in ("WorkerJoined", "WorkerLeft")}
        ended_s = {int(event.payload["step"]): event.at_s for event in store.events("Record")}
    rows = []
    for step in sorted(ended_s)[1:]:
        seconds: dict[str, dict[str, float]] = {}
        for entry in ledger:
            if entry.step == step:
                seconds.setdefault(entry.device, {})[entry.account] = round(entry.seconds, 3)
        began_s = ended_s[step - 1]
        here = [sum(at_s <= moment for at_s in stays["WorkerJoined"]) for moment in (began_s, ended_s[step])]
        gone = [sum(at_s <= moment for at_s in stays["WorkerLeft"]) for moment in (began_s, ended_s[step])]
        before, after = here[0] - gone[0], here[1] - gone[1]
        changed = (here[0], gone[0]) != (here[1], gone[1])
        row = {"step": step, "workers": f"{before}>{after}" if changed else str(before)}
        row |= {"step_s": round(ended_s[step] - began_s, 3), "tokens": metrics["rollout/tokens"][step]}
        rows.append(row | {"seconds": seconds})
    return rows


def part(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of steps with the same workers: a token's time, and shares of each process by account."""
    spent: dict[str, dict[str, float]] = {}
    for row in rows:
        for device, by_account in row["seconds"].items():
            for account, seconds in by_account.items():
                accounts = spent.setdefault(device, {})
                accounts[account] = accounts.get(account, 0.0) + seconds
    shares = {
        device: {name: round(by[name] / sum(by.values()), 3) for name in ACCOUNTS if by.get(name)}
        for device, by in spent.items()
    }
    a_token = [1e3 * row["step_s"] / row["tokens"] for row in rows]
    spread = statistics.stdev(a_token) if len(a_token) > 1 else 0.0
    return {"steps": len(rows), "ms_a_token": statistics.fmean(a_token), "spread": spread, "shares": shares}


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        by_device = [
            f"{device}: " + ", ".join(f"{name} {by[name]:.2f}" for name in ACCOUNTS if by.get(name, 0.0) >= 0.005)
            for device, by in sorted(row["seconds"].items())
        ]
        print(f"step {row['step']:>2}  workers {row['workers']:<3}  {row['step_s']:.2f} s  " + " | ".join(by_device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--keep", type=Path, help="a new folder for the runs; without it they are removed")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=options.keep is None)
        changes = CHANGES | {"train": CHANGES["train"] | {"steps": options.steps}}
        undisturbed, changed = (
            Run(folder, name, changes, save_every=options.steps) for name in ("undisturbed", "elastic")
        )
        if undisturbed.start("--overwrite").wait() != 0:
            raise SystemExit(f"the undisturbed run failed; its words: {undisturbed.log.name}")
        disturb(changed)
        rows, wanted, found = rows_of(changed), undisturbed.rollouts(), changed.rollouts()
        uids = [row[0] for row in found]
        harm = {
            "same_weights": weights(changed) == weights(undisturbed),
            "lost": len({row[0] for row in wanted} - set(uids)),
            "twice": len(uids) - len(set(uids)),
            "changed": sum(row not in set(wanted) for row in found),
        }
    first, second = (next((i for i, row in enumerate(rows) if row["workers"] == move), -1) for move in ("1>2", "2>1"))
    parts = {"before": rows[1:first], "between": rows[first + 1 : second], "after": rows[second + 1 :]}
    if first < 0 or second < 0 or not all(parts.values()):
        raise SystemExit("no step before, between or after the changes: give more --steps")
    record = {"what": "benchmarks/elastic.py", "rollouts": len(wanted), "harm": harm}
    record |= {"parts": {name: part(some) for name, some in parts.items()}, "rows": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    show(rows)
    for name, some in record["parts"].items():
        print(f"{name}: {some['steps']} steps, {some['ms_a_token']:.3f} ms a token (+-{some['spread']:.3f})")
    print(f"{len(wanted)} rollouts; {harm}")
    sys.exit(0 if harm == {"same_weights": True, "lost": 0, "twice": 0, "changed": 0} else 1)


if __name__ == "__main__":
    main()
