"""Groups of requests in, graded groups out; and what the trainer and the store get of these.

Grading runs in other processes while the engine goes on with the groups that are not finished yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from slipstream.config import Algorithm
from slipstream.engine.engine import Engine
from slipstream.observe.metrics import rollout_metrics
from slipstream.observe.store import RolloutKind, RunStore
from slipstream.rng import derive_seed
from slipstream.schedule.events import GroupScored
from slipstream.tasks.grading import Grader
from slipstream.train.algorithms import ALGORITHMS
from slipstream.types import Prompt, Request, Rollout, SamplingParams, Scored, TrainSample, Unscored

MATCHED_TOKENS = 256
"""Of each rollout that is sampled again alone: enough to see how often a token depends on the batch."""


@dataclass(frozen=True, slots=True)
class GradedGroup:
    name: str
    prompt: Prompt
    results: tuple[Scored | Unscored, ...]
    """In the order of the samples."""

    @property
    def scored(self) -> list[Scored]:
        return [result for result in self.results if isinstance(result, Scored)]

    @property
    def unscored(self) -> list[Unscored]:
        return [result for result in self.results if isinstance(result, Unscored)]


@dataclass(slots=True)
class _OpenGroup:
    prompt: Prompt
    requests: list[Request]
    rollouts: dict[str, Rollout] = field(default_factory=dict)


class OpenGroups:
    """Groups between their requests and their grades."""

    def __init__(
        self,
        grader: Grader,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        on_graded: Callable[[], None] | None = None,
    ) -> None:
        """`on_graded`: is called, from another thread, when there may be grades."""
        self._grader, self._tokenizer, self._seed = grader, tokenizer, seed
        if on_graded is not None:
            grader.on_answer = on_graded
        self._open: dict[str, _OpenGroup] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def num_in_grading(self) -> int:
        return self._grader.num_pending

    def open(self, name: str, prompt: Prompt, num_samples: int, sampling: SamplingParams) -> list[Request]:
        """What to sample. The name is unique in the run; seeds depend on it, the prompt and the sample."""
        requests = [
            Request(
                uid=f"{name}/{sample}",
                group=name,
                prompt_ids=prompt.token_ids,
                seed=derive_seed(self._seed, "rollout", name, prompt.key, sample),
                sampling=sampling,
            )
            for sample in range(num_samples)
        ]
        self._open[name] = _OpenGroup(prompt, requests)
        return requests

    def collect(self, rollout: Rollout) -> None:
        """One that has ended; the last of its group sends that to be graded."""
        name = rollout.request.group
        group = self._open[name]
        group.rollouts[rollout.request.uid] = rollout
        if len(group.rollouts) == len(group.requests):
            rollouts = [group.rollouts[request.uid] for request in group.requests]
            texts = self._tokenizer.batch_decode(
                [list(r.token_ids) for r in rollouts], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            problem = group.prompt.problem
            items = [(problem, r, text) for r, text in zip(rollouts, texts, strict=True)]
            self._grader.submit(name, items, _num_trained(name))

    def close(self, name: str, results: Sequence[Scored]) -> GradedGroup:
        """A group of which all grades are known from elsewhere."""
        return GradedGroup(name, self._open.pop(name).prompt, tuple(results))

    def collected(self) -> list[Rollout]:
        """Ended, of groups that are not graded."""
        return [rollout for group in self._open.values() for rollout in group.rollouts.values()]

    def graded(self, wait_s: float) -> list[GradedGroup]:
        """Those whose grades are there; waits for the first."""
        finished: Sequence[tuple[str, list[Scored | Unscored]]] = self._grader.poll(wait_s)
        return [GradedGroup(name, self._open.pop(name).prompt, tuple(results)) for name, results in finished]


def _num_trained(name: str) -> int:
    """Steps of training before the one that a group is for ("<step>/<position>"), or before its evaluation
    ("eval/<set>/<step>/<number>")."""
    step = int(name.split("/")[-2])
    return step if name.startswith("eval/") else step - 1


class RolloutDesk:
    def __init__(self, engine: Engine, grader: Grader, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._engine = engine
        self._groups = OpenGroups(grader, tokenizer, seed)
        self.engine_s = 0.0
        """Time in the engine."""
        self.waiting_s = 0.0
        """Time waiting for grades with the engine idle."""

    @property
    def busy(self) -> bool:
        return bool(self._groups)

    def ask(self, name: str, prompt: Prompt, num_samples: int, sampling: SamplingParams) -> None:
        """Sample one group."""
        self._engine.submit(self._groups.open(name, prompt, num_samples, sampling))

    def token_match(self, rollouts: Sequence[Rollout]) -> float:
        """The share of tokens that come out the same when each rollout is sampled again, alone; with an idle engine."""
        assert not self._engine.has_work, "others would be in the batch"
        num_same = num_tokens = 0
        for rollout in rollouts:
            sampling = replace(rollout.request.sampling, max_new_tokens=min(MATCHED_TOKENS, len(rollout.token_ids)))
            request = replace(rollout.request, uid=f"{rollout.request.uid}/alone", sampling=sampling)
            self._engine.submit([request])
            again: list[Rollout] = []
            while self._engine.has_work:
                again += self._engine.step()
            num_same += sum(a == b for a, b in zip(rollout.token_ids, again[0].token_ids, strict=False))
            num_tokens += sampling.max_new_tokens
        return num_same / num_tokens

    def advance(self, on_finished: Callable[[Rollout], None]) -> list[GradedGroup]:
        """One engine step (or, with the engine idle, a short wait for grades); the groups that are graded now."""
        started = time.perf_counter()
        if self._engine.has_work:
            for rollout in self._engine.step():
                on_finished(rollout)
                self._groups.collect(rollout)
            self.engine_s += time.perf_counter() - started
            return self._groups.graded(wait_s=0.0)
        graded = self._groups.graded(wait_s=0.2)
        self.waiting_s += time.perf_counter() - started
        return graded

    def take_times(self) -> tuple[float, float]:
        """(engine seconds, waiting seconds) since the last call."""
        times = self.engine_s, self.waiting_s
        self.engine_s = self.waiting_s = 0.0
        return times


def scored_fact(group: GradedGroup) -> GroupScored:
    """Of a group of training, which is named by its step and position."""
    step, position = (int(part) for part in group.name.split("/"))
    rewards = {result.reward for result in group.scored}
    return GroupScored(step, position, len(group.scored), len(group.unscored), len(rewards) > 1)


def metrics_of(groups: Sequence[GradedGroup], samples_per_prompt: int) -> dict[str, float]:
    """Of the rollouts of a step."""
    scored = [result for group in groups for result in group.scored]
    return rollout_metrics(scored, [result for group in groups for result in group.unscored], samples_per_prompt)


def train_samples(groups: Sequence[GradedGroup], algorithm: Algorithm) -> list[TrainSample]:
    """What the trainer is given of these groups."""
    scored = [group.scored for group in groups]
    rewards = [[result.reward for result in results] for results in scored]
    advantages = ALGORITHMS[algorithm.name].advantages(rewards)
    return [
        TrainSample(
            uid=result.rollout.request.uid,
            prompt_ids=result.rollout.request.prompt_ids,
            response_ids=result.rollout.token_ids,
            behaviour_logprobs=result.rollout.logprobs,
            advantage=advantage,
            log_kept=result.rollout.log_kept,
        )
        for results, group_advantages in zip(scored, advantages, strict=True)
        for result, advantage in zip(results, group_advantages, strict=True)
    ]


def store_groups(store: RunStore, step: int, kind: RolloutKind, set_name: str, groups: Sequence[GradedGroup]) -> None:
    asked = {
        group.name: (group.prompt.key, "\n".join(message["content"] for message in group.prompt.problem.messages))
        for group in groups
    }
    results = [result for group in groups for result in group.results]
    store.add_rollouts(step, kind, set_name, asked, results)
