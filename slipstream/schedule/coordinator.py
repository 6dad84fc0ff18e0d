"""Which workers train the drafter while they have nothing to sample. A pure state machine.

A worker is BUSY while it samples, IDLE once the fleet lends it or it is told to rest, and TRAINING in a session. A
session begins when enough workers are idle and there is enough to learn from; who becomes idle later joins at the next
round, which is when members average what they have learned. Whoever is recalled or dies leaves at once, without waiting
for the others. One member leads: it publishes the drafter after every round. If it leaves, the next in line leads on;
with the last member the session ends, and what was published stays.

Invariants, asserted by `tests/test_schedule_coordinator.py`: a worker never trains while it samples; a recalled worker
is told to stop in the very answer to its recall; a session has exactly one leader, who is a member; there is at most
one session; workers that stay idle long enough are taken in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Coordinator:
    least_idle: int = 1
    """Idle workers from which on a session begins."""
    least_lessons: int = 1
    """Rollouts not yet learned from, from which on a session or another round begins."""
    _idle: dict[str, None] = field(default_factory=dict)
    """In the order in which they became so."""
    _members: dict[str, None] = field(default_factory=dict)
    """The first of them leads."""
    _session: int = 0
    _num_lessons: int = 0
    """Not yet learned from in a round that was done."""
    _in_round: int = 0
    """Of these, those of the round under way."""

    @property
    def training(self) -> tuple[str, ...]:
        return tuple(self._members)

    @property
    def idle(self) -> tuple[str, ...]:
        return tuple(self._idle)

    @property
    def has_enough(self) -> bool:
        """To learn from, for a session to begin."""
        return self._num_lessons >= self.least_lessons

    def on_event(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        match event:
            case Lend():
                assert event.worker not in self._members, f"{event.worker} trains, and cannot be idle too"
                self._idle[event.worker] = None
                return self._begin(self.least_idle)
            case Rest():
                self._idle |= dict.fromkeys(name for name in event.workers if name not in self._members)
                return self._begin(least_idle=1)  # they stop sampling for it, however few they are
            case Recall() | WorkerLeft():
                return self._leave(event.worker, is_here=isinstance(event, Recall))
            case LessonsAdded():
                self._num_lessons += event.count
                return self._begin(self.least_idle)
            case RoundDone():
                return self._go_on(event.session)

    def _begin(self, least_idle: int) -> list[CoordinatorAction]:
        if self._members or len(self._idle) < least_idle or not self.has_enough:
            return []
        self._session += 1
        return [self._round()]

    def _round(self) -> TrainRound:
        """With everybody who is idle by now."""
        self._members |= self._idle
        self._idle.clear()
        self._in_round = self._num_lessons
        return TrainRound(self._session, next(iter(self._members)), tuple(self._members))

    def _go_on(self, session: int) -> list[CoordinatorAction]:
        if session != self._session or not self._members:
            return []  # of a session that has ended meanwhile
        self._num_lessons -= self._in_round
        actions: list[CoordinatorAction] = [Publish(session, next(iter(self._members)))]
        if self.has_enough:
            return [*actions, self._round()]
        self._idle = self._members | self._idle
        self._members = {}
        return [*actions, EndSession(session)]

    def _leave(self, worker: str, *, is_here: bool) -> list[CoordinatorAction]:
        self._idle.pop(worker, None)
        if worker not in self._members:
            return []
        del self._members[worker]
        actions: list[CoordinatorAction] = [StopTraining(worker)] if is_here else []
        return actions if self._members else [*actions, EndSession(self._session)]
