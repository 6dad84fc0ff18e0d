"""Worker processes with an engine and a trainer of a drafter, of the tiny model, and gates to hold them at a place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from test_draft_learned import guessing, target
from test_draft_lesson import show
from torch import Tensor

from slipstream.draft.online import DrafterTrainer
from slipstream.draft.together import Member
from slipstream.engine.strategy import Strategy
from slipstream.runtime.drafter_worker import DrafterWorker
from slipstream.types import Request, Rollout

Texts = Sequence[Sequence[int]]


class Gate:
    """A file: while it is there, nobody passes; who stands before it says so."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file, self._here = folder / name, folder / f"{name}.here"

    def shut(self) -> None:
        self._here.unlink(missing_ok=True)
        self._file.touch()

    def open(self) -> None:
        self._file.unlink()

    @property
    def somebody_waits(self) -> bool:
        return self._here.exists()

    def go_through(self) -> None:
        while self._file.exists():
            self._here.touch()
            time.sleep(0.01)


def taught_by(texts: Texts, seed: int) -> DrafterTrainer:
    model = target()
    trainer = DrafterTrainer(model, lr=3e-3, temperature=1.0, memory_bytes=10**9, seed=seed)
    show(trainer, model, texts)
    return trainer


class Sampling:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._guesser, self._engine = guessing("eagle3", Strategy(4.0, 0, 4))

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def submit(self, work: list[list[Request]]) -> None:
        for group in work:
            self._engine.submit(group)

    def step(self) -> list[Rollout]:
        self._gate.go_through()
        return self._engine.step()

    def draft_with(self, weights: dict[str, Tensor]) -> None:
        self._guesser.write(weights.items())


def worker(connection: Connection, name: str, folder: Path, texts: Texts, seed: int, gates: Path) -> None:
    torch.set_num_threads(1)
    trainer = taught_by(texts, seed)
    gate, start = Gate(gates, f"{name}-update"), trainer.start

    def start_later() -> None:
        gate.go_through()
        start()

    trainer.start = start_later  # type: ignore[method-assign]
    member = Member(trainer, folder, name=name, target_digest="policy")
    DrafterWorker(connection, member, Sampling(Gate(gates, f"{name}-step"))).serve()
