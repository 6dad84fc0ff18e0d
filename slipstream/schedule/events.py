"""What happens (facts) and what shall be done (actions): frozen records, the same in a real and a simulated world.

Three state machines speak it: `scheduler.py`, which leads a run from step to step, `fleet.py`, which shares out the
rollouts of those steps among workers, and `coordinator.py`, which lets those train the drafter that have time for it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

UnderWay = tuple[tuple[int, tuple[int, ...]], ...]
"""Step by step: (rounds of dynamic sampling so far, positions that were asked for)."""


@dataclass(frozen=True, slots=True)
class RunBegan:
    """The run is set up, its weights those after `step` steps."""

    step: int
    position: int
    """The first prompt of the order that no trained step has used."""
    concluded: bool
    """This step was evaluated, recorded and saved before; False for a new run."""
    under_way: UnderWay = ()
    """Of the steps that follow: what had been asked for, which is asked for again."""


@dataclass(frozen=True, slots=True)
class GroupScored:
    """All samples of one prompt are graded."""

    step: int
    position: int
    """Place of the prompt in the run's order of prompts."""
    num_scored: int
    num_unscored: int
    rewards_differ: bool


@dataclass(frozen=True, slots=True)
class StepTrained:
    step: int


@dataclass(frozen=True, slots=True)
class WeightsLive:
    """The engine holds the weights of this step."""

    step: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    step: int


@dataclass(frozen=True, slots=True)
class Saved:
    step: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants the run to end early, with a checkpoint."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotExact:
    """Rollouts of this run may depend on their batch, although engine.exact is on. For the record."""

    reason: str


@dataclass(frozen=True, slots=True)
class DraftChosen:
    """From now on the engine drafts otherwise when it runs about so many sequences. For the record."""

    batch: int
    strategy: str
    reason: str
    is_matching: bool = False
    """Whether this is for when they repeat known texts."""


@dataclass(frozen=True, slots=True)
class DrafterAsked:
    """From now on the engine asks its learned drafter, or leaves it alone. For the record."""

    is_asked: bool
    reason: str


DraftRecord = DraftChosen | DrafterAsked
Event = RunBegan | GroupScored | StepTrained | WeightsLive | Evaluated | Saved | StopAsked | DraftRecord


@dataclass(frozen=True, slots=True)
class Generate:
    """Sample one group for the prompt at this position of the order."""

    step: int
    position: int


@dataclass(frozen=True, slots=True)
class Feed:
    """Add the gradient of the group at this position; the step goes on."""

    step: int
    position: int


@dataclass(frozen=True, slots=True)
class Train:
    """Train on the groups at these positions, in this order; some may have been fed."""

    step: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PushWeights:
    step: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    step: int


@dataclass(frozen=True, slots=True)
class Record:
    """Everything about this step is known: write its row of metrics."""

    step: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint of the weights after `step`, from which the run goes on with the prompt at `position`."""

    step: int
    position: int
    concluded: bool
    """False if the run stopped before this step was evaluated and recorded: that is left to the resumed run."""
    under_way: UnderWay = ()
    """Of the steps that follow: what has been asked for and is not trained on yet."""


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str


Action = Generate | Feed | Train | PushWeights | Evaluate | Record | Save | Finish


# The fleet.


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    worker: str
    slots: int
    """Sequences at once."""
    points: tuple[tuple[int, float], ...]
    """Its speed: (sequences, seconds of a step)."""
    tokens_a_step: tuple[tuple[int, float], ...] = ((1, 1.0),)


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """It died or was given back. What it was sampling is handed back with as many tokens as are known."""

    worker: str
    tokens: tuple[tuple[str, int], ...] = ()
    """(rollout, tokens sampled so far)."""
    reason: str = ""
    """For whoever reads the event log."""


@dataclass(frozen=True, slots=True)
class RolloutsAsked:
    """The rollouts of a step, all at once: (rollout, its prompt)."""

    step: int
    rollouts: tuple[tuple[str, str], ...]
    tokens: tuple[tuple[str, int], ...] = ()
    """(rollout, tokens that it has already), of those that an earlier run began."""
    prompts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(prompt, its token ids): what lengths of prompts that never came up are told by."""


