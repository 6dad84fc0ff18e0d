"""A worker process that samples, and trains the drafter with others while it has nothing to sample.

One thread: between two updates, as between two steps of the engine, it looks whether somebody has said something. It
ends when its pipe does, so that it never outlives who started it. A fault in training the drafter is told and costs the
drafter; one in sampling ends the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from torch import Tensor

from slipstream.draft.together import Member, Share
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

FAULTS = (OSError, ValueError, RuntimeError)
"""What may go wrong with a drafter: its files, what is in them, its device."""


class Sampler(Protocol):
    """A worker's main work."""

    @property
    def has_work(self) -> bool: ...
    def submit(self, work: Any) -> None: ...
    def step(self) -> Iterable[Any]:
        """A short one; what has ended by it."""

    def draft_with(self, weights: dict[str, Tensor]) -> None:
        """From the next step on."""


class PipeClosed(Exception):
    """Whoever started this process is gone."""


class DrafterWorker:
    def __init__(self, connection: Connection, member: Member, sampler: Sampler) -> None:
        self._connection, self._member, self._sampler = connection, member, sampler
        self._inbox = deque[ToWorker]()
        self._num_given_up = 0
        """Updates of the round that it was stopped in, until it has answered."""

    def serve(self) -> None:
        """Until the pipe is closed."""
        try:
            version = self._take_newest()
            self._say(Here(version, len(self._member.trainer.lessons)))
            while True:
                self._listen(wait=not self._sampler.has_work and not self._inbox)
                if self._inbox:
                    self._obey(self._inbox.popleft())
                elif self._sampler.has_work:
                    for result in self._sampler.step():
                        self._say(Result(result))
        except PipeClosed:
            return

    def _obey(self, message: ToWorker) -> None:
        match message:
            case Work():
                self._sampler.submit(message.work)
            case Stop():
                num_updates, self._num_given_up = self._num_given_up, 0
                self._say(Stopped(num_updates))
            case Take():
                try:
                    self._say(Taken(self._take_newest()))
                except FAULTS as error:
                    self._say(Failed(None, f"version {message.version} of the drafter: {error}"))
            case Train() | Average():
                try:
                    self._learn(message)
                except FAULTS as error:
                    self._say(Failed(message.round, str(error)))

    def _learn(self, message: Train | Average) -> None:
        if self._sampler.has_work:
            raise RuntimeError("asked to train the drafter while it samples")
        if isinstance(message, Train):
            is_whole, num_updates = self._member.train(
                message.version, message.num_updates, message.share_folder, self._is_stopped
            )
            if is_whole:
                self._say(Trained(message.round, num_updates))
            else:
                self._num_given_up = num_updates
            return
        shares = [Share(folder, num_updates) for folder, num_updates in message.shares]
        version = self._member.lead(shares, self._is_stopped)
        if version is not None:
            self._say(Averaged(message.round, version))

    def _take_newest(self) -> int:
        state = self._member.newest()
        self._sampler.draft_with(state.weights)
        return state.step

    def _is_stopped(self) -> bool:
        self._listen(wait=False)
        return any(isinstance(message, Stop) for message in self._inbox)

    def _listen(self, *, wait: bool) -> None:
        try:
            while wait or self._connection.poll(0):
                self._inbox.append(self._connection.recv())
                wait = False
        except (EOFError, ConnectionError) as error:
            raise PipeClosed from error

    def _say(self, message: FromWorker) -> None:
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionError) as error:
            raise PipeClosed from error
