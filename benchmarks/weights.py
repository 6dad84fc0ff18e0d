"""Weights from trainer to engines: bytes of what changed in real RL steps, time to several workers, a damaged transfer.

    python benchmarks/weights.py --record /tmp/versions --out benchmarks/results/weights.json

The first time, the recipe is trained for so many steps and every version is kept in the folder (float32, half a
gigabyte each for SmolLM2); later runs measure what is there. Workers are processes of their own with a model of their
own; the shelf lies in shared memory. A version counts as brought when the last worker has verified its content hash.
Workers wait for an edition (delta, full) while it is written; what is lent they are told of once it is there, as in a
run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.config import load_config
from slipstream.engine.engine import Engine
from slipstream.models.loading import load_model
from slipstream.models.weights import fingerprint, named_weights
from slipstream.runtime.benches import describe_machine
from slipstream.runtime.local import run_training
from slipstream.stream.editions import RefusedWeights
from slipstream.stream.neighbours import Borrower, Lender
from slipstream.stream.publisher import Publisher
from slipstream.stream.receiver import Receiver
from slipstream.stream.shelf import Shelf
from slipstream.types import WeightVersion

SHARED_MEMORY = Path("/dev/shm")
SOCKET = "lender"
"""In the folder of the shelf, where the publisher lends."""


def record_versions(folder: Path, recipe: str, steps: int, overrides: Sequence[str]) -> None:
    """Train, and keep the weights as the engine was given them after every step; version 0 is what RL starts from."""
    folder.mkdir(parents=True, exist_ok=True)
    run = [f"run.dir={folder / 'run'}", "run.save_every=1000", "eval.every=0", "tasks.eval={}", f"train.steps={steps}"]
    config = load_config(recipe, [*run, *overrides])
    first = load_model(config.model, dtype=torch.float32, device=torch.device("cpu"), seed=config.seed)
    keep(folder, 0, named_weights(first))
    del first
    plain = Engine.apply_weights

    def keeping(self: Engine, weights: Iterable[tuple[str, Tensor]], number: int, *rest: Any) -> WeightVersion:
        weights = list(weights)
        keep(folder, number, weights)
        return plain(self, weights, number, *rest)

    with mock.patch.object(Engine, "apply_weights", keeping):
        run_training(config, overwrite=True)


def keep(folder: Path, number: int, weights: Iterable[tuple[str, Tensor]]) -> None:
    partial = folder / "partial"
    save_file({name: weight.clone() for name, weight in weights}, partial)
    partial.rename(folder / f"{number:03d}.safetensors")


def version(folder: Path, number: int) -> list[tuple[str, Tensor]]:
    return list(load_file(folder / f"{number:03d}.safetensors").items())


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, lowest and highest."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.{digits}g}") for name, value in found.items()}


class Stopwatch:
    """Seconds by the clock and of this process's cores: the second do not depend on who else uses the machine."""

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.cpu_s = time.perf_counter() - self._began[0], time.process_time() - self._began[1]


def measure_steps(folder: Path, model_name: str, last: int, dtype: torch.dtype) -> dict[str, Any]:
    """Every step's delta, sent and taken in this process, on one core, with a model that follows."""
    torch.set_num_threads(1)
    model = load_model(model_name, dtype=dtype, device=torch.device("cpu"))
    rows = []
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shelf:
        publisher, receiver = Publisher(Path(shelf), dtype=dtype, full_every=1000), Receiver(Path(shelf), "bench")
        for number in range(last + 1):
            weights = version(folder, number)
            with Stopwatch() as publish:
                told = publisher.publish(weights, number)
            with Stopwatch() as catch_up:
                assert receiver.catch_up(model, number) == told
            with Stopwatch() as hashing:
                assert fingerprint(model) == told.digest
            done = publisher.last
            assert done is not None
            row: dict[str, Any] = {"step": number}
            for name, watch in (("publish", publish), ("catch_up", catch_up), ("hash", hashing)):
                row |= {f"{name}_s": watch.seconds, f"{name}_cpu_s": watch.cpu_s}
            if done.delta_bytes is None:
                assert done.full_bytes is not None
                full = {"bytes": done.full_bytes, **{name: round(value, 3) for name, value in row.items()}}
                continue
            assert done.delta_bytes is not None
            row |= {"changed": done.num_changed / done.num_values, "delta_bytes": done.delta_bytes}
            edition = Shelf(Path(shelf)).edition(f"{number:06d}.on.{number - 1:06d}")
            assert edition is not None
            codings = [bucket.coding for bucket in edition.buckets]
            row |= {name: codings.count(name) for name in sorted(set(codings))}
            rows.append({name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()})
            print(dtype, rows[-1], flush=True)
            Shelf(Path(shelf)).forget_before(number)
    return {
        "values": done.num_values,
        "full": full,
        "share_changed": spread([row["changed"] for row in rows]),
        "delta_of_full": spread([row["delta_bytes"] / full["bytes"] for row in rows]),
        "delta_bytes": spread([row["delta_bytes"] for row in rows], 4),
        **{name: spread([row[name] for row in rows]) for name in rows[0] if name.endswith("_s")},
        "steps": rows,
    }


