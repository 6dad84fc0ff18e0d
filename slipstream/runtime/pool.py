"""Rollout workers and what they sample: carries out what `schedule.fleet.Fleet` wants, and tells it what happens.

Owns the workers' links, the tokens known of each rollout, and which weights each worker has. Decides nothing about who
samples what. Invariants, asserted by `tests/test_runtime_pool.py`: each rollout that was asked for ends exactly once,
whichever workers are lost or hang meanwhile, with the tokens that an undisturbed worker would have given it; a worker
samples nothing before it has the newest weights that were given out, and none with other content than was published;
one that is lost is started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from slipstream.draft.shelves import Text
from slipstream.engine.sequences import PartialRollout
from slipstream.engine.strategy import DraftCounts
from slipstream.observe.ledger import IDLE, Ledger, Waits, split_decoding
from slipstream.runtime.drafter_messages import FromMember
from slipstream.runtime.drafter_session import DrafterSession
from slipstream.runtime.placement import worker_name
from slipstream.runtime.rollout_messages import (
    Beat,
    Broke,
    DraftAs,
    Ended,
    GiveBack,
    GivenBack,
    GoOn,
    Grown,
    HasWeights,
    Here,
    Leave,
    SampleGroup,
    Spent,
    TakeWeights,
    is_evaluation,
)
from slipstream.schedule.events import (
    CloseStep,
    FleetEvent,
    HandedBack,
    Item,
    Lend,
    LessonsAdded,
    Recall,
    RolloutEnded,
    RolloutsAsked,
    Sample,
    TakeBack,
    WeightsLive,
    WorkerJoined,
    WorkerLeft,
)
from slipstream.schedule.fleet import Fleet
from slipstream.schedule.rules import Rules
from slipstream.schedule.speeds import Paces, sum_paces
from slipstream.types import Request, Rollout, WeightVersion

START_S = 600.0
"""A worker that has not said that it is here by then hangs."""
LONGEST_LOOK_S = 2.0
"""What silence between two looks counts at most: if the run itself was stopped, its processes need not have been."""
MAX_LOSSES = 5
"""Of each worker, on average, without a rollout that ended in between: then something else is wrong."""


class WorkerLink(Protocol):
    """The end of a worker's link that is here, as `processes.Link` has it."""

    name: str

    @property
    def is_gone(self) -> bool: ...
    @property
    def pid(self) -> int: ...
    def send(self, message: object) -> None: ...
    def receive(self) -> list[Any]: ...
    def how_it_ended(self) -> str: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class WorkerBroke(RuntimeError):
    """A process of the run ended by an error of its own, or could not be kept alive; the message names its log."""


@dataclass(slots=True, eq=False)
class _Worker:
    link: WorkerLink
    silent_s: float = 0.0
    """Since it said something."""
    here: Here | None = None
    version: WeightVersion | None = None
    has_joined: bool = False
    """The fleet knows of it."""
    is_leaving: bool = False
    """It was told to: it is not started again."""
    end: str = ""
    """Why it was killed, if it was from here."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A rollout that has not ended."""

    request: Request
    past: tuple[Text, ...]
    worker: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    log_kept: list[float] = field(default_factory=list)
    first_version: int = -1

    def set_tokens(self, known: PartialRollout) -> None:
        self.token_ids, self.logprobs = list(known.token_ids), list(known.logprobs)
        self.log_kept, self.first_version = list(known.log_kept), known.first_version

    def partial(self) -> PartialRollout:
        texts = tuple(self.token_ids), tuple(self.logprobs)
        return PartialRollout(self.request, *texts, self.first_version, tuple(self.log_kept))


