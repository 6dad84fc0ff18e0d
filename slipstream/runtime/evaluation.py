"""Evaluation of named sets with an engine and a grader: avg@k and pass@k."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    desk: RolloutDesk,
    sets: Mapping[str, Sequence[Prompt]],
    *,
    step: int,
    samples_per_prompt: int,
    sampling: SamplingParams,
    max_fault_share: float,
    console: Console,
    should_stop: Callable[[], bool],
) -> list[EvaluatedSet]:
    """One set after the other; Interrupted if should_stop says so on the way."""
    return [
        _evaluate(desk, name, prompts, step, samples_per_prompt, sampling, max_fault_share, console, should_stop)
        for name, prompts in sets.items()
    ]


def _evaluate(
    desk: RolloutDesk,
    name: str,
    prompts: Sequence[Prompt],
    step: int,
    samples_per_prompt: int,
    sampling: SamplingParams,
    max_fault_share: float,
    console: Console,
    should_stop: Callable[[], bool],
) -> EvaluatedSet:
    for number, prompt in enumerate(prompts):
        desk.ask(f"eval/{name}/{step}/{number}", prompt, samples_per_prompt, sampling)
    groups: dict[str, GradedGroup] = {}
    with console.phase(f"eval {name}", len(prompts) * samples_per_prompt) as advance:

        def on_finished(rollout: Rollout) -> None:
            advance(1, tokens=len(rollout.token_ids))

        while desk.busy:
            if should_stop():
                raise Interrupted
            groups |= {group.name: group for group in desk.advance(on_finished)}
    ordered = tuple(groups[f"eval/{name}/{step}/{number}"] for number in range(len(prompts)))
    check_faults([result for group in ordered for result in group.results], max_fault_share)
    scored = [result for group in ordered for result in group.scored]
    unscored = [result for group in ordered for result in group.unscored]
    return EvaluatedSet(name, evaluation_metrics(name, scored, unscored, samples_per_prompt), ordered)
