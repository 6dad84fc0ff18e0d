"""Worker processes that train a drafter together: carries out what `schedule/coordinator.py` decides.

Turns its actions into messages to processes, and their answers, deaths and silences into its events. Pure: weights go
through files (`draft/versions.py`), of which it knows no more than where they lie. A round is over when everybody who
is still there has answered; then the leader averages, and if it is gone before it has, the next one does. Who was told
to stop or died after it had given its share has still given it. Nothing polls: it waits for pipes, processes and
deadlines. Who lets a deadline pass is ended, with a warning that says which: it could not sample either.
"""

from __future__ import annotations

import multiprocessing
import shutil
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from slipstream.runtime.drafter_messages import (
    Average,
    Averaged,
    Failed,
    FromWorker,
    Here,
    Result,
    Stop,
    Stopped,
    Take,
    Taken,
    ToWorker,
    Train,
    Trained,
    Work,
)
from slipstream.schedule.coordinator import Coordinator
from slipstream.schedule.events import (
    CoordinatorAction,
    CoordinatorEvent,
    EndSession,
    Item,
    Lend,
    LessonsAdded,
    Publish,
    Recall,
    RoundDone,
    StopTraining,
    TrainRound,
    WorkerLeft,
)

SHARES_FOLDER = "shares"
ROUND_UPDATES = 8
"""Of each member."""
START_S, ROUND_S, STOP_S, END_S = 300.0, 600.0, 60.0, 10.0
"""Longest waits: for a process to start, for a round or its average, for one update to end, for a process to end."""

Entry = Callable[..., None]
"""What a process runs: it is given its end of the pipe, its name, the folder, and what `start` was given."""


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    connection: Connection
    version: int = -1
    """That it drafts with; -1: it has not started yet."""
    awaited: dict[str, float] = field(default_factory=dict)
    """What it owes an answer for: until when."""
    num_given_up: int = 0
    """Updates of rounds that it was stopped in."""


@dataclass(slots=True)
class _Round:
    number: int
    session: int
    missing: set[str]
    """Members that train."""
    shares: dict[str, int] = field(default_factory=dict)
    """Updates, by member."""
    failed: set[str] = field(default_factory=set)
    """Members that cannot lead in this round."""
    leader: str | None = None
    """Who averages, once all have answered."""


