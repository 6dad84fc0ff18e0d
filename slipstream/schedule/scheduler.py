"""What to do next in a synchronous run. A pure state machine: `on_event(event, now_s) -> [Action]`.

One step: generate groups -> (dynamic sampling: replace groups without a signal, round by round) -> train -> push
weights -> evaluate if due -> record -> save if due -> next step.

Invariants, asserted by `tests/test_schedule.py`: a step trains on groups in the order of their prompts, whatever order
they were scored in; prompts are consumed in order, none twice; actions depend on the events alone, never on the time;
after StopAsked the last trained step is saved and the run finishes; no new group, step or evaluation begins.
"""

from __future__ import annotations

from slipstream.config import Config
from slipstream.schedule.events import (
    Action,
    DraftChosen,
    DrafterAsked,
    Evaluate,
    Evaluated,
    Event,
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
    WeightsLive,
)


class Scheduler:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._position = self._position_after_step = 0
        self._step = 0
        self._concluded = False
        self._round = 0
        self._outstanding: set[int] = set()
        self._kept: list[int] = []
        self._evaluating = False
        self._stopping: str | None = None

    def on_event(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case RunBegan():
                self._step, self._concluded = event.step, event.concluded
                self._position = self._position_after_step = event.position
                return [PushWeights(event.step)]
            case GroupScored():
                return self._on_group(event)
            case StepTrained():
                self._step, self._concluded = event.step, False
                self._position_after_step = self._position
                return [PushWeights(event.step)]
            case WeightsLive():
                return self._on_weights()
            case Evaluated():
                if not self._evaluating:
                    return []  # the run stopped meanwhile, and has saved this step as not concluded
                self._evaluating = False
                return self._conclude()
            case Saved():
                return self._next()
            case StopAsked():
                return self._on_stop(event)
            case DraftChosen() | DrafterAsked():
                return []

    def _on_weights(self) -> list[Action]:
        if self._concluded:
            return self._next()
        if not evaluation_due(self._config, self._step):
            return self._conclude()
        if self._stopping is not None:
            return [self._save()]
        self._evaluating = True
        return [Evaluate(self._step)]

    def _on_group(self, event: GroupScored) -> list[Action]:
        if event.position not in self._outstanding:
            return []  # the run is stopping: this group belongs to a step that will be done again
        self._outstanding.remove(event.position)
        algorithm = self._config.algorithm
        if event.rewards_differ or not algorithm.dynamic_sampling:
            self._kept.append(event.position)
        if self._outstanding:
            return []
        # Replacements wait for the whole round, so that which prompts are asked for does not depend on timing.
        missing = self._config.train.prompts_per_step - len(self._kept)
        if missing and self._round < algorithm.max_sampling_rounds:
            return self._ask_for(missing)
        return [Train(self._step + 1, tuple(sorted(self._kept)))]

    def _on_stop(self, event: StopAsked) -> list[Action]:
        if self._stopping is not None:
            return []
        self._stopping = event.reason
        if self._outstanding or self._evaluating:
            self._outstanding, self._evaluating = set(), False
            return [self._save()]
        return []  # an action is under way, and the fact that it is done leads to Save and Finish

    def _ask_for(self, num_prompts: int) -> list[Action]:
        positions = range(self._position, self._position + num_prompts)
        self._position += num_prompts
        self._outstanding = set(positions)
        self._round += 1
        return [Generate(self._step + 1, position) for position in positions]

    def _conclude(self) -> list[Action]:
        """The step is complete: record it, save it if due, go on."""
        self._concluded = True
        if save_due(self._config, self._step) or self._stopping is not None:
            return [Record(self._step), self._save()]
        return [Record(self._step), *self._next()]

    def _next(self) -> list[Action]:
        if self._stopping is not None:
            return [Finish(self._stopping)]
        if self._step >= self._config.train.steps:
            return [Finish("done")]
        self._kept, self._round = [], 0
        return self._ask_for(self._config.train.prompts_per_step)

    def _save(self) -> Save:
        return Save(self._step, self._position_after_step, self._concluded)


def evaluation_due(config: Config, step: int) -> bool:
    if not config.tasks.eval:
        return False
    if step == 0:
        return config.eval.before_train
    return step == config.train.steps or (config.eval.every > 0 and step % config.eval.every == 0)


def save_due(config: Config, step: int) -> bool:
    # The first checkpoint keeps the warm start.
    return step in (0, config.train.steps) or step % config.run.save_every == 0
