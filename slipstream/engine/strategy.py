"""How much the engine drafts, who decides it, and what came of it. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from slipstream.engine.sequences import Report, StepPlan
from slipstream.types import MODEL_ORIGIN, TEXT_ORIGINS

MATCHING = 2.0
"""Right drafts from texts that a sequence must have had in a step, on average, for sequences to count as matching."""


@dataclass(frozen=True, slots=True)
class Strategy:
    drafts_each: float
    """Drafts that a step may verify, a sequence on average; 0: none are made."""
    min_match: int = 2
    """Tokens that must match before what followed them is a draft; 0: nothing is matched."""
    depth: int = 0
    """How many tokens a learned drafter goes ahead where nothing matched; 0: it is not asked."""
    branches: int = 1
    """Alternatives that it pursues at each of them: from 2 on, drafts are a tree."""

    @property
    def looks_for_matches(self) -> bool:
        """In texts that are known: whether it would find out that sequences repeat one."""
        return self.drafts_each >= MATCHING and self.min_match > 0

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """Ways of one kind differ in how many drafts they make: what has to match, whether a model is asked, trees."""
        return self.min_match, self.depth > 0, self.branches > 1

    def __str__(self) -> str:
        """Short enough for a table: 4 drafts each where 2 or more tokens match, or the model's, 3 deep."""
        if not self.drafts_each:
            return "off"
        ways = [f"{self.min_match}+"] if self.min_match else []
        tree = f" x {self.branches}" if self.branches > 1 else ""
        ways += [f"model {self.depth}{tree}"] if self.depth else []
        return f"{self.drafts_each:g} drafts, {' or '.join(ways)}"


OFF = Strategy(0.0)


class Feeding(IntEnum):
    """What a learned drafter gets of a step."""

    NOTHING = 0
    """Nobody will ask it for long: it costs nothing. Where keys of what was said meanwhile should be, it will find
    those of other texts, or none: it drafts worse as long as these sequences go on."""
    KEYS = 1
    """It is kept up to date, and can be asked later."""
    ALL = 2
    """It can be asked right after the step."""


