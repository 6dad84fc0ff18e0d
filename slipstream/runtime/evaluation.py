"""Evaluation of named sets with an engine and a grader: avg@k and pass@k."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.config import Config
from slipstream.observe.console import Console
from slipstream.observe.metrics import evaluation_metrics
from slipstream.runtime.rollouts import GradedGroup, RolloutDesk
from slipstream.tasks.grading import check_faults
from slipstream.types import Prompt, Rollout, SamplingParams


class Interrupted(Exception):
    """Somebody asked the run to stop in the middle of an action that can be done again."""


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    name: str
    metrics: dict[str, float]
    groups: tuple[GradedGroup, ...]


class EvaluationRound:
    """All sets together, so that there is one long tail and not one a set."""

    def __init__(
        self, config: Config, sets: Mapping[str, Sequence[Prompt]], *, step: int, stop_token_ids: tuple[int, ...]
    ) -> None:
        self.step = step
        self.samples_per_prompt = config.eval.samples_per_prompt
        self.sampling = SamplingParams(
            temperature=config.eval.temperature,
            max_new_tokens=config.sampling.max_new_tokens,
            stop_token_ids=stop_token_ids,
            stop=config.sampling.stop,
        )
        self._max_fault_share = config.reward.max_fault_share
        self._names = {
            name: [f"eval/{name}/{step}/{number}" for number in range(len(prompts))] for name, prompts in sets.items()
        }
        self.prompts = {
            group: prompt
            for name, prompts in sets.items()
            for group, prompt in zip(self._names[name], prompts, strict=True)
        }
        """By the name of the group to ask for."""
        self._graded: dict[str, GradedGroup] = {}

    @property
    def num_samples(self) -> int:
        return self.samples_per_prompt * len(self.prompts)

    @property
    def is_done(self) -> bool:
        return len(self._graded) == len(self.prompts)

    def take(self, group: GradedGroup) -> None:
        self._graded[group.name] = group

    def results(self) -> list[EvaluatedSet]:
        results = [result for group in self._graded.values() for result in group.results]
        check_faults(results, self._max_fault_share)
        return [
            _summary(name, [self._graded[group] for group in groups], self.samples_per_prompt)
            for name, groups in self._names.items()
        ]


def evaluate_sets(
    config: Config,
    desk: RolloutDesk,
    sets: Mapping[str, Sequence[Prompt]],
    *,
    step: int,
    stop_token_ids: tuple[int, ...],
    console: Console,
    should_stop: Callable[[], bool],
) -> list[EvaluatedSet]:
    """Interrupted if should_stop says so."""
    evaluation = EvaluationRound(config, sets, step=step, stop_token_ids=stop_token_ids)
    for name, prompt in evaluation.prompts.items():
        desk.ask(name, prompt, evaluation.samples_per_prompt, evaluation.sampling)
    with console.phase("evaluation", evaluation.num_samples) as advance:

        def on_finished(rollout: Rollout) -> None:
            advance(1, tokens=len(rollout.token_ids))

        while desk.busy:
            if should_stop():
                raise Interrupted
            for group in desk.advance(on_finished):
                evaluation.take(group)
    return evaluation.results()


def _summary(name: str, groups: Sequence[GradedGroup], samples_per_prompt: int) -> EvaluatedSet:
    scored = [result for group in groups for result in group.scored]
    unscored = [result for group in groups for result in group.unscored]
    return EvaluatedSet(name, evaluation_metrics(name, scored, unscored, samples_per_prompt), tuple(groups))
