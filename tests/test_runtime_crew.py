"""The processes that train, in this process: who is silent too long is killed, and who works speaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.config import build_config
from slipstream.observe.advice import Advice
from slipstream.observe.ledger import Ledger
from slipstream.runtime.crew import BLAME_S, LONGEST_LOOK_S, TrainerCrew, TrainerLost
from slipstream.runtime.kept import Kept
from slipstream.runtime.pool import START_S
from slipstream.runtime.processes import Doorbell
from slipstream.runtime.stream_world import StreamWorld
from slipstream.runtime.trainer_messages import (
    FeedSamples,
    FinishStep,
    PublishWeights,
    StepFinished,
    TrainerBroke,
    TrainerReady,
    Working,
)
from slipstream.runtime.trainer_worker import TELL_S, TrainerWorker
from slipstream.schedule.events import StepTrained
from slipstream.types import TrainSample, WeightVersion


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeLink:
    def __init__(self, name: str) -> None:
        self.name, self.pid = name, 1
        self.is_gone = False
        self.said: list[Any] = []
        self.told: list[Any] = []

    def send(self, message: object) -> None:
        self.told.append(message)

    def receive(self) -> list[Any]:
        said, self.said = self.said, []
        return said

    def how_it_ended(self) -> str:
        return f"{self.name} (process 1) was ended by SIGKILL. Its log: logs/{self.name}.log"

    def kill(self) -> None:
        self.is_gone = True

    def close(self) -> None:
        self.is_gone = True


def crew_of(clock: Clock, num_ranks: int = 1, silence_s: float = 10.0) -> tuple[TrainerCrew, list[FakeLink]]:
    links = [FakeLink(f"trainer-{rank}") for rank in range(num_ranks)]
    return TrainerCrew(links, silence_s, clock), links


def wait(crew: TrainerCrew, clock: Clock, seconds: float) -> None:
    for _ in range(round(seconds / 0.5)):
        clock.now_s += 0.5
        crew.hear()


def test_one_that_says_nothing_is_killed_and_named_with_its_log() -> None:
    clock = Clock()
    crew, links = crew_of(clock, num_ranks=2)
    for link in links:
        link.said.append(TrainerReady())
    assert [message for _, message in crew.hear()] == [TrainerReady(), TrainerReady()]
    for _ in range(4):
        wait(crew, clock, 9.0)
        for link in links:
            link.said.append(Working(None))
    wait(crew, clock, 9.0)
    links[0].said.append(Working(None))
    with pytest.raises(
        TrainerLost, match=r"trainer-1 hangs: it said nothing for 10 s \(train.silence_s\) and was killed\n.*Its log: "
    ):
        wait(crew, clock, 3.0)
    assert links[1].is_gone and not links[0].is_gone


def test_one_that_starts_has_longer() -> None:
    clock = Clock()
    crew, _ = crew_of(clock)
    wait(crew, clock, START_S - 1)
    with pytest.raises(TrainerLost, match="hangs: it said nothing for 600 s and was killed"):
        wait(crew, clock, 3.0)


def test_if_the_run_itself_was_stopped_its_trainer_is_not_killed_for_it() -> None:
    clock = Clock()
    crew, links = crew_of(clock)
    links[0].said.append(TrainerReady())
    crew.hear()
    clock.now_s += 3600.0
    assert crew.hear() == [], "what it said meanwhile is still on its way"
    wait(crew, clock, 10.0 - 2 * LONGEST_LOOK_S)
    assert not links[0].is_gone


def test_one_that_is_gone_is_lost_unless_it_said_why() -> None:
    clock = Clock()
    crew, links = crew_of(clock, num_ranks=2)
    links[1].is_gone = True
    with pytest.raises(TrainerLost, match=r"trainer-1 .process 1. was ended by SIGKILL. Its log: logs/trainer-1.log"):
        crew.hear()
    broke = TrainerBroke("ValueError", "no numbers")
    links[1].said.append(broke)
    assert crew.hear() == [], "the other may be gone, and nobody has seen it yet"
    clock.now_s += BLAME_S
    assert crew.hear() == [(links[1], broke)]


def test_an_error_that_tells_of_the_end_of_another_is_a_loss() -> None:
    crew, links = crew_of(Clock(), num_ranks=2)
    links[0].said += [Working(1, 0, 9), TrainerBroke("RuntimeError", "Connection reset by peer")]
    links[0].is_gone = True
    assert crew.hear() == [(links[0], Working(1, 0, 9))]
    links[1].is_gone = True
    with pytest.raises(TrainerLost, match="trainer-1"):
        crew.hear()


def test_an_error_that_all_have_told_of_is_one() -> None:
    crew, links = crew_of(Clock(), num_ranks=2)
    first, second = TrainerBroke("ValueError", "no numbers"), TrainerBroke("RuntimeError", "Connection reset by peer")
    links[0].said.append(first)
    assert crew.hear() == []
    links[1].said.append(second)
    assert crew.hear() == [(links[0], first)]


class SlowRank:
    """Each micro-batch, weight and update takes a second."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.done, self.fed = clock, 0, 0

    def begin_step(self) -> None:
        pass

    def feed(self, samples: Any, on_progress: Any) -> None:
        self.fed += sum(len(sample.response_ids) for sample in samples)
        for sample in samples:
            self.clock.now_s += 1.0
            self.done += len(sample.response_ids)
            on_progress(self.done, self.fed)

    def finish_step(self, on_progress: Any) -> dict[str, float]:
        self.clock.now_s += 1.0
        on_progress(self.done, self.fed)
        return {}

    def weights(self) -> Any:
        for name in "abc":
            self.clock.now_s += 1.0
            yield name, torch.zeros(1)


