"""Runs to be harmed: a small recipe with a signal in every step, a run in a folder of its own, and the faults that can
be done to its processes. `faults.py` and `soak.py` say when, and look at what it did; `elastic.py` harms nobody.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slipstream.train.checkpoint import latest_checkpoint

SLOW_S = 10.0
FULL_BYTES = 64 * 1024
"""A file may have so many where the disk is as good as full: a log fits, weights do not."""
PIDFD_GETFD = 438
"""The number of this system call, on every machine."""
START_S = 600.0
WORDS = {"wording": "terse", "min_length": 3, "max_length": 4, "max_value": 9}
RECIPE: dict[str, Any] = {
    "model": "tiny",
    "mode": "sync",
    "rollout": {"workers": 2, "threads": 1, "silence_s": 10},
    "tasks": {
        "train": [{"source": "sorting", "size": 400, "seed": 1, "params": WORDS}],
        "eval": {"heldout": {"source": "sorting", "size": 8, "seed": 2, "params": WORDS}},
    },
    "sampling": {"max_new_tokens": 96},
    "engine": {"max_sequences": 32, "max_prompt_tokens": 32},
    # Slowly: the model stays one that is right now and then, so that groups have a signal for hours.
    "train": {
        "steps": 6,
        "prompts_per_step": 8,
        "samples_per_prompt": 8,
        "lr": 1e-5,
        "deterministic": True,
        "silence_s": 30,
    },
    "eval": {"every": 0, "before_train": False},
}
WARM_START: dict[str, Any] = {
    "mode": "colocated",
    "rollout": {"workers": 1},
    "warmup": {"steps": 120, "sequences_per_step": 32, "lr": 4e-3},
    "train": RECIPE["train"] | {"steps": 1},
}


class Run:
    """One in a folder of its own."""

    def __init__(self, folder: Path, name: str, changes: dict[str, Any] | None = None, save_every: int = 2) -> None:
        self.dir = folder / name
        self.recipe = folder / f"{name}.yaml"
        self.settings = RECIPE | (changes or {})
        run = {"dir": str(self.dir), "save_every": save_every}
        self.recipe.write_text(yaml.safe_dump(self.settings | {"run": run}))
        self.log = (folder / f"{name}.log").open("a")

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "slipstream.cli", "train", str(self.recipe), *options]
        return subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def recorded(self) -> int:
        """The last step, or -1."""
        file = self.dir / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=-1)

    def processes(self) -> dict[str, int]:
        """All that are alive, by name; those that nobody has named by what they are for."""
        try:
            named: dict[str, int] = json.loads((self.dir / "processes.json").read_text())
        except FileNotFoundError:
            return {}  # none but the run has started
        found = {name: pid for name, pid in named.items() if command_of(pid)}
        for pid in children_of(named["driver"]):
            command = command_of(pid)
            for word, name in (
                ("guardian.py", "guardian"),
                ("forkserver", "forkserver"),
                ("resource_tracker", "tracker"),
            ):
                if word in command and pid not in found.values():
                    found[name if name not in found else f"{name}-{pid}"] = pid
                    graders = children_of(pid) if name == "guardian" else []
                    found |= {f"grader-{grader}": grader for grader in graders}
        return found

    def victims(self, kind: str) -> list[int]:
        """Of the processes that a fault of this kind may hit."""
        return [pid for name, pid in self.processes().items() if name.startswith(KINDS[kind].victim)]

    def tells_of(self, fault: Fault) -> bool:
        """Whether its output has a line that says what happened to whom, and names the log."""
        return bool(re.search(KINDS[fault.kind].words, Path(self.log.name).read_text()[fault.log_start :]))

    def last_checkpoint(self) -> Path:
        found = latest_checkpoint(self.dir)
        assert found is not None, f"{self.dir} has no checkpoint"
        return found

    def rollouts(self) -> list[tuple[Any, ...]]:
        return self._read("SELECT uid, token_ids, logprobs, reward FROM rollouts ORDER BY uid")

    def astray(self, num_steps: int) -> tuple[int, int]:
        """Rollouts of the first steps that are (lost, there twice): of each prompt, from the first position on, there
        must be all samples, and in one step only. Without dynamic sampling, which asks for more."""
        rows = self._read("SELECT grp, sample FROM rollouts WHERE kind = 'train' AND step <= ?", num_steps)
        of_position: dict[int, list[int]] = {}
        for group, sample in rows:
            of_position.setdefault(int(group.split("/")[1]), []).append(sample)
        train = self.settings["train"]
        samples = range(train["samples_per_prompt"])
        wanted = {(position, sample) for position in range(num_steps * train["prompts_per_step"]) for sample in samples}
        found = [(position, sample) for position, those in of_position.items() for sample in those]
        return len(wanted - set(found)), len(found) - len(set(found))

    def recovered_s(self, fault: Fault) -> float | None:
        """When what it interrupted was there again: a worker, a graded group, or a step that was under way."""
        name = KINDS[fault.kind].recovery
        rows = self._read("SELECT at_s, payload FROM events WHERE name = ? AND at_s > ? ORDER BY id", name, fault.at_s)
        for at_s, payload in rows:
            if name != "StepTrained" or json.loads(payload)["step"] > fault.after_step:
                return float(at_s)
        return None

    def _read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.dir / 'run.db'}?mode=ro", uri=True, timeout=30.0) as connection:
            return connection.execute(query, values).fetchall()


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    after_step: int
    """That was recorded before."""
    at_s: float
    """As `time.time` has it."""
    log_start: int
    """Characters that the run had printed before."""


@dataclass(frozen=True, slots=True)
class Kind:
    victim: str
    """How the names of the processes begin that it may hit."""
    strike: Callable[[int], None]
    recovery: str
    """The event that shows that what it interrupted is there again; a step that was under way, if it is StepTrained."""
    words: str
    """A pattern of what the run must print."""
    ends_run: bool = False
    """And somebody has to resume it."""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def slow_down(pid: int) -> None:
    """Let it run a fifth of the time for a while."""
    until_s = time.monotonic() + SLOW_S
    with suppress(ProcessLookupError):
        while time.monotonic() < until_s:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.4)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)


def fill_disk(pid: int) -> None:
    """As far as this process can tell: from now on the system refuses every larger file that it writes."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, resource.RLIM_INFINITY))


