"""A fleet without GPUs: workers that decode, a trainer and its weights, led as real ones would be. Pure.

A heap of what happens next: a worker's next rollout ends, a step is trained, its weights arrive, a worker joins or
leaves. Each is told to `schedule.fleet.Fleet`, and what that wants done is done at once; the rest is arithmetic. The
same seed gives the same run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from slipstream.schedule.allocation import Allocator, StepSeen
from slipstream.schedule.dispatch import WorkerSpec
from slipstream.schedule.events import (
    CloseStep,
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
from slipstream.schedule.fleet import CHUNK, Fleet, Forecast
from slipstream.schedule.speeds import SpeedCurve
from slipstream.simulate.outcome import Outcome, StepTimes
from slipstream.simulate.system import Change, Costs, System
from slipstream.simulate.trainer import SimulatedTrainer
from slipstream.simulate.worker import SimulatedWorker
from slipstream.simulate.workloads import SimulatedStep


def simulate(
    system: System,
    costs: Costs,
    steps: Sequence[SimulatedStep],
    *,
    num_gpus: int,
    train_gpus: int = 0,
    changes: Sequence[Change] = (),
    most_workers: int = 0,
) -> Outcome:
    """`train_gpus` of `num_gpus` train, if they are not shared. `most_workers`: if more than 0, workers are rented and
    given back from step to step as `schedule.allocation.Allocator` says, up to so many."""
    sizes = {"num_gpus": num_gpus, "train_gpus": train_gpus, "most_workers": most_workers}
    return World(system, costs, steps, changes=changes, **sizes).run()


class World:
    def __init__(
        self,
        system: System,
        costs: Costs,
        steps: Sequence[SimulatedStep],
        *,
        num_gpus: int,
        train_gpus: int,
        changes: Sequence[Change] = (),
        most_workers: int = 0,
    ) -> None:
        num_workers = (num_gpus if system.colocated else num_gpus - train_gpus) // costs.gpus_a_worker
        if num_workers < 1:
            raise ValueError(
                f"{num_gpus} GPUs with {train_gpus} for training leave no worker of {costs.gpus_a_worker}: give more"
            )
        if not system.colocated and train_gpus < 1:
            raise ValueError("training needs GPUs of its own: give train_gpus")
        self._system, self._costs, self._num_gpus = system, costs, num_gpus
        self._train_gpus = num_gpus if system.colocated else train_gpus
        self._lengths = {uid: length for step in steps for uid, length in step.lengths.items()}
        self._to_train = self._lengths | {uid: tokens for step in steps for uid, tokens in step.trained.items()}
        self._asks = [
            RolloutsAsked(number, tuple((uid, step.prompts[uid]) for uid in step.lengths))
            for number, step in enumerate(steps, start=1)
        ]
        forecast: Forecast | None = (lambda uid, prompt: self._lengths[uid]) if system.foresees else None
        self.fleet = Fleet(system.rules, forecast)
        train_s = costs.train_gpu_s / self._train_gpus
        self._trainer = SimulatedTrainer(system.streams, train_s, costs.update_s, costs.micro_batch_tokens)
        self._groups: dict[str, _Group] = {}
        self._in_turn: dict[int, tuple[dict[int, _Group], int]] = {}
        """By step: groups that are done and wait for earlier ones, and whose turn it is."""
        for ask in self._asks:
            here: dict[str, _Group] = {}
            for uid, prompt in ask.rollouts:
                group = self._groups[uid] = here.setdefault(prompt, _Group(ask.step, len(here)))
                group.num_left += 1
                group.num_tokens += self._to_train[uid]
        self._curve = SpeedCurve(costs.curve.points, system.drafts) if system.drafts else costs.curve
        self._workers: dict[str, SimulatedWorker] = {}
        self._stamps: dict[str, int] = {}
        self._changed: dict[str, SimulatedWorker] = {}
        """Those whose next end is to be reckoned anew once the fleet has said all it wants."""
        self._ended: deque[str] = deque()
        self._outgrown: deque[str] = deque()
        self._on_the_way: dict[str, tuple[str, int]] = {}
        """Rollouts that were taken back: from which worker, and with how many tokens."""
        self._busy: set[str] = set()
        self._decoding: list[tuple[float, int]] = []
        self._depth = 0
        self._numbers = count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._closed: dict[int, tuple[str, ...]] = {}
        self._sampled_s: dict[int, float] = {}
        self._done: list[StepTimes] = []
        self._allocator = Allocator(1, most_workers) if most_workers else None
        self._lent: set[str] = set()
        self._trains_here = False
        """Whether the workers' own GPUs train just now: then there is nothing to lend."""
        self._busy_s = self._train_gpu_s = self._lent_s = 0.0
        self._extra_s = self._counted_s = self._loans_counted_s = 0.0
        """Worker-seconds more than those of the workers at the start, up to the last change."""
        self._num_at_start = num_workers
        self._decoded_s = 0.0
        """Worker-seconds of decoding until the last step was trained."""
        self._num_moved = self._num_events = 0
        self.now_s = 0.0
        self._at(0.0, lambda: self._begin(num_workers))
        for change in changes:
            self._at(change.at_s, lambda change=change: self._change(change))  # type: ignore[misc]

    def run(self) -> Outcome:
        while self._heap and len(self._done) < len(self._asks):
            self.now_s, _, happen = heapq.heappop(self._heap)
            happen()
        if len(self._done) < len(self._asks):
            raise RuntimeError(f"step {len(self._done) + 1} is never done: no worker is left")
        return Outcome(
            steps=self._done,
            staleness=self._system.rules.staleness,
            num_moved=self._num_moved,
            num_events=self._num_events,
            forecasts=[] if self._system.foresees else list(self.fleet.forecast_metrics.values()),
            decoding=self._decoding,
        )

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at_s, next(self._numbers), happen))

    def _tell(self, event: FleetEvent) -> None:
        self._num_events += 1
        self._depth += 1
        for action in self.fleet.on_event(event, self.now_s):
            match action:
                case Sample():
                    self._sample(action)
                case TakeBack():
                    self._take_back(action)
                case Watch():
                    self._watch(action)
                case Lend():
                    self._count_loans()
                    self._lent.add(action.worker)
                case Recall():
                    self._count_loans()
                    self._lent.remove(action.worker)
                case CloseStep():
                    self._count_loans()
                    self._trains_here = self._system.colocated
                    self._sampled_s[action.step] = self.now_s
                    self._after_grading(lambda close=action: self._close(close))  # type: ignore[misc]
        self._depth -= 1
        if not self._depth:
            self._settle()

    def _settle(self) -> None:
        """Once the fleet has said all it wants: who has ended meanwhile, and when whoever changed will end."""
        self._depth += 1  # what the fleet says to these is not settled one inside the other
        while self._ended:
            uid = self._ended.popleft()
            group = self._groups.pop(uid)
            group.num_left -= 1
            if not group.num_left:
                self._after_grading(lambda done=group: self._take_in(done))  # type: ignore[misc]
            self._tell(RolloutEnded(uid, int(self._lengths[uid])))
        while self._outgrown:
            uid = self._outgrown.popleft()
            if uid in self._groups and uid not in self._on_the_way:
                self._tell(Outgrew(uid))
        self._depth -= 1
        for worker in self._changed.values():
            self._expect_end(worker)
        self._changed.clear()

    def _advance(self, worker: SimulatedWorker) -> None:
        """To now. What ends at this very moment is told to the fleet after what it is saying."""
        self._ended.extend(uid for _, uid in worker.advance(self.now_s))
        self._outgrown.extend(worker.take_passed())
        self._changed[worker.spec.name] = worker

    def _begin(self, num_workers: int) -> None:
        for number in range(num_workers):
            self._join(f"w{number}")
        for ask in self._asks:
            self._tell(ask)
        self._tell(WeightsLive(0))

    def _change(self, change: Change) -> None:
        if change.kind == "join" and change.worker not in self._workers:
            self._join(change.worker)
        elif change.kind == "leave" and change.worker in self._workers:
            worker = self._workers[change.worker]
            self._advance(worker)
            self._settle()
            self._count_workers()
            self._count_loans()
            self._lent.discard(change.worker)
            del self._workers[change.worker]
            self._busy_s += worker.busy_s
            self._stamps[change.worker] = -1
            self._note_work(change.worker, has_work=False)
            tokens = {uid: self._sampled(uid, to_go) for uid, to_go in worker.tokens_to_go().items()}
            for uid, (origin, sampled) in list(self._on_the_way.items()):
                if origin == change.worker:
                    tokens[uid] = sampled
                    del self._on_the_way[uid]
            self._tell(WorkerLeft(change.worker, tuple(tokens.items())))

    def _join(self, name: str) -> None:
        spec = WorkerSpec(name, self._curve, self._costs.slots)
        self._count_workers()
        self._workers[name] = SimulatedWorker(spec, now_s=self.now_s)
        self._tell(WorkerJoined(name, spec.slots, self._curve.points, self._curve.tokens_a_step))

    def _sampled(self, uid: str, to_go: float) -> int:
        """Tokens that a rollout has; one at least is left to be sampled."""
        pace, length = self._system.pace, self._lengths[uid]
        return max(0, min(int(pace.num_tokens(max(0.0, pace.work(length) - to_go))), int(length) - 1))

    def _sample(self, action: Sample) -> None:
        worker = self._workers[action.worker]
        assert worker.num_running < worker.spec.slots, f"{action.worker} has no slot left"
        self._advance(worker)
        pace, length = self._system.pace, self._lengths[action.rollout]
        done = pace.work(action.num_tokens) - action.num_tokens * self._costs.prefill_share
        tells = action.tell_at and action.num_tokens <= action.tell_at < length
        worker.submit(action.rollout, pace.work(length) - done, pace.work(action.tell_at) - done if tells else None)

    def _watch(self, action: Watch) -> None:
        if self._lengths[action.rollout] > action.tell_at and action.rollout not in self._ended:
            worker, pace = self._workers[action.worker], self._system.pace
            worker.watch(action.rollout, pace.work(action.tell_at) - pace.work(action.tell_at - CHUNK))
            self._changed[action.worker] = worker

    def _take_back(self, action: TakeBack) -> None:
        worker = self._workers[action.worker]
        self._advance(worker)
        if action.rollout in self._ended:
            return  # which the fleet is about to hear
        to_go = worker.withdraw(action.rollout)
        self._num_moved += 1
        back = HandedBack(action.rollout, self._sampled(action.rollout, to_go))
        if self._costs.hand_back_s:
            self._on_the_way[action.rollout] = action.worker, back.num_tokens
            self._at(self.now_s + self._costs.hand_back_s, lambda: self._arrive(back))
        else:
            self._tell(back)

    def _arrive(self, back: HandedBack) -> None:
        if self._on_the_way.pop(back.rollout, None) is not None:  # else its worker left first, and it with it
            self._tell(back)

    def _expect_end(self, worker: SimulatedWorker) -> None:
        stamp = self._stamps[worker.spec.name] = next(self._numbers)
        next_s = worker.next_s()
        self._note_work(worker.spec.name, next_s is not None)
        if next_s is not None:
            self._at(max(next_s, self.now_s), lambda: self._end(worker, stamp))

    def _note_work(self, name: str, has_work: bool) -> None:
        if has_work != (name in self._busy):
            (self._busy.add if has_work else self._busy.discard)(name)
            self._decoding.append((self.now_s, len(self._busy) * self._costs.gpus_a_worker))

    def _end(self, worker: SimulatedWorker, stamp: int) -> None:
        if self._stamps[worker.spec.name] != stamp:
            return  # its batch has changed since
        # By what it says itself: its end may be a rounding error before the time that was noted.
        self._ended.extend(uid for _, uid in worker.advance(worker.next_s() or self.now_s))
        self._outgrown.extend(worker.take_passed())
        self._changed[worker.spec.name] = worker
        self._settle()

    def _after_grading(self, happen: Callable[[], None]) -> None:
        if self._costs.grading_s:
            self._at(self.now_s + self._costs.grading_s, happen)
        else:
            happen()

    def _take_in(self, group: _Group) -> None:
        if not self._system.in_order:
            self._trainer.take_in(group.step, group.num_tokens, self.now_s)
            return
        waiting, place = self._in_turn.setdefault(group.step, ({}, 0))
        waiting[group.place] = group
        while place in waiting:
            self._trainer.take_in(group.step, waiting.pop(place).num_tokens, self.now_s)
            place += 1
        self._in_turn[group.step] = waiting, place

    def _close(self, action: CloseStep) -> None:
        self._closed[action.step] = action.rollouts
        self._train()

    def _train(self) -> None:
        """If the step that is next in turn is closed: when will it be done?"""
        step = self._trainer.step
        if step in self._closed and not self._trainer.is_ending:
            num_tokens = sum(self._to_train[uid] for uid in self._closed[step])
            self._at(self._trainer.end(num_tokens, self.now_s), self._trained)

    def _trained(self) -> None:
        step = self._trainer.step
        ready_s = self.now_s + self._costs.weights_s
        rollouts = self._closed.pop(step)
        train_gpu_s = sum(self._to_train[uid] for uid in rollouts) * self._costs.train_gpu_s
        self._train_gpu_s += train_gpu_s + self._costs.update_s * self._train_gpus
        decoding_s = self._busy_s + sum(worker.busy_until(self.now_s) for worker in self._workers.values())
        self._count_workers()
        unit = self._costs.gpus_a_worker
        self._count_loans()
        times = StepTimes(
            sampled_s=self._sampled_s[step],
            trained_s=self.now_s,
            ready_s=ready_s,
            rollouts=rollouts,
            busy_gpu_s=decoding_s * unit + self._train_gpu_s,
            had_gpu_s=self._num_gpus * self.now_s + self._extra_s * unit,
            lent_gpu_s=self._lent_s * unit,
            num_workers=len(self._workers),
        )
        self._adjust(decoding_s, rollouts)
        self._done.append(times)
        self._trainer.go_on(self.now_s)
        self._at(ready_s, lambda: self._go_on(step))
        self._train()

    def _adjust(self, decoding_s: float, rollouts: tuple[str, ...]) -> None:
        """After a step: a worker more, or one fewer, if they may come and go."""
        if self._allocator is None:
            return
        num_workers = len(self._workers)
        busy_s, self._decoded_s = decoding_s - self._decoded_s, decoding_s
        running = [worker.num_running for worker in self._workers.values()]
        batch = max(1.0, sum(running) / num_workers)

        def times_as_long(other: int) -> float:
            return self._curve.token_s(max(1, round(batch * num_workers / other))) / self._curve.token_s(round(batch))

        before_s = self._done[-1].trained_s if self._done else 0.0
        seen = StepSeen(
            step_s=self.now_s - before_s,
            num_tokens=sum(self._lengths[uid] for uid in rollouts),
            busy_s=busy_s,
            train_s=self._trainer.token_s * sum(self._to_train[uid] for uid in rollouts) + self._costs.update_s,
            num_workers=num_workers,
            num_wanted=num_workers,
        )
        wish = self._allocator.observe(seen, times_as_long)
        if wish is None:
            return
        if wish.num_workers > num_workers:
            self._join(f"rented {next(self._numbers)}")
        else:
            self._change(Change(self.now_s, "leave", next(reversed(self._workers))))

    def _count_workers(self) -> None:
        self._extra_s += (len(self._workers) - self._num_at_start) * (self.now_s - self._counted_s)
        self._counted_s = self.now_s

    def _count_loans(self) -> None:
        if not self._trains_here:
            self._lent_s += len(self._lent) * (self.now_s - self._loans_counted_s)
        self._loans_counted_s = self.now_s

    def _go_on(self, step: int) -> None:
        """With the weights of this step."""
        self._count_loans()
        self._trains_here = False
        self._tell(WeightsLive(step))


@dataclass(slots=True)
class _Group:
    step: int
    place: int
    """Among the groups of its step."""
    num_left: int = 0
    num_tokens: float = 0.0