class Sink:
    def publish(self, weights: Any, number: int) -> WeightVersion:
        return WeightVersion(number, "".join(name for name, _ in weights))


def test_who_works_speaks_after_every_piece_and_says_how_far_it_is() -> None:
    clock, said = Clock(), list[Any]()
    worker = TrainerWorker(SlowRank(clock), Sink(), said.append, clock)  # type: ignore[arg-type]
    samples = tuple(TrainSample(f"1/0/{place}", (1,), (2, 3), (0.0, 0.0), 1.0) for place in range(3))
    worker.obey(FeedSamples(1, samples))
    assert said == [Working(1, 2, 6, 1.0), Working(1, 4, 6, 1.0), Working(1, 6, 6, 1.0)]
    said.clear()
    worker.obey(FinishStep(1))
    assert said == [Working(1, 6, 6, 1.0), StepFinished(1, {}, busy_s=4.0, untold_s=0.0)]
    said.clear()
    worker.obey(PublishWeights(1))
    assert said[:3] == [Working(None)] * 3 and said[3].version == WeightVersion(1, "abc")
    said.clear()
    worker.tell()
    clock.now_s += TELL_S
    worker.tell()
    worker.tell()
    assert said == [Working(None)], "not more often than there is something to see"


class Bars:
    """A console that remembers: by bar, [done, total], and those that are open."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[int, int]]] = {}
        self.open: set[str] = set()

    def note(self, line: str) -> None: ...

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Any]:
        self.open.add(name)
        shown = [0, total]
        self.seen[name] = []

        def advance(n: int = 1, *, more_total: int = 0, **facts: float) -> None:
            shown[0] += n
            shown[1] += more_total
            self.seen[name].append((shown[0], shown[1]))

        yield advance
        self.open.discard(name)


def test_a_bar_shows_how_far_training_is(tmp_path: Path) -> None:
    crew, links = crew_of(Clock())
    bars = Bars()
    nothing = SimpleNamespace(graded=lambda wait_s: [], advance=list, note_waits=lambda: None, live=-1)
    recipe = {"model": "tiny", "mode": "sync", "tasks": {"train": [{"source": "sorting", "size": 4, "seed": 1}]}}
    parts: dict[str, Any] = dict.fromkeys(("history", "store", "log", "reports"))
    config = build_config(recipe | {"run": {"dir": str(tmp_path)}})
    world = StreamWorld(
        config,
        **parts,
        crew=crew,
        pool=nothing,  # type: ignore[arg-type]
        groups=nothing,  # type: ignore[arg-type]
        ledger=Ledger(),
        bell=Doorbell(),
        prompts=[None],  # type: ignore[list-item]
        eval_sets={},
        stop_token_ids=(),
        console=bars,  # type: ignore[arg-type]
        advice=Advice(config),
        rows={},
        kept_state={},
        kept=Kept(),
        stop_reason=lambda: None,
        note=lambda item: None,
    )
    for message in (Working(None), Working(3, 0, 40), Working(3, 20, 40), Working(3, 40, 100), Working(3, 100, 100)):
        links[0].said.append(message)
        assert world.advance() == []
    assert bars.seen == {"step 3 training": [(0, 40), (20, 40), (40, 100), (100, 100)]}
    assert bars.open == {"step 3 training"}
    links[0].said.append(StepFinished(3, {}, 1.0, 1.0))
    assert world.advance() == [StepTrained(3)] and not bars.open
    links[0].said += [Working(4, 10, 30)]
    world.advance()
    assert bars.seen["step 4 training"] == [(10, 30)], "it begins anew"