def cut_off(pid: int) -> None:
    """Shut its sockets down as the other end would find them after a broken connection. Both processes live on."""
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(entry).startswith("socket:"):
                ours = libc.syscall(PIDFD_GETFD, pidfd, int(entry.name), 0)
                if ours < 0:
                    raise OSError(ctypes.get_errno(), f"no way to reach the sockets of process {pid}")
                with socket.socket(fileno=ours) as one:
                    one.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(pidfd)


def log_of(name: str) -> str:
    return rf"{name} \(process \d+\) %s Its log: \S+/logs/{name}\.log"


WORKER, TRAINER = log_of(r"rollout-\d+"), log_of("trainer")
KINDS = {
    "worker killed": Kind("rollout-", kill, "WorkerJoined", WORKER % r"was ended by SIGKILL\."),
    "worker hangs": Kind("rollout-", stop, "WorkerJoined", r"rollout-\d+ has said nothing for \d+ s: it is killed"),
    "grader killed": Kind("grader", kill, "GroupScored", ""),
    "trainer killed": Kind("trainer", kill, "StepTrained", TRAINER % r"was ended by SIGKILL\."),
    "run killed": Kind("driver", kill, "StepTrained", "resumed from", ends_run=True),
    "trainer hangs": Kind(
        "trainer", stop, "StepTrained", r"trainer hangs: it said nothing .* and was killed\n" + TRAINER % r".*"
    ),
    "worker slow": Kind("rollout-", slow_down, "StepTrained", ""),
    "worker cut off": Kind("rollout-", cut_off, "WorkerJoined", WORKER % r"lost its connection .*"),
    "trainer cut off": Kind("trainer", cut_off, "StepTrained", TRAINER % r"lost its connection .*"),
    "disk full": Kind(
        "trainer", fill_disk, "StepTrained", r"training: .*File too large(.|\n)*" + TRAINER % r".*", True
    ),
}


def strike(run: Run, process: subprocess.Popen[bytes], kind: str, chance: random.Random) -> Fault:
    """Do it now. A run that it ends is for the caller to resume."""
    victims = run.victims(kind)
    fault = Fault(kind, run.recorded(), time.time(), len(Path(run.log.name).read_text()))
    KINDS[kind].strike(chance.choice(victims))
    if KINDS[kind].ends_run and process.wait(timeout=START_S) == 0:
        raise RuntimeError(f"{kind}: the run went on as if nothing had happened; see {run.log.name}")
    return fault


def wait_for_step(run: Run, process: subprocess.Popen[bytes], step: int, limit_s: float = START_S) -> None:
    """Until it is recorded."""
    until_s = time.monotonic() + limit_s
    while run.recorded() < step:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended by itself; see {run.log.name}")
        if time.monotonic() > until_s:
            raise RuntimeError(f"step {step} was not recorded in {limit_s:.0f} s; see {run.log.name}")
        time.sleep(0.02)


def warm_start(folder: Path) -> Path:
    """A model that has learned the form of answers and is right now and then: where the runs begin."""
    run = Run(folder, "warm-start", WARM_START)
    if latest_checkpoint(run.dir) is None and run.start().wait() != 0:
        raise RuntimeError(f"the warm start failed; see {run.log.name}")
    return run.last_checkpoint()


def children_of(pid: int) -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and stat_of(entry)[1:2] == [str(pid)]
    ]


def stat_of(entry: Path) -> Sequence[str]:
    """What /proc says of a process, from its state on; nothing if it has ended meanwhile."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ()


def command_of(pid: int) -> str:
    """Empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