class DrafterSession:
    def __init__(
        self,
        folder: Path,
        *,
        updates: int = ROUND_UPDATES,
        coordinator: Coordinator | None = None,
        record: Callable[[Item], None] = lambda item: None,
        start_s: float = START_S,
        round_s: float = ROUND_S,
        stop_s: float = STOP_S,
    ) -> None:
        """`folder`: for versions and shares, of this session alone. `record`: writes the event log."""
        self.folder, self._updates, self._record = folder, updates, record
        self._limits_s = {"start": start_s, "round": round_s, "average": round_s, "stop": stop_s}
        self.coordinator = coordinator or Coordinator()
        self.version = -1
        """The newest that was published."""
        self._workers: dict[str, _Worker] = {}
        self._round: _Round | None = None
        self._num_rounds = 0
        self._results: list[tuple[str, Any]] = []
        self._context = multiprocessing.get_context("spawn")
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / SHARES_FOLDER, *folder.glob(".tmp-*")):  # what a crash left behind
            shutil.rmtree(path, ignore_errors=True)

    def __enter__(self) -> DrafterSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def here(self) -> dict[str, int]:
        """Workers that have started: the version that each drafts with."""
        return {name: worker.version for name, worker in self._workers.items() if worker.version >= 0}

    def start(self, name: str, entry: Entry, *arguments: Any) -> int:
        """A process; its id. It is one of `here` once it has said so."""
        assert name not in self._workers, f"{name} is here already"
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=entry, args=(theirs, name, self.folder, *arguments), name=name, daemon=True
        )
        process.start()
        theirs.close()  # else its end would not be seen
        self._workers[name] = _Worker(process, ours)
        self._await(name, "start")
        assert process.pid is not None
        return process.pid

    def tell(self, event: Lend | Recall | LessonsAdded) -> None:
        """Lend and Recall are the fleet's: somebody has nothing to sample, or has again."""
        if isinstance(event, Lend):
            assert event.worker in self.here, f"{event.worker} has not started, or has gone"
        if not isinstance(event, Recall) or event.worker in self._workers:
            self._decide(event)

    def give(self, name: str, work: Any) -> None:
        """Something to sample, small enough for a pipe, to somebody who is not lent."""
        assert name not in (*self.coordinator.idle, *self.coordinator.training), f"{name} is lent: recall it first"
        self._send(name, Work(work))

    def take_results(self) -> list[tuple[str, Any]]:
        """(worker, what it sampled), in the order they came."""
        results, self._results = self._results, []
        return results

    def wait(self, timeout_s: float) -> bool:
        """For somebody to say something or die, or let a deadline pass; what follows is done. False: nothing did."""
        deadlines = [until for worker in self._workers.values() for until in worker.awaited.values()]
        now_s = time.monotonic()
        rest_s = max(0.0, min([timeout_s, *(until - now_s for until in deadlines)]))
        by_handle: dict[Any, str] = {}
        for name, worker in self._workers.items():
            by_handle |= {worker.connection: name, worker.process.sentinel: name}
        if not by_handle:
            time.sleep(rest_s)
            return False
        ready = wait(list(by_handle), rest_s)
        for name in dict.fromkeys(by_handle[handle] for handle in ready):
            self._hear(name)
        return self._check_deadlines() or bool(ready)

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
        """TimeoutError, with how things stand, if it never is."""
        end_s = time.monotonic() + timeout_s
        while not is_so():
            rest_s = end_s - time.monotonic()
            if rest_s <= 0:
                raise TimeoutError(f"{what}: not within {timeout_s:g} s; {self._standing()}")
            self.wait(rest_s)

    def close(self) -> None:
        """No process is left after it."""
        workers, self._workers, self._round = self._workers, {}, None
        for worker in workers.values():
            worker.connection.close()  # at which it ends
        end_s = time.monotonic() + END_S
        for name, worker in workers.items():
            worker.process.join(max(0.0, end_s - time.monotonic()))
            if worker.process.is_alive():
                warnings.warn(f"{name} did not end within {END_S:g} s of its pipe, and was killed", stacklevel=2)
                worker.process.kill()
                worker.process.join()
        shutil.rmtree(self.folder / SHARES_FOLDER, ignore_errors=True)

    # What is decided.

    def _decide(self, event: CoordinatorEvent) -> None:
        self._record(event)
        for action in self.coordinator.on_event(event):
            self._record(action)
            self._do(action)
        self._go_on()

    def _do(self, action: CoordinatorAction) -> None:
        match action:
            case TrainRound():
                self._begin(action)
            case StopTraining():
                self._leave_round(action.worker)
                self._send(action.worker, Stop())
                self._await(action.worker, "stop")
            case Publish():
                self._announce()
            case EndSession():
                self._drop_round()

    def _announce(self) -> None:
        for name in self.here:
            self._send(name, Take(self.version))

    def _begin(self, action: TrainRound) -> None:
        self._num_rounds += 1
        self._round = _Round(self._num_rounds, action.session, set(action.members))
        for name in action.members:
            self._send(name, Train(self._num_rounds, self.version, self._updates, self._share_folder(name)))
            self._await(name, "round")

    def _go_on(self) -> None:
        """If all have answered: somebody averages, or there is nothing to average."""
        this = self._round
        if this is None or this.missing or this.leader is not None:
            return
        leader = next((name for name in self.coordinator.training if name not in this.failed), None)
        if leader is None or not any(this.shares.values()):
            self._end_round()
            return
        this.leader = leader
        shares = [(self._share_folder(name), this.shares[name]) for name in sorted(this.shares) if this.shares[name]]
        self._send(leader, Average(this.number, tuple(shares)))
        self._await(leader, "average")

    def _end_round(self) -> None:
        assert self._round is not None
        session = self._round.session
        self._drop_round()
        self._decide(RoundDone(session))

    def _drop_round(self) -> None:
        self._round = None
        shutil.rmtree(self.folder / SHARES_FOLDER, ignore_errors=True)
        for worker in self._workers.values():
            worker.awaited.pop("round", None)
            worker.awaited.pop("average", None)

    def _leave_round(self, name: str) -> None:
        """Its share, if it has given it, stays."""
        self._settle(name, "round", "average")
        if self._round is not None:
            self._round.missing.discard(name)
            if self._round.leader == name:
                self._round.leader = None

    # What is heard.

    def _hear(self, name: str) -> None:
        """All that it has said; then, perhaps, that it is gone."""
        worker = self._workers.get(name)
        if worker is None:
            return
        has_ended = not worker.process.is_alive()  # before its pipe is emptied, which then holds its last words
        try:
            while worker.connection.poll(0):
                self._on_message(name, worker, worker.connection.recv())
        except (EOFError, ConnectionError):
            has_ended = True
        if has_ended and self._workers.get(name) is worker:
            self._on_death(name, worker)

    def _on_message(self, name: str, worker: _Worker, message: FromWorker) -> None:
        this = self._round
        is_current = this is not None and getattr(message, "round", None) == this.number
        match message:
            case Here():
                self._settle(name, "start")
                worker.version = message.version
                self.version = max(self.version, message.version)
                if message.num_lessons:
                    self._decide(LessonsAdded(message.num_lessons))
            case Result():
                self._results.append((name, message.result))
            case Taken():
                worker.version = message.version
            case Stopped():
                self._settle(name, "stop")
                worker.num_given_up += message.num_updates
            case Trained() if is_current and this is not None:
                this.shares[name] = message.num_updates
                this.missing.discard(name)
                self._settle(name, "round")
                self._go_on()
            case Averaged():
                self.version = max(self.version, message.version)
                self._settle(name, "average")
                if is_current:
                    self._end_round()
                else:
                    self._announce()  # all others had left meanwhile, or it was told to stop just then
            case Failed():
                if is_current or message.round is None:  # what fails in a round that was given up is nobody's concern
                    warnings.warn(f"{name} goes on without training the drafter: {message.reason}", stacklevel=2)
                if is_current and this is not None:
                    this.failed.add(name)
                    self._leave_round(name)
                    self._go_on()

    def _on_death(self, name: str, worker: _Worker) -> None:
        worker.connection.close()
        worker.process.join(END_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        self._leave_round(name)
        del self._workers[name]
        self._decide(WorkerLeft(name))

    def _check_deadlines(self) -> bool:
        now_s, has_passed = time.monotonic(), False
        for name, worker in list(self._workers.items()):
            late = [what for what, until in worker.awaited.items() if until <= now_s]
            if late and self._workers.get(name) is worker:
                has_passed = True
                limit = f"{late[0]} within {self._limits_s[late[0]]:g} s"
                warnings.warn(f"{name} is ended: no answer about {limit}; {self._standing()}", stacklevel=3)
                worker.process.kill()
                self._on_death(name, worker)
        return has_passed

    def _await(self, name: str, what: str) -> None:
        if name in self._workers:
            self._workers[name].awaited[what] = time.monotonic() + self._limits_s[what]

    def _settle(self, name: str, *whats: str) -> None:
        for what in whats:
            self._workers[name].awaited.pop(what, None)

    def _send(self, name: str, message: ToWorker) -> None:
        with suppress(ConnectionError):  # it is dead, which is heard when its pipe is next waited for
            self._workers[name].connection.send(message)

    def _share_folder(self, name: str) -> Path:
        number = self._round.number if self._round is not None else 0
        return self.folder / SHARES_FOLDER / str(number) / name

    def _standing(self) -> str:
        owed: Iterable[str] = (
            f"{name}: {', '.join(one.awaited)}" for name, one in self._workers.items() if one.awaited
        )
        return f"version {self.version}, awaited of {'; '.join(owed) or 'nobody'}"
