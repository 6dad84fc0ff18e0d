"""The drafter is trained in the tail of a rollout, while few sequences are left and nobody waits for a slot.

Carries out what `schedule/coordinator.py` decides for the one worker there is: it is lent when the tail begins and
recalled when work arrives. A round is what a step's training of the drafter still lacks. Called between the engine's
steps, it starts an update when `draft/throttle.py` lets it, looks whether one is over, and waits for none; recalled, it
starts no more, so that at most the one under way is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Protocol

from slipstream.draft.throttle import ALIKE, Throttle
from slipstream.schedule.coordinator import Coordinator
from slipstream.schedule.events import (
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
)

WORKER = "local"
TAIL_SEQUENCES = 32
"""So many at most are left: the device has reading to do for them, and little to compute."""
PUBLISH_EVERY = 4
"""Updates after which the engine gets the drafter, beside the end of the tail."""
MOST_SLOWDOWN = 0.03
"""Of the tail's decoding, on the mean."""


class Learner(Protocol):
    """What is asked of `DrafterTrainer`."""

    @property
    def trains_aside(self) -> bool: ...
    @property
    def can_start(self) -> bool: ...
    @property
    def is_busy(self) -> bool: ...
    def start(self) -> None: ...
    def finish(self) -> None: ...
    def follow(self) -> None: ...


class TailTrainer:
    def __init__(
        self,
        learner: Learner,
        publish: Callable[[], None],
        *,
        updates: int,
        record: Callable[[Item], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`updates`: of a step. `publish`: gives the engine the drafter as it is. `record`: writes the event log."""
        self._learner, self._publish, self._record, self._clock = learner, publish, record, clock
        self._updates = updates
        self._coordinator = Coordinator()
        self.throttle = Throttle(MOST_SLOWDOWN)
        self._lent = self._running = False
        self._session: int | None = None
        self._last_session = 0
        self._last_s: float | None = None
        """When the last step was over, if it was one of this tail."""
        self._num_unread = 0
        self._num_done = self._num_unpublished = 0
        self._tail_s = self._slowed = self._free_s = 0.0
        self._num_steps = 0

    def add_lessons(self, count: int) -> None:
        """So many texts of a step were collected."""
        self._tell(LessonsAdded(count))

    def after_step(self, num_running: int, num_waiting: int, num_unread: int = 0, kind: Hashable = ALIKE) -> None:
        """The engine has taken a step, and has this many sequences left, and steps launched and not yet read; those of
        the `kind` of the last one that was read take as long as each other."""
        now_s = self._clock()
        # Else steps were launched ahead, or caught up with: this call took longer than a step, or shorter.
        is_even, self._num_unread = num_unread == self._num_unread, num_unread
        if self._last_s is not None:
            self._tail_s += now_s - self._last_s
            if is_even:
                self.throttle.step_took(now_s - self._last_s, beside_update=self._running, kind=kind)
        self._settle()
        in_tail = num_waiting == 0 and 0 < num_running <= TAIL_SEQUENCES
        if in_tail and not self._lent and self._learner.trains_aside:
            self._lent = True
            self.throttle.begin_tail()
            self._tell(Lend(WORKER))
        elif not in_tail:
            self.recall()
        self._last_s = now_s if self._lent else None
        if self._session is None or self._running or self._num_done >= self._updates:
            return
        if is_even and self._learner.can_start and self.throttle.may_start():
            self.throttle.started()
            self._running = True
            self._learner.start()

    def recall(self) -> None:
        """There is other work: no further update is started."""
        if self._lent:
            self._lent, self._last_s = False, None
            self._num_steps += self.throttle.num_steps
            self._slowed += self.throttle.num_steps * self.throttle.slowdown
            self._free_s += self.throttle.busy_s - self.throttle.lost_s
            self._tell(Recall(WORKER))

    def stop(self) -> None:
        """As `recall`; and when it returns nothing runs, and what was learned is the engine's."""
        self.recall()
        if self._running:
            self._learner.finish()
        self._settle()

    def take(self) -> tuple[int, dict[str, float]]:
        """Updates in the tails of this step, and metrics; counts anew from here."""
        assert not self._running, "stop comes first"
        num_done, self._num_done = self._num_done, 0
        metrics = {"drafter/updates_in_tail": float(num_done)}
        if self._num_steps:
            metrics["drafter/tail_s"] = self._tail_s
            metrics["drafter/tail_slowdown"] = self._slowed / self._num_steps
            metrics["drafter/free_s"] = self._free_s  # of training beside decoding, less what that took longer
        if self.throttle.cost is not None:
            metrics["drafter/busy_slowdown"] = self.throttle.cost
        self._tail_s, self._slowed, self._free_s, self._num_steps = 0.0, 0.0, 0.0, 0
        return num_done, metrics

    def _settle(self) -> None:
        """If an update is over, it counts; after some, and at the end, the engine gets what came of them."""
        if self._running and not self._learner.is_busy:
            self._running = False
            self._num_done += 1
            self._num_unpublished += 1
            if self._session is not None and self._num_done >= self._updates:
                self._tell(RoundDone(self._session))
        is_due = self._session is None or self._num_unpublished >= PUBLISH_EVERY
        if self._num_unpublished and not self._running and is_due:
            self._give(Publish(self._last_session, WORKER))

    def _tell(self, event: CoordinatorEvent) -> None:
        if isinstance(event, Lend | Recall):
            self._record(event)
        for action in self._coordinator.on_event(event):
            match action:
                case TrainRound():
                    self._record(action)
                    self._session = self._last_session = action.session
                    self._learner.follow()
                case Publish():
                    self._give(action)
                case StopTraining() | EndSession():
                    self._record(action)
                    self._session = None

    def _give(self, action: Publish) -> None:
        self._record(action)
        self._publish()
        self._learner.follow()
        self._num_unpublished = 0
