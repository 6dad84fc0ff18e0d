"""Who trains the drafter: nobody who samples, and whoever is recalled stops at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.schedule.coordinator import Coordinator
from slipstream.schedule.events import (
    CoordinatorAction,
    CoordinatorEvent,
    EndSession,
    Lend,
    LessonsAdded,
    Publish,
    Recall,
    Rest,
    RoundDone,
    StopTraining,
    TrainRound,
    WorkerLeft,
)

WORKERS = ("a", "b", "c", "d")
HAPPENS = ("lend", "rest", "recall", "die", "lessons", "round")


def test_a_session_from_beginning_to_end() -> None:
    coordinator = Coordinator(least_idle=2, least_lessons=4)
    assert coordinator.on_event(LessonsAdded(4)) == [] == coordinator.on_event(Lend("a"))
    assert coordinator.on_event(Lend("b")) == [TrainRound(1, "a", ("a", "b"))]
    assert coordinator.on_event(Lend("c")) == [], "the session is under way"
    assert coordinator.on_event(LessonsAdded(5)) == []
    assert coordinator.on_event(RoundDone(1)) == [Publish(1, "a"), TrainRound(1, "a", ("a", "b", "c"))]
    assert coordinator.on_event(Recall("a")) == [StopTraining("a")], "b leads on"
    assert coordinator.on_event(RoundDone(1)) == [Publish(1, "b"), EndSession(1)], "nothing new to learn from"
    assert coordinator.idle == ("b", "c")
    assert coordinator.on_event(LessonsAdded(4)) == [TrainRound(2, "b", ("b", "c"))]
    assert coordinator.on_event(WorkerLeft("b")) == []
    assert coordinator.on_event(Recall("c")) == [StopTraining("c"), EndSession(2)]
    assert coordinator.on_event(RoundDone(2)) == [], "nobody is left to publish it"
    assert coordinator.on_event(Lend("d")) == [], "one is too few"
    assert coordinator.on_event(Lend("c")) == [TrainRound(3, "d", ("d", "c"))], "what was not learned is still there"


def test_who_rests_trains_together_from_the_beginning() -> None:
    coordinator = Coordinator(least_lessons=4)
    assert coordinator.on_event(Rest(("a", "b"))) == [] and not coordinator.has_enough
    assert coordinator.on_event(Recall("a")) == [] == coordinator.on_event(Recall("b"))
    coordinator.on_event(LessonsAdded(4))
    assert coordinator.has_enough
    assert coordinator.on_event(Rest(("b", "a"))) == [TrainRound(1, "b", ("b", "a"))]
    assert coordinator.on_event(Rest(("a", "c"))) == [], "a is at it, and c comes late"
    assert coordinator.training == ("b", "a") and coordinator.idle == ("c",)


class Watched:
    """Workers that sample or not, and what they were told."""

    def __init__(self, least_idle: int, least_lessons: int) -> None:
        self.coordinator = Coordinator(least_idle, least_lessons)
        self.lent: set[str] = set()
        self.here = set(WORKERS)
        self.training: set[str] = set()
        self.leader: str | None = None
        self.session = 0

    def tell(self, event: CoordinatorEvent) -> None:
        actions = self.coordinator.on_event(event)
        for action in actions:
            self.hear(action)
        if isinstance(event, Recall):
            assert event.worker not in self.training, "it stops in the answer to its recall"
        assert self.training <= self.lent, "nobody trains who samples"
        assert self.training == set(self.coordinator.training)
        assert not self.training & set(self.coordinator.idle)
        assert self.training | set(self.coordinator.idle) == self.lent, "nobody is forgotten"

    def hear(self, action: CoordinatorAction) -> None:
        match action:
            case TrainRound():
                assert action.leader in action.members and set(action.members) <= self.lent
                assert action.session == self.session if self.training else action.session > self.session
                self.session, self.leader, self.training = action.session, action.leader, set(action.members)
            case StopTraining():
                self.training.remove(action.worker)
            case Publish():
                assert action.leader in self.training and action.session == self.session
            case EndSession():
                assert action.session == self.session
                self.training = set()


@settings(max_examples=200)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.lists(
        st.tuples(st.sampled_from(["lend", "rest", "recall", "die", "lessons", "round"]), st.sampled_from(WORKERS))
    ),
)
def test_nobody_trains_and_samples_and_everybody_idle_is_taken_in(
    least_idle: int, least_lessons: int, happens: list[tuple[str, str]]
) -> None:
    watched = Watched(least_idle, least_lessons)
    for what, worker in happens:
        if what == "lend" and worker in watched.here - watched.lent:
            watched.lent.add(worker)
            watched.tell(Lend(worker))
        elif what == "rest" and watched.here:  # also those that are lent, or train
            watched.lent |= watched.here
            watched.tell(Rest(tuple(sorted(watched.here))))
        elif what == "recall" and worker in watched.lent:
            watched.lent.remove(worker)
            watched.tell(Recall(worker))
        elif what == "die" and worker in watched.here:
            watched.here.remove(worker)
            watched.lent.discard(worker)
            watched.training.discard(worker)
            watched.tell(WorkerLeft(worker))
        elif what == "lessons":
            watched.tell(LessonsAdded(2))
        elif what == "round" and watched.training:
            watched.tell(RoundDone(watched.session))
    for _ in range(2):  # whoever stays idle is taken in, once there is enough to learn from
        watched.tell(LessonsAdded(least_lessons))
        if watched.training:
            watched.tell(RoundDone(watched.session))
    watched.tell(LessonsAdded(least_lessons))
    if len(watched.lent) >= least_idle:
        assert watched.training == watched.lent
