"""The warm start: a supervised stage on worked solutions before RL, resumable at any of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.config import Warmup
from slipstream.observe.console import Console
from slipstream.rng import keyed_random
from slipstream.runtime.evaluation import Interrupted
from slipstream.train.trainer import Trainer

Pair = tuple[tuple[int, ...], tuple[int, ...]]


def warm_up(
    trainer: Trainer,
    warmup: Warmup,
    pairs: Sequence[Pair],
    *,
    seed: int,
    done: int,
    console: Console,
    should_stop: Callable[[int], bool],
) -> dict[str, float]:
    """Steps `done` to the end; the last step's metrics. `should_stop(steps done)` raises the matter of a signal."""
    metrics: dict[str, float] = {}
    with console.phase("warm start", warmup.steps) as advance:
        advance(done)
        for step in range(done, warmup.steps):
            if should_stop(step):
                raise Interrupted
            chosen = keyed_random(seed, "warmup", step).choices(range(len(pairs)), k=warmup.sequences_per_step)
            metrics = trainer.supervised_step([pairs[index] for index in chosen], learning_rate(warmup, step))
            advance(1, loss=metrics["warmup/loss"])
    return metrics


def learning_rate(warmup: Warmup, step: int) -> float:
    """A tenth of the steps up, the rest down to a tenth of the peak: short stages need both ends."""
    rise = max(1, warmup.steps // 10)
    if step < rise:
        return warmup.lr * (step + 1) / rise
    return warmup.lr * (1.0 - 0.9 * (step - rise) / max(1, warmup.steps - rise))
