"""A rank that obeys: what it tells of its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from slipstream.runtime.trainer_messages import (
    FeedSamples,
    FinishStep,
    PublishWeights,
    SaveState,
    StateSaved,
    StepFinished,
    TookPart,
    WeightsPublished,
    Working,
)
from slipstream.runtime.trainer_worker import TrainerWorker
from slipstream.train.trainer_rank import TrainerRank
from slipstream.types import WeightVersion


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Rank:
    """Everything takes a while."""

    def __init__(self, clock: Clock, is_first: bool) -> None:
        self._clock, self._is_first = clock, is_first

    def begin_step(self) -> None: ...

    def skip_step(self) -> None: ...

    def feed(self, samples: Any, done: Any) -> None:
        self._clock.now_s += 2.0

    def finish_step(self, *done: Any) -> dict[str, float]:
        self._clock.now_s += 1.0
        return {}

    def weights(self) -> Any:
        self._clock.now_s += 0.5
        return iter(())

    def save(self, step: int, run_state: Any, files: Any) -> Path | None:
        self._clock.now_s += 3.0
        return Path("step") if self._is_first else None


class Sink:
    def publish(self, weights: Any, number: int) -> WeightVersion:
        return WeightVersion(number, "same")


def worker_of(clock: Clock, said: list[Any], is_first: bool = True) -> TrainerWorker:
    def say(message: Any) -> None:
        if not isinstance(message, Working):  # `test_runtime_crew.py` is about these
            said.append(message)

    return TrainerWorker(cast(TrainerRank, Rank(clock, is_first)), Sink() if is_first else None, say, clock)


@pytest.mark.parametrize(("grading_s", "waited_s"), [(0.0, 0.0), (0.4, 0.4), (2.5, 1.0), (100.0, 7.0)])
def test_it_waits_for_grades_while_only_those_are_missing_and_it_has_nothing_to_do(
    grading_s: float, waited_s: float
) -> None:
    clock, said = Clock(), list[Any]()
    worker = worker_of(clock, said)
    clock.now_s += 6.0  # rollouts are sampled
    worker.obey(FeedSamples(1, ()))  # takes two seconds
    clock.now_s += 1.0
    worker.obey(FinishStep(1, grading_s))
    assert said == [StepFinished(1, {}, busy_s=3.0, untold_s=1.0, reward_wait_s=pytest.approx(waited_s))]
    said.clear()
    clock.now_s += 5.0
    worker.obey(FinishStep(2, 0.5))
    assert said[0].reward_wait_s == 0.5, "what was before is of another step"


def test_it_tells_of_its_seconds_while_it_spends_them_and_of_each_once() -> None:
    clock, said = Clock(), list[Any]()
    worker = TrainerWorker(cast(TrainerRank, Rank(clock, True)), Sink(), said.append, clock)
    for step in (1, 2):
        for _ in range(3):
            worker.obey(FeedSamples(step, ()))
        clock.now_s += 5.0
        worker.tell()  # as it does where there is nothing to do
        worker.obey(PublishWeights(step))
        worker.obey(FinishStep(step, 0.0))
        told = [one.busy_s for one in said if isinstance(one, Working)]
        (finished,) = (one for one in said if isinstance(one, StepFinished))
        assert finished.busy_s == 7.0 == sum(told) + finished.untold_s and max(told) == 2.0
        said.clear()


@pytest.mark.parametrize("is_first", [True, False])
def test_every_rank_tells_what_publishing_and_saving_took(is_first: bool) -> None:
    clock, said = Clock(), list[Any]()
    worker = worker_of(clock, said, is_first)
    worker.obey(PublishWeights(3))
    worker.obey(SaveState(3, {}, {}))
    if is_first:
        assert said == [WeightsPublished(WeightVersion(3, "same"), 0.5), StateSaved(3, Path("step"), 3.0)]
    else:
        assert said == [TookPart("weight sync", 0.5), TookPart("checkpoint", 3.0)]
