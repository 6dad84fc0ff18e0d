"""What to do next in a synchronous run. A pure state machine: `on_event(event, now_s) -> [Action]`.

One step: generate groups -> (dynamic sampling: replace groups without a signal, round by round) -> train -> push
weights -> evaluate if due -> record -> save if due -> next step.

Invariants, asserted by `tests/test_schedule.py`: a step trains on groups in the order of their prompts, whatever order
they were scored in; prompts are consumed in order, none twice; actions depend on the events alone, never on the time;
after StopAsked the last complete step is saved exactly once, and nothing else begins.
"""

from __future__ import annotations

from slipstream.config import Config
from slipstream.schedule.events import (
    Action,
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
    def __init__(self, config: Config, *, position: int = 0) -> None:
        """`position`: the first prompt of the order that no finished step has used."""
        self._config = config
        self._position = position
        self._saved_position = position
        self._step = 0
        self._saved_step = -1
        self._round = 0
        self._outstanding: set[int] = set()
        self._kept: list[int] = []
        self._stopping: str | None = None

    def on_event(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case RunBegan():
                self._step = event.step
                if event.resumed:
                    self._saved_step = event.step
                    return [PushWeights(event.step)]
                return [PushWeights(event.step)]
            case GroupScored():
                return self._on_group(event)
            case StepTrained():
                self._step = event.step
                self._saved_position = self._position
                return [PushWeights(event.step)]
            case WeightsLive():
                if self._saved_step == event.step:
                    return self._next()  # resumed: this step was evaluated and saved before the run ended
                if self._evaluation_due():
                    return [Evaluate(event.step)]
                return self._conclude()
            case Evaluated():
                return self._conclude()
            case Saved():
                self._saved_step = event.step
                return self._next()
            case StopAsked():
                return self._on_stop(event)

    def _begin_step(self) -> list[Action]:
        self._kept, self._round = [], 0
        return self._ask_for(self._config.train.prompts_per_step)

    def _ask_for(self, num_prompts: int) -> list[Action]:
        positions = range(self._position, self._position + num_prompts)
        self._position += num_prompts
        self._outstanding = set(positions)
        self._round += 1
        return [Generate(self._step + 1, position) for position in positions]

    def _on_group(self, event: GroupScored) -> list[Action]:
        if self._stopping is not None:
            return []
        self._outstanding.discard(event.position)
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

    def _conclude(self) -> list[Action]:
        """The step is complete: record it, and save it if due."""
        record = Record(self._step)
        if self._save_due() or self._stopping is not None:
            return [record, Save(self._step, self._saved_position)]
        return [record, *self._next()]

    def _next(self) -> list[Action]:
        if self._stopping is not None:
            return [Finish(self._stopping)]
        if self._step >= self._config.train.steps:
            return [Finish("done")]
        return self._begin_step()

    def _on_stop(self, event: StopAsked) -> list[Action]:
        if self._stopping is not None:
            return []
        self._stopping = event.reason
        if not self._outstanding:
            return []  # between two actions: the answer to the one under way leads to Save and Finish
        self._outstanding = set()
        if self._saved_step == self._step:
            return [Finish(event.reason)]
        return [Save(self._step, self._saved_position)]

    def _evaluation_due(self) -> bool:
        evaluation, step = self._config.eval, self._step
        if not self._config.tasks.eval:
            return False
        if step == 0:
            return evaluation.before_train
        return step == self._config.train.steps or (evaluation.every > 0 and step % evaluation.every == 0)

    def _save_due(self) -> bool:
        run, step = self._config.run, self._step
        return step == 0 or step == self._config.train.steps or step % run.save_every == 0
