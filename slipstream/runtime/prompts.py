"""Which problems a run trains on and is evaluated on, and that they fit its model.

A training prompt is rendered when it is drawn, so that the size of a data set costs neither time nor memory. At the
start all rows are gone through once (`TrainingSet.examined`): each is parsed and checked against the reward, and only
those are tokenized whose text leaves open whether they are short enough, or in an evaluation set.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slipstream.config import Config
from slipstream.models.prompt_bounds import SPARE_TOKENS, PromptBound, PromptTwins, text_bound
from slipstream.models.rendering import render_short_prompt, render_solution, solution_ids, worked_solution
from slipstream.observe.console import Console
from slipstream.runtime.overlap import describe_left_out
from slipstream.tasks.sources import load_problems, open_problems
from slipstream.tasks.tables import Computed, Joined
from slipstream.types import Problem, Prompt

Pair = tuple[tuple[int, ...], tuple[int, ...]]
ROWS_A_TICK = 1000
"""Between two movements of the bar."""
MANY_ROWS = 100_000
"""Take a second or more to check."""


def load_training_problems(config: Config) -> list[Problem]:
    return [
        problem
        for number, task_set in enumerate(config.tasks.train)
        for problem in load_problems(task_set, f"train/{number}")
    ]


def open_training_problems(config: Config, console: Console) -> Joined[Problem]:
    """As `load_training_problems`, but each is made when it is asked for."""
    with console.phase("finding rows", None) as on_rows:
        return Joined(
            [open_problems(task_set, f"train/{number}", on_rows) for number, task_set in enumerate(config.tasks.train)]
        )


def load_eval_problems(config: Config) -> dict[str, list[Problem]]:
    return {name: load_problems(task_set, f"eval/{name}") for name, task_set in config.tasks.eval.items()}


def check_length(config: Config, model: PreTrainedModel) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.max_length > limit:
        raise ValueError(
            f"engine.max_prompt_tokens={config.engine.max_prompt_tokens} + sampling.max_new_tokens="
            f"{config.sampling.max_new_tokens} = {config.max_length} tokens, but {config.model} takes {limit}"
        )


class TrainingSet:
    """The training prompts that no evaluation set has, so that evaluation measures what was learned, not remembered."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        problems: Sequence[Problem],
        eval_sets: Mapping[str, Sequence[Prompt]],
    ) -> None:
        self._config, self._tokenizer, self._problems = config, tokenizer, problems
        evaluated = [prompt for prompts in eval_sets.values() for prompt in prompts]
        self._held_out = {prompt.key for prompt in evaluated}
        self._twins = PromptTwins(tokenizer, (prompt.problem for prompt in evaluated))
        self._bound = PromptBound(tokenizer)
        self._kept: array[int] | None = None
        """Places of the problems that are kept; known once all are examined."""

    def examined(self, console: Console) -> Iterator[Problem]:
        """Every problem once, beside a bar. ValueError names the first that cannot be trained on."""
        kept, total = array("q"), len(self._problems)
        if total >= MANY_ROWS:  # where there is no terminal there is no bar
            console.note(f"checking {total:,} rows")
        with console.phase("checking rows", total) as advance:
            for place, problem in enumerate(self._problems):
                if place and not place % ROWS_A_TICK:
                    advance(ROWS_A_TICK)
                yield problem
                if not self._is_held_out(problem):
                    kept.append(place)
        left_out = describe_left_out(self._config, len(kept), total)
        if left_out is not None:
            console.note(left_out)
        self._kept = kept

    @property
    def prompts(self) -> Computed[Prompt]:
        """In the order of the data, each rendered when it is asked for; ValueError if one is too long after all."""
        assert self._kept is not None, "first all problems are examined"
        kept = self._kept
        return Computed(len(kept), lambda number: self._render(self._problems[kept[number]]))

    @property
    def pairs(self) -> Computed[Pair]:
        """What the warm start learns from: prompts with worked solutions."""
        prompts, limit = self.prompts, self._config.sampling.max_new_tokens
        return Computed(len(prompts), lambda number: render_solution(self._tokenizer, prompts[number], limit))

    def _is_held_out(self, problem: Problem) -> bool:
        may_be_held_out = problem in self._twins
        if may_be_held_out or self._bound(problem) > self._config.engine.max_prompt_tokens:
            prompt = self._render(problem)
            if may_be_held_out and prompt.key in self._held_out:
                return True
        if self._config.warmup is not None:
            limit = self._config.sampling.max_new_tokens
            if text_bound(worked_solution(problem)) + SPARE_TOKENS > limit:
                solution_ids(self._tokenizer, problem, limit)
        return False

    def _render(self, problem: Problem) -> Prompt:
        return render_short_prompt(self._tokenizer, problem, self._config.engine.max_prompt_tokens)
