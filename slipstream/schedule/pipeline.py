"""What to do next where sampling and training each have processes of their own. A pure state machine like
`scheduler.py`, whose steps it takes apart: groups are fed to the trainer as they are scored, while others are sampled,
and with a staleness above 0 the next steps are asked for before a step is trained.

Invariants, asserted by `tests/test_schedule_pipeline.py`, whatever order groups are scored in: a step is asked for when
`rules.oldest_version` is live, and not before; each group that is kept is fed once at most, to the step it was asked
for, and only while that step is the one in training; a step is trained once the step before it is concluded (evaluated,
recorded, its checkpoint asked for), so that checkpoints and evaluations are of the weights they name; with `in_order`
groups are fed and trained in the order of their prompts, as `scheduler.py` does; every prompt that was asked for is
trained on, dropped for want of a signal, or in `Save.under_way`; after StopAsked no group is asked for or fed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.config import Config
from slipstream.schedule.events import (
    Action,
    DraftChosen,
    DrafterAsked,
    Evaluate,
    Evaluated,
    Event,
    Feed,
    Finish,
    Generate,
    GroupScored,
    PushWeights,
    Record,
    RunBegan,
    Save,
    Saved,
    StepTrained,
    StopAsked,
    Train,
    UnderWay,
    WeightsLive,
)
from slipstream.schedule.rules import MODES, oldest_version
from slipstream.schedule.scheduler import evaluation_due, save_due


@dataclass(slots=True)
class _Asked:
    """A step that was asked for and is not trained."""

    positions: list[int]
    rounds: int
    outstanding: set[int]
    kept: list[int] = field(default_factory=list)
    """With a signal, in the order they are trained in."""
    num_fed: int = 0
    """Of these, so many from the first on."""
    is_training: bool = False


class Pipeline:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._staleness = MODES[config.mode].staleness
        self._in_order = config.train.deterministic
        self._streams = not config.algorithm.compares_whole_steps
        self._steps: dict[int, _Asked] = {}
        self._under_way: UnderWay = ()
        """What a resumed run asks for again."""
        self._newest = 0
        """The last step that was asked for."""
        self._position = 0
        self._trained = 0
        self._live = -1
        self._concluded = self._evaluating = False
        self._saving: set[int] = set()
        self._stopping: str | None = None

    def on_event(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case RunBegan():
                self._trained = self._newest = event.step
                self._concluded, self._position, self._under_way = event.concluded, event.position, event.under_way
                return [PushWeights(event.step)]
            case GroupScored():
                return [*self._on_group(event), *self._go_on()]
            case StepTrained():
                del self._steps[event.step]
                self._trained, self._concluded = event.step, False
                return [PushWeights(event.step), *self._go_on()]
            case WeightsLive():
                self._live = event.step
                return [*self._look_at_weights(), *self._go_on()]
            case Evaluated():
                if not self._evaluating:
                    return []  # the run stopped meanwhile, and has saved this step as not concluded
                self._evaluating = False
                return [*self._conclude(), *self._go_on()]
            case Saved():
                self._saving.discard(event.step)
                return self._go_on()
            case StopAsked():
                return self._on_stop(event)
            case DraftChosen() | DrafterAsked():
                return []

    def _go_on(self) -> list[Action]:
        """All that has become possible."""
        if self._stopping is not None:
            return self._end()
        return [*self._ask(), *self._feed(), *self._train(), *self._end()]

    def _ask(self) -> list[Action]:
        actions: list[Action] = []
        while self._newest < self._config.train.steps and self._live >= oldest_version(
            self._newest + 1, self._staleness
        ):
            self._newest += 1
            if self._under_way:
                (rounds, positions), *rest = self._under_way
                self._under_way = tuple(rest)
            else:
                rounds, positions = 1, self._take_positions(self._config.train.prompts_per_step)
            self._steps[self._newest] = _Asked(list(positions), rounds, set(positions))
            actions += [Generate(self._newest, position) for position in positions]
        return actions

    def _take_positions(self, count: int) -> tuple[int, ...]:
        positions = tuple(range(self._position, self._position + count))
        self._position += count
        return positions

    def _on_group(self, event: GroupScored) -> list[Action]:
        step = self._steps.get(event.step)
        if step is None or event.position not in step.outstanding:
            return []  # the run is stopping: this group belongs to a step that will be done again
        step.outstanding.remove(event.position)
        algorithm = self._config.algorithm
        if event.rewards_differ or not algorithm.dynamic_sampling:
            step.kept.append(event.position)
            if self._in_order:
                step.kept.sort()  # what was fed came before all that were outstanding
        # A resumed step is asked for with all its rounds at once, and may come to more.
        missing = max(0, self._config.train.prompts_per_step - len(step.kept))
        if (
            step.outstanding
            or not missing
            or step.rounds >= algorithm.max_sampling_rounds
            or self._stopping is not None
        ):
            return []
        step.rounds += 1
        positions = self._take_positions(missing)
        step.positions += positions
        step.outstanding.update(positions)
        return [Generate(event.step, position) for position in positions]

    def _feed(self) -> list[Action]:
        step = self._steps.get(self._trained + 1)
        if step is None or step.is_training or not self._streams:
            return []
        end = len(step.kept)
        if self._in_order and step.outstanding:
            first = min(step.outstanding)
            end = sum(position < first for position in step.kept)
        fed = step.kept[step.num_fed : end]
        step.num_fed = max(step.num_fed, end)
        return [Feed(self._trained + 1, position) for position in fed]

    def _train(self) -> list[Action]:
        step = self._steps.get(self._trained + 1)
        if step is None or step.is_training or step.outstanding or not self._concluded:
            return []
        step.is_training = True
        if not self._streams:
            step.kept.sort()
        return [Train(self._trained + 1, tuple(step.kept))]

    def _look_at_weights(self) -> list[Action]:
        if self._concluded:
            return []
        if not evaluation_due(self._config, self._trained):
            return self._conclude()
        if self._stopping is not None:
            return [self._save()]
        self._evaluating = True
        return [Evaluate(self._trained)]

    def _conclude(self) -> list[Action]:
        """The step is complete: record it, and save it if due."""
        self._concluded = True
        if save_due(self._config, self._trained) or self._stopping is not None:
            return [Record(self._trained), self._save()]
        return [Record(self._trained)]

    def _on_stop(self, event: StopAsked) -> list[Action]:
        if self._stopping is not None:
            return []
        self._stopping = event.reason
        if self._evaluating:
            self._evaluating = False
            return [self._save()]
        is_training = any(step.is_training for step in self._steps.values())
        if self._saving or is_training or self._live < self._trained:
            return []  # an action is under way, and the fact that it is done leads to Save and Finish
        return [self._save()]

    def _end(self) -> list[Action]:
        if self._saving or self._live < self._trained or any(step.is_training for step in self._steps.values()):
            return []
        if self._stopping is not None:
            return [Finish(self._stopping)]
        return [Finish("done")] if self._concluded and self._trained >= self._config.train.steps else []

    def _save(self) -> Save:
        self._saving.add(self._trained)
        under_way = tuple((step.rounds, tuple(step.positions)) for _, step in sorted(self._steps.items()))
        return Save(self._trained, self._position, self._concluded, under_way + self._under_way)
