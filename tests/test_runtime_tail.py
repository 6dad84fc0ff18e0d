"""The drafter learns in the tail: not while anybody waits, no more once work arrives, and no token depends on it."""

from __future__ import annotations

import pytest

from slipstream.draft.throttle import ALIKE
from slipstream.runtime.tail import PUBLISH_EVERY, TAIL_SEQUENCES, TailTrainer
from slipstream.schedule.events import (
    EndSession,
    Item,
    Lend,
    Publish,
    Recall,
    StopTraining,
    TrainRound,
)

STEP_S = 0.01


class Device:
    """A clock, and an update that takes some of its time and slows down the steps beside it."""

    def __init__(self, update_steps: int = 3, slower: float = 1.0) -> None:
        self.now_s, self.busy_until_s = 0.0, 0.0
        self.update_steps, self.slower = update_steps, slower
        self.trains_aside = self.can_start = True
        self.num_started = 0
        self.published: list[int] = []
        self.records: list[Item] = []

    @property
    def is_busy(self) -> bool:
        return self.now_s < self.busy_until_s - 1e-9

    def start(self) -> None:
        assert not self.is_busy
        self.num_started += 1
        self.busy_until_s = self.now_s + self.update_steps * STEP_S * self.slower

    def finish(self) -> None:
        self.now_s = max(self.now_s, self.busy_until_s)

    def follow(self) -> None:
        assert not self.is_busy, "it would wait for what it is itself"

    def publish(self) -> None:
        assert not self.is_busy, "the weights are changing"
        self.published.append(self.num_started)

    def tail_trainer(self, updates: int = 16) -> TailTrainer:
        return TailTrainer(self, self.publish, updates=updates, record=self.records.append, clock=lambda: self.now_s)

    def steps(self, tail: TailTrainer, count: int, running: int = 4, waiting: int = 0) -> None:
        for _ in range(count):
            self.now_s += STEP_S * (self.slower if self.is_busy else 1.0)
            tail.after_step(running, waiting)


def test_a_tail_from_beginning_to_end() -> None:
    device = Device()
    tail = device.tail_trainer(updates=6)
    tail.add_lessons(12)
    device.steps(tail, 50, running=TAIL_SEQUENCES + 1)
    device.steps(tail, 50, waiting=1)
    assert device.num_started == 0 and device.records == []
    device.steps(tail, 200)
    assert device.num_started == 6 and device.published == [PUBLISH_EVERY, 6]
    session = [Lend("local"), TrainRound(1, "local", ("local",)), Publish(1, "local"), Publish(1, "local")]
    assert device.records == [*session, EndSession(1)], "the step's updates are done"
    tail.stop()
    assert device.records[5:] == [Recall("local")]
    num_done, metrics = tail.take()
    assert num_done == 6 and metrics["drafter/tail_slowdown"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["drafter/tail_s"] == pytest.approx(199 * STEP_S)
    assert metrics["drafter/free_s"] == pytest.approx(6 * device.update_steps * STEP_S), "nothing was slowed by it"
    device.steps(tail, 200)
    assert device.num_started == 6, "nothing new to learn from"
    tail.stop()
    tail.add_lessons(12)
    device.steps(tail, 200)
    assert device.num_started == 12 and tail._num_done == 6, "counted by the step"


def in_the_middle_of_an_update(device: Device, tail: TailTrainer) -> None:
    tail.add_lessons(12)
    device.steps(tail, 80)
    for _ in range(100):
        if device.is_busy:
            return
        device.steps(tail, 1)
    raise AssertionError("no update was started")


def test_when_work_arrives_the_update_under_way_is_the_last() -> None:
    device = Device()
    tail = device.tail_trainer(updates=1000)
    in_the_middle_of_an_update(device, tail)
    started, before_s, published = device.num_started, device.now_s, list(device.published)
    tail.recall()
    assert device.records[-3:] == [Recall("local"), StopTraining("local"), EndSession(1)]
    assert device.now_s == before_s and device.published == published, "nobody waits for it"
    device.steps(tail, 20, running=40, waiting=10)
    assert device.num_started == started and device.published == [*published, started], "what it learned is used"
    device.steps(tail, 60)
    assert device.num_started > started and TrainRound(2, "local", ("local",)) in device.records
    in_the_middle_of_an_update(device, tail)
    started = device.num_started
    tail.stop()
    assert not device.is_busy and device.published[-1] == started, "before the policy's weights change, it is over"
    assert tail.take()[0] == started


def test_a_tail_is_slowed_by_the_bound_at_most() -> None:
    device = Device(update_steps=4, slower=1.5)
    tail = device.tail_trainer(updates=1000)
    for number in range(3):
        tail.add_lessons(12)
        begun_s = device.now_s
        device.steps(tail, 800)
        slowdown = (device.now_s - begun_s) / (800 * STEP_S) - 1
        tail.stop()
        num_done, metrics = tail.take()
        assert 0.02 < slowdown < 0.0301 and num_done > 5, number
        assert metrics["drafter/tail_slowdown"] == pytest.approx(slowdown, abs=1e-3)
        assert metrics["drafter/busy_slowdown"] == pytest.approx(0.5, abs=0.01)
        assert metrics["drafter/free_s"] == pytest.approx(num_done * 4 * STEP_S, rel=0.15), "what the steps took anyway"


def test_a_learner_that_cannot_train_aside_is_never_lent() -> None:
    device = Device()
    device.trains_aside = False
    tail = device.tail_trainer()
    tail.add_lessons(12)
    device.steps(tail, 200)
    tail.stop()
    assert device.num_started == 0 and device.records == [] and tail.take() == (0, {"drafter/updates_in_tail": 0.0})


def test_calls_that_launch_ahead_or_catch_up_say_nothing_of_how_long_a_step_takes() -> None:
    device = Device()
    tail = device.tail_trainer(updates=1000)
    tail.add_lessons(12)
    for num_unread in [2] * 90 + list(range(3, 43)):
        device.now_s += STEP_S if num_unread == 2 else STEP_S / 10
        tail.after_step(4, 0, num_unread)
    num_steps, num_started = tail.throttle.num_steps, device.num_started
    assert num_steps == 89 and num_started > 0, "those that launched one and read one"
    device.now_s += 40 * STEP_S
    tail.after_step(4, 0, 2)
    assert tail.throttle.num_steps == num_steps and device.num_started == num_started
    quiet_s = list(tail.throttle._quiet_s[ALIKE])
    assert quiet_s == pytest.approx([STEP_S] * len(quiet_s)) and quiet_s
    device.finish()
    for _ in range(8):
        device.now_s += STEP_S
        tail.after_step(4, 0, 2)
    assert tail.throttle.num_steps == num_steps + 8
