"""Advantages, token weights and learning rates against numbers computed by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from slipstream.config import Training
from slipstream.train.algorithms import ALGORITHMS, Aggregation, learning_rate, token_weight, update_total

# Group one: mean 0.5, population deviation 0.5. Group two: mean 2, deviation sqrt(2/3). The others: no signal.
GROUPS = [[1.0, 0.0, 0.0, 1.0], [1.0, 2.0, 3.0], [0.1, 0.1, 0.1], [5.0]]
A, B = 0.5 / (0.5 + 1e-6), 1 / (math.sqrt(2 / 3) + 1e-6)
IN_GROUP = [[A, -A, -A, A], [-B, 0.0, B], [0.0, 0.0, 0.0], [0.0]]


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_standardised_in_group(name: str) -> None:
    assert_groups(ALGORITHMS[name].advantages(GROUPS), IN_GROUP)


def test_dr_grpo_is_centred() -> None:
    expected = [[0.5, -0.5, -0.5, 0.5], [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0]]
    assert_groups(ALGORITHMS["dr_grpo"].advantages(GROUPS), expected)


def test_rloo_leaves_one_out() -> None:
    # 1 - (0 + 0 + 1) / 3 = 2/3;  1 - (2 + 3) / 2 = -1.5
    expected = [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [-1.5, 0.0, 1.5], [0.0, 0.0, 0.0], [0.0]]
    assert_groups(ALGORITHMS["rloo"].advantages(GROUPS), expected)


def test_reinforce_plus_plus_standardises_the_batch_and_groups_of_one() -> None:
    # 1, 0, 5: mean 2, squares 1, 4, 9, deviation sqrt(14/3)
    deviation = math.sqrt(14 / 3) + 1e-6
    expected = [[-1 / deviation, -2 / deviation], [3 / deviation]]
    assert_groups(ALGORITHMS["reinforce++"].advantages([[1.0, 0.0], [5.0]]), expected)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_rewards_give_exactly_zero_and_empty_is_empty(name: str) -> None:
    assert ALGORITHMS[name].advantages([[0.1] * 7, [0.1]]) == [[0.0] * 7, [0.0]]
    assert ALGORITHMS[name].advantages([]) == []


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", [1 / 8] * 3), ("sequence_mean", [1 / 3, 1 / 9, 1 / 12]), ("constant", [1 / 30] * 3)],
)
def test_token_weights(aggregation: Aggregation, expected: list[float]) -> None:
    lengths = [1, 3, 4]
    total = update_total(lengths, aggregation)
    assert [token_weight(length, aggregation, 10) / total for length in lengths] == pytest.approx(expected)


def test_learning_rates() -> None:
    def rates(schedule: str, warmup: int) -> list[float]:
        training = Training(steps=6, lr=1.0, lr_schedule=schedule, lr_warmup_steps=warmup)
        return [learning_rate(training, step) for step in range(7)]

    assert rates("constant", 2) == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates("linear", 2) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    assert rates("cosine", 0)[3] == pytest.approx(0.5)
    assert rates("cosine", 0)[6] == pytest.approx(0.0)
    assert rates("linear", 9) == pytest.approx([(step + 1) / 9 for step in range(7)])


def test_pure() -> None:
    code = "import sys, slipstream.train.algorithms, slipstream.train.packing; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def assert_groups(got: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(group) for group in got] == [len(group) for group in expected]
    for group, wanted in zip(got, expected, strict=True):
        assert group == pytest.approx(wanted)