def work(pipe: Connection, name: str, model_name: str, dtype: torch.dtype, device: torch.device) -> None:
    """A worker: takes the versions that it is told to, from the shelves that it is told of."""
    torch.set_num_threads(1)
    model = load_model(model_name, dtype=dtype, device=device)
    receivers: dict[Path, Receiver] = {}
    pipe.send("ready")
    warnings.simplefilter("ignore")
    while (told := pipe.recv()) is not None:
        shelf, number, in_full = told
        if shelf not in receivers:
            is_lent = (shelf / SOCKET).exists()
            receivers[shelf] = Receiver(shelf, name, borrower=Borrower(shelf / SOCKET) if is_lent else None)
        receiver = receivers[shelf]
        if in_full:
            receiver.forget()
        num_refused = len(receiver.refusals)
        taken: WeightVersion | None = None
        with suppress(RefusedWeights):
            taken = receiver.catch_up(model, number, wait_s=120)
        done_s = time.monotonic()
        pipe.send((taken, fingerprint(model), done_s, [str(one) for one in receiver.refusals[num_refused:]]))


@dataclass
class Workers:
    pipes: list[Connection]
    processes: list[Any]

    @classmethod
    def start(cls, number: int, model_name: str, dtype: torch.dtype, device: torch.device) -> Workers:
        context = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for index in range(number):
            mine, theirs = context.Pipe()
            processes.append(context.Process(target=work, args=(theirs, f"worker {index}", model_name, dtype, device)))
            processes[-1].start()
            pipes.append(mine)
        assert all(pipe.recv() == "ready" for pipe in pipes)
        return cls(pipes, processes)

    def take(self, number_of_workers: int, shelf: Path, number: int, *, in_full: bool = False) -> None:
        for pipe in self.pipes[:number_of_workers]:
            pipe.send((shelf, number, in_full))

    def taken(self, number_of_workers: int, wanted: WeightVersion, *, refused: bool = False) -> tuple[float, list[str]]:
        """When the last was done, and what was refused on the way, or for good; every hash was computed again."""
        results = [pipe.recv() for pipe in self.pipes[:number_of_workers]]
        assert all(taken == (None if refused else wanted) for taken, *_ in results)
        assert all(digest == wanted.digest for _, digest, *_ in results)
        return max(done_s for _, _, done_s, _ in results), [line for *_, lines in results for line in lines]

    def stop(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


def measure_workers(
    folder: Path, workers: Workers, numbers: Sequence[int], repeats: int, dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    """Seconds from the trainer's call until the last worker holds the version, whose hash it has verified. What is lent
    is written as a delta too, after it was told of: `written_s` is until then."""
    rows = []
    for kind, full_every in (("delta", 1000), ("full", 1), ("lent", 1000)):
        for number_of_workers in numbers:
            total_s, publish_s, written_s, num_bytes = [], [], [], 0
            with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as name:
                shelf = Path(name)
                lender = Lender(shelf / SOCKET) if kind == "lent" else None
                publisher = Publisher(shelf, dtype=dtype, full_every=full_every, lender=lender)
                for number in range(repeats + 1):
                    weights = [(name, weight.to(device)) for name, weight in version(folder, number)]
                    if lender is None:
                        workers.take(number_of_workers, shelf, number)
                        time.sleep(0.5)  # they wait
                    started_s = time.monotonic()
                    told = publisher.publish(weights, number)
                    published_s = time.monotonic()
                    if lender is not None:
                        workers.take(number_of_workers, shelf, number)
                    done_s, refused = workers.taken(number_of_workers, told)
                    publisher.look(wait=True)
                    assert not refused and publisher.last is not None
                    if number == 0:  # in full for all kinds, and it maps memory for the first time
                        continue
                    total_s.append(done_s - started_s)
                    publish_s.append(published_s - started_s)
                    written_s.append(publisher.last.seconds if lender else published_s - started_s)
                    num_bytes = publisher.last.delta_bytes or publisher.last.full_bytes or 0
                if lender is not None:
                    lender.close()
            row = {"kind": kind, "workers": number_of_workers, "bytes": num_bytes, "repeats": repeats}
            seconds = {"total_s": total_s, "publish_s": publish_s, "written_s": written_s}
            rows.append(row | {what: spread(values) for what, values in seconds.items()})
            print(rows[-1], flush=True)
    return rows


def measure_damage(folder: Path, workers: Workers, dtype: torch.dtype) -> dict[str, Any]:
    """A flipped bit in one bucket of the delta: refused, the full version taken instead; then in that as well: refused
    for good until the publisher repeats it."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as name:
        shelf = Path(name)
        publisher = Publisher(shelf, dtype=dtype, full_every=2)
        for number in (0, 1):
            told = publisher.publish(version(folder, number), number)
        workers.take(1, shelf, 1)
        workers.taken(1, told)
        told = publisher.publish(version(folder, 2), 2)
        flip(shelf / "000002.on.000001")
        started_s = time.monotonic()
        workers.take(1, shelf, 2)
        done_s, refused = workers.taken(1, told)
        around = {"refused": refused, "seconds": round(done_s - started_s, 3)}
        flip(shelf / "000002.full")
        workers.take(1, shelf, 2, in_full=True)
        _, refused = workers.taken(1, told, refused=True)  # it still holds version 2, from before
        started_s = time.monotonic()
        publisher.repeat()
        workers.take(1, shelf, 2, in_full=True)
        done_s, again = workers.taken(1, told)
        assert refused and not again
        repeated = {"refused": refused, "seconds_to_repeat": round(done_s - started_s, 3)}
        return {"delta damaged, full taken": around, "full damaged, repeated by the publisher": repeated}


def flip(edition: Path) -> None:
    path = max(edition.glob("*.bucket"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="the folder of the versions")
    parser.add_argument("--recipe", default="smollm2-arithmetic")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--float32-steps", type=int, default=3, help="measured as float32 too")
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="of workers and damage: where trainer and workers are")
    parser.add_argument("--parts", default="workers,damage,steps", help="others stay in --out as they are")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="of the recipe")
    arguments = parser.parse_args()
    folder: Path = arguments.record
    parts = arguments.parts.split(",")
    if not (folder / f"{arguments.steps:03d}.safetensors").is_file():
        record_versions(folder, arguments.recipe, arguments.steps, arguments.overrides)
        shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
    model_name = load_config(arguments.recipe).model
    numbers = [int(number) for number in arguments.workers.split(",")]
    record = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    device = torch.device(arguments.device)
    record |= describe_machine(device, torch.bfloat16) | {
        "cores": os.cpu_count(),
        "what": "benchmarks/weights.py",
        "recipe": arguments.recipe,
        "overrides": arguments.overrides,
    }
    if {"workers", "damage"} & set(parts):
        workers = Workers.start(max(numbers), model_name, torch.bfloat16, device)
        try:
            if "workers" in parts:
                measured = measure_workers(folder, workers, numbers, arguments.repeats, torch.bfloat16, device)
                record["workers"] = measured
            if "damage" in parts:
                record["damage"] = measure_damage(folder, workers, torch.bfloat16)
        finally:
            workers.stop()
    if "steps" in parts:
        record["bfloat16"] = measure_steps(folder, model_name, arguments.steps, torch.bfloat16)
        record["float32"] = measure_steps(folder, model_name, arguments.float32_steps, torch.float32)
    for part in parts:  # of a machine that others use too, what is measured depends on them
        record.setdefault("load_average", {})[part] = round(os.getloadavg()[0], 1)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
