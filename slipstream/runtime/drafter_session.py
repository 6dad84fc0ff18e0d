"""Rollout workers train a drafter together: carries out what `schedule/coordinator.py` decides, by messages.

Turns its actions into messages to workers, and their answers and deaths into its events. Pure: weights go through files
(`draft/versions.py`), of which it knows no more than where they lie, and workers, their links and how long they may be
silent are the pool's. A round is over when everybody who is still there has answered; then the leader averages, and if
it is gone before it has, the next one does. Who was told to stop or died after it had given its share has still given
it. A drafter is to learn also where nobody ever waits: if there was no round while the policy was the same, all rest
from sampling when it changes, for one that makes up for it; what they are given to sample meanwhile comes after it.
"""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.runtime.drafter_messages import (
    AverageShares,
    DrafterFailed,
    DrafterStopped,
    DrafterTaken,
    DrafterTrained,
    FromMember,
    SharesAveraged,
    StopDrafter,
    TakeDrafter,
    ToMember,
    TrainDrafter,
)
from slipstream.schedule.coordinator import Coordinator
from slipstream.schedule.events import (
    CoordinatorAction,
    CoordinatorEvent,
    EndSession,
    Item,
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

SHARES_FOLDER, LEFT_OUT = "shares", "drafter/texts_left_out"
ROUNDS = 2
"""Of a step: one with the first half of its rollouts, while others are sampled, one with all."""


@dataclass(slots=True)
class _Round:
    number: int
    session: int
    missing: set[str]
    """Members that train."""
    shares: dict[str, int] = field(default_factory=dict)
    """Updates, by member."""
    failed: set[str] = field(default_factory=set)
    """Members that cannot lead in this round."""
    leader: str | None = None
    """Who averages, once all have answered."""


class DrafterSession:
    def __init__(
        self,
        folder: Path,
        send: Callable[[str, ToMember], None],
        *,
        updates: int,
        samples: int,
        num_updates: int = 0,
        least_idle: int = 1,
        record: Callable[[Item], None] = lambda item: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`folder`: of versions and shares, of this session alone; it holds one that took `num_updates`. `updates`: of
        each worker for each step, which has so many `samples`. `least_idle`: workers that have nothing to sample, from
        which on they train. `record`: writes the event log."""
        self.folder, self._send, self._record, self._say = folder, send, record, say
        self._updates, self._round_updates = updates, math.ceil(updates / ROUNDS)
        self.coordinator = Coordinator(least_idle, least_lessons=math.ceil(samples / ROUNDS))
        self.version = 0
        """The newest that was published."""
        self.here: dict[str, int] = {}
        """Workers that have started: the version that each drafts with."""
        self._round: _Round | None = None
        self._num_rounds = 0
        self._lent: set[str] = set()
        """Who has nothing to sample."""
        self._resting: set[str] = set()
        """Who is in a round that is owed, and is not called away from it."""
        self._policy = self._published_at = 0
        """The policy's version, and what it was when the newest drafter was published."""
        self._is_owed = False
        """There was no round since the policy changed, but for one that made up for what was owed then."""
        self._updates_of = {0: num_updates}
        """By version of the drafter."""
        self._means: dict[str, list[tuple[float, int]]] = defaultdict(list)
        """Of each metric that members tell: values, and the updates they are of."""
        self._num_lent = self._num_given_up = 0
        """Updates since metrics were taken: made by workers with nothing to sample, and given up."""
        self._num_left_out = 0.0
        """Texts since then that members had no room for."""
        shutil.rmtree(folder / SHARES_FOLDER, ignore_errors=True)  # what a crash left behind

    # What the pool says.

    def join(self, name: str, version: int) -> None:
        """A worker has started, and drafts with this version."""
        self.here[name] = version
        if version < self.version:
            self._send(name, TakeDrafter(self.version))

    def leave(self, name: str) -> None:
        """A worker is gone, however that came about."""
        if name not in self.here:
            return
        self._leave_round(name)
        del self.here[name]
        self._lent.discard(name)
        self._resting.discard(name)
        self._decide(WorkerLeft(name))

    def tell(self, event: Lend | Recall | LessonsAdded) -> None:
        """Lend and Recall are the fleet's: somebody has nothing to sample, or has again."""
        match event:
            case LessonsAdded():
                if self._updates:
                    self._decide(event)
            case Lend():
                self._lent.add(event.worker)
                if event.worker not in self._resting:
                    self._decide(event)
            case Recall():
                self._lent.discard(event.worker)
                if event.worker not in self._resting:
                    self._decide(event)

    def new_policy(self, number: int) -> None:
        """All workers were told to take weights of this version. If a round is owed and none is under way, they rest
        for one; from one that is, nobody is called away."""
        is_owed, self._is_owed, self._policy = self._is_owed, True, number
        if not is_owed or not self.coordinator.has_enough:
            return
        if self._round is not None:
            self._resting = set(self.coordinator.training)
        else:
            self._resting = set(self.here)
            self._decide(Rest(tuple(self.here)))

    def take_metrics(self) -> dict[str, float]:
        """Since they were last taken."""
        oldest = min(self.here.values(), default=self.version)
        # Whoever rests for a round that is owed has sampled nothing with the newest policy yet.
        sampled_with = self._policy - bool(self._resting)
        metrics = {
            "drafter/version": float(self._updates_of.get(oldest, 0)),
            "drafter/behind": float(max(0, sampled_with - self._published_at)),
            "drafter/updates": float(self._updates_of[self.version]),
            "drafter/updates_in_tail": float(self._num_lent),
            "drafter/updates_given_up": float(self._num_given_up),
        }
        if self._num_left_out:
            metrics[LEFT_OUT] = self._num_left_out
        for name, told in self._means.items():
            metrics[name] = sum(value * count for value, count in told) / sum(count for _, count in told)
        self._means.clear()
        self._num_lent = self._num_given_up = 0
        self._num_left_out = 0.0
        return metrics

    # What is decided.

    def _decide(self, event: CoordinatorEvent) -> None:
        if isinstance(event, Lend | Recall | Rest):
            self._record(event)
        for action in self.coordinator.on_event(event):
            self._record(action)
            self._do(action)
        self._go_on()

    def _do(self, action: CoordinatorAction) -> None:
        match action:
            case TrainRound():
                self._begin(action)
            case StopTraining():
                self._leave_round(action.worker)
                self._send(action.worker, StopDrafter())
            case Publish():
                self._announce()
            case EndSession():
                self._drop_round()

    def _announce(self) -> None:
        for name in self.here:
            self._send(name, TakeDrafter(self.version))

    def _begin(self, action: TrainRound) -> None:
        self._num_rounds += 1
        self._round = _Round(self._num_rounds, action.session, set(action.members))
        num_updates = self._updates if self._resting else self._round_updates
        for name in action.members:
            self._send(name, TrainDrafter(self._num_rounds, self.version, num_updates, self._share_folder(name)))

    def _go_on(self) -> None:
        """If all have answered: somebody averages, or there is nothing to average."""
        this = self._round
        if this is None or this.missing or this.leader is not None:
            return
        leader = next((name for name in self.coordinator.training if name not in this.failed), None)
        if leader is None or not any(this.shares.values()):
            self._end_round()
            return
        this.leader = leader
        shares = [(self._share_folder(name), this.shares[name]) for name in sorted(this.shares) if this.shares[name]]
        self._send(leader, AverageShares(this.number, tuple(shares)))

    def _end_round(self) -> None:
        assert self._round is not None
        session = self._round.session
        self._drop_round()
        resting, self._resting = self._resting, set()
        self._is_owed = bool(resting)
        self._decide(RoundDone(session))
        for name in sorted(resting - self._lent):
            self._decide(Recall(name))

    def _drop_round(self) -> None:
        self._round = None
        shutil.rmtree(self.folder / SHARES_FOLDER, ignore_errors=True)

    def _leave_round(self, name: str) -> None:
        """Its share, if it has given it, stays."""
        if self._round is not None:
            self._round.missing.discard(name)
            if self._round.leader == name:
                self._round.leader = None

    # What is heard.

    def hear(self, name: str, message: FromMember) -> None:
        this = self._round
        is_current = this is not None and getattr(message, "round", None) == this.number
        match message:
            case DrafterTaken():
                self.here[name] = message.version
            case DrafterStopped():
                self._num_given_up += message.num_updates
            case DrafterTrained() if is_current and this is not None:
                this.shares[name] = message.num_updates
                this.missing.discard(name)
                self._count(name, message)
                self._go_on()
            case SharesAveraged():
                self._publish(message)
                if is_current:
                    self._end_round()
                else:
                    self._announce()  # all others had left meanwhile, or it was told to stop just then
            case DrafterFailed():
                if is_current or message.round is None:  # what fails in a round that was given up is nobody's concern
                    self._say(f"{name} goes on without training the drafter: {message.reason}")
                if is_current and this is not None:
                    this.failed.add(name)
                    self._leave_round(name)
                    self._go_on()

    def _count(self, name: str, message: DrafterTrained) -> None:
        if name in self._lent:
            self._num_lent += message.num_updates
        for metric, value in message.metrics.items():
            if metric == LEFT_OUT:
                self._num_left_out += value
            else:
                self._means[metric].append((value, max(1, message.num_updates)))

    def _publish(self, message: SharesAveraged) -> None:
        self._updates_of[message.version] = message.num_updates
        if message.version > self.version:
            self.version, self._published_at = message.version, self._policy

    def _share_folder(self, name: str) -> Path:
        number = self._round.number if self._round is not None else 0
        return self.folder / SHARES_FOLDER / str(number) / name
