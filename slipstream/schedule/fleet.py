"""Who samples which rollout, and which rollouts a step is trained on. A pure state machine, as `scheduler.py` is.

The rule of staleness. Version v of the weights is that after step v. A step s is opened when version s - 1 - staleness
is live, so whatever is begun for it has at least that version; and a rollout is trained in the step it was begun for.
Hence what is trained in step s was begun with a version of at least s - 1 - staleness: none is staler than that. Where
groups that take too long are carried into the next step, once at most, a step is opened one version later, and the same
holds for s + 1.

Invariants, asserted by `tests/test_schedule_fleet.py`, whatever workers come, die or leave in between, also while a
rollout is on its way from one to another: every rollout that was asked for is in exactly one closed step, unless it is
carried into one that nobody asks for; a worker never has more rollouts than slots; no rollout is sampled
twice at the same time; steps are closed in order; actions depend on the events alone.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from slipstream.schedule.dispatch import DISPATCHES, Dispatch, WorkerSpec
from slipstream.schedule.events import (
    CloseStep,
    FleetAction,
    FleetEvent,
    HandedBack,
    RolloutEnded,
    RolloutsAsked,
    Sample,
    TakeBack,
    WeightsLive,
    WorkerJoined,
    WorkerLeft,
)
from slipstream.schedule.lengths import LengthForecaster
from slipstream.schedule.speeds import SpeedCurve
from slipstream.schedule.tiers import equal_tiers, two_tiers

PLACEMENTS: dict[str, Dispatch | None] = {
    "least load": None,
    **DISPATCHES,
    "ranking groups": equal_tiers,
    "two tiers": two_tiers,
}
"""How the rollouts of a step come to workers: all by a plan when the step opens, or (None) one by one, the longest
first, to whoever would be done first."""
TAILS = {
    "whole": "every rollout ends where it began",
    "move": "a worker without work takes half of what the most crowded one has",
    "carry": "groups that are not done when CARRIED of a step are left go on in the next step",
}
CARRIED = 0.1
"""Of a step's groups: so many are carried at most."""
WORTH_MOVING = 1.05
"""Times faster that the crowded worker must get."""
MOST_MOVES = 2
"""Of one rollout: each costs computing its keys again."""

Forecast = Callable[[str, str], float]
"""Tokens that a rollout of a prompt will have."""


@dataclass(frozen=True, slots=True)
class Rules:
    placement: str = "least load"
    tail: str = "whole"
    staleness: int = 0
    mixes_steps: bool = True
    """A worker with free slots takes up the next step beside the one it has; else, as published systems do, once it is
    done with its share of that."""

    def __post_init__(self) -> None:
        for name, known in (("placement", PLACEMENTS), ("tail", TAILS)):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} '{getattr(self, name)}'; known: {', '.join(known)}")
        if self.carries and not self.staleness:
            raise ValueError(f"tail '{self.tail}' trains rollouts a step late: it needs a staleness of 1 or more")

    @property
    def carries(self) -> bool:
        return self.tail == "carry"


@dataclass(slots=True, eq=False)
class _Rollout:
    uid: str
    prompt: str
    group: str
    """Its prompt; in a step that it was carried into, where the prompt may have come up again, a name of its own."""
    step: int
    forecast: float
    order: int
    num_tokens: int = 0
    worker: _Worker | None = None
    bound_for: _Worker | None = None
    """Where it goes on once it is handed back."""
    load: float = 0.0
    """What it adds to its worker's."""
    num_moves: int = 0
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class _Worker:
    spec: WorkerSpec
    running: dict[str, _Rollout] = field(default_factory=dict)
    queue: deque[_Rollout] = field(default_factory=deque)
    """What a plan gave it."""
    num_expected: int = 0
    """Rollouts on their way to it, for which slots are kept."""
    load: float = 0.0
    """About how long what it has would take it from the start: what balances workers that get new work."""
    stamp: int = 0
    """Of its newest entry in the heaps."""
    is_here: bool = True

    @property
    def num_free(self) -> int:
        return self.spec.slots - len(self.running) - self.num_expected


