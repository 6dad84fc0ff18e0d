"""The warm start: a supervised stage on worked solutions before RL, resumable at any of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slipstream.config import Config, Evaluation, Warmup
from slipstream.engine.engine import Engine
from slipstream.models.weights import named_weights
from slipstream.observe.console import Console
from slipstream.rng import keyed_random
from slipstream.runtime.evaluation import Interrupted, evaluate_sets
from slipstream.runtime.rollouts import RolloutDesk
from slipstream.tasks.grading import Grader
from slipstream.train.trainer import Trainer
from slipstream.types import Prompt

Pair = tuple[tuple[int, ...], tuple[int, ...]]
MEASURED_PROMPTS = 128
"""Rollouts of one measurement: a share near 0.5 comes with a standard error of 0.044. One that reaches the target is
taken twice, since the first of many noisy ones to do so is too high on average."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a warm start has come. Checkpoints hold it."""

    steps: int = 0
    reward: float = 0.0
    """Mean reward when it was last measured."""
    measured_at: int = 0
    """Steps done by then."""

    def is_measured_now(self, target: float) -> bool:
        """True every 40 steps while no rollout is right, every 5 from half the target on, else every 20."""
        interval = 40 if self.reward <= 0 else 20 if self.reward < target / 2 else 5
        return self.steps - self.measured_at >= interval

    def is_enough(self, warmup: Warmup) -> bool:
        return self.steps >= warmup.steps or (warmup.until_reward is not None and self.reward >= warmup.until_reward)


def warm_up(
    trainer: Trainer,
    warmup: Warmup,
    pairs: Sequence[Pair],
    *,
    seed: int,
    progress: Progress,
    measure: Callable[[int, int], float],
    console: Console,
    should_stop: Callable[[Progress], bool],
) -> tuple[Progress, dict[str, float]]:
    """Trains from `progress` to the end of the stage; returns the progress and the metrics of the last step.

    `measure(step, number)` samples the mean reward of the current weights; it is called if warmup.until_reward is set.
    `should_stop` is asked before each step; True raises Interrupted.
    """
    metrics: dict[str, float] = {}
    with console.phase("warm start", warmup.steps) as advance:
        advance(progress.steps)
        while not progress.is_enough(warmup):
            if should_stop(progress):
                raise Interrupted
            step = progress.steps
            chosen = keyed_random(seed, "warmup", step).choices(range(len(pairs)), k=warmup.sequences_per_step)
            metrics = trainer.supervised_step([pairs[index] for index in chosen], learning_rate(warmup, step))
            progress = replace(progress, steps=step + 1)
            if warmup.until_reward is not None:
                if progress.is_measured_now(warmup.until_reward):
                    reward = measure(progress.steps, 0)
                    if reward >= warmup.until_reward:
                        reward = (reward + measure(progress.steps, 1)) / 2
                    progress = replace(progress, reward=reward, measured_at=progress.steps)
                advance(0, reward=progress.reward)
            advance(1, loss=metrics["warmup/loss"])
    if warmup.until_reward is not None:
        metrics["warmup/reward"] = progress.reward
    return progress, metrics | {"warmup/steps": float(progress.steps)}


class RewardSampler:
    """Measures the mean reward of a model while it warms up, with an engine of its own."""

    def __init__(self, config: Config, engine: Engine, grader: Grader, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config.model_copy(update={"eval": Evaluation(temperature=config.sampling.temperature)})
        self._engine = engine
        self._desk = RolloutDesk(engine, grader, tokenizer, config.seed)

    def measure(
        self,
        model: PreTrainedModel,
        step: int,
        number: int,
        prompts: Sequence[Prompt],
        *,
        stop_token_ids: tuple[int, ...],
        console: Console,
        should_stop: Callable[[], bool],
    ) -> float:
        """Mean reward of one rollout of each of MEASURED_PROMPTS prompts. Interrupted if should_stop says so."""
        self._engine.apply_weights(named_weights(model), step)
        random = keyed_random(self._config.seed, "warmup reward", step, number)
        chosen = random.choices(range(len(prompts)), k=MEASURED_PROMPTS)
        (measured,) = evaluate_sets(
            self._config,
            self._desk,
            {f"warmup/{number}": [prompts[index] for index in chosen]},
            step=step,
            stop_token_ids=stop_token_ids,
            console=console,
            should_stop=should_stop,
        )
        return measured.metrics[f"eval/warmup/{number}/avg@1"]


def learning_rate(warmup: Warmup, step: int) -> float:
    """A tenth of the steps up, the rest down to a tenth of the peak: short stages need both ends."""
    rise = max(1, warmup.steps // 10)
    if step < rise:
        return warmup.lr * (step + 1) / rise
    return warmup.lr * (1.0 - 0.9 * (step - rise) / max(1, warmup.steps - rise))
