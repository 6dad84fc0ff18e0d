"""Who samples which rollout. A pure state machine, as `scheduler.py` is; what a step consists of is in `steps.py`.

Invariants, asserted by `tests/test_schedule_fleet.py`, whatever workers come, die or leave in between, also while a
rollout is on its way from one to another: every rollout that was asked for is in exactly one closed step, unless it is
carried into one that nobody asks for; a worker never has more rollouts than slots; no rollout is sampled
twice at the same time; steps are closed in order; actions depend on the events alone (and on how this machine adds up,
where lengths of new prompts are told apart by a hair: `ranker.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from slipstream.schedule.dispatch import WorkerSpec
from slipstream.schedule.events import (
    CloseStep,
    FleetAction,
    FleetEvent,
    HandedBack,
    Lend,
    Outgrew,
    Recall,
    RolloutEnded,
    RolloutsAsked,
    Sample,
    TakeBack,
    Watch,
    WeightsLive,
    WorkerJoined,
    WorkerLeft,
)
from slipstream.schedule.lengths import LengthForecaster, forecast_metrics
from slipstream.schedule.members import FleetRollout, FleetWorker
from slipstream.schedule.ranker import Features, token_features
from slipstream.schedule.rules import PLACEMENTS, Rules
from slipstream.schedule.speeds import SpeedCurve
from slipstream.schedule.steps import Steps
from slipstream.schedule.tiers import equal_tiers, two_tiers

GROWTH = 1.5
"""Times its forecast, from which on a rollout counts as an outlier."""
CHUNK = 2048
"""Tokens after which a rollout may be placed anew."""
WORTH_MOVING = 1.05
"""Times faster that the crowded worker must get."""
MOST_MOVES = 2
"""Of one rollout: each costs computing its keys again."""
DESCRIBED = 4096
"""Prompts whose features are kept when a step is closed, 2 kB each: more than are asked for ahead of it."""

Forecast = Callable[[str, str], float]
"""Tokens that a rollout of a prompt will have."""


class Fleet:
    def __init__(self, rules: Rules, forecast: Forecast | None = None) -> None:
        """`forecast`: instead of one that learns from what ends, to see what foresight would be worth."""
        self.rules = rules
        self._described: dict[str, Features] = {}
        """Prompts that were asked for lately."""
        self._forecaster = LengthForecaster(self._described.get)
        self.forecast_metrics: dict[int, dict[str, float]] = {}
        """Of each step that was closed: how good its forecasts were."""
        self._forecast = forecast
        self._steps = Steps(rules)
        self._workers: dict[str, FleetWorker] = {}
        self._rollouts: dict[str, FleetRollout] = {}
        self._pending: list[tuple[int, float, int, FleetRollout]] = []
        """For anybody: the oldest step first, in it the longest; a heap."""
        self._by_load: list[tuple[float, int, FleetWorker]] = []
        self._by_crowd: list[tuple[float, int, FleetWorker]] = []
        """(how much, stamp, worker), in heaps from which an entry is dropped when it comes up and is out of date."""
        self._numbers = count()

    def on_event(self, event: FleetEvent, now_s: float) -> list[FleetAction]:
        match event:
            case WorkerJoined():
                return self._on_worker(event)
            case WorkerLeft():
                return self._on_loss(event)
            case RolloutsAsked():
                self._describe(event)
                self._steps.ask(event)
                return self._begin_steps()
            case WeightsLive():
                self._steps.see_weights(event.step)
                return self._begin_steps()
            case Outgrew():
                return self._on_growth(event)
            case RolloutEnded():
                return self._on_end(event)
            case HandedBack():
                return self._on_handed_back(event)

    def _on_worker(self, event: WorkerJoined) -> list[FleetAction]:
        assert event.worker not in self._workers, f"{event.worker} is here already"
        spec = WorkerSpec(event.worker, SpeedCurve(event.points, event.tokens_a_step), event.slots)
        worker = self._workers[event.worker] = FleetWorker(spec)
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

    def _begin_steps(self) -> list[FleetAction]:
        return [action for asked in self._steps.may_begin() for action in self._place(asked)]

    def _place(self, asked: RolloutsAsked) -> list[FleetAction]:
        forecasts: dict[str, float] = {}
        known, rollouts = dict(asked.tokens), []
        for uid, prompt in asked.rollouts:
            if self._forecast is not None:
                length = self._forecast(uid, prompt)
            else:
                length = forecasts.get(prompt) or forecasts.setdefault(prompt, self._forecaster.forecast(prompt))
            rollout = self._rollouts[uid] = FleetRollout(uid, prompt, prompt, asked.step, length, next(self._numbers))
            rollout.num_tokens = known.get(uid, 0)
            rollouts.append(rollout)
        self._steps.begin(rollouts)
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

    def _describe(self, asked: RolloutsAsked) -> None:
        for prompt, token_ids in asked.prompts:
            known = self._described.pop(prompt, None)
            self._described[prompt] = token_features(token_ids) if known is None else known

    def _on_end(self, event: RolloutEnded) -> list[FleetAction]:
        rollout = self._rollouts[event.rollout]
        worker = rollout.worker
        assert worker is not None and not rollout.has_ended, f"{event.rollout} was not being sampled"
        rollout.num_tokens = event.num_tokens
        self._leave(rollout)
        actions: list[FleetAction] = []
        target = self._unbind(rollout)  # it may have ended before it could be taken back
        if target is not None and target.is_here:
            actions += self._find_work(target)
        if self._steps.end(rollout):
            actions += self._close_steps()
        return actions + self._find_work(worker)

    def _on_growth(self, event: Outgrew) -> list[FleetAction]:
        rollout = self._rollouts.get(event.rollout)
        if rollout is None:
            return []  # its step was closed before this arrived
        if self.rules.tail == "chunks":
            return self._place_again(rollout)
        self._steps.outgrow(rollout)
        return self._close_steps()

    def _place_again(self, rollout: FleetRollout) -> list[FleetAction]:
        """After a chunk: elsewhere, where that is clearly faster, or where it is."""
        worker = rollout.worker
        if worker is None or rollout.bound_for is not None or rollout.has_ended:
            return []
        target = self._least_loaded()
        if target is not None and target is not worker:
            there_s = target.spec.curve.token_s(len(target.running) + target.num_expected + 1)
            if worker.spec.curve.token_s(len(worker.running)) > WORTH_MOVING * there_s:
                return [self._take_back(rollout, target)]
        rollout.tell_at += CHUNK
        return [Watch(worker.spec.name, rollout.uid, rollout.tell_at)]

    def _close_steps(self) -> list[FleetAction]:
        actions: list[FleetAction] = []
        for step, done, leaves_some in self._steps.close():
            lengths: dict[str, list[float]] = {}
            for rollout in done:
                lengths.setdefault(rollout.prompt, []).append(float(rollout.num_tokens))
                del self._rollouts[rollout.uid]
            self.forecast_metrics[step] = forecast_metrics(
                {rollout.uid: rollout.forecast for rollout in done},
                {rollout.uid: float(rollout.num_tokens) for rollout in done},
            )
            self._forecaster.learn_step(lengths)
            for prompt in list(self._described)[:-DESCRIBED]:  # those that were asked for first
                del self._described[prompt]
            actions.append(CloseStep(step, tuple(rollout.uid for rollout in done)))
            if leaves_some and not self.rules.mixes_steps:  # what was carried is of the next step now, for which others
                for worker in list(self._workers.values()):  # may have waited
                    actions += self._find_work(worker)
        return actions

    def _on_handed_back(self, event: HandedBack) -> list[FleetAction]:
        rollout = self._rollouts[event.rollout]
        worker = rollout.worker
        self._leave(rollout)
        target = self._unbind(rollout)
        assert worker is not None and target is not None, f"{event.rollout} was not asked back"
        rollout.num_tokens = event.num_tokens
        actions: list[FleetAction] = []
        if target.is_here:
            actions += self._begin(rollout, target)
        else:
            self._wait(rollout)
            actions += self._hand_out()
        return actions + (self._find_work(worker) if worker.is_here else [])

    # Handing out.

    def _wait(self, rollout: FleetRollout) -> None:
        heapq.heappush(self._pending, (rollout.step, -rollout.forecast, rollout.order, rollout))

    def _hand_out(self) -> list[FleetAction]:
        """What waits for anybody, to whoever has a slot and would be done first."""
        actions: list[FleetAction] = []
        while self._pending:
            worker = self._least_loaded()
            if worker is None or not self._may_begin(self._pending[0][-1], worker):
                break
            actions += self._begin(heapq.heappop(self._pending)[-1], worker)
        return actions

    def _find_work(self, worker: FleetWorker) -> list[FleetAction]:
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
            actions += self._begin(rollout, worker)
        if self.rules.moves and not worker.running and not worker.num_expected:
            actions += self._relieve_somebody(worker)
        if self.rules.lends_idle and worker.has_nothing and not worker.is_lent:
            worker.is_lent = True
            actions.append(Lend(worker.spec.name))
        return actions

    def _may_begin(self, rollout: FleetRollout, worker: FleetWorker) -> bool:
        return self.rules.mixes_steps or all(one.step >= rollout.step for one in worker.running.values())

    def _begin(self, rollout: FleetRollout, worker: FleetWorker) -> list[FleetAction]:
        assert rollout.worker is None and not rollout.has_ended
        rollout.worker = worker
        rollout.load = max(1.0, rollout.forecast - rollout.num_tokens) * worker.spec.curve.extra_s(len(worker.running))
        worker.running[rollout.uid] = rollout
        worker.load += rollout.load
        self._note(worker)
        rollout.tell_at = 0
        if self.rules.tail == "chunks":
            rollout.tell_at = rollout.num_tokens + CHUNK
        elif self.rules.tail == "outliers" and not rollout.has_outgrown:
            rollout.tell_at = int(GROWTH * rollout.forecast)
        sample = Sample(worker.spec.name, rollout.uid, rollout.num_tokens, rollout.tell_at)
        if not worker.is_lent:
            return [sample]
        worker.is_lent = False
        return [Recall(worker.spec.name), sample]

    def _leave(self, rollout: FleetRollout) -> None:
        worker = rollout.worker
        assert worker is not None
        del worker.running[rollout.uid]
        worker.load -= rollout.load
        rollout.worker = None
        if worker.is_here:
            self._note(worker)

    def _take_back(self, rollout: FleetRollout, target: FleetWorker) -> TakeBack:
        assert rollout.worker is not None and rollout.bound_for is None
        rollout.bound_for = target
        target.num_expected += 1
        return TakeBack(rollout.worker.spec.name, rollout.uid)

    def _unbind(self, rollout: FleetRollout) -> FleetWorker | None:
        """It is no longer on its way: to whom it was, if to anybody."""
        target, rollout.bound_for = rollout.bound_for, None
        if target is not None:
            target.num_expected -= 1
            if target.is_here:
                self._note(target)
        return target

    def _relieve_somebody(self, worker: FleetWorker) -> list[FleetAction]:
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

    def _note(self, worker: FleetWorker) -> None:
        """Its place among the others has changed."""
        worker.stamp = next(self._numbers)
        heapq.heappush(self._by_load, (worker.load, worker.stamp, worker))
        heapq.heappush(self._by_crowd, (-len(worker.running) - len(worker.queue), worker.stamp, worker))
        for heap in (self._by_load, self._by_crowd):
            if len(heap) > 4 * len(self._workers) + 64:  # most of it is out of date
                heap[:] = [entry for entry in heap if entry[1] == entry[2].stamp and entry[2].is_here]
                heapq.heapify(heap)

    def _least_loaded(self) -> FleetWorker | None:
        """Of those with a slot: one without comes into the heap again when it has one."""
        return _first(self._by_load, lambda worker: worker.num_free > 0)

    def _most_crowded(self) -> FleetWorker | None:
        return _first(self._by_crowd, lambda worker: True)


def _first(heap: list[tuple[float, int, FleetWorker]], counts: Callable[[FleetWorker], bool]) -> FleetWorker | None:
    while heap:
        _, stamp, worker = heap[0]
        if stamp == worker.stamp and worker.is_here and counts(worker):
            return worker
        heapq.heappop(heap)
    return None
