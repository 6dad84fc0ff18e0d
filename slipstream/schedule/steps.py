"""Which rollouts may be begun, and which a step is trained on. Pure.

The rule of staleness. Version v of the weights is that after step v; 0 is that before the first, without which nothing
is begun. A step s is opened when version s - 1 - staleness is live, so whatever is begun for it has at least that
version; and a rollout is trained in the step it was begun for. Hence what is trained in step s was begun with a version
of at least s - 1 - staleness: none is staler than that.

Where groups may be carried into the next step, once at most, a step is opened one version later, at s - staleness: what
is carried into s was begun for s - 1, with a version of at least s - 1 - staleness. The same holds for groups of s that
over-sampling begins early, with step s - 1, if they are not carried on; trained early, in s - 1, they are less stale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from slipstream.schedule.events import RolloutsAsked
from slipstream.schedule.members import FleetRollout
from slipstream.schedule.rules import Rules, oldest_version

CARRIED = 0.1
"""Of a step's groups: so many are carried at most."""
OVERSAMPLED = 0.2
"""Of a step's groups: so many of the next step's are begun with it."""


@dataclass(slots=True)
class _Step:
    number: int
    is_open: bool = False
    """All its rollouts may be begun; else at most some, or some have been carried into it."""
    groups: dict[str, list[FleetRollout]] = field(default_factory=dict)
    num_left: dict[str, int] = field(default_factory=dict)
    """By group: rollouts that have not ended."""
    num_late: int = 0
    """Groups with rollouts that have not ended."""
    outgrown: set[str] = field(default_factory=set)
    """Of these, those with a rollout that is much longer than forecast."""
    staying: set[str] = field(default_factory=set)
    """Groups that are not carried on: they were carried into it, or begun before it was open."""

    def take_in(self, name: str, group: list[FleetRollout]) -> None:
        if name in self.groups:  # a prompt that came up twice in the step
            group = self.give_away(name) + group
        left = sum(not rollout.has_ended for rollout in group)
        self.groups[name], self.num_left[name] = group, left
        self.num_late += left > 0
        if left and any(rollout.has_outgrown for rollout in group):
            self.outgrown.add(name)
        for rollout in group:
            rollout.step, rollout.group = self.number, name

    def give_away(self, name: str) -> list[FleetRollout]:
        self.num_late -= self.num_left.pop(name) > 0
        self.outgrown.discard(name)
        self.staying.discard(name)
        return self.groups.pop(name)


class Steps:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._version = -1
        self._asked: deque[RolloutsAsked] = deque()
        self._steps: deque[_Step] = deque()
        """Those with rollouts that were begun, oldest first."""
        self._newest = 0
        """The last step that was opened."""
        self._begun_early = 0
        """The last of which some groups were begun before it was opened."""

    def ask(self, asked: RolloutsAsked) -> None:
        assert asked.rollouts, f"step {asked.step} asks for nothing"
        self._asked.append(asked)

    def see_weights(self, version: int) -> None:
        self._version = max(self._version, version)

    def may_begin(self) -> Iterator[RolloutsAsked]:
        """What may be begun now and could not before; `begin` each before the next is taken."""
        patience = self._rules.staleness - self._rules.carries
        while self._asked and self._version >= 0:
            asked = self._asked[0]
            if self._version >= oldest_version(asked.step, patience):
                self._asked.popleft()
                self._newest = asked.step
                self._step(asked.step).is_open = True
                yield asked
            elif self._rules.tail == "oversample" and self._begun_early < asked.step == self._newest + 1:
                self._begun_early = asked.step
                early, self._asked[0] = _split(asked)
                if early is not None:
                    yield early
            else:
                break

    def begin(self, rollouts: Iterable[FleetRollout]) -> None:
        groups: dict[tuple[int, str], list[FleetRollout]] = {}
        for rollout in rollouts:
            groups.setdefault((rollout.step, rollout.group), []).append(rollout)
        for (number, name), group in groups.items():
            step = self._step(number)
            step.take_in(name, group)
            if not step.is_open:
                step.staying.add(name)

    def outgrow(self, rollout: FleetRollout) -> None:
        if rollout.has_ended:
            return  # it was told of too late
        rollout.has_outgrown = True
        self._step(rollout.step).outgrown.add(rollout.group)

    def end(self, rollout: FleetRollout) -> bool:
        """Whether that was the last of its group."""
        rollout.has_ended = True
        step = self._step(rollout.step)
        step.num_left[rollout.group] -= 1
        if step.num_left[rollout.group]:
            return False
        step.num_late -= 1
        step.outgrown.discard(rollout.group)
        return True

    def close(self) -> Iterator[tuple[int, list[FleetRollout], bool]]:
        """(step, what it is trained on, whether others of it go on): every step that can be closed now, in order."""
        while self._steps and self._steps[0].is_open:
            step = self._steps[0]
            late: list[str] = []
            if step.num_late:
                if not self._may_leave(step) or any(step.num_left[name] for name in step.staying):
                    break
                late = [name for name, left in step.num_left.items() if left]
            following = self._step(step.number + 1) if late else step
            if self._rules.tail == "oversample":
                done = [name for name, left in following.num_left.items() if not left]
                for name in done[: len(late)]:
                    step.take_in(f"{name} of step {following.number}", following.give_away(name))
            for name in late:
                carried = f"{name} of step {step.number}"
                following.take_in(carried, step.give_away(name))
                following.staying.add(carried)
            self._steps.popleft()
            yield step.number, [rollout for group in step.groups.values() for rollout in group], bool(late)

    def _may_leave(self, step: _Step) -> bool:
        """Whether it may be closed without the groups that are not done."""
        is_almost_done = step.num_late <= CARRIED * len(step.groups)
        match self._rules.tail:
            case "carry":
                return is_almost_done
            case "outliers":
                return is_almost_done and len(step.outgrown) == step.num_late
            case "oversample":
                following = self._step(step.number + 1)
                return step.num_late <= len(following.groups) - following.num_late
            case _:
                return False

    def _step(self, number: int) -> _Step:
        """A new one if there is none: rollouts may come to it before it is opened."""
        for step in self._steps:
            if step.number == number:
                return step
        step = _Step(number)
        self._steps.append(step)
        self._steps = deque(sorted(self._steps, key=lambda one: one.number))
        return step


def _split(asked: RolloutsAsked) -> tuple[RolloutsAsked | None, RolloutsAsked]:
    """The groups that are begun early, if there are enough for one, and the others."""
    prompts = dict.fromkeys(prompt for _, prompt in asked.rollouts)
    early = set(list(prompts)[: int(OVERSAMPLED * len(prompts))])
    parts = (
        replace(asked, rollouts=tuple(one for one in asked.rollouts if (one[1] in early) == is_early))
        for is_early in (True, False)
    )
    first, others = parts
    return (first if first.rollouts else None), others
