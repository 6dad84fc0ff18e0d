"""A long run with a fault every few minutes: does any process grow, is any rollout lost?

    python benchmarks/soak.py --minutes 60 --every 3 --folder runs/soak --out soak.json --plot soak.html

Faults come in turn, as in `faults.py`. Meanwhile the memory of every process is looked at: what it has allocated,
itself or as part of the server that it was forked from (`Anonymous` of smaps_rollup; USS is kept beside it, but grows
whenever a page is written to that was shared since the fork, which allocates nothing), with its open files and
threads. A process that is started again is another incarnation. Each kind of process is judged twice: within every
incarnation that lived long enough, by its last quarter against its first after it has settled; and between
incarnations at the same age, the last ones against the first, which shows growth that a new process takes over from
files. A process that trains has three times its memory for a moment in every step, and how many of these moments are
seen is chance: what counts is the level that a quarter of the looks are below, which is what it keeps. Flat means
within 5 % by both. Exits with 1 if a kind is not flat, a rollout was lost or there twice, or a fault was not recovered
from.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from drills import KINDS, RECIPE, Fault, Run, stat_of, strike, wait_for_step, warm_start

from slipstream.schedule.rules import MODES

FLAT = 0.05
"""Growth that is none."""
STEPS = 1_000_000
"""More than the run comes to: it is stopped."""
STOP_S = 300.0
TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    """Since the start."""
    age_s: float
    memory_mb: float
    uss_mb: float
    files: int
    threads: int


@dataclass(slots=True)
class Incarnation:
    name: str
    """As in processes.json, or what it is for."""
    pid: int
    born_s: float
    samples: list[Sample] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]

    def settled(self, settle_s: float) -> list[Sample]:
        return [sample for sample in self.samples if sample.age_s >= settle_s]


@dataclass(slots=True)
class Struck:
    fault: Fault
    at_s: float
    """Since the start."""
    recovery_s: float | None = None
    steps_done: int = 0
    """When it was recovered from."""


class Watch:
    """The processes of a run over time."""

    def __init__(self, run: Run) -> None:
        self._run, self._began_s = run, time.time()
        self.incarnations: dict[tuple[int, str], Incarnation] = {}

    def now_s(self) -> float:
        return time.time() - self._began_s

    def look(self) -> None:
        for name, pid in self._run.processes().items():
            try:
                born = stat_of(Path(f"/proc/{pid}"))[19]
                sample = look_at(pid, self.now_s(), int(born))
            except (OSError, IndexError, KeyError):
                continue  # it has ended meanwhile
            key = pid, born
            if key not in self.incarnations:
                self.incarnations[key] = Incarnation(name, pid, round(sample.at_s - sample.age_s, 1))
            self.incarnations[key].samples.append(sample)


def look_at(pid: int, at_s: float, born_ticks: int) -> Sample:
    """KeyError of a process that is a zombie, and has no memory."""
    entry = Path(f"/proc/{pid}")
    kb = {}
    for line in (entry / "smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        kb[name] = int(rest.split()[0])
    threads = next(line for line in (entry / "status").read_text().splitlines() if line.startswith("Threads:"))
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - born_ticks / os.sysconf("SC_CLK_TCK")
    return Sample(
        at_s=round(at_s, 1),
        age_s=round(age_s, 1),
        memory_mb=kb["Anonymous"] / 1024,
        uss_mb=(kb["Private_Clean"] + kb["Private_Dirty"]) / 1024,
        files=len(os.listdir(entry / "fd")),
        threads=int(threads.split()[1]),
    )


class Soak:
    def __init__(self, run: Run, minutes: float, every_min: float, sample_s: float, chance: random.Random) -> None:
        self._run, self._limit_s, self._every_s, self._chance = run, 60 * minutes, 60 * every_min, chance
        self._sample_s = sample_s
        self.watch = Watch(run)
        self.struck: list[Struck] = []
        self.steps: list[tuple[float, int]] = []
        """(seconds since the start, steps recorded)."""

    def go_through(self) -> None:
        self._process = self._run.start("--overwrite")
        try:
            wait_for_step(self._run, self._process, 1)
            self._strike_until_the_end()
            self._process.send_signal(signal.SIGINT)
            if self._process.wait(timeout=STOP_S) != 130:
                raise RuntimeError(f"the run could not be stopped; see {self._run.log.name}")
        finally:
            if self._process.poll() is None:
                self._process.kill()  # its processes end with it

    def _strike_until_the_end(self) -> None:
        looked_s, next_s = -self._sample_s, self.watch.now_s() + self._every_s
        while (now_s := self.watch.now_s()) < self._limit_s or self._waits():
            if self._process.poll() is not None:
                raise RuntimeError(f"the run ended by itself; see {self._run.log.name}")
            if now_s - looked_s >= self._sample_s:
                looked_s = now_s
                self.watch.look()
                self.steps.append((round(now_s, 1), self._run.recorded()))
                self._look_for_recovery()
            if now_s >= next_s and not self._waits() and now_s < self._limit_s - self._every_s / 2:
                next_s = now_s + self._every_s + self._chance.uniform(-2, 2)  # at any moment of a step
                kind = list(KINDS)[len(self.struck) % len(KINDS)]
                self.struck.append(Struck(strike(self._run, self._process, kind, self._chance), round(now_s, 1)))
                if KINDS[kind].ends_run:
                    self._process = self._run.start("--resume")
            time.sleep(TICK_S)

    def _waits(self) -> bool:
        """For recovery from the last fault."""
        return bool(self.struck) and self.struck[-1].recovery_s is None

    def _look_for_recovery(self) -> None:
        if not self._waits():
            return
        last = self.struck[-1]
        recovered_s = self._run.recovered_s(last.fault)
        if recovered_s is not None:
            last.recovery_s, last.steps_done = round(recovered_s - last.fault.at_s, 2), self._run.recorded()
            print(f"{last.at_s:7.0f} s  {last.fault.kind}: {last.recovery_s:.1f} s", file=sys.stderr, flush=True)
        elif time.time() - last.fault.at_s > STOP_S:
            raise RuntimeError(f"{last.fault} was not recovered from in {STOP_S:.0f} s; see {self._run.log.name}")


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line nearest to them."""
    mean_x, mean_y = statistics.fmean(x for x, _ in points), statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def kept_mb(samples: Sequence[Sample]) -> float:
    levels = sorted(sample.memory_mb for sample in samples)
    return levels[len(levels) // 4]


def grown_within(one: Incarnation, settle_s: float) -> dict[str, Any]:
    """How one incarnation's memory went after it had settled."""
    samples = one.settled(settle_s)
    quarter = max(1, len(samples) // 4)
    first, last = kept_mb(samples[:quarter]), kept_mb(samples[-quarter:])
    return {
        "name": one.name,
        "pid": one.pid,
        "born_s": one.born_s,
        "lived_s": samples[-1].age_s,
        "first_quarter_mb": round(first, 2),
        "last_quarter_mb": round(last, 2),
        "ratio": round(last / first, 4),
        "slope_mb_per_hour": round(3600 * slope([(sample.age_s, sample.memory_mb) for sample in samples]), 2),
        "files": [samples[0].files, samples[-1].files],
        "threads": [samples[0].threads, samples[-1].threads],
    }


def grown_between(those: Sequence[Incarnation], settle_s: float, until_s: float) -> dict[str, Any] | None:
    """The same age in one incarnation after the other; None for less than two that reached it."""
    levels = []
    for one in sorted(those, key=lambda one: one.born_s):
        aged = [sample for sample in one.samples if settle_s <= sample.age_s < until_s]
        if aged and one.samples[-1].age_s >= until_s:
            levels.append((one.born_s, kept_mb(aged)))
    if len(levels) < 2:
        return None
    quarter = max(1, len(levels) // 4)
    first = statistics.fmean(level for _, level in levels[:quarter])
    last = statistics.fmean(level for _, level in levels[-quarter:])
    return {
        "incarnations": len(levels),
        "age_s": [settle_s, until_s],
        "levels_mb": [round(level, 2) for _, level in levels],
        "ratio": round(last / first, 4),
        "slope_mb_per_hour": round(3600 * slope(levels), 2),
    }


def judge(incarnations: Iterable[Incarnation], settle_s: float, long_s: float) -> dict[str, dict[str, Any]]:
    """By kind of process. `is_flat` is None where nothing lived long enough to say."""
    by_kind: dict[str, list[Incarnation]] = {}
    for one in incarnations:
        by_kind.setdefault(one.kind, []).append(one)
    verdicts = {}
    for kind, those in sorted(by_kind.items()):
        long_lived = [one for one in those if one.samples[-1].age_s - settle_s >= long_s]
        within = [grown_within(one, settle_s) for one in long_lived]
        between = grown_between(those, settle_s, settle_s + min(60.0, long_s))
        ratios = [each["ratio"] for each in within] + ([between["ratio"]] if between else [])
        verdicts[kind] = {
            "incarnations": len(those),
            "most_mb": round(max(sample.memory_mb for one in those for sample in one.samples), 1),
            "within": within,
            "between": between,
            "worst_ratio": max(ratios, default=None),
            "is_flat": all(ratio <= 1 + FLAT for ratio in ratios) if ratios else None,
        }
    return verdicts


def table(result: dict[str, Any]) -> str:
    head = (
        f"{'process':<11}{'lives':>6}{'judged':>7}{'first MB':>10}{'last MB':>9}{'within':>8}{'MB/h':>8}{'between':>9}"
    )
    lines = [head + "  flat within 5 %"]
    for kind, one in result["memory"].items():
        words = f"{kind:<11}{one['incarnations']:>6}{len(one['within']):>7}"
        if one["within"]:
            worst = max(one["within"], key=lambda each: each["ratio"])
            words += f"{worst['first_quarter_mb']:>10.1f}{worst['last_quarter_mb']:>9.1f}{worst['ratio']:>8.3f}"
            words += f"{worst['slope_mb_per_hour']:>8.1f}"
        else:
            words += f"{'-':>10}{'-':>9}{'-':>8}{'-':>8}"
        words += f"{one['between']['ratio']:>9.3f}" if one["between"] else f"{'-':>9}"
        lines.append(words + "  " + {True: "yes", False: "NO", None: "too short-lived to say"}[one["is_flat"]])
    for kind, seconds in result["recovery_s"].items():
        lines.append(f"{kind}: {len(seconds)} times, recovered in {min(seconds):.1f} to {max(seconds):.1f} s")
    lines.append(
        f"{result['minutes']:.0f} minutes, {result['steps']} steps, {result['faults']} faults, "
        f"{result['lost']} rollouts lost, {result['twice']} there twice"
    )
    return "\n".join(lines)


def plot(incarnations: Iterable[Incarnation], struck: Sequence[Struck], file: Path) -> None:
    colours = {"driver": "#2a78d6", "trainer": "#eda100", "rollout": "#1baf7a", "grader": "#6a5acd"}
    figure, shown = go.Figure(), set[str]()
    for one in incarnations:
        minutes, memory_mb = [s.at_s / 60 for s in one.samples], [s.memory_mb for s in one.samples]
        line = {"color": colours.get(one.kind, "#9aa0a6")}
        first = one.kind not in shown
        shown.add(one.kind)
        figure.add_scatter(x=minutes, y=memory_mb, name=one.kind, legendgroup=one.kind, showlegend=first, line=line)
    for hit in struck:
        figure.add_vline(hit.at_s / 60, line={"color": "#e34948", "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=hit.at_s / 60, y=1, yref="paper", text=hit.fault.kind, textangle=-90, showarrow=False, xanchor="right"
        )
    figure.update_layout(xaxis_title="minutes", yaxis_title="MB", yaxis_rangemode="tozero", hovermode="closest")
    figure.write_html(file, include_plotlyjs=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=3.0, help="minutes between two faults")
    parser.add_argument("--mode", choices=sorted(MODES), default="sync")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=float, default=3.0, help="seconds between two looks at the memory")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds of a process's life that do not count")
    parser.add_argument("--long", type=float, default=240.0, help="seconds after that, from which on it is judged")
    parser.add_argument("--folder", type=Path, required=True, help="for the run and its logs")
    parser.add_argument("--out", type=Path, help="a file for the JSON, beside the table on stdout")
    parser.add_argument("--plot", type=Path, help="an HTML file: memory over time, with the faults")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    changes = {
        "model": str(warm_start(options.folder)),
        "mode": options.mode,
        "train": RECIPE["train"] | {"steps": STEPS},
    }
    run = Run(options.folder, "soak", changes, save_every=5)
    soak = Soak(run, options.minutes, options.every, options.sample, random.Random(options.seed))
    failure = None
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and end the run
    try:
        soak.go_through()
    except RuntimeError as error:
        failure = str(error)
    incarnations = list(soak.watch.incarnations.values())
    steps = run.recorded()
    lost, twice = run.astray(steps)
    recovery: dict[str, list[float]] = {}
    for hit in soak.struck:
        if hit.recovery_s is not None:
            recovery.setdefault(hit.fault.kind, []).append(hit.recovery_s)
    result = {
        "mode": options.mode,
        "minutes": round(soak.watch.now_s() / 60, 1),
        "steps": steps,
        "faults": len(soak.struck),
        "failure": failure,
        "lost": lost,
        "twice": twice,
        "recovery_s": recovery,
        "memory": judge(incarnations, options.settle, options.long),
        "struck": [{"at_s": hit.at_s, "recovery_s": hit.recovery_s, **asdict(hit.fault)} for hit in soak.struck],
        "steps_at_s": soak.steps[::10],
        "samples": [
            {"name": one.name, "pid": one.pid, "born_s": one.born_s}
            | {
                "at_s": [s.at_s for s in one.samples],
                "memory_mb": [round(s.memory_mb, 1) for s in one.samples],
                "uss_mb": [round(s.uss_mb, 1) for s in one.samples],
            }
            for one in incarnations
        ],
    }
    print(table(result))
    if failure is not None:
        print(f"FAILED: {failure}")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot is not None:
        plot(incarnations, soak.struck, options.plot)
    is_well = (
        failure is None and not lost + twice and all(one["is_flat"] is not False for one in result["memory"].values())
    )
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
