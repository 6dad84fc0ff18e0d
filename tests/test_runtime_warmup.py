"""The warm start ends at the reward that it is meant to end at, and goes on after a stop as if there had been none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.config import Warmup, load_config
from slipstream.observe.console import Console
from slipstream.runtime.evaluation import Interrupted
from slipstream.runtime.local import run_training
from slipstream.runtime.warmup import Progress, warm_up

PAIRS = [((1, 2), (3, 4)), ((5,), (6,))]
REWARDS = Path(__file__).parent / "data" / "reward_functions.py"


class SupervisedSteps:
    """A trainer that only counts, and rewards that grow with the steps it has taken."""

    def __init__(self) -> None:
        self.learning_rates: list[float] = []
        self.measured: list[tuple[int, int]] = []

    def supervised_step(self, pairs: list[Any], lr: float) -> dict[str, float]:
        self.learning_rates.append(lr)
        return {"warmup/loss": 1.0 / len(self.learning_rates)}

    def reward(self, step: int, number: int) -> float:
        """Nothing is right before step 50; the first measurement of a step says 0.1 more than the second."""
        self.measured.append((step, number))
        return max(0.0, (step - 50) / 100) + (0.05 if number == 0 else -0.05) * (step > 50)


def warm(
    trainer: SupervisedSteps, warmup: Warmup, progress: Progress | None = None, stop_at: int | None = None
) -> tuple[Progress, dict[str, float]]:
    reached = progress or Progress()

    def should_stop(now: Progress) -> bool:
        nonlocal reached
        reached = now
        return now.steps == stop_at

    try:
        return warm_up(
            trainer,  # type: ignore[arg-type]
            warmup,
            PAIRS,
            seed=3,
            progress=reached,
            measure=trainer.reward,
            console=Console(1, quiet=True),
            should_stop=should_stop,
        )
    except Interrupted:
        return reached, {}


def test_it_ends_at_its_reward_and_takes_a_measurement_that_reaches_it_twice() -> None:
    trainer = SupervisedSteps()
    progress, metrics = warm(trainer, Warmup(steps=300, until_reward=0.39))
    # In step 85 the first measurement says 0.40 and the second 0.30; in step 90 their mean is 0.40.
    assert (progress.steps, metrics["warmup/reward"], metrics["warmup/steps"]) == (90, pytest.approx(0.4), 90.0)
    assert [step for step, _ in trainer.measured] == [40, 80, 85, 85, 90, 90]
    assert len(trainer.learning_rates) == 90


def test_without_a_target_it_takes_its_steps_and_measures_nothing() -> None:
    trainer = SupervisedSteps()
    progress, metrics = warm(trainer, Warmup(steps=60))
    assert progress.steps == 60 and trainer.measured == [] and "warmup/reward" not in metrics


def test_a_target_out_of_reach_ends_after_the_steps() -> None:
    progress, metrics = warm(SupervisedSteps(), Warmup(steps=70, until_reward=0.9))
    assert progress.steps == 70 and metrics["warmup/reward"] < 0.9


@pytest.mark.parametrize("stop_at", [0, 1, 40, 41, 84, 85, 89])
def test_after_a_stop_it_goes_on_as_if_there_had_been_none(stop_at: int) -> None:
    warmup = Warmup(steps=300, until_reward=0.39)
    unbroken, broken = SupervisedSteps(), SupervisedSteps()
    whole = warm(unbroken, warmup)
    part, _ = warm(broken, warmup, stop_at=stop_at)
    assert part.steps == stop_at
    assert warm(broken, warmup, part) == whole
    assert (broken.learning_rates, broken.measured) == (unbroken.learning_rates, unbroken.measured)


@pytest.mark.parametrize("mode", ["colocated", "sync"])
def test_a_run_begins_rl_where_its_rollouts_have_the_reward(tmp_path: Path, mode: str) -> None:
    pairs = {"wording": "terse", "min_length": 2, "max_length": 2, "max_value": 9}
    recipe = {
        "model": "tiny",
        "mode": mode,
        "run": {"dir": str(tmp_path / "run")},
        "tasks": {"train": [{"source": "sorting", "size": 40, "seed": 1, "params": pairs}]},
        "reward": {"functions": [{"function": f"{REWARDS}:always_half"}]},
        "warmup": {"steps": 50, "sequences_per_step": 2, "until_reward": 0.5},
        "sampling": {"max_new_tokens": 20},
        "engine": {"max_sequences": 128, "max_prompt_tokens": 32},
        "train": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert run_training(load_config(tmp_path / "recipe.yaml"), quiet=True).reason == "done"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if "warmup/steps" in row)
    assert (first["warmup/steps"], first["warmup/reward"]) == (40.0, 0.5)
    assert (tmp_path / "run" / "checkpoints" / "step_1").is_dir()