@dataclass(slots=True)
class _Step:
    number: int
    groups: dict[str, list[_Rollout]]
    num_left: dict[str, int]
    """By prompt: rollouts that have not ended."""
    num_asked: int = 0
    """Groups, once the step is open."""
    num_late: int = 0
    """Groups with rollouts that have not ended."""
    carried_in: set[str] = field(default_factory=set)
    """Prompts that came from the step before: they are not carried again."""


class Fleet:
    def __init__(self, rules: Rules, forecast: Forecast | None = None) -> None:
        """`forecast`: instead of one that learns from what ends, to see what foresight would be worth."""
        self.rules = rules
        self._forecaster = LengthForecaster()
        self._forecast = forecast
        self._version = -1
        self._workers: dict[str, _Worker] = {}
        self._rollouts: dict[str, _Rollout] = {}
        self._asked: deque[RolloutsAsked] = deque()
        self._steps: deque[_Step] = deque()
        """Open ones, oldest first."""
        self._pending: list[tuple[int, float, int, _Rollout]] = []
        """For anybody: the oldest step first, in it the longest; a heap."""
        self._by_load: list[tuple[float, int, _Worker]] = []
        self._by_crowd: list[tuple[float, int, _Worker]] = []
        """(how much, stamp, worker), in heaps from which an entry is dropped when it comes up and is out of date."""
        self._numbers = count()

    def on_event(self, event: FleetEvent, now_s: float) -> list[FleetAction]:
        match event:
            case WorkerJoined():
                return self._on_worker(event)
            case WorkerLeft():
                return self._on_loss(event)
            case RolloutsAsked():
                assert event.rollouts, f"step {event.step} asks for nothing"
                self._asked.append(event)
                return self._open_steps()
            case WeightsLive():
                self._version = max(self._version, event.step)
                return self._open_steps()
            case RolloutEnded():
                return self._on_end(event)
            case HandedBack():
                return self._on_handed_back(event)

    def _on_worker(self, event: WorkerJoined) -> list[FleetAction]:
        assert event.worker not in self._workers, f"{event.worker} is here already"
        spec = WorkerSpec(event.worker, SpeedCurve(event.points, event.tokens_a_step), event.slots)
        worker = self._workers[event.worker] = _Worker(spec)
        self._note(worker)
        return self._find_work(worker)

    def _on_loss(self, event: WorkerLeft) -> list[FleetAction]:
        worker = self._workers.pop(event.worker)
        worker.is_here = False
        known = dict(event.tokens)
        for rollout in (*worker.running.values(), *worker.queue):
            rollout.num_tokens = known.get(rollout.uid, rollout.num_tokens)
            self._unbind(rollout)
            rollout.worker = None
            self._wait(rollout)
        return self._hand_out()

    def _open_steps(self) -> list[FleetAction]:
        patience = self.rules.staleness - self.rules.carries
        actions: list[FleetAction] = []
        while self._asked and self._version >= self._asked[0].step - 1 - patience:
            actions += self._open(self._asked.popleft())
        return actions

    def _open(self, asked: RolloutsAsked) -> list[FleetAction]:
        step = self._step(asked.step)
        forecasts: dict[str, float] = {}
        rollouts = []
        for uid, prompt in asked.rollouts:
            if self._forecast is not None:
                length = self._forecast(uid, prompt)
            else:
                length = forecasts.get(prompt) or forecasts.setdefault(prompt, self._forecaster.forecast(prompt))
            rollout = self._rollouts[uid] = _Rollout(uid, prompt, prompt, asked.step, length, next(self._numbers))
            step.groups.setdefault(prompt, []).append(rollout)
            step.num_left[prompt] = step.num_left.get(prompt, 0) + 1
            rollouts.append(rollout)
        step.num_asked = len(step.groups)
        step.num_late = sum(left > 0 for left in step.num_left.values())
        place = PLACEMENTS[self.rules.placement]
        if place is None or not self._workers:
            for rollout in rollouts:
                self._wait(rollout)
            return self._hand_out()
        by_uid = {rollout.uid: rollout for rollout in rollouts}
        specs = [worker.spec for worker in self._workers.values()]
        if asked.step % 2 and place in (equal_tiers, two_tiers):
            specs.reverse()  # who had the short ones has the long ones next
        plan = place({rollout.uid: rollout.forecast for rollout in rollouts}, specs)
        actions: list[FleetAction] = []
        for name, uids in plan.items():
            worker = self._workers[name]
            worker.queue.extend(by_uid[uid] for uid in uids)
            self._note(worker)
            actions += self._find_work(worker)
        return actions

    def _step(self, number: int) -> _Step:
        """The open one of this number, or a new one: rollouts may be carried into it before it is asked for."""
        for step in self._steps:
            if step.number == number:
                return step
        step = _Step(number, {}, {})
        self._steps.append(step)
        return step

    def _on_end(self, event: RolloutEnded) -> list[FleetAction]:
        rollout = self._rollouts[event.rollout]
        worker = rollout.worker
        assert worker is not None and not rollout.has_ended, f"{event.rollout} was not being sampled"
        rollout.has_ended, rollout.num_tokens = True, event.num_tokens
        self._leave(rollout)
        actions: list[FleetAction] = []
        target = self._unbind(rollout)  # it may have ended before it could be taken back
        if target is not None and target.is_here:
            actions += self._find_work(target)
        step = self._step(rollout.step)
        step.num_left[rollout.group] -= 1
        if not step.num_left[rollout.group]:
            step.num_late -= 1
            actions += self._close_steps()
        return actions + self._find_work(worker)

    def _close_steps(self) -> list[FleetAction]:
        actions: list[FleetAction] = []
        while self._steps:
            step = self._steps[0]
            if not step.num_asked or step.num_late > (CARRIED * step.num_asked if self.rules.carries else 0):
                break
            late = [group for group, left in step.num_left.items() if left]
            if not step.carried_in.isdisjoint(late):
                break
            self._steps.popleft()
            self._carry(step, late)
            done = [rollout for name, group in step.groups.items() if not step.num_left[name] for rollout in group]
            lengths: dict[str, list[float]] = {}
            for rollout in done:
                lengths.setdefault(rollout.prompt, []).append(float(rollout.num_tokens))
                del self._rollouts[rollout.uid]
            self._forecaster.learn_step(lengths)
            actions.append(CloseStep(step.number, tuple(rollout.uid for rollout in done)))
            if late and not self.rules.mixes_steps:  # what was carried is of the next step now, which may be taken up
                for worker in list(self._workers.values()):
                    actions += self._find_work(worker)
        return actions

    def _carry(self, step: _Step, late: list[str]) -> None:
        if not late:
            return
        following = self._step(step.number + 1)
        self._steps = deque(sorted(self._steps, key=lambda one: one.number))
        for old_name in late:
            name = f"{old_name} of step {step.number}"
            following.groups[name] = group = step.groups[old_name]
            following.num_left[name] = step.num_left[old_name]
            following.carried_in.add(name)
            following.num_late += 1
            for rollout in group:
                rollout.step, rollout.group = following.number, name

    def _on_handed_back(self, event: HandedBack) -> list[FleetAction]:
        rollout = self._rollouts[event.rollout]
        worker = rollout.worker
        self._leave(rollout)
        target = self._unbind(rollout)
        assert worker is not None and target is not None, f"{event.rollout} was not asked back"
        rollout.num_tokens = event.num_tokens
        actions: list[FleetAction] = []
        if target.is_here:
            actions.append(self._begin(rollout, target))
        else:
            self._wait(rollout)
            actions += self._hand_out()
        return actions + (self._find_work(worker) if worker.is_here else [])

    # Handing out.

    def _wait(self, rollout: _Rollout) -> None:
        heapq.heappush(self._pending, (rollout.step, -rollout.forecast, rollout.order, rollout))

    def _hand_out(self) -> list[FleetAction]:
        """What waits for anybody, to whoever has a slot and would be done first."""
        actions: list[FleetAction] = []
        while self._pending:
            worker = self._least_loaded()
            if worker is None or not self._may_begin(self._pending[0][-1], worker):
                break
            actions.append(self._begin(heapq.heappop(self._pending)[-1], worker))
        return actions

    def _find_work(self, worker: _Worker) -> list[FleetAction]:
        """For a worker with free slots: of its own, of everybody's, of the others'."""
        actions: list[FleetAction] = []
        while worker.num_free > 0 and (worker.queue or self._pending):
            is_own = bool(worker.queue) and not (self._pending and self._pending[0][0] < worker.queue[0].step)
            rollout = worker.queue[0] if is_own else self._pending[0][-1]
            if not self._may_begin(rollout, worker):
                break
            if is_own:
                worker.queue.popleft()
            else:
                heapq.heappop(self._pending)
            actions.append(self._begin(rollout, worker))
        if self.rules.tail == "move" and not worker.running and not worker.num_expected:
            actions += self._relieve_somebody(worker)
        return actions

    def _may_begin(self, rollout: _Rollout, worker: _Worker) -> bool:
        return self.rules.mixes_steps or all(one.step >= rollout.step for one in worker.running.values())

    def _begin(self, rollout: _Rollout, worker: _Worker) -> Sample:
        assert rollout.worker is None and not rollout.has_ended
        rollout.worker = worker
        rollout.load = max(1.0, rollout.forecast - rollout.num_tokens) * worker.spec.curve.extra_s(len(worker.running))
        worker.running[rollout.uid] = rollout
        worker.load += rollout.load
        self._note(worker)
        return Sample(worker.spec.name, rollout.uid, rollout.num_tokens)

    def _leave(self, rollout: _Rollout) -> None:
        worker = rollout.worker
        assert worker is not None
        del worker.running[rollout.uid]
        worker.load -= rollout.load
        rollout.worker = None
        if worker.is_here:
            self._note(worker)

    def _take_back(self, rollout: _Rollout, target: _Worker) -> TakeBack:
        assert rollout.worker is not None and rollout.bound_for is None
        rollout.bound_for = target
        target.num_expected += 1
        return TakeBack(rollout.worker.spec.name, rollout.uid)

    def _unbind(self, rollout: _Rollout) -> _Worker | None:
        """It is no longer on its way: to whom it was, if to anybody."""
        target, rollout.bound_for = rollout.bound_for, None
        if target is not None:
            target.num_expected -= 1
            if target.is_here:
                self._note(target)
        return target

    def _relieve_somebody(self, worker: _Worker) -> list[FleetAction]:
        crowded = self._most_crowded()
        if crowded is None or crowded is worker:
            return []
        if crowded.queue:
            for _ in range(-(-len(crowded.queue) // 2)):
                worker.queue.appendleft(crowded.queue.pop())
            self._note(crowded)
            return self._find_work(worker)
        staying = [one for one in crowded.running.values() if one.bound_for is None]
        curve, size = crowded.spec.curve, len(staying)
        if size < 2 or curve.token_s(size) < WORTH_MOVING * curve.token_s(size - size // 2):
            return []
        movable = [one for one in staying if one.num_moves < MOST_MOVES]
        movable.sort(key=lambda one: (-one.forecast, one.order))
        actions: list[FleetAction] = []
        for rollout in movable[: min(size // 2, worker.num_free)]:
            rollout.num_moves += 1
            actions.append(self._take_back(rollout, worker))
        self._note(crowded)
        return actions

    def _note(self, worker: _Worker) -> None:
        """Its place among the others has changed."""
        worker.stamp = next(self._numbers)
        heapq.heappush(self._by_load, (worker.load, worker.stamp, worker))
        heapq.heappush(self._by_crowd, (-len(worker.running) - len(worker.queue), worker.stamp, worker))
        for heap in (self._by_load, self._by_crowd):
            if len(heap) > 4 * len(self._workers) + 64:  # most of it is out of date
                heap[:] = [entry for entry in heap if entry[1] == entry[2].stamp and entry[2].is_here]
                heapq.heapify(heap)

    def _least_loaded(self) -> _Worker | None:
        """Of those with a slot: one without comes into the heap again when it has one."""
        return _first(self._by_load, lambda worker: worker.num_free > 0)

    def _most_crowded(self) -> _Worker | None:
        return _first(self._by_crowd, lambda worker: True)


def _first(heap: list[tuple[float, int, _Worker]], counts: Callable[[_Worker], bool]) -> _Worker | None:
    while heap:
        _, stamp, worker = heap[0]
        if stamp == worker.stamp and worker.is_here and counts(worker):
            return worker
        heapq.heappop(heap)
    return None
