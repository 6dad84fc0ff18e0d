"""What `pool.py` and rollout workers say to each other. Pure: records that travel between processes as they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.draft.shelves import Text
from slipstream.engine.sequences import PartialRollout
from slipstream.engine.strategy import DraftCounts
from slipstream.runtime.drafter_messages import FromMember, ToMember
from slipstream.schedule.events import DraftRecord
from slipstream.schedule.speeds import Paces
from slipstream.types import Request, Rollout, WeightVersion

EVALUATION = "eval/"
"""How the names of groups of held-out prompts begin."""


def is_evaluation(group: str) -> bool:
    return group.startswith(EVALUATION)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Begin these, which share a prompt."""

    requests: tuple[Request, ...]
    past: tuple[Text, ...] = ()
    """Earlier rollouts of the prompt, to draft from."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """With a rollout that another worker began."""

    partial: PartialRollout
    past: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Stop sampling this; nothing to do if it has ended."""

    uid: str


@dataclass(frozen=True, slots=True)
class TakeWeights:
    """Before anything that is said later is done; rollouts that are running go on with them."""

    number: int


@dataclass(frozen=True, slots=True)
class DraftAs:
    """By what other workers, or an earlier run, have measured of ways to draft: the state of a selector."""

    known: dict[str, object]


@dataclass(frozen=True, slots=True)
class Leave:
    """Tell what is known of running rollouts, and end the process: others go on with them."""


ToRolloutWorker = SampleGroup | GoOn | GiveBack | TakeWeights | DraftAs | Leave | ToMember


@dataclass(frozen=True, slots=True)
class Here:
    """It has started."""

    slots: int
    points: tuple[tuple[int, float], ...]
    """Its speed as it measured it: (sequences, seconds of a step)."""
    drafter: int | None = None
    """The version of the drafter that it drafts with, if there is one that learns."""


@dataclass(frozen=True, slots=True)
class HasWeights:
    version: WeightVersion
    drafting: dict[str, object] = field(default_factory=dict)
    """What it knows by then of ways to draft."""


@dataclass(frozen=True, slots=True)
class Ended:
    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Grown:
    """Tokens that running rollouts have beyond those told before: what is known of them if the worker is lost."""

    pieces: tuple[PartialRollout, ...]


@dataclass(frozen=True, slots=True)
class GivenBack:
    partial: PartialRollout


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a worker's time by account, since it last said."""

    prefill_s: float = 0.0
    """Of a step that also decodes: by its share of the tokens."""
    decode_s: float = 0.0
    graph_s: float = 0.0
    """Of steps that made a CUDA graph, or had none yet."""
    weights_s: float = 0.0
    idle_s: float = 0.0
    """With nothing to sample, and nothing to learn."""
    evaluation_s: float = 0.0
    """Of all that held-out prompts take: by their share of the sequences."""
    drafter_s: float = 0.0
    """Teaching the drafter, and taking in what came of it."""

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.prefill_s + other.prefill_s,
            self.decode_s + other.decode_s,
            self.graph_s + other.graph_s,
            self.weights_s + other.weights_s,
            self.idle_s + other.idle_s,
            self.evaluation_s + other.evaluation_s,
            self.drafter_s + other.drafter_s,
        )


@dataclass(frozen=True, slots=True)
class Beat:
    """It is alive, and this is what it did."""

    spent: Spent
    num_tokens: int
    """Sampled meanwhile."""
    drafts: DraftCounts | None = None
    """What came of drafts since it last said, if it drafts."""
    paces: Paces = ()
    """How fast its steps were meanwhile."""
    choices: tuple[DraftRecord, ...] = ()
    """Otherwise than before."""


@dataclass(frozen=True, slots=True)
class Broke:
    """It ends, by an error of its own and not by a fault of its machine: another worker would fare no better."""

    reason: str


FromRolloutWorker = Here | HasWeights | Ended | Grown | GivenBack | Beat | Broke | FromMember
