"""Speeds, the worker that jumps, and who samples what: against token by token and against every possible plan."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.schedule.dispatch import (
    DISPATCHES,
    Plan,
    WorkerSpec,
    by_deadline,
    earliest,
    round_robin,
    skewness_split,
)
from slipstream.schedule.speeds import SpeedCurve, curve_of_bench
from slipstream.simulate.worker import SimulatedWorker, makespan_s

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
FLAT = SpeedCurve(((1, 1.0),))
SEEN = SpeedCurve(((1, 0.0084), (8, 0.0091), (32, 0.0103), (128, 0.0153), (512, 0.0369)))
"""Of a 7B model on an H800, as read off a published plot."""

curves = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4).map(
    lambda rises: SpeedCurve(tuple((1 << place, 1.0 + sum(rises[: place + 1])) for place in range(len(rises))))
)


def specs(num: int, curve: SpeedCurve = SEEN, slots: int = 64) -> list[WorkerSpec]:
    return [WorkerSpec(f"w{number}", curve, slots) for number in range(num)]


def long_tail(num: int, seed: int = 0) -> dict[str, float]:
    dice = random.Random(seed)
    return {f"r{number}": float(min(20_000, 1 + int(dice.lognormvariate(7.5, 1.1)))) for number in range(num)}


def end_s(plan: Plan, lengths: dict[str, float], workers: list[WorkerSpec]) -> float:
    return max(makespan_s(plan, lengths, workers).values())


# Speeds.


def test_a_curve_is_straight_between_points_and_goes_on_beyond() -> None:
    curve = SpeedCurve(((2, 1.0), (4, 2.0), (8, 2.0)), tokens_a_step=((1, 3.0), (4, 1.0)))
    assert [curve.token_s(batch) for batch in (4, 5, 8, 20)] == [2.0, 2.0, 2.0, 2.0]
    assert curve.token_s(1) == 1.0 / 3 and curve.token_s(3) == pytest.approx(1.5 / (3 - 4 / 3))
    assert SpeedCurve(((1, 1.0), (2, 1.5))).token_s(10) == pytest.approx(5.5)
    assert SEEN.extra_s(0) == SEEN.token_s(1) and SEEN.extra_s(8) == pytest.approx(0.0012 / 24)


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((1, 0.0),), ((1, 2.0), (2, 1.0)), ((2, 1.0), (1, 2.0))])
def test_a_curve_that_cannot_be_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError):
        SpeedCurve(points)


def test_a_curve_from_a_benchmark() -> None:
    record = json.loads((RESULTS / "engine-h200.json").read_text())
    curve = curve_of_bench(record, "qwen2.5-7b")
    assert [batch for batch, _ in curve.points] == [1, 4, 16, 64, 256] and 0.003 < curve.token_s(1) < 0.006
    with pytest.raises(ValueError, match="no shape 'gpt', only qwen"):
        curve_of_bench(record, "gpt")
    with pytest.raises(ValueError, match="bench engine"):
        curve_of_bench({"rows": [{"batch": 1}]}, "gpt")


# The worker that jumps.


def ends_token_by_token(spec: WorkerSpec, jobs: list[tuple[str, int]]) -> dict[str, float]:
    """The plain twin: every step one token for each of the running."""
    waiting, running, now_s = list(jobs), dict[str, int](), 0.0
    ends = {}
    while waiting or running:
        while waiting and len(running) < spec.slots:
            uid, num_tokens = waiting.pop(0)
            running[uid] = num_tokens
        now_s += spec.curve.token_s(len(running))
        for uid in list(running):
            running[uid] -= 1
            if not running[uid]:
                ends[uid] = now_s
                del running[uid]
    return ends


@settings(max_examples=150)
@given(curves, st.integers(1, 4), st.lists(st.integers(1, 12), min_size=1, max_size=12), st.floats(0.1, 9.0))
def test_a_worker_ends_when_one_that_counts_tokens_does(
    curve: SpeedCurve, slots: int, lengths: list[int], look_every_s: float
) -> None:
    spec = WorkerSpec("w", curve, slots)
    jobs = [(f"r{number}", length) for number, length in enumerate(lengths)]
    worker = SimulatedWorker(spec)
    for uid, num_tokens in jobs:
        worker.submit(uid, num_tokens)
    ends: dict[str, float] = {}
    now_s = 0.0
    while worker.num_running:
        now_s += look_every_s
        ends |= {uid: when for when, uid in worker.advance(now_s)}
    assert ends == pytest.approx(ends_token_by_token(spec, jobs))
    assert worker.busy_slot_s >= sum(lengths) * curve.token_s(1) * 0.999


def test_who_is_taken_out_leaves_the_rest_as_they_were() -> None:
    worker = SimulatedWorker(WorkerSpec("w", FLAT, 2))
    for uid, num_tokens in (("a", 10), ("b", 4), ("c", 3)):
        worker.submit(uid, num_tokens)
    assert worker.advance(2.0) == [] and worker.withdraw("a") == 8
    assert worker.num_running == 2 and worker.advance(6.0) == [(4.0, "b"), (5.0, "c")]
    worker.submit("d", 1)
    worker.submit("e", 1)
    worker.submit("f", 7)
    assert worker.withdraw("f") == 7
    with pytest.raises(KeyError):
        worker.withdraw("a")
    assert [uid for _, uid in worker.advance(99.0)] == ["d", "e"] and worker.next_end_s() is None


# Who samples what.


@pytest.mark.parametrize("name", DISPATCHES)
@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 60), st.integers(0, 9))
def test_every_rollout_goes_to_one_worker(name: str, num_workers: int, slots: int, num: int, seed: int) -> None:
    lengths = long_tail(num, seed)
    plan = DISPATCHES[name](lengths, specs(num_workers, slots=slots))
    assert sorted(uid for uids in plan.values() for uid in uids) == sorted(lengths)
    assert set(plan) == {f"w{number}" for number in range(num_workers)}


@settings(max_examples=80)
@given(st.lists(curves, min_size=1, max_size=3), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_the_plan_is_within_a_third_of_the_best_possible(kinds: list[SpeedCurve], sizes: list[int]) -> None:
    workers = [WorkerSpec(f"w{number}", curve, 8) for number, curve in enumerate(kinds)]
    lengths = {f"r{number}": float(size) for number, size in enumerate(sizes)}
    best = min(
        end_s(
            {w.name: [uid for uid, at in zip(lengths, places, strict=True) if at == w.name] for w in workers},
            lengths,
            workers,
        )
        for places in product([worker.name for worker in workers], repeat=len(lengths))
    )
    assert end_s(by_deadline(lengths, workers), lengths, workers) <= 4 / 3 * best + 1e-9


def test_what_it_reckons_is_what_happens_while_slots_last() -> None:
    lengths = long_tail(40)
    (worker,) = specs(1)
    ordered = sorted(lengths.values(), reverse=True)
    reckoned = sum(length * SEEN.extra_s(number) for number, length in enumerate(ordered))
    assert end_s(by_deadline(lengths, [worker]), lengths, [worker]) == pytest.approx(reckoned)


@pytest.mark.parametrize("seed", range(4))
def test_known_lengths_end_a_long_tail_sooner(seed: int) -> None:
    lengths, workers = long_tail(1024, seed), specs(16, slots=128)
    ends = {name: end_s(dispatch(lengths, workers), lengths, workers) for name, dispatch in DISPATCHES.items()}
    assert ends["deadline"] < ends["skewness split"] < 1.02 * ends["round robin"]
    assert ends["deadline"] < 0.93 * ends["round robin"]


def test_a_faster_worker_gets_more_and_a_slow_one_only_what_it_can_end() -> None:
    fast = SpeedCurve(tuple((batch, seconds / 3) for batch, seconds in SEEN.points))
    workers = [WorkerSpec("slow", SEEN, 256), WorkerSpec("fast", fast, 256)]
    few, many = (by_deadline(dict.fromkeys(map(str, range(num)), 1000.0), workers) for num in (200, 1500))
    assert not few["slow"], "alone it would take longer than the fast one with all"
    assert len(many["fast"]) > 2 * len(many["slow"]) > 0


@settings(max_examples=100)
@given(st.lists(curves, min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 60), st.integers(0, 99))
def test_nobody_ends_after_the_deadline_that_was_found(
    kinds: list[SpeedCurve], slots: int, num: int, seed: int
) -> None:
    workers = [WorkerSpec(f"w{number}", curve, slots) for number, curve in enumerate(kinds)]
    lengths = long_tail(num, seed)
    plan, deadline_s = earliest(lengths, workers)
    assert end_s(plan, lengths, workers) <= deadline_s * (1 + 1e-9) and plan == by_deadline(lengths, workers)


def test_the_sum_that_was_printed_gives_the_tail_fewer_workers() -> None:
    lengths, workers = long_tail(400), specs(8)
    used = [
        sum(lengths[uid] > 5000 for uid in uids) > 0
        for uids in skewness_split(lengths, workers, worst_of_both=False).values()
    ]
    assert 0 < sum(used) < 8 and round_robin({}, workers) == {worker.name: [] for worker in workers}