def are_matching(report: Report) -> bool:
    """Whether sequences repeat texts that are known, by where the tokens of their last step came from."""
    num_copied = sum(report.num_from[origin] for origin in TEXT_ORIGINS)
    return num_copied >= MATCHING * max(1, report.num_rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step that only decoded."""

    batch: int
    """Sequences in it."""
    strategy: Strategy
    tokens_each: float
    """That a sequence got, on average."""
    seconds: float
    is_matching: bool = False
    """Whether they were found to repeat known texts when it was chosen."""
    of_model: float | None = None
    """Of the tokens each, those that a learned drafter had drafted; None: it was not asked."""
    tokens_behind: float | None = None
    """That a sequence got which all others may have to wait for; None: it is not known who."""
    others_follow: bool = False
    """Whether others will have the slots that get free, so that nobody waits for the last one."""
    is_fed: bool = False
    """Whether a learned drafter was told of it."""


def size_of(batch: int) -> int:
    """The most sequences that are judged together with so many."""
    return 1 << (max(1, batch) - 1).bit_length()


class DraftPolicy(Protocol):
    def ways(self, batch: int) -> Sequence[Strategy]:
        """All that it may choose for so many sequences."""

    def choose(self, batch: int, is_matching: bool = False) -> Strategy:
        """For a step of so many sequences, which were just found to repeat known texts, or not."""

    def best(self, batch: int, is_matching: bool = False) -> Strategy:
        """For such a step, while what was chosen is not prepared."""

    def feed(self, batch: int) -> Feeding:
        """What a learned drafter gets of a step of so many sequences that does not ask it."""

    def observe(self, step: StepResult) -> None:
        """What came of one; not of steps with prompts, nor of the first of its size."""

    def observe_preparing(self, batch: int, seconds: float, is_matching: bool = False) -> None:
        """A step with drafts took so much longer, because it was the first of its size."""

    def note_new_model(self) -> None:
        """The learned drafter has other weights from now on."""


class Always:
    """The policy of one strategy, for measurements and tests."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def ways(self, batch: int) -> Sequence[Strategy]:
        return (self.strategy,)

    def choose(self, batch: int, is_matching: bool = False) -> Strategy:
        return self.strategy

    def best(self, batch: int, is_matching: bool = False) -> Strategy:
        return self.strategy

    def feed(self, batch: int) -> Feeding:
        return Feeding.KEYS

    def observe(self, step: StepResult) -> None:
        pass

    def observe_preparing(self, batch: int, seconds: float, is_matching: bool = False) -> None:
        pass

    def note_new_model(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """How a step drafts, decided before it was planned."""

    batch: int
    """Sequences that are seated."""
    is_matching: bool
    """Whether they were found to repeat known texts."""
    strategy: Strategy
    room: int
    """Drafts that there was to be room for, before sizes were rounded."""
    feeding: Feeding = Feeding.NOTHING
    """What a learned drafter gets of it."""


def result_of(
    drafts: StepDrafts,
    plan: StepPlan,
    report: Report,
    seconds: float,
    tokens_behind: float | None = None,
    others_follow: bool = False,
) -> StepResult:
    """By what was reported of its sequences; there may be fewer than ran, if some had ended."""
    was_asked = plan.num_drafts > 0 and drafts.strategy.depth > 0
    return StepResult(
        batch=len(plan.samplers),
        strategy=drafts.strategy,
        tokens_each=sum(report.num_from) / report.num_rows,
        seconds=seconds,
        is_matching=drafts.is_matching,
        of_model=report.num_from[MODEL_ORIGIN] / report.num_rows if was_asked else None,
        tokens_behind=tokens_behind,
        others_follow=others_follow,
        is_fed=drafts.feeding > Feeding.NOTHING,
    )


MARGIN = 1.2
"""Times the drafts that there were of late: room for a few more."""
REGROWTH = 1.5
"""Times the room, after a step in which there may have been more."""
STALE_STEPS = 100
"""What a strategy needed so many steps ago says nothing about now."""


class Demand:
    """How many drafts there are a sequence, as steps see it: a step made for more costs time and gives nothing."""

    def __init__(self) -> None:
        self._each: dict[Strategy, float] = {}
        self._seen_at: dict[Strategy, int] = {}
        self._num_steps = 0

    def room(self, strategy: Strategy, batch: int) -> int:
        """Drafts that the next step may verify: what the strategy allows, or three quarters, half, three eighths and
        so on; few sizes, since each needs a CUDA graph."""
        self._num_steps += 1
        recent = [one for one, seen_at in self._seen_at.items() if self._num_steps - seen_at <= STALE_STEPS]
        if strategy not in recent:
            # There is hardly more to draft than there was for one of its kind that had room to spare.
            alike = (other for other in recent if other.kind == strategy.kind)
            needed = [self._each[other] for other in alike if self._each[other] < other.drafts_each]
            self._each[strategy] = REGROWTH * max(needed, default=strategy.drafts_each)
        self._seen_at[strategy] = self._num_steps
        each, less, still_less = strategy.drafts_each, 3 / 4, 2 / 3
        while each * less >= max(self._each[strategy], 1 / batch):
            each *= less
            less, still_less = still_less, less
        return math.ceil(each * batch)

    def observe(self, step: StepDrafts, given: int, num_drafted: int) -> None:
        """A step that was to have room for some drafts had room for `given`, and had `num_drafted`."""
        if not given:
            return
        before = self._each[step.strategy]
        if num_drafted >= given - 1:
            # From what was asked, not from what was given: sizes that are rounded down would never be left again.
            self._each[step.strategy] = max(before, REGROWTH * max(step.room, num_drafted) / step.batch)
        else:
            self._each[step.strategy] = 0.8 * before + 0.2 * MARGIN * num_drafted / step.batch


@dataclass(slots=True)
class DraftCounts:
    """What came of drafts in some steps."""

    num_rows: int = 0
    """Sequences that sampled, summed over the steps."""
    drafted: Counter[int] = field(default_factory=Counter)
    """Of these, by how many drafts were verified."""
    accepted: Counter[int] = field(default_factory=Counter)
    """And by how many were right, which are always the first of them."""
    tokens_from: Counter[int] = field(default_factory=Counter)
    """Tokens by the source of the draft they were, or 0."""
    saved_s: float = 0.0
    """Seconds that they saved, as a selector estimates it."""

    @property
    def num_tokens(self) -> int:
        return self.tokens_from.total()

    @property
    def num_drafted(self) -> int:
        return sum(drafts * rows for drafts, rows in self.drafted.items())

    @property
    def num_accepted(self) -> int:
        return self.num_tokens - self.tokens_from[0]

    def accept_rate_at(self, place: int) -> float | None:
        """Of the drafts at this place after the last known token, from 0 on; None if there was none."""
        drafted, accepted = (
            sum(rows for drafts, rows in counts.items() if drafts > place) for counts in (self.drafted, self.accepted)
        )
        return accepted / drafted if drafted else None

    def merge(self, other: DraftCounts) -> None:
        self.num_rows += other.num_rows
        self.drafted.update(other.drafted)
        self.accepted.update(other.accepted)
        self.tokens_from.update(other.tokens_from)
        self.saved_s += other.saved_s

    def add(self, report: Report) -> None:
        """One step."""
        self.num_rows += report.num_rows
        self.tokens_from.update(_counted(report.num_from))
        drafted = _counted(report.by_drafted)
        drafted.pop(0, None)
        if drafted:
            self.drafted.update(drafted)
            self.accepted.update(_counted(report.by_right))


def _counted(counts: list[int]) -> dict[int, int]:
    return {what: count for what, count in enumerate(counts) if count}
