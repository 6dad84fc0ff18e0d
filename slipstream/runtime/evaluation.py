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
    """All sets together, so that there is one long tail and not one a set. Interrupted if should_stop says so."""
    samples_per_prompt = config.eval.samples_per_prompt
    sampling = SamplingParams(
        temperature=config.eval.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        stop_token_ids=stop_token_ids,
        stop=config.sampling.stop,
    )
    for name, prompts in sets.items():
        for number, prompt in enumerate(prompts):
            desk.ask(_group_name(name, step, number), prompt, samples_per_prompt, sampling)
    graded: dict[str, GradedGroup] = {}
    num_samples = samples_per_prompt * sum(len(prompts) for prompts in sets.values())
    with console.phase("evaluation", num_samples) as advance:

        def on_finished(rollout: Rollout) -> None:
            advance(1, tokens=len(rollout.token_ids))

        while desk.busy:
            if should_stop():
                raise Interrupted
            graded |= {group.name: group for group in desk.advance(on_finished)}
    check_faults([result for group in graded.values() for result in group.results], config.reward.max_fault_share)
    return [
        _summary(name, [graded[_group_name(name, step, number)] for number in range(len(prompts))], samples_per_prompt)
        for name, prompts in sets.items()
    ]


def _group_name(set_name: str, step: int, number: int) -> str:
    return f"eval/{set_name}/{step}/{number}"


def _summary(name: str, groups: Sequence[GradedGroup], samples_per_prompt: int) -> EvaluatedSet:
    scored = [result for group in groups for result in group.scored]
    unscored = [result for group in groups for result in group.unscored]
    return EvaluatedSet(name, evaluation_metrics(name, scored, unscored, samples_per_prompt), tuple(groups))
