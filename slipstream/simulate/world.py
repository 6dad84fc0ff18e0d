"""A fleet without GPUs: workers that decode, a trainer and its weights, led by the scheduler of a real one. Pure.

A heap of what happens next: a worker's next rollout ends, a step is trained, its weights arrive, a worker joins or
leaves. Each is told to `schedule.fleet.Fleet`, and what that wants done is done at once; the rest is arithmetic. The
same seed gives the same run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from slipstream.schedule.dispatch import WorkerSpec
from slipstream.schedule.events import (
    CloseStep,
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
from slipstream.schedule.fleet import Fleet, Forecast, Rules
from slipstream.schedule.speeds import SpeedCurve
from slipstream.simulate.worker import SimulatedWorker
from slipstream.simulate.workloads import SimulatedStep

FILLING = 2
"""Steps at the beginning in which pipelines fill."""


@dataclass(frozen=True, slots=True)
class System:
    """Who does what when."""

    rules: Rules = field(default_factory=Rules)
    colocated: bool = False
    """Generation and training take turns on all GPUs; else each has its own."""
    streams: bool = False
    """Groups are trained as they are done; else a step at once."""
    drafts: tuple[tuple[int, float], ...] = ()
    """(sequences, times the tokens a second with drafts, all told); none if empty."""
    foresees: bool = False
    """Lengths are known, not forecast: nobody has that, and it shows what forecasts could be worth."""

    def __post_init__(self) -> None:
        if self.colocated and (self.streams or self.rules.staleness):
            raise ValueError("what shares its GPUs can neither stream nor overlap: leave out streams and staleness")


@dataclass(frozen=True, slots=True)
class Costs:
    curve: SpeedCurve
    """Of one worker without drafts."""
    slots: int
    gpus_a_worker: int
    train_gpu_s: float
    """GPU-seconds of training a token."""
    weights_s: float = 0.0
    """From the end of training until all workers have the weights."""
    prefill_share: float = 0.005
    """Of the time of decoding a token: that of computing its keys again when a rollout goes on elsewhere."""
    hand_back_s: float = 0.0
    """Between taking a rollout from a worker and telling the fleet, which may hear other things meanwhile."""


@dataclass(frozen=True, slots=True)
class Change:
    """A worker dies or is given back, or another one comes."""

    at_s: float
    kind: Literal["join", "leave"]
    worker: str


@dataclass(frozen=True, slots=True)
class StepTimes:
    sampled_s: float
    """When the last of its rollouts ended."""
    trained_s: float
    ready_s: float
    """When its weights were on the workers."""
    rollouts: tuple[str, ...]
    busy_gpu_s: float
    """GPU-time spent decoding or training until it was trained."""


@dataclass(frozen=True, slots=True)
class Outcome:
    steps: list[StepTimes]
    num_gpus: int
    staleness: int
    num_moved: int
    """Rollouts taken from one worker and given to another, or begun again."""
    num_events: int
    decoding: list[tuple[float, int]]
    """(time, GPUs of workers with something to decode from then on)."""

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next, once pipelines are full and as long as there is a next step to sample."""
        first, last, num_steps = self._steady()
        return (last.trained_s - first.trained_s) / num_steps

    @property
    def idle_share(self) -> float:
        """GPU-time in which nothing was decoded or trained, in the same steps."""
        first, last, _ = self._steady()
        return 1 - (last.busy_gpu_s - first.busy_gpu_s) / ((last.trained_s - first.trained_s) * self.num_gpus)

    def decoding_over(self, num_points: int) -> dict[float, float]:
        """{seconds since pipelines were full: GPUs that decode}, until there was no next step to sample."""
        first, last = (step.trained_s for step in self._steady()[:2])
        times = [first + (last - first) * point / (num_points - 1) for point in range(num_points)]
        found: dict[float, float] = {}
        place = 0
        for at_s in times:
            while place + 1 < len(self.decoding) and self.decoding[place + 1][0] <= at_s:
                place += 1
            found[round(at_s - first, 3)] = float(self.decoding[place][1])
        return found

    def _steady(self) -> tuple[StepTimes, StepTimes, int]:
        """From which step to which, and how many that is: steps that may overlap come in turns, a long and a short one,
        so whole turns count."""
        least = least_steps(self.staleness)
        if len(self.steps) < least:
            raise ValueError(f"at least {least} steps are needed to tell the time of one, not {len(self.steps)}")
        num_steps = len(self.steps) - FILLING - 1 - self.staleness
        num_steps -= num_steps % (self.staleness + 1)
        return self.steps[FILLING], self.steps[FILLING + num_steps], num_steps


