"""`slipstream report` of runs that have grown: seconds, memory, rows read, and the size of what it writes.

    python benchmarks/run_size.py --steps 1800 7200 --json benchmarks/results/run_size.json

Writes a run folder of each size through RunStore, as a colocated run with drafts and evaluations does (256 training
rollouts a step, 256 evaluated every ninth step, 70 events, 45 metrics, the ledger), and has its report and its trace
written by processes of their own, as a user and a run do. The folders stay under --folder, and are used again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slipstream.config import build_config, dump_config
from slipstream.observe.ledger import Entry
from slipstream.observe.metrics import draft_share_name, evaluation_metrics, rollout_metrics
from slipstream.observe.store import RunStore
from slipstream.rng import keyed_random
from slipstream.schedule import events
from slipstream.types import Request, Rollout, SamplingParams, Scored

PROMPTS, SAMPLES, EVAL_PROMPTS, EVAL_SAMPLES, EVAL_EVERY = 32, 8, 64, 4, 9
REPORT = [sys.executable, "-c", "from slipstream.cli import main; main()", "report"]
REFRESH = [sys.executable, "-m", "slipstream.observe.reports"]


def write_run(folder: Path, num_steps: int) -> None:
    """Nothing is written if it is there."""
    done = folder / "complete"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tasks = {"train": [{"source": "gcd", "size": 5000}], "eval": {"held": {"source": "gcd", "size": EVAL_PROMPTS}}}
    tree = {"model": "tiny", "run": {"dir": str(folder)}, "tasks": tasks, "train": {"steps": num_steps}}
    (folder / "config.yaml").write_text(dump_config(build_config(tree)))
    with RunStore(folder) as store:
        clock = Clock()
        note(store, clock, 0, events.RunBegan(0, 0, False))
        evaluate(store, 0)
        for step in range(1, num_steps + 1):
            write_step(store, clock, step)
            if step % EVAL_EVERY == 0:
                evaluate(store, step)
    done.touch()


class Clock:
    now_s = 1.7e9

    def pass_by(self, seconds: float) -> float:
        self.now_s += seconds
        return self.now_s


def note(store: RunStore, clock: Clock, step: int, item: Any) -> None:
    name, fields = events.to_record(item)
    store.add_event(step, clock.pass_by(0.01), name, fields)


def write_step(store: RunStore, clock: Clock, step: int) -> None:
    begin = (step - 1) * PROMPTS
    for position in range(begin, begin + PROMPTS):
        note(store, clock, step - 1, events.Generate(step, position))
    groups = [f"{step}/{position}" for position in range(begin, begin + PROMPTS)]
    results = [scored(f"{group}/{sample}", group) for group in groups for sample in range(SAMPLES)]
    for position in range(begin, begin + PROMPTS):
        note(store, clock, step - 1, events.GroupScored(step, position, SAMPLES, 0, True))
    store.add_event(step - 1, clock.now_s, "DraftChosen", {"batch": step % 64 + 1, "strategy": "off", "reason": "dear"})
    note(store, clock, step - 1, events.Train(step, tuple(range(begin, begin + PROMPTS))))
    store.add_rollouts(
        step, "train", "train", {group: (f"key {group}", f"gcd of {group}?") for group in groups}, results
    )
    num_tokens = sum(len(one.rollout.token_ids) for one in results)
    gen_s, train_s = 0.2 + 3e-5 * num_tokens, 0.1 + 2e-5 * num_tokens
    clock.pass_by(train_s)
    note(store, clock, step, events.StepTrained(step))
    note(store, clock, step, events.PushWeights(step))
    note(store, clock, step, events.WeightsLive(step))
    row = rollout_metrics(results, [], SAMPLES)
    row |= {"timing_s/gen": gen_s, "timing_s/update_actor": train_s, "timing_s/step": gen_s + train_s + 0.05}
    row |= {"perf/throughput": num_tokens / (gen_s + train_s), "rollout/tokens_per_s": num_tokens / gen_s}
    row |= {draft_share_name(origin): 0.1 for origin in (1, 2, 3)}
    row |= {"rollout/spec_accept_length": 1.5, "rollout/spec_accept_rate": 0.6, "rollout/spec_saved_s": 0.01}
    row |= {f"actor/{name}": 1.0 / step for name in ("pg_loss", "entropy", "clipfrac", "kl", "lr", "tokens")}
    row |= {"actor/grad_norm": math.nan if step % 500 == 0 else 0.5, "mismatch_kl": 1e-4}
    row |= {f"engine/{name}": float(step) for name in ("graphs", "graph_mb", "forwards", "pages", "preempted", "kv_mb")}
    store.add_metrics(step, row)
    spent = {"decode": gen_s, "accepted drafts": gen_s / 9, "rejected drafts": gen_s / 20, "prefill": gen_s / 10}
    spent |= {"training": train_s, "weight sync": 0.01, "evaluation": 0.02, "idle": 0.01}
    store.add_ledger([Entry(step, "local", account, seconds) for account, seconds in spent.items()])
    note(store, clock, step, events.Record(step))


def evaluate(store: RunStore, step: int) -> None:
    groups = [f"eval/held/{step}/{number}" for number in range(EVAL_PROMPTS)]
    results = [scored(f"{group}/{sample}", group) for group in groups for sample in range(EVAL_SAMPLES)]
    store.add_rollouts(step, "eval", "held", {group: (f"key {group}", "gcd?") for group in groups}, results)
    store.add_metrics(step, evaluation_metrics("held", results, [], EVAL_SAMPLES))


def scored(uid: str, group: str) -> Scored:
    """About 35 tokens, with a tail; drafted here and there."""
    dice = keyed_random("run size", uid)
    length = min(512, max(4, round(30 * math.exp(dice.gauss(0, 0.6)))))
    request = Request(uid, group, (1,), dice.getrandbits(60), SamplingParams())
    origins = tuple([place % 5 and 2 for place in range(length)])
    tokens = tuple([7 + place % 80 for place in range(length)])
    rollout = Rollout(request, tokens, (-0.25,) * length, "stop", 1, 1, origins)
    reward = float(dice.random() < 0.5)
    return Scored(rollout, "12 = 3 * 4, so " * (length // 6), reward, {"task": reward})


def measure(command: list[str], folder: Path) -> dict[str, float]:
    """Of a process of its own: its seconds and the most memory it had. Not ru_maxrss, which counts what the process had
    that started it."""
    began, peak_mb = time.perf_counter(), 0.0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen([*command, str(folder)], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            peak_mb = max(peak_mb, int(found[1]) / 1e3) if found else peak_mb
            time.sleep(0.01)
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "peak_mb": round(peak_mb, 1)}


def look_at(folder: Path, num_steps: int, repeats: int) -> dict[str, Any]:
    num_evaluations = num_steps // EVAL_EVERY + 1
    with RunStore(folder, read_only=True) as store:
        num_events = store.num_events()
    found: dict[str, Any] = {
        "steps": num_steps,
        "rollouts": num_steps * PROMPTS * SAMPLES + num_evaluations * EVAL_PROMPTS * EVAL_SAMPLES,
        "events": num_events,
        "run_db_mb": round((folder / "run.db").stat().st_size / 1e6),
    }
    found["report"] = [measure(REPORT, folder) for _ in range(repeats)]
    found["refresh"] = [measure(REFRESH, folder) for _ in range(repeats)]
    trace = json.loads((folder / "trace.json").read_text())
    found["page_mb"] = round((folder / "report.html").stat().st_size / 1e6, 2)
    found["trace_mb"] = round((folder / "trace.json").stat().st_size / 1e6, 2)
    found["trace_events"] = len(trace["traceEvents"])
    found["load"] = round(os.getloadavg()[0], 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1800, 7200])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/slipstream-run-size"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write-only", action="store_true", help="write the run folders and measure nothing")
    options = parser.parse_args()
    results = []
    for num_steps in options.steps:
        folder = options.folder / f"steps-{num_steps}"
        write_run(folder, num_steps)
        if not options.write_only:
            results.append(look_at(folder, num_steps, options.repeats))
            print(json.dumps(results[-1]))
    if options.json is not None:
        options.json.write_text(json.dumps({"what": "run_size", "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
