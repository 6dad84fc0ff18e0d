"""What becomes of a round when workers die, fail or are called away: the others' goes on. And that there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
from slipstream.runtime.drafter_session import SHARES_FOLDER, DrafterSession
from slipstream.schedule.events import (
    EndSession,
    Item,
    Lend,
    LessonsAdded,
    Publish,
    Recall,
    Rest,
    StopTraining,
    TrainRound,
)

UPDATES, SAMPLES = 8, 20
HALF = SAMPLES // 2


class Stage:
    """A session of these workers; what it sends them lies there until somebody answers."""

    def __init__(self, folder: Path, workers: str, updates: int = UPDATES, least_idle: int = 1) -> None:
        self.noted, self.said, self.sent = list[Item](), list[str](), list[tuple[str, Any]]()
        self.session = DrafterSession(
            folder,
            lambda name, message: self.sent.append((name, message)),
            updates=updates,
            samples=SAMPLES,
            least_idle=least_idle,
            record=self.noted.append,
            say=self.said.append,
        )
        for name in workers:
            self.session.join(name, 0)

    def lend(self, workers: str) -> None:
        for name in workers:
            self.session.tell(Lend(name))

    def learn(self, count: int = HALF) -> None:
        self.session.tell(LessonsAdded(count))

    def to(self, name: str) -> list[Any]:
        return [message for receiver, message in self.sent if receiver == name]

    def trained(self, name: str, num_updates: int = UPDATES // 2, **metrics: float) -> None:
        told = [message for message in self.to(name) if isinstance(message, TrainDrafter)][-1]
        assert told.share_folder == self.session.folder / SHARES_FOLDER / str(told.round) / name
        self.session.hear(name, DrafterTrained(told.round, num_updates, metrics))

    def shares(self, name: str) -> dict[str, int]:
        """That it was told to average last."""
        told = [message for message in self.to(name) if isinstance(message, AverageShares)][-1]
        return {folder.name: num_updates for folder, num_updates in told.shares}

    def averaged(self, name: str) -> None:
        told = [message for message in self.to(name) if isinstance(message, AverageShares)][-1]
        version, num_updates = self.session.version + 1, sum(count for _, count in told.shares)
        self.session.hear(name, SharesAveraged(told.round, version, 100 + num_updates))


def test_a_round_from_beginning_to_end(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "abc")
    stage.lend("ba")
    stage.learn(HALF - 1)
    assert stage.sent == [], "too little to learn from"
    stage.learn(1)
    assert [name for name, _ in stage.sent] == ["b", "a"]
    assert stage.sent[0][1] == TrainDrafter(1, 0, UPDATES // 2, tmp_path / SHARES_FOLDER / "1" / "b")
    stage.trained("b", 0)
    stage.trained("a", 4, **{"drafter/loss": 3.0})
    assert stage.shares("b") == {"a": 4}, "b, who leads, had nothing to learn from"
    stage.averaged("b")
    for name in "abc":
        assert stage.to(name)[-1] == TakeDrafter(1)
        stage.session.hear(name, DrafterTaken(1))
    assert stage.noted == [Lend("b"), Lend("a"), TrainRound(1, "b", ("b", "a")), Publish(1, "b"), EndSession(1)]
    stage.session.join("d", 0)
    assert stage.to("d") == [TakeDrafter(1)], "who began with an older one"
    stage.session.hear("d", DrafterTaken(1))
    metrics = stage.session.take_metrics()
    assert metrics["drafter/loss"] == 3.0 and metrics["drafter/version"] == metrics["drafter/updates"] == 104
    assert metrics["drafter/updates_in_tail"] == 4 and metrics["drafter/behind"] == 0
    assert "drafter/loss" not in stage.session.take_metrics(), "they are taken"


@pytest.mark.parametrize("who", ["a", "b"])
@pytest.mark.parametrize(("fate", "counts"), [("die", False), ("die after", True), ("fail", False)])
def test_who_dies_or_fails_in_a_round_costs_no_more_than_its_own_updates(
    tmp_path: Path, who: str, fate: str, counts: bool
) -> None:
    """Of a and b the one does, the other is called away, and c is left; a leads as long as it is there."""
    other = "b" if who == "a" else "a"
    stage = Stage(tmp_path, "abc")
    stage.lend("abc")
    stage.learn()
    stage.session.leave("nobody")
    # All were idle when there was enough to learn from.
    assert stage.noted[-1] == TrainRound(1, "a", ("a", "b", "c"))
    if fate == "fail":
        stage.session.hear(who, DrafterFailed(1, "out of memory"))
        assert stage.said == [f"{who} goes on without training the drafter: out of memory"]
    elif fate == "die after":
        stage.trained(who)
        stage.session.leave(who)
    else:
        stage.session.leave(who)
    stage.session.tell(Recall(other))
    assert stage.to(other)[-1] == StopDrafter() and stage.noted[-1] == StopTraining(other)
    stage.session.hear(other, DrafterStopped(3))
    stage.trained("c")
    assert stage.shares("c") == {who: 4, "c": 4} if counts else {"c": 4}
    stage.averaged("c")
    assert stage.noted[-1] == EndSession(1) and stage.session.version == 1
    assert stage.session.take_metrics()["drafter/updates_given_up"] == 3


def test_the_next_averages_if_the_leader_dies_or_fails_at_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "abc")
    stage.lend("abc")
    stage.learn()
    for name in "abc":
        stage.trained(name)
    assert stage.shares("a") == {"a": 4, "b": 4, "c": 4}
    stage.session.leave("a")
    assert stage.shares("b") == {"a": 4, "b": 4, "c": 4}, "also what is the dead one's"
    stage.session.hear("b", DrafterFailed(1, "the disk is full"))
    stage.averaged("c")
    assert stage.noted[-2:] == [Publish(1, "b"), EndSession(1)] and set(stage.session.here) == {"b", "c"}
    assert not (tmp_path / SHARES_FOLDER).exists()


def test_if_nobody_can_nothing_is_published_and_nothing_hangs(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "ab")
    stage.lend("ab")
    stage.learn()
    for name in "ab":
        stage.session.hear(name, DrafterFailed(1, "out of memory"))
    assert stage.session.version == 0 and stage.session.coordinator.idle == ("a", "b")
    stage.session.leave("a")
    stage.session.leave("b")
    assert stage.session.coordinator.idle == () == tuple(stage.session.here)


def test_all_are_called_away_and_what_one_had_published_just_then_is_kept(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "ab")
    stage.lend("ab")
    stage.learn()
    stage.trained("a")
    stage.trained("b")
    stage.session.tell(Recall("a"))
    stage.session.tell(Recall("b"))
    assert stage.noted[-3:] == [StopTraining("b"), EndSession(1)] or stage.noted[-1] == EndSession(1)
    stage.averaged("a")  # it had, before it heard
    assert stage.session.version == 1 and stage.to("b")[-1] == TakeDrafter(1)
    stage.lend("b")
    assert stage.noted[-1] == TrainRound(2, "b", ("b",)), "what was not learned in a round that was done"


def test_if_nobody_ever_waits_all_rest_for_one_round_a_policy(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "ab")
    stage.session.new_policy(0)
    stage.learn(HALF - 1)
    stage.session.new_policy(1)
    assert stage.sent == [], "too little to learn from"
    stage.learn(1)
    stage.session.new_policy(2)
    assert stage.noted == [Rest(("a", "b")), TrainRound(1, "a", ("a", "b"))]
    assert stage.to("b") == [TrainDrafter(1, 0, UPDATES, tmp_path / SHARES_FOLDER / "1" / "b")], "all of a step's"
    stage.session.tell(Lend("b"))
    stage.session.tell(Recall("b"))  # as when it gets something to sample
    assert not any(isinstance(message, StopDrafter) for _, message in stage.sent), "nobody is called away"
    stage.trained("a")
    stage.trained("b")
    stage.averaged("a")
    assert stage.noted[2:] == [Publish(1, "a"), EndSession(1), Recall("a"), Recall("b")]
    assert stage.session.coordinator.idle == (), "they sample"
    assert stage.session.take_metrics()["drafter/updates_in_tail"] == 0
    stage.learn()
    stage.session.new_policy(3)
    assert stage.session.take_metrics()["drafter/behind"] == 0, "nobody has sampled with the newest policy yet"
    assert stage.noted[6:] == [Rest(("a", "b")), TrainRound(2, "a", ("a", "b"))], "that was for the one before"
    stage.session.leave("b")
    stage.trained("a")
    stage.averaged("a")
    stage.learn()
    stage.lend("a")
    stage.trained("a")
    stage.averaged("a")
    stage.learn()
    stage.session.tell(Recall("a"))
    del stage.noted[:]
    assert stage.session.take_metrics()["drafter/behind"] == 0
    stage.session.new_policy(4)
    assert stage.session.take_metrics()["drafter/behind"] == 1
    assert stage.noted == [], "there was a round since the policy changed"


def test_a_round_waits_until_so_many_are_idle(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "abc", least_idle=2)
    stage.learn()
    stage.lend("a")
    assert not any(isinstance(item, TrainRound) for item in stage.noted)
    stage.lend("b")
    assert TrainRound(1, "a", ("a", "b")) in stage.noted

    stage = Stage(tmp_path, "a", least_idle=2)
    stage.session.new_policy(0)
    stage.learn()
    stage.session.new_policy(1)
    assert stage.noted == [Rest(("a",)), TrainRound(1, "a", ("a",))], "what is owed is made up for by whoever is there"


def test_who_is_at_a_round_that_is_owed_ends_it_before_it_samples(tmp_path: Path) -> None:
    """As in mode=sync, where all wait for the policy, and are asked to sample as soon as it is there."""
    stage = Stage(tmp_path, "abc")
    stage.session.new_policy(0)
    stage.lend("ab")
    stage.learn()
    stage.session.new_policy(1)
    assert not any(isinstance(item, Rest) for item in stage.noted), "c, who is late, does not rest"
    stage.session.tell(Recall("a"))
    stage.session.tell(Recall("b"))
    stage.trained("a")
    stage.session.leave("b")
    stage.averaged("a")
    assert stage.noted[-2:] == [EndSession(1), Recall("a")] and stage.session.coordinator.idle == ()


def test_without_updates_nothing_is_trained(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "ab", updates=0)
    stage.lend("ab")
    stage.learn(100)
    stage.session.new_policy(0)
    stage.session.new_policy(1)
    assert stage.sent == []