def least_steps(staleness: int, turns: int = 1) -> int:
    """Steps to simulate, so that so many turns of steady ones are among them."""
    return FILLING + 1 + staleness + turns * (staleness + 1)


def simulate(
    system: System,
    costs: Costs,
    steps: Sequence[SimulatedStep],
    *,
    num_gpus: int,
    train_gpus: int = 0,
    changes: Sequence[Change] = (),
) -> Outcome:
    """`train_gpus` of `num_gpus` train, if they are not shared."""
    return World(system, costs, steps, num_gpus=num_gpus, train_gpus=train_gpus, changes=changes).run()


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
    ) -> None:
        num_workers = (num_gpus if system.colocated else num_gpus - train_gpus) // costs.gpus_a_worker
        if num_workers < 1:
            raise ValueError(
                f"{num_gpus} GPUs with {train_gpus} for training leave no worker of {costs.gpus_a_worker}: give more"
            )
        if not system.colocated and train_gpus < 1:
            raise ValueError("training needs GPUs of its own: give train_gpus")
        self._system, self._costs, self._num_gpus = system, costs, num_gpus
        self._lengths = {uid: length for step in steps for uid, length in step.lengths.items()}
        self._asks = [
            RolloutsAsked(number, tuple((uid, step.prompts[uid]) for uid in step.lengths))
            for number, step in enumerate(steps, start=1)
        ]
        forecast: Forecast | None = (lambda uid, prompt: self._lengths[uid]) if system.foresees else None
        self.fleet = Fleet(system.rules, forecast)
        self._trainer = _Trainer(system.streams, costs.train_gpu_s / (num_gpus if system.colocated else train_gpus))
        self._groups: dict[str, _Group] = {}
        for ask in self._asks:
            here: dict[str, _Group] = {}
            for uid, prompt in ask.rollouts:
                group = self._groups[uid] = here.setdefault(prompt, _Group(ask.step))
                group.num_left += 1
                group.num_tokens += self._lengths[uid]
        self._curve = SpeedCurve(costs.curve.points, system.drafts) if system.drafts else costs.curve
        self._workers: dict[str, SimulatedWorker] = {}
        self._stamps: dict[str, int] = {}
        self._changed: dict[str, SimulatedWorker] = {}
        """Those whose next end is to be reckoned anew once the fleet has said all it wants."""
        self._ended: deque[str] = deque()
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
        self._busy_s = self._trained_tokens = 0.0
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
            num_gpus=self._num_gpus,
            staleness=self._system.rules.staleness,
            num_moved=self._num_moved,
            num_events=self._num_events,
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
                case CloseStep():
                    self._closed[action.step] = action.rollouts
                    self._sampled_s[action.step] = self.now_s
                    self._train()
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
                self._trainer.take_in(group.step, group.num_tokens, self.now_s)
            self._tell(RolloutEnded(uid, int(self._lengths[uid])))
        self._depth -= 1
        for worker in self._changed.values():
            self._expect_end(worker)
        self._changed.clear()

    def _advance(self, worker: SimulatedWorker) -> None:
        """To now. What ends at this very moment is told to the fleet after what it is saying."""
        self._ended.extend(uid for _, uid in worker.advance(self.now_s))
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
        self._workers[name] = SimulatedWorker(spec, now_s=self.now_s)
        self._tell(WorkerJoined(name, spec.slots, self._curve.points, self._curve.tokens_a_step))

    def _sampled(self, uid: str, to_go: float) -> int:
        """Tokens that a rollout has; one at least is left to be sampled."""
        return max(0, min(int(self._lengths[uid] - to_go), int(self._lengths[uid]) - 1))

    def _sample(self, action: Sample) -> None:
        worker = self._workers[action.worker]
        assert worker.num_running < worker.spec.slots, f"{action.worker} has no slot left"
        self._advance(worker)
        again = action.num_tokens * self._costs.prefill_share
        worker.submit(action.rollout, self._lengths[action.rollout] - action.num_tokens + again)

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
        end_s = worker.next_end_s()
        self._note_work(worker.spec.name, end_s is not None)
        if end_s is not None:
            self._at(max(end_s, self.now_s), lambda: self._end(worker, stamp))

    def _note_work(self, name: str, has_work: bool) -> None:
        if has_work != (name in self._busy):
            (self._busy.add if has_work else self._busy.discard)(name)
            self._decoding.append((self.now_s, len(self._busy) * self._costs.gpus_a_worker))

    def _end(self, worker: SimulatedWorker, stamp: int) -> None:
        if self._stamps[worker.spec.name] != stamp:
            return  # its batch has changed since
        # By what it says itself: its end may be a rounding error before the time that was noted.
        self._ended.extend(uid for _, uid in worker.advance(worker.next_end_s() or self.now_s))
        self._changed[worker.spec.name] = worker
        self._settle()

    def _train(self) -> None:
        """If the step that is next in turn is closed: when will it be done?"""
        step = self._trainer.step
        if step in self._closed and not self._trainer.is_ending:
            num_tokens = sum(self._lengths[uid] for uid in self._closed[step])
            self._at(self._trainer.end(num_tokens, self.now_s), self._trained)

    def _trained(self) -> None:
        step = self._trainer.step
        ready_s = self.now_s + self._costs.weights_s
        rollouts = self._closed.pop(step)
        self._trained_tokens += sum(self._lengths[uid] for uid in rollouts)
        decoding_s = self._busy_s + sum(worker.busy_until(self.now_s) for worker in self._workers.values())
        busy_gpu_s = decoding_s * self._costs.gpus_a_worker + self._trained_tokens * self._costs.train_gpu_s
        self._done.append(StepTimes(self._sampled_s[step], self.now_s, ready_s, rollouts, busy_gpu_s))
        self._trainer.go_on(self.now_s)
        self._at(ready_s, lambda: self._tell(WeightsLive(step)))
        self._train()


@dataclass(slots=True)
class _Group:
    step: int
    num_left: int = 0
    num_tokens: float = 0.0


class _Trainer:
    """When it will be done with what it was given."""

    def __init__(self, streams: bool, token_s: float) -> None:
        self.step = 1
        self.is_ending = False
        self._streams, self._token_s = streams, token_s
        self._free_s = 0.0
        self._early: dict[int, float] = {}
        """Tokens of groups that belong to steps to come."""

    def take_in(self, step: int, num_tokens: float, now_s: float) -> None:
        if not self._streams:
            return
        if step > self.step:
            self._early[step] = self._early.get(step, 0.0) + num_tokens
        else:
            self._free_s = max(self._free_s, now_s) + num_tokens * self._token_s

    def end(self, num_tokens: float, now_s: float) -> float:
        self.is_ending = True
        if not self._streams:
            self._free_s = max(self._free_s, now_s) + num_tokens * self._token_s
        return max(self._free_s, now_s)

    def go_on(self, now_s: float) -> None:
        self.step, self.is_ending = self.step + 1, False
        self._free_s = max(self._free_s, now_s) + self._early.pop(self.step, 0.0) * self._token_s