class Pool:
    def __init__(
        self,
        rules: Rules,
        num_workers: int,
        start: Callable[[str], WorkerLink],
        *,
        silence_s: float,
        ledger: Ledger,
        note: Callable[[Item], None] = lambda item: None,
        is_grading: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        drafter: DrafterSession | None = None,
        drafting: Mapping[str, object] = {},
    ) -> None:
        """`start`: a process for the worker of this name, rollout-0 and so on. `note`: is told of workers that come and
        go, rollouts that move between them, and ways to draft. `is_grading`: whether grades are missing. `drafter`: how
        workers without work train one, if there is one that learns. `drafting`: what is known of ways to draft."""
        self._fleet = Fleet(rules if drafter is None else replace(rules, lends_idle=True))
        self._ledger, self._drafter = ledger, drafter
        self._start, self._silence_s, self._note, self._say, self._clock = start, silence_s, note, say, clock
        self._is_grading, self._waits = is_grading, Waits()
        self._workers: dict[str, _Worker] = {}
        self._looked_s = clock()
        self._rollouts: dict[str, _Asked] = {}
        self._asked: dict[int, list[tuple[_Asked, str]]] = {}
        """By step: what was asked for since the last `advance`."""
        self._ended: list[Rollout] = []
        self._wanted: WeightVersion | None = None
        self.live = -1
        """The newest version that all workers have."""
        self._num_losses = 0
        self.num_lost = 0
        """Workers lost since the start."""
        self.num_resumed = 0
        """Rollouts that went on, from the tokens they had, after their worker was lost."""
        self._spent, self._num_sampled, self._drafts = Spent(), 0, DraftCounts()
        self._paces: Paces = ()
        self.drafting = dict(drafting)
        """What is known of ways to draft, by size of batch, and of asking a model: what was last heard of each."""
        self.resize(num_workers)

    @property
    def has_work(self) -> bool:
        return bool(self._rollouts or self._asked)

    def ask(
        self,
        step: int,
        prompt_key: str,
        requests: Sequence[Request],
        past: Sequence[Text] = (),
        begun: Mapping[str, PartialRollout] = {},
    ) -> None:
        """Rollouts of one prompt. What is asked for between two calls of `advance` is shared out together. `begun`: by
        uid, those that go on from the tokens they have."""
        for request in requests:
            asked = self._rollouts[request.uid] = _Asked(request, tuple(past))
            if request.uid in begun:
                asked.set_tokens(begun[request.uid])
            self._asked.setdefault(step, []).append((asked, prompt_key))

    def partials(self) -> tuple[list[PartialRollout], int]:
        """What is known of rollouts that have begun and not ended, and the newest version that a token of them may be
        of."""
        newest = -1 if self._wanted is None else self._wanted.number
        return [asked.partial() for asked in self._rollouts.values() if asked.token_ids], newest

    def give_weights(self, version: WeightVersion) -> None:
        """To all workers, before anything that is asked for later."""
        self._wanted = version
        for worker in self._workers.values():
            if worker.here is not None:
                worker.link.send(TakeWeights(version.number))
        if self._drafter is not None:
            self._drafter.new_policy(version.number)

    def advance(self) -> list[Rollout]:
        """What has ended by now. Does not wait."""
        self.note_waits()
        for step, asked in sorted(self._asked.items()):
            rollouts = tuple((one.request.uid, prompt_key) for one, prompt_key in asked)
            tokens = tuple((one.request.uid, len(one.token_ids)) for one, _ in asked if one.token_ids)
            prompts = {prompt_key: one.request.prompt_ids for one, prompt_key in asked}
            self._tell(RolloutsAsked(step, rollouts, tokens, tuple(prompts.items())))
        self._asked.clear()
        now_s = self._clock()
        waited_s, self._looked_s = min(LONGEST_LOOK_S, now_s - self._looked_s), now_s
        for name, worker in list(self._workers.items()):
            worker.silent_s += waited_s
            for message in worker.link.receive():
                self._hear(name, worker, message)
            self._look_after(name, worker)
        self.note_waits()
        ended, self._ended = self._ended, []
        return ended

    def note_waits(self) -> None:
        """What a worker without work waits for: others, grades, or the trainer."""
        reason = "reward wait" if self._is_grading() else "training wait"
        self._waits.note("tail wait" if self._rollouts else reason, self._clock())

    def resize(self, num_workers: int) -> None:
        """Start workers, or let the newest go: others go on with their rollouts."""
        assert num_workers > 0
        staying = [name for name, worker in self._workers.items() if not worker.is_leaving]
        for name in staying[num_workers:]:
            self._workers[name].is_leaving = True
            self._workers[name].link.send(Leave())
        for _ in range(num_workers - len(staying)):
            # The lowest number that is free, which placement on GPUs goes by.
            name = next(name for name in map(worker_name, count()) if name not in self._workers)
            self._start_worker(name)

    @property
    def num_workers(self) -> int:
        return sum(not worker.is_leaving for worker in self._workers.values())

    @property
    def num_joined(self) -> int:
        """Of these, those that take part."""
        return sum(worker.has_joined and not worker.is_leaving for worker in self._workers.values())

    def take_spent(self) -> Spent:
        """Seconds of all workers together since this was last asked."""
        spent, self._spent = self._spent, Spent()
        return spent

    def take_sampled(self) -> int:
        """Tokens that workers have sampled since this was last asked."""
        num_sampled, self._num_sampled = self._num_sampled, 0
        return num_sampled

    def take_paces(self) -> Paces:
        paces, self._paces = self._paces, ()
        return paces

    def take_drafts(self) -> DraftCounts:
        drafts, self._drafts = self._drafts, DraftCounts()
        return drafts

    def take_drafter_metrics(self) -> dict[str, float]:
        return self._drafter.take_metrics() if self._drafter is not None else {}

    def take_forecasts(self) -> dict[str, float]:
        """How good the forecasts of lengths were in the last step that was closed."""
        metrics = self._fleet.forecast_metrics
        newest = metrics.get(max(metrics), {}) if metrics else {}
        metrics.clear()
        return newest

    def close(self) -> None:
        for worker in self._workers.values():
            worker.link.close()

    # What is heard.

    def _hear(self, name: str, worker: _Worker, message: Any) -> None:
        worker.silent_s = 0.0
        match message:
            case Here():
                worker.here = message
                if self.drafting:
                    worker.link.send(DraftAs(dict(self.drafting)))
                if self._wanted is not None:
                    worker.link.send(TakeWeights(self._wanted.number))
                if self._drafter is not None and message.drafter is not None:
                    self._drafter.join(name, message.drafter)
            case HasWeights():
                self.drafting |= message.drafting
                self._see_weights(name, worker, message.version)
            case Ended():
                self._num_losses = 0
                del self._rollouts[message.rollout.request.uid]
                self._ended.append(message.rollout)
                self._tell(RolloutEnded(message.rollout.request.uid, len(message.rollout.token_ids)))
                # After who has nothing to do now was lent.
                if self._drafter is not None and not is_evaluation(message.rollout.request.group):
                    self._drafter.tell(LessonsAdded(1))
            case Grown():
                for piece in message.pieces:
                    self._add_tokens(piece)
            case GivenBack():
                asked = self._rollouts[message.partial.request.uid]
                asked.set_tokens(message.partial)
                self._tell(HandedBack(asked.request.uid, len(asked.token_ids)))
            case Beat():
                self._spent += message.spent
                self._num_sampled += message.num_tokens
                if worker.has_joined:  # what was before is the start
                    self._book(name, message)
                    self._paces = sum_paces((self._paces, message.paces))
                if message.drafts is not None:
                    self._drafts.merge(message.drafts)
                for choice in message.choices:
                    self._note(choice)
            case Broke() if not worker.has_joined and any(one.has_joined for one in self._workers.values()):
                worker.is_leaving = True
                self._say(
                    f"rollout worker {name} cannot start: {message.reason}. The run goes on with {self.num_workers}; "
                    f"{worker.link.how_it_ended()}"
                )
            case Broke():
                raise WorkerBroke(f"rollout worker {name}: {message.reason}\n{worker.link.how_it_ended()}")
            case _ if isinstance(message, FromMember) and self._drafter is not None:
                self._drafter.hear(name, message)
            case _:
                raise AssertionError(f"{name} said {message!r}")

    def _book(self, name: str, beat: Beat) -> None:
        """Its seconds on the ledger. It tells of waiting and of work apart; new weights come after waiting."""
        spent, drafts = beat.spent, beat.drafts or DraftCounts()
        decoding = split_decoding(spent.decode_s, beat.num_tokens, drafts.num_accepted, drafts.num_drafted)
        waited_to_s = self._clock() - spent.weights_s
        accounts = {"prefill": spent.prefill_s, "graphs": spent.graph_s, "weight sync": spent.weights_s}
        accounts |= {"evaluation": spent.evaluation_s, "drafter training": spent.drafter_s} | decoding
        accounts |= self._waits.split(waited_to_s - spent.idle_s, waited_to_s)
        for account, seconds in accounts.items():
            self._ledger.book(name, account, seconds)

    def _start_worker(self, name: str) -> None:
        self._ledger.arrive(name, self._clock(), rest="start")
        self._workers[name] = _Worker(self._start(name))

    def _see_weights(self, name: str, worker: _Worker, version: WeightVersion) -> None:
        wanted = self._wanted
        assert wanted is not None
        if version.number != wanted.number:
            return  # newer ones are on their way to it
        if version != wanted:
            self._say(f"rollout worker {name} has other weights than were published ({version}, not {wanted})")
            worker.end = "it had other weights than were published"
            worker.link.kill()
            return
        worker.version = version
        if not worker.has_joined:
            assert worker.here is not None
            worker.has_joined = True
            self._ledger.rest_on(name, IDLE, self._clock())
            self._tell(WorkerJoined(name, worker.here.slots, worker.here.points))
        self._look_at_weights()

    def _look_at_weights(self) -> None:
        """Whether all that take part have the newest; one that is still starting gets them before it does."""
        joined = [worker for worker in self._workers.values() if worker.has_joined]
        if self._wanted is None or self.live >= self._wanted.number or not joined:
            return
        if all(worker.version == self._wanted for worker in joined):
            self.live = self._wanted.number
            self._tell(WeightsLive(self.live))

    def _add_tokens(self, piece: PartialRollout) -> None:
        asked = self._rollouts[piece.request.uid]
        asked.token_ids += piece.token_ids
        asked.logprobs += piece.logprobs
        asked.log_kept += piece.log_kept
        asked.first_version = piece.first_version

    # Who is lost.

    def _look_after(self, name: str, worker: _Worker) -> None:
        if not worker.link.is_gone and worker.silent_s > (self._silence_s if worker.has_joined else START_S):
            worker.end = f"it said nothing for {worker.silent_s:.0f} s"
            self._say(f"rollout worker {name} has said nothing for {worker.silent_s:.0f} s: it is killed")
            worker.link.kill()
        if not worker.link.is_gone:
            return
        for message in worker.link.receive():  # what it said before it went
            self._hear(name, worker, message)
        worker.link.close()
        self._ledger.leave(name, self._clock())
        if self._drafter is not None:
            self._drafter.leave(name)
        if worker.is_leaving:
            del self._workers[name]
            self._say(f"rollout worker {name} has left; {self.num_workers} are there or on their way")
        else:
            self._start_again(name, worker.link.how_it_ended())
        if not worker.has_joined:
            return
        lost = [asked for asked in self._rollouts.values() if asked.worker == name]
        self.num_resumed += sum(bool(asked.token_ids) for asked in lost)
        for asked in lost:
            asked.worker = ""
        known = tuple((asked.request.uid, len(asked.token_ids)) for asked in lost)
        how = "it was told to leave" if worker.is_leaving else worker.end or worker.link.how_it_ended().splitlines()[0]
        self._tell(WorkerLeft(name, known, how))
        self._look_at_weights()

    def _start_again(self, name: str, cause: str) -> None:
        self._num_losses += 1
        self.num_lost += 1
        if self._num_losses > MAX_LOSSES * self.num_workers:
            raise WorkerBroke(f"{self._num_losses} workers were lost one after the other; the last: {cause}")
        self._say(f"rollout worker {cause}\n{name} is started again; others go on with its rollouts")
        self._start_worker(name)

    # The fleet.

    def _tell(self, event: FleetEvent) -> None:
        if isinstance(event, WorkerJoined | WorkerLeft | HandedBack):
            self._note(event)
        fresh: dict[tuple[str, str], list[_Asked]] = {}
        for action in self._fleet.on_event(event, self._clock()):
            match action:
                case Sample():
                    asked = self._rollouts[action.rollout]
                    assert action.num_tokens == len(asked.token_ids)
                    asked.worker = action.worker
                    if asked.token_ids:
                        self._note(action)
                        self._workers[action.worker].link.send(GoOn(asked.partial(), asked.past))
                    else:
                        fresh.setdefault((action.worker, asked.request.group), []).append(asked)
                case TakeBack():
                    self._note(action)
                    self._workers[action.worker].link.send(GiveBack(action.rollout))
                case Lend() | Recall() if self._drafter is not None:
                    self._drafter.tell(action)
                case CloseStep():
                    pass  # what a step is trained on is the scheduler's to say, which hears of rewards too
                case _:
                    raise AssertionError(f"no mode has rules with {action}")
        for (name, _), group in fresh.items():
            requests = tuple(asked.request for asked in group)
            self._workers[name].link.send(SampleGroup(requests, group[0].past))
