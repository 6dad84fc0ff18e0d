"""Metrics against numbers computed by hand."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest

from slipstream.observe.metrics import evaluation_metrics, percentile, rollout_metrics
from slipstream.types import Request, Rollout, SamplingParams, Scored, Unscored


def rollout(group: str, sample: int, length: int, finish: str = "stop") -> Rollout:
    request = Request(f"{group}/{sample}", group, (1, 2), 7, SamplingParams())
    return Rollout(request, (5,) * length, (-0.5,) * length, finish, 1, 1)  # type: ignore[arg-type]


def scored(group: str, sample: int, reward: float, length: int = 4, finish: str = "stop", **parts: float) -> Scored:
    return Scored(rollout(group, sample, length, finish), "text", reward, parts)


def unscored(group: str, sample: int, length: int = 4) -> Unscored:
    return Unscored(rollout(group, sample, length), "text", "raised", "Traceback")


def test_rollout_metrics_by_hand() -> None:
    good = [
        scored("1/0", 0, 1.0, 10, task=1.0, style=0.0),
        scored("1/0", 1, 0.0, 20, "length", task=0.0, style=1.0),
        scored("1/1", 0, 0.5, 30, task=0.5, style=0.0),
        scored("1/1", 1, 0.5, 40, task=0.5, style=0.0),
    ]
    metrics = rollout_metrics(good, [unscored("1/0", 2, 100)], samples_per_prompt=3)
    assert metrics == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/std": math.sqrt(0.125),
            "reward/max": 1.0,
            "reward/min": 0.0,
            "reward/task/mean": 0.5,
            "reward/style/mean": 0.25,
            "reward/zero_spread_groups": 0.5,
            "reward/stderr": 0.0,  # both prompts have a mean of 0.5
            "reward/unscored": 1.0,
            "response_length/mean": 40.0,
            "response_length/median": 30.0,
            "response_length/p99": 97.6,  # position 4 * 0.99 = 3.96 of [10, 20, 30, 40, 100]
            "response_length/max": 100.0,
            "response_length/min": 10.0,
            "response_length/clip_ratio": 0.2,
            "rollout/tokens": 200.0,
        }
    )


def test_an_unscored_sample_is_not_a_zero() -> None:
    with_fault = rollout_metrics([scored("g", 0, 1.0)], [unscored("g", 1)], 2)
    assert with_fault["reward/mean"] == 1.0 and with_fault["reward/min"] == 1.0
    only_faults = rollout_metrics([], [unscored("g", 0)], 2)
    assert "reward/mean" not in only_faults and "reward/zero_spread_groups" not in only_faults
    assert only_faults["reward/unscored"] == 1.0 and only_faults["response_length/mean"] == 4.0


def test_of_nothing_only_counts_exist() -> None:
    assert rollout_metrics([], [], 8) == {"reward/unscored": 0.0, "rollout/tokens": 0.0}
    assert evaluation_metrics("a", [], [], 4) == {"eval/a/unscored": 0.0}


def test_zero_spread_is_about_equality_not_zero() -> None:
    rewards = {"a": (0.0, 0.0), "b": (0.5, 0.5), "c": (1.0, 1.0), "d": (0.0, 1.0)}
    items = [scored(group, i, value) for group, values in rewards.items() for i, value in enumerate(values)]
    assert rollout_metrics(items, [], 2)["reward/zero_spread_groups"] == 0.75


def test_one_sample_a_prompt_has_no_spread_to_speak_of() -> None:
    assert "reward/zero_spread_groups" not in rollout_metrics([scored("g", 0, 1.0)], [], 1)


def test_order_does_not_show() -> None:
    items = [scored(f"g{i % 3}", i, 0.1 * i, 3 + i, a=0.1 * i) for i in range(20)]
    mixed = random.Random(1).sample(items, len(items))
    assert rollout_metrics(items, [], 7) == rollout_metrics(mixed, [], 7)
    assert evaluation_metrics("s", items, [], 7) == evaluation_metrics("s", mixed, [], 7)


def test_evaluation_by_hand() -> None:
    good = [scored("p0", 0, 1.0, 10), scored("p0", 1, 0.0, 20), scored("p1", 0, 0.5, 30), scored("p2", 0, 0.25, 40)]
    metrics = evaluation_metrics("held/out", good, [unscored("p1", 1, 50), unscored("p3", 0, 60)], 2)
    assert metrics == pytest.approx(
        {
            "eval/held/out/avg@2": (0.5 + 0.5 + 0.25) / 3,  # p3 has no scored sample, so it is no prompt here
            "eval/held/out/pass@2": 1 / 3,
            "eval/held/out/stderr": math.sqrt((1 / 144 + 1 / 144 + 4 / 144) / 2 / 3),
            "eval/held/out/response_length": 35.0,
            "eval/held/out/unscored": 2.0,
        }
    )


def test_weights_that_round_below_one_still_pass() -> None:
    assert 0.7 + 0.2 + 0.1 < 1.0
    assert evaluation_metrics("s", [scored("p", 0, 0.7 + 0.2 + 0.1)], [], 1)["eval/s/pass@1"] == 1.0
    assert evaluation_metrics("s", [scored("p", 0, 0.999)], [], 1)["eval/s/pass@1"] == 0.0


def test_weights_that_sum_below_one_never_pass() -> None:
    assert evaluation_metrics("s", [scored("p", 0, 0.5 * 1.0)], [], 1)["eval/s/pass@1"] == 0.0


def test_percentile_rule() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([7], 99) == 7
    assert percentile([0, 10], 90) == pytest.approx(9)


def test_observe_needs_no_torch() -> None:
    modules = ("metrics", "store", "loggers", "console", "figures", "page", "report")
    code = f"import sys; {'; '.join(f'import slipstream.observe.{name}' for name in modules)}; "
    code += "bad = {'torch', 'plotly', 'wandb', 'tensorboard'} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
