"""A rollout worker's part in the drafter: piece by piece, given up when told, told of when it fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from slipstream.draft.saved import DrafterState
from slipstream.runtime.drafter_messages import (
    AverageShares,
    DrafterFailed,
    DrafterStopped,
    DrafterTaken,
    DrafterTrained,
    SharesAveraged,
    StopDrafter,
    TakeDrafter,
    TrainDrafter,
)
from slipstream.runtime.drafter_worker import DrafterWorker
from slipstream.types import WeightVersion

NOWHERE = Path("nowhere")


class Trainer:
    def take_metrics(self) -> dict[str, float]:
        return {"drafter/loss": 2.0, "drafter/updates": 99.0}


class Member:
    """As `together.Member`, without a model."""

    def __init__(self) -> None:
        self.version, self.fault, self.num_made, self.trainer, self.target_digest = 3, "", 0, Trainer(), ""

    def newest(self) -> DrafterState:
        if self.fault:
            raise OSError(self.fault)
        return DrafterState(self.version, 0, "", {"model.w": torch.tensor(float(self.version))})

    def train(self, version: int, num_updates: int, _: Path) -> Generator[None, None, int]:
        for _number in range(num_updates):
            if self.fault:
                raise SafetensorError(self.fault)  # as when the folder of shares is gone by then
            self.num_made += 1
            yield
        return num_updates

    def give_up(self) -> int:
        num_made, self.num_made = self.num_made, 0
        return num_made

    def lead(self, shares: list[Any]) -> Generator[None, None, tuple[int, int]]:
        for _ in shares:
            yield
        return self.version + 1, 10 * len(shares)


class Texts:
    """As `reading.Reader`: two pieces to read."""

    num_policies = 0

    def read(self) -> Iterator[None]:
        yield
        yield

    def new_policy(self) -> None:
        self.num_policies += 1


class Played:
    def __init__(self) -> None:
        self.member, self.texts, self.said, self.drafts_with = Member(), Texts(), list[Any](), list[float]()
        self.worker = DrafterWorker(
            self.member,  # type: ignore[arg-type]
            self.texts,  # type: ignore[arg-type]
            lambda state: self.drafts_with.extend(float(one) for one in state.weights.values()),
            self.said.append,
        )

    def pieces(self) -> int:
        """Until there is nothing left to do."""
        count = 0
        while self.worker.is_busy:
            self.worker.advance()
            count += 1
        return count


def test_it_trains_leads_and_takes() -> None:
    played = Played()
    assert played.worker.version == 3 and played.drafts_with == [3.0] and not played.worker.is_busy
    played.worker.obey(TrainDrafter(1, 3, 5, NOWHERE))
    assert played.pieces() == 2 + 5 + 1 and played.said == [DrafterTrained(1, 5, {"drafter/loss": 2.0})]
    played.worker.obey(AverageShares(1, ((NOWHERE, 5), (NOWHERE, 5))))
    assert played.pieces() == 3 and played.said[1:] == [SharesAveraged(1, 4, 20)]
    played.member.version = 4
    played.worker.obey(TakeDrafter(4))
    assert played.said[2:] == [DrafterTaken(4)] and played.drafts_with == [3.0, 4.0] and played.worker.version == 4
    played.worker.new_policy(WeightVersion(7, "of seven"))
    assert played.member.target_digest == "of seven" and played.texts.num_policies == 1


def test_told_to_stop_it_does_no_other_piece() -> None:
    played = Played()
    played.worker.obey(TrainDrafter(1, 3, 5, NOWHERE))
    for _ in range(2 + 3):
        played.worker.advance()
    played.worker.obey(StopDrafter())
    assert not played.worker.is_busy and played.said == [DrafterStopped(3)]
    played.worker.obey(StopDrafter())
    assert played.said[1:] == [DrafterStopped(0)], "there was nothing to stop"
    played.worker.obey(TrainDrafter(2, 3, 5, NOWHERE))
    played.worker.advance()
    played.worker.obey(StopDrafter())
    assert played.said[2:] == [DrafterStopped(0)], "it was reading"
    played.worker.obey(TrainDrafter(3, 3, 1, NOWHERE))
    played.pieces()
    assert played.said[3:] == [DrafterTrained(3, 1, {"drafter/loss": 2.0})], "what it was told before is over"


def test_a_fault_of_the_drafter_is_told_and_nothing_else_comes_of_it() -> None:
    played = Played()
    played.member.fault = "no space"
    played.worker.obey(TakeDrafter(4))
    played.worker.obey(TrainDrafter(1, 3, 5, NOWHERE))
    played.pieces()
    assert played.said == [DrafterFailed(None, "version 4 of the drafter: no space"), DrafterFailed(1, "no space")]
    assert played.worker.version == 3
