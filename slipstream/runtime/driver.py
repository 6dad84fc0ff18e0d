"""The loop of a run: facts go to the scheduler, its actions to the world, both into the event log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from slipstream.schedule.events import Action, Event, Finish


class Decider(Protocol):
    """What to do next: `schedule.scheduler.Scheduler` or `schedule.pipeline.Pipeline`."""

    def on_event(self, event: Event, now_s: float) -> list[Action]: ...


class World(Protocol):
    """Where actions are carried out: in this process (`world.py`), by several (`stream_world.py`), or simulated."""

    def perform(self, action: Action) -> Iterable[Event]:
        """Do it, or begin it; the facts that are true when it returns."""
        ...

    def advance(self) -> Iterable[Event]:
        """Let what has begun go on for a moment; the facts that became true."""
        ...


def drive(
    scheduler: Decider,
    world: World,
    first: Event,
    clock: Callable[[], float],
    log: Callable[[float, Event, list[Action]], None],
) -> str:
    """Run until the scheduler says Finish; the reason it gave."""
    inbox: deque[Event] = deque([first])
    while True:
        while inbox:
            event, now_s = inbox.popleft(), clock()
            actions = scheduler.on_event(event, now_s)
            log(now_s, event, actions)
            for action in actions:
                if isinstance(action, Finish):
                    return action.reason
                inbox.extend(world.perform(action))
        inbox.extend(world.advance())
