"""The worker's side of the pipe: it obeys in order, stops when told, samples whatever becomes of the drafter."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.draft.saved import DrafterState
from slipstream.runtime.drafter_messages import (
    Average,
    Averaged,
    Failed,
    Here,
    Result,
    Stop,
    Stopped,
    Take,
    Taken,
    Train,
    Trained,
    Work,
)
from slipstream.runtime.drafter_worker import DrafterWorker

NOWHERE = Path("nowhere")


class Member:
    """As `together.Member`, with updates that take as long as somebody lets them."""

    def __init__(self) -> None:
        self.version, self.fault = 3, ""
        self.in_update, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.trainer: Any = type("Trainer", (), {"lessons": [1, 2]})()

    def newest(self) -> DrafterState:
        if self.fault:
            raise OSError(self.fault)
        return DrafterState(self.version, 0, "", {"model.w": torch.tensor(float(self.version))})

    def train(self, version: int, num_updates: int, _: Path, stopped: Callable[[], bool]) -> tuple[bool, int]:
        if self.fault:
            raise RuntimeError(self.fault)
        for number in range(num_updates):
            self.in_update.set()
            assert self.go_on.wait(60)
            if stopped():
                return False, number + 1
        return True, num_updates

    def lead(self, shares: list[Any], stopped: Callable[[], bool]) -> int | None:
        return None if stopped() else self.version + len(shares)


class Sampler:
    def __init__(self) -> None:
        self.todo, self.drafts_with = list[str](), list[float]()

    @property
    def has_work(self) -> bool:
        return bool(self.todo)

    def submit(self, work: str) -> None:
        self.todo += work

    def step(self) -> list[str]:
        return [self.todo.pop(0)]

    def draft_with(self, weights: dict[str, Tensor]) -> None:
        self.drafts_with.append(float(weights["w"]))


@contextmanager
def serving(member: Member, sampler: Sampler) -> Iterator[Connection]:
    ours, theirs = multiprocessing.Pipe()
    worker = DrafterWorker(theirs, member, sampler)  # type: ignore[arg-type]
    thread = threading.Thread(target=worker.serve, daemon=True)
    thread.start()
    yield ours
    ours.close()
    thread.join(60)
    assert not thread.is_alive(), "it ends with its pipe"


def answers(pipe: Connection, count: int) -> list[object]:
    got = []
    for _ in range(count):
        assert pipe.poll(60), got
        got.append(pipe.recv())
    return got


def test_it_trains_leads_takes_and_samples() -> None:
    member, sampler = Member(), Sampler()
    with serving(member, sampler) as pipe:
        assert answers(pipe, 1) == [Here(3, 2)] and sampler.drafts_with == [3.0]
        for message in (Train(1, 3, 5, NOWHERE), Average(1, ((NOWHERE, 5),)), Work("xy")):
            pipe.send(message)
        assert answers(pipe, 4) == [Trained(1, 5), Averaged(1, 4), Result("x"), Result("y")]
        pipe.send(Stop())
        assert answers(pipe, 1) == [Stopped(0)], "there was nothing to stop"
        member.version = 4
        pipe.send(Take(4))
        assert answers(pipe, 1) == [Taken(4)] and sampler.drafts_with == [3.0, 4.0]


def test_told_to_stop_in_an_update_it_makes_no_other_and_what_was_said_meanwhile_is_not_lost() -> None:
    member, sampler = Member(), Sampler()
    with serving(member, sampler) as pipe:
        answers(pipe, 1)
        member.go_on.clear()
        pipe.send(Train(1, 3, 5, NOWHERE))
        assert member.in_update.wait(60)
        for message in (Take(3), Stop(), Work("x"), Train(2, 3, 5, NOWHERE)):
            pipe.send(message)
        member.go_on.set()
        got = answers(pipe, 4)
        assert got[:2] == [Taken(3), Stopped(1)]
        assert Result("x") in got and Failed(2, "asked to train the drafter while it samples") in got
        pipe.send(Train(3, 3, 2, NOWHERE))
        assert answers(pipe, 1) == [Trained(3, 2)], "what it was told before is over"


def test_a_fault_of_the_drafter_is_told_and_it_samples_on() -> None:
    member, sampler = Member(), Sampler()
    with serving(member, sampler) as pipe:
        answers(pipe, 1)
        member.fault = "no space"
        for message in (Take(4), Train(1, 3, 5, NOWHERE), Work("x")):
            pipe.send(message)
        faults = Failed(None, "version 4 of the drafter: no space"), Failed(1, "no space")
        assert answers(pipe, 3) == [*faults, Result("x")]


def test_if_nobody_is_left_to_hear_it_ends_in_the_middle_of_a_round() -> None:
    member = Member()
    with serving(member, Sampler()) as pipe:
        answers(pipe, 1)
        pipe.send(Train(1, 3, 10**9, NOWHERE))
        assert member.in_update.wait(60)