@dataclass(frozen=True, slots=True)
class RolloutEnded:
    rollout: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class HandedBack:
    """A worker no longer samples this, as it was told, and has this many tokens of it."""

    rollout: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Outgrew:
    """A rollout has more tokens than it was to tell of."""

    rollout: str


@dataclass(frozen=True, slots=True)
class WorkersWanted:
    """From now on there shall be so many workers. For the record."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkersPaced:
    """How fast workers were in a step. For the record, from which it can be simulated."""

    step: int
    paces: tuple[tuple[int, int, float], ...]
    """(steps of an engine, their sequences summed up, their seconds), of steps with 1 sequence, 2 or 3, 4 to 7 ..."""


FleetEvent = WorkerJoined | WorkerLeft | RolloutsAsked | RolloutEnded | HandedBack | Outgrew | WeightsLive


@dataclass(frozen=True, slots=True)
class Sample:
    """Begin a rollout on this worker, or go on with it from the tokens it has."""

    worker: str
    rollout: str
    num_tokens: int
    tell_at: int = 0
    """Tell when it has more tokens than this and has not ended; 0: need not."""


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Stop sampling this, and hand it back."""

    worker: str
    rollout: str


@dataclass(frozen=True, slots=True)
class CloseStep:
    """These are the rollouts that the step is trained on."""

    step: int
    rollouts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Watch:
    """Go on with this, and tell again when it has more tokens than this and has not ended."""

    worker: str
    rollout: str
    tell_at: int


@dataclass(frozen=True, slots=True)
class Lend:
    """There is nothing to sample for this worker: it may train a drafter until it is recalled."""

    worker: str


@dataclass(frozen=True, slots=True)
class Recall:
    """At once: what it was lent for is given up."""

    worker: str


FleetAction = Sample | Watch | TakeBack | CloseStep | Lend | Recall


# The training of the drafter.


@dataclass(frozen=True, slots=True)
class LessonsAdded:
    """So many rollouts more can be learned from."""

    count: int


@dataclass(frozen=True, slots=True)
class Rest:
    """These stop sampling for one round, since nobody has had time for one."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundDone:
    """All members of the session have trained for a round and averaged their weights."""

    session: int


CoordinatorEvent = Lend | Recall | Rest | WorkerLeft | LessonsAdded | RoundDone


@dataclass(frozen=True, slots=True)
class TrainRound:
    """These workers train together; the leader holds the optimizer's state, and gives it to who is new."""

    session: int
    leader: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Now, in the middle of whatever it does."""

    worker: str


@dataclass(frozen=True, slots=True)
class Publish:
    """The leader gives the drafter to all workers."""

    session: int
    leader: str


@dataclass(frozen=True, slots=True)
class EndSession:
    session: int


CoordinatorAction = TrainRound | StopTraining | Publish | EndSession

FleetRecord = WorkersWanted | WorkersPaced
Item = NotExact | Event | Action | FleetEvent | FleetAction | FleetRecord | CoordinatorEvent | CoordinatorAction

BY_NAME: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(RunBegan, GroupScored, StepTrained, WeightsLive, Evaluated, Saved, StopAsked),
        *(NotExact, DraftChosen, DrafterAsked),
        *(Generate, Feed, Train, PushWeights, Evaluate, Record, Save, Finish),
        *(WorkerJoined, WorkerLeft, RolloutsAsked, RolloutEnded, HandedBack, Outgrew, WorkersWanted, WorkersPaced),
        *(Sample, Watch, TakeBack, CloseStep, Lend, Recall),
        *(LessonsAdded, Rest, RoundDone, TrainRound, StopTraining, Publish, EndSession),
    )
}


FLEET = (WorkerJoined, WorkerLeft, HandedBack, Sample, TakeBack, WorkersWanted, WorkersPaced)
"""What a run with workers writes into its event log beside what the scheduler hears and says; of Sample only where a
rollout goes on elsewhere."""


def to_record(item: Item) -> tuple[str, dict[str, Any]]:
    """(name, fields) for the event log."""
    return type(item).__name__, asdict(item)


def from_record(name: str, fields: dict[str, Any]) -> Item:
    item: Item = BY_NAME[name](**{key: _frozen(value) for key, value in fields.items()})
    return item


def _frozen(value: Any) -> Any:
    """Lists, which is what JSON has, as the tuples they were."""
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value
