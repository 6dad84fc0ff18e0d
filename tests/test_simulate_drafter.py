"""Fleet, coordinator and selector together, over steps with long tails, without a clock, a device or torch.

Workers decode step by step with the drafts that their selector chooses; who has nothing to sample is lent and trains;
a version that is published makes more drafts right. What is asserted on the way is in `Tail` itself.
"""

from __future__ import annotations

import heapq
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from slipstream.draft.selector import MODEL_STRATEGIES, Selector
from slipstream.engine.strategy import OFF, StepResult, Strategy
from slipstream.rng import keyed_random
from slipstream.schedule.coordinator import Coordinator
from slipstream.schedule.events import (
    CloseStep,
    CoordinatorEvent,
    EndSession,
    FleetEvent,
    HandedBack,
    Lend,
    LessonsAdded,
    Publish,
    Recall,
    RolloutEnded,
    RolloutsAsked,
    RoundDone,
    Sample,
    StopTraining,
    TakeBack,
    TrainRound,
    WeightsLive,
    WorkerJoined,
    WorkerLeft,
)
from slipstream.schedule.fleet import Fleet
from slipstream.schedule.rules import Rules
from slipstream.schedule.speeds import SpeedCurve
from slipstream.simulate.workloads import LongTail

POINTS = ((1, 0.0084), (8, 0.0091), (32, 0.0153))
CURVE = SpeedCurve(POINTS)
DRAFT_COST = 0.06
"""Of a step's time, for every draft of a sequence."""
UPDATE_S, ROUND_UPDATES, POLICY_S = 0.05, 6, 0.12
SLOTS = 8


def right(version: int) -> float:
    """How often a draft is, if those before it were."""
    return 0.05 + 0.8 * (1 - 0.7**version)


@dataclass(slots=True)
class Worker:
    name: str
    selector: Selector = field(default_factory=lambda: Selector(MODEL_STRATEGIES))
    running: dict[str, int] = field(default_factory=dict)
    """Tokens so far, by rollout."""
    is_busy: bool = False
    """With a step or an update, which is not broken off."""
    updates_to_go: int = 0
    recalled_s: float | None = None
    """When it was last recalled, until it samples."""
    num_updates: int = 0
    num_steps: int = 0


