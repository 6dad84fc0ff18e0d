"""Bad inputs to the command line: what ends in a traceback, hangs, or cannot run though it was accepted?

    python benchmarks/fuzz.py --seconds 3600 --seed 0 --out fuzz.json
    python benchmarks/fuzz.py --kinds settings --only 17 --seed 0

Kinds of case, in turn: `settings` (a recipe with one or two values by chance is asked for with --dry-run; what that
accepts is trained with for one step, unless the value only asks for more work), `data` (a damaged .jsonl, .json or
.parquet is trained on), `runs` (a file of a finished run is damaged, and the run is resumed, evaluated, reported on,
simulated, replayed or taught from), `files` (a damaged curve, trace or recipe, or what is no file), `options` (any
command with wrong words for its options) and `edges` (every number at the smallest and at the largest value that is
accepted, and every choice: each is trained with). Each case is a process of its own with a time limit, forked from one
that has imported torch. A case is drawn from the seed, its kind and its number alone: --only runs one again and shows
what it printed. Ends with a table of what became of the cases, and exits with 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import yaml
from fuzz_inputs import NO_FILES, base_tree, damage, draw_setting, draw_words, settings, values_for, with_value
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slipstream.cli import main
from slipstream.config import build_config
from slipstream.runtime.capacity import check_start

LIMIT_S = 240.0
"""Of a case; a step of the tiny model takes two seconds on an idle core, and much longer on a busy one."""
MEMORY_BYTES = 24 << 30
"""Of addresses, which torch reserves more of than it uses."""
MORE_WORK = 64
"""Larger values of these settings are accepted and only take longer."""
WORK = (
    *(
        "steps",
        "size",
        "prompts_per_step",
        "samples_per_prompt",
        "updates",
        "sequences_per_step",
        "max_sampling_rounds",
    ),
    *("workers", "min", "max", "ranks", "max_new_tokens", "max_prompt_tokens", "keep_last", "threads"),
)
LONG_COMMANDS = {("check",)}
"""They ask the hub for a model."""
SMALL_WORK = {
    ("bench", "engine"): "--shapes tiny --batches 1 --new-tokens 16",
    ("bench", "history"): "--shape tiny --batches 1 --likenesses 0.5 --new-tokens 16",
    ("simulate",): "--steps 8 --prompts 8 --samples 2 --gpus 4",
    ("plan",): "--prompts 8 --samples 2",
}
"""Options that come before those drawn, so that a command whose other options are right ends within the limit."""
VERDICTS = ("ran", "refused", "late", "usage", "failed", "more work", "TRACEBACK", "HANG", "KILLED", "MUTE")
"""ran: exit 0; refused: one sentence and exit 2; late: so, by `train` before its first step, for what only the model or
the data shows; usage: an option that is none; failed: one sentence and exit 1; more
work: accepted and not run. The rest are findings; mute: an exit code other than 0 and no sentence."""


@dataclass(frozen=True, slots=True)
class Outcome:
    verdict: str
    seconds: float
    said: str


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    number: int
    what: str
    verdict: str
    seconds: float
    said: str


def run(words: list[str], folder: Path, limit_s: float = LIMIT_S) -> Outcome:
    """The command in a forked process and a session of its own, ended with all its children."""
    started_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become_command(words, folder)
    code: int | None = None
    while code is None and time.monotonic() - started_s < limit_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    seconds = time.monotonic() - started_s
    said = (folder / "stderr").read_text(errors="replace")
    return Outcome(verdict_of(code, said), seconds, said)


def verdict_of(code: int | None, said: str) -> str:
    sentences = [line for line in said.splitlines() if line.startswith("slipstream: ")]
    if code is None:
        return "HANG"
    if "Traceback (most recent call last)" in said and not (sentences and code == 1):  # a grader's own may be quoted
        return "TRACEBACK"
    if code < 0:
        return "KILLED"
    if code == 0:
        return "ran"
    if code == 2 and "Usage: " in said:
        return "usage"
    if not sentences:
        return "MUTE"
    return "refused" if code == 2 else "failed"


def _become_command(words: list[str], folder: Path) -> None:
    code = 99
    try:
        os.setsid()
        out, err = (os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("stdout", "stderr"))
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        main(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Fuzz:
    def __init__(self, folder: Path, seed: int, first: int) -> None:
        self._folder, self._seed, self._edges = folder, seed, edges()[first:]
        self._finished = folder / "finished"
        tree = base_tree(self._finished / "run")
        tree["train"]["steps"] = 2
        self._finished.mkdir()
        recipe = self._write_recipe(self._finished, tree)
        first = run(["train", str(recipe), "--quiet"], self._finished, 300)
        assert first.verdict == "ran", first

    @property
    def num_edges(self) -> int:
        """How many are still to be asked."""
        return len(self._edges)

    def ask(self, kind: str, number: int) -> Case:
        chance = random.Random(f"{self._seed} {kind} {number}")
        folder = self._folder / f"{kind}-{number}"
        folder.mkdir()
        try:
            what, outcome = KINDS[kind](self, chance, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Case(kind, number, what, outcome.verdict, round(outcome.seconds, 2), outcome.said[-3000:])

    def settings(self, chance: random.Random, folder: Path) -> tuple[str, Outcome]:
        tree, drawn = base_tree(folder / "run"), []
        for _ in range(chance.choice((1, 1, 2))):
            path, value = draw_setting(chance)
            try:
                tree = with_value(tree, path, value)
            except (TypeError, ValueError, IndexError, KeyError, AttributeError):
                continue  # the first value has taken away what this one is in
            drawn.append((path, value))
        what = ", ".join(f"{path}={value!r:.60}" for path, value in drawn)
        recipe = self._write_recipe(folder, tree)
        asked = run(["train", str(recipe), "--dry-run"], folder)
        if asked.verdict != "ran":
            return what, asked
        if any(_asks_for_more(path, value) for path, value in drawn):
            return what, Outcome("more work", asked.seconds, "")
        trained = run(["train", str(recipe), "--quiet"], folder)
        late = replace(trained, verdict="late") if trained.verdict == "refused" else trained
        return what + " (train)", late

    def edges(self, chance: random.Random, folder: Path) -> tuple[str, Outcome]:
        if not self._edges:
            return "", Outcome("more work", 0.0, "")
        path, value = self._edges.pop(0)
        recipe = self._write_recipe(folder, with_value(base_tree(folder / "run"), path, value))
        return f"{path}={value!r:.60} (train)", run(["train", str(recipe), "--quiet"], folder)

    def data(self, chance: random.Random, folder: Path) -> tuple[str, Outcome]:
        import pyarrow
        import pyarrow.parquet

        rows = [{"prompt": f"{n}+1", "answer": str(n), "extra": {"n": n}} for n in range(4)]
        name = chance.choice(("x.jsonl", "x.json", "x.parquet"))
        file = folder / name
        if name == "x.parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        else:
            file.write_text(json.dumps(rows) if name == "x.json" else "".join(json.dumps(row) + "\n" for row in rows))
        for _ in range(chance.choice((1, 1, 2))):
            file.write_bytes(damage(file.read_bytes(), chance))
        tree = base_tree(folder / "run")
        tree["tasks"] = {"train": [{"source": str(file)}]}
        tree["reward"] = {"functions": [{"function": "math_verify"}]}
        return f"{name}: {file.read_bytes()[:60]!r}", run(["train", str(self._write_recipe(folder, tree))], folder)

    def runs(self, chance: random.Random, folder: Path) -> tuple[str, Outcome]:
        shutil.copytree(self._finished / "run", folder / "run")
        files = sorted(path for path in (folder / "run").rglob("*") if path.is_file() and path.name != ".lock")
        file = chance.choice(files)
        if chance.random() < 0.2:
            kind = chance.choice(sorted(NO_FILES))
            file.unlink()
            NO_FILES[kind](file)
            what = f"{file.relative_to(folder)} is {kind}"
        else:
            file.write_bytes(damage(file.read_bytes(), chance))
            what = f"{file.relative_to(folder)} damaged"
        here, run_dir = str(folder), str(folder / "run")
        tree = base_tree(folder / "run")
        tree["train"]["steps"] = 3
        recipe = str(self._write_recipe(folder, tree))
        words = chance.choice(
            (
                ["train", recipe, "--resume", "--quiet"],
                ["train", recipe, "--resume", "--quiet", "mode=sync"],
                ["train", recipe, "--resume-from", f"{run_dir}/checkpoints/step_1", "--quiet"],
                ["eval", run_dir, "--json"],
                ["report", run_dir],
                ["simulate", "--run", run_dir, "--gpus", "2", "--systems", "colocated", "--steps", "2"],
                ["simulate", "--against", run_dir],
                ["bench", "history", "--shape", "tiny", "--trace", run_dir, "--batches", "1"],
                ["train-drafter", run_dir, "--updates", "1", "--quiet"],
                ["export-drafter", run_dir, f"{here}/drafter"],
                ["scale", run_dir, "--rollout", "2"],
            )
        )
        return f"{what}: {' '.join(words)}", run(words, folder)

    def files(self, chance: random.Random, folder: Path) -> tuple[str, Outcome]:
        bench = {"rows": [{"shape": "x", "batch": 2**n, "step_ms": 2.0 + n} for n in range(4)]}
        rollouts = [{"p": "0", "ep": epoch, "t": [1, 2, 3]} for epoch in range(3)]
        recipe = yaml.safe_dump(base_tree(folder / "run"))
        name, whole, words = chance.choice(
            (
                (
                    "curve.json",
                    json.dumps(bench),
                    ["simulate", *SMALL_WORK[("simulate",)].split(), "--shape", "x", "--curve"],
                ),
                (
                    "rollouts.jsonl",
                    "".join(json.dumps(one) + "\n" for one in rollouts),
                    ["bench", "history", "--shape", "tiny", "--batches", "1", "--trace"],
                ),
                ("x.yaml", recipe, ["train", "--dry-run"]),
                ("x.yaml", recipe, ["eval"]),
            )
        )
        file = folder / name
        if chance.random() < 0.2:
            kind = chance.choice(sorted(NO_FILES))
            NO_FILES[kind](file)
            return f"{name} is {kind}", run([*words, str(file)], folder)
        file.write_bytes(damage(whole.encode(), chance))
        return f"{name}: {file.read_bytes()[:60]!r}", run([*words, str(file)], folder)

    def options(self, chance: random.Random, folder: Path) -> tuple[str, Outcome]:
        words = draw_words(chance, LONG_COMMANDS)
        for command, options in SMALL_WORK.items():
            if tuple(words[: len(command)]) == command:
                words = [*command, *options.split(), *words[len(command) :]]
        return " ".join(f"{word:.60}" for word in words).encode("utf-8", "backslashreplace").decode(), run(
            words, folder
        )

    def _write_recipe(self, folder: Path, tree: dict[str, Any]) -> Path:
        (folder / "x.yaml").write_text(yaml.dump(tree))
        return folder / "x.yaml"


def edges() -> list[tuple[str, Any]]:
    """Of every number the smallest and the largest value that are accepted, and every choice of words."""
    found: list[tuple[str, Any]] = []
    for path, info in settings():
        accepted = [value for value in values_for(info) if _is_accepted(path, value)]
        numbers = [value for value in accepted if isinstance(value, int | float) and not isinstance(value, bool)]
        if any(kind in (info.annotation, *get_args(info.annotation)) for kind in (int, float)) and numbers:
            found += [(path, min(numbers)), (path, max(numbers))]
        else:
            words = {
                word for part in (info.annotation, *get_args(info.annotation)) for word in get_args(part) or [part]
            }
            choices = dict.fromkeys(value for value in accepted if isinstance(value, str | bool))
            found += [(path, value) for value in choices if isinstance(value, bool) or value in words]
    return found


def _is_accepted(path: str, value: Any) -> bool:
    try:
        check_start(build_config(with_value(base_tree(Path("runs/fuzz")), path, value)))
    except ValueError:
        return False
    return not _asks_for_more(path, value) and path not in ("run.dir", "tasks.train.0.source", "tasks.eval.held.source")


KINDS: dict[str, Callable[[Fuzz, random.Random, Path], tuple[str, Outcome]]] = {
    "settings": Fuzz.settings,
    "runs": Fuzz.runs,
    "data": Fuzz.data,
    "options": Fuzz.options,
    "files": Fuzz.files,
    "edges": Fuzz.edges,
}


def _asks_for_more(path: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return path.rpartition(".")[2] in WORK and is_number and value > MORE_WORK


def tables(cases: list[Case]) -> list[Table]:
    counts = Counter((case.kind, case.verdict) for case in cases)
    verdicts = [verdict for verdict in VERDICTS if any(case.verdict == verdict for case in cases)]
    table = Table(title=f"{len(cases)} cases", box=SIMPLE_HEAD, title_justify="left")
    for column in ("kind", *verdicts, "all"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind in KINDS:
        table.add_row(
            kind, *(str(counts[kind, verdict]) for verdict in verdicts), str(sum(c.kind == kind for c in cases))
        )
    found = Table(title="findings", box=SIMPLE_HEAD, title_justify="left")
    for column in ("case", "what", "last words"):
        found.add_column(column, overflow="fold")
    for case in cases:
        if case.verdict.isupper():
            last = (case.said.strip().splitlines() or [""])[-1]
            found.add_row(f"{case.verdict} {case.kind} {case.number}", repr(case.what), repr(last[:300]))
    return [table, found] if found.row_count else [table]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(kind for kind in KINDS if kind != "edges"))
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each kind")
    parser.add_argument("--only", type=int, help="this case of the one kind given, with all that it printed")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def run_all(arguments: argparse.Namespace, folder: Path) -> list[Case]:
    import slipstream.runtime.local
    import slipstream.runtime.standalone  # noqa: F401  (before the forks, for all of them)

    fuzz, kinds, cases = Fuzz(folder, arguments.seed, arguments.first), arguments.kinds.split(","), list[Case]()
    if arguments.only is not None:
        return [fuzz.ask(kinds[0], arguments.only)]
    until_s, number = time.monotonic() + arguments.seconds, arguments.first
    while time.monotonic() < until_s:
        for kind in kinds:
            cases.append(fuzz.ask(kind, number))
            if cases[-1].verdict.isupper() or kind == "edges":
                print(cases[-1].verdict, kind, number, repr(cases[-1].what), file=sys.stderr, flush=True)
        number += 1
        if kinds == ["edges"] and not fuzz.num_edges:
            break
    print(f"cases {arguments.first} to {number - 1} of each kind")
    return cases


if __name__ == "__main__":
    given = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        asked = run_all(given, Path(scratch))
    if given.only is not None:
        print(asked[0].what, asked[0].verdict, asked[0].said, sep="\n")
    console = Console(width=160)
    for one in tables(asked):
        console.print(one)
    if given.out is not None:
        record = {"what": "benchmarks/fuzz.py", "seed": given.seed, "cases": [asdict(case) for case in asked]}
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(any(case.verdict.isupper() for case in asked))