class Tail:
    def __init__(self, seed: int, *, learns: bool = True, deaths: tuple[tuple[float, str], ...] = ()) -> None:
        self.steps = LongTail(80, 1500).draw(num_prompts=24, prompts_per_step=12, samples=4, steps=5, seed=seed)
        self.lengths = {uid: int(length) for step in self.steps for uid, length in step.lengths.items()}
        self.seed, self.learns, self.now_s, self.version = seed, learns, 0.0, 0
        self.fleet = Fleet(Rules(tail="move", lends_idle=True))
        self.coordinator = Coordinator(least_idle=1, least_lessons=2)
        self.workers: dict[str, Worker] = {}
        self.lent, self.in_round = set[str](), set[str]()
        self.round_of: TrainRound | None = None
        self.ended, self.closed = list[str](), list[int]()
        self.published_s = list[float]()
        self.tail_tokens: dict[int, list[float]] = {}
        """By policy step: tokens a sequence of its engine steps with few sequences."""
        self.waits_s = list[float]()
        self._future: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        for name in ("w0", "w1", "w2", "w3"):
            self.join(name)
        for number, step in enumerate(self.steps, start=1):
            asked = RolloutsAsked(number, tuple((uid, step.prompts[uid]) for uid in step.lengths))
            self.at(0.0, lambda asked=asked: self.tell_fleet(asked))  # type: ignore[misc]
        self.at(0.0, lambda: self.tell_fleet(WeightsLive(0)))
        for at_s, name in deaths:
            self.at(at_s, lambda name=name: self.die(name))  # type: ignore[misc]

    def at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._future, (at_s, next(self._order), happen))

    def run(self) -> Tail:
        while self._future and len(self.closed) < len(self.steps):
            self.now_s, _, happen = heapq.heappop(self._future)
            happen()
        assert sorted(self.ended) == sorted(self.lengths), "no rollout starves"
        assert self.closed == [1, 2, 3, 4, 5]
        return self

    # Who says what to whom.

    def tell_fleet(self, event: FleetEvent) -> None:
        for action in self.fleet.on_event(event, self.now_s):
            match action:
                case Sample():
                    worker = self.workers[action.worker]
                    assert action.worker not in self.lent, "it is recalled first"
                    worker.running[action.rollout] = action.num_tokens
                    self.begin(worker)
                case TakeBack():
                    num_tokens = self.workers[action.worker].running.pop(action.rollout)
                    back = HandedBack(action.rollout, num_tokens)
                    self.at(self.now_s, lambda back=back: self.tell_fleet(back))  # type: ignore[misc]
                case CloseStep():
                    self.closed.append(action.step)
                    live = WeightsLive(action.step)
                    self.at(self.now_s + POLICY_S, lambda live=live: self.tell_fleet(live))  # type: ignore[misc]
                case Lend():
                    assert not self.workers[action.worker].running
                    self.lent.add(action.worker)
                    self.tell_coordinator(action)
                case Recall():
                    self.lent.remove(action.worker)
                    self.workers[action.worker].recalled_s = self.now_s
                    self.tell_coordinator(action)
                    assert action.worker not in self.in_round, "it stops in the answer"

    def tell_coordinator(self, event: CoordinatorEvent) -> None:
        if not self.learns:
            return
        for action in self.coordinator.on_event(event):
            match action:
                case TrainRound():
                    assert set(action.members) == self.lent, "nobody idle is left out"
                    self.round_of, self.in_round = action, set(action.members)
                    for name in action.members:
                        self.workers[name].updates_to_go = ROUND_UPDATES
                        self.begin(self.workers[name])
                case StopTraining():
                    self.leave_round(action.worker)
                case Publish():
                    self.version += 1
                    self.published_s.append(self.now_s)
                    for worker in self.workers.values():
                        worker.selector.note_new_model()
                case EndSession():
                    self.in_round, self.round_of = set(), None
        self.end_round()

    def leave_round(self, name: str) -> None:
        self.workers[name].updates_to_go = 0
        self.in_round.discard(name)

    def end_round(self) -> None:
        if self.round_of is not None and not any(self.workers[name].updates_to_go for name in self.in_round):
            done, self.round_of = RoundDone(self.round_of.session), None
            self.tell_coordinator(done)

    # What workers do.

    def join(self, name: str) -> None:
        self.workers[name] = Worker(name)
        self.at(self.now_s, lambda: self.tell_fleet(WorkerJoined(name, SLOTS, POINTS)))

    def die(self, name: str) -> None:
        worker = self.workers[name]
        self.leave_round(name)
        del self.workers[name]
        self.lent.discard(name)
        self.tell_coordinator(WorkerLeft(name))
        self.tell_fleet(WorkerLeft(name, tuple(worker.running.items())))

    def begin(self, worker: Worker) -> None:
        """Its next step or update, if it does nothing yet."""
        if worker.is_busy or self.workers.get(worker.name) is not worker:
            return
        if worker.running:
            assert worker.name not in self.lent and worker.name not in self.in_round, "it samples and trains"
            if worker.recalled_s is not None:
                self.waits_s.append(self.now_s - worker.recalled_s)
                worker.recalled_s = None
            batch = len(worker.running)
            strategy = worker.selector.choose(batch)
            seconds = CURVE.token_s(batch) * (1 + DRAFT_COST * strategy.drafts_each)
            worker.is_busy = True
            uids = tuple(worker.running)
            self.at(self.now_s + seconds, lambda: self.end_step(worker, uids, strategy, seconds))
        elif worker.updates_to_go:
            assert worker.name in self.lent and worker.name in self.in_round, "it trains while it is not lent"
            worker.is_busy = True
            self.at(self.now_s + UPDATE_S, lambda: self.end_update(worker))

    def end_step(self, worker: Worker, uids: tuple[str, ...], strategy: Strategy, seconds: float) -> None:
        worker.is_busy = False
        if self.workers.get(worker.name) is not worker:
            return
        worker.num_steps += 1
        num_tokens = [self.sample(worker, uid, strategy) for uid in uids if uid in worker.running]
        if num_tokens:
            each = sum(num_tokens) / len(num_tokens)
            worker.selector.observe(StepResult(len(uids), strategy, each, seconds))
            if len(uids) <= 2:
                self.tail_tokens.setdefault(len(self.closed) + 1, []).append(each)
        for uid in [uid for uid in uids if worker.running.get(uid, 0) >= self.lengths[uid]]:
            del worker.running[uid]
            self.ended.append(uid)
            self.tell_coordinator(LessonsAdded(1))
            self.tell_fleet(RolloutEnded(uid, self.lengths[uid]))
        self.begin(worker)

    def sample(self, worker: Worker, uid: str, strategy: Strategy) -> int:
        """A token, and as many drafts as are right one after another."""
        known, got = worker.running[uid], 1
        dice = keyed_random("tail", self.seed, uid, known)
        while got <= min(strategy.depth, int(strategy.drafts_each)) and dice.random() < right(self.version):
            got += 1
        worker.running[uid] = known + got
        return got

    def end_update(self, worker: Worker) -> None:
        worker.is_busy = False
        if self.workers.get(worker.name) is not worker:
            return
        worker.num_updates += 1
        if worker.updates_to_go:
            worker.updates_to_go -= 1
            self.end_round()
        self.begin(worker)


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_a_drafter_that_workers_train_in_their_idle_time_makes_the_tails_short(seed: int) -> None:
    tail, without = Tail(seed).run(), Tail(seed, learns=False).run()
    assert tail.version >= 5 and tail.published_s == sorted(tail.published_s)
    updates = sorted(worker.num_updates for worker in tail.workers.values())
    assert updates[0] > 0 and updates[1] >= ROUND_UPDATES, "one may have the longest in each step, and is hardly idle"
    assert len(tail.waits_s) > 10 and 0 < max(tail.waits_s) <= UPDATE_S + 1e-9, "the update under way, and no other"
    first, last = (sum(tail.tail_tokens[step]) / len(tail.tail_tokens[step]) for step in (1, 5))
    assert last > 1.5 * first, "tokens a step"
    bests = [worker.selector.best(1) for worker in tail.workers.values()]
    assert any(best != OFF for best in bests)
    assert all(worker.selector.best(1) == OFF for worker in without.workers.values()), "untaught, it does not pay"
    assert tail.now_s < 0.9 * without.now_s


@pytest.mark.parametrize("seed", range(3))
def test_whoever_dies_the_others_go_on(seed: int) -> None:
    alone_s, dice = Tail(seed).run().now_s, keyed_random("deaths", seed)
    deaths = tuple((dice.uniform(1.0, 0.5 * alone_s), name) for name in dice.sample(["w0", "w1", "w2", "w3"], 3))
    tail = Tail(seed, deaths=deaths).run()
    assert len(tail.workers) == 1 and max(tail.waits_s) <= UPDATE_S + 1e-9
    assert tail.published_s[-1] > min(at_s for at_s, _ in deaths), "what they learn together is published as before"


def test_none_of_it_needs_torch() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_simulate_drafter as simulated, slipstream.runtime.drafter_session\n"
        "assert simulated.Tail(0).run().version\n"
        "heavy = {'torch', 'transformers', 'numba', 'ray', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": str(tests.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tests)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
