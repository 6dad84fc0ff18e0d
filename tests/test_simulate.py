"""Simulated steps: by hand, the order in which systems come, the rule of staleness, and drawn workloads."""

from __future__ import annotations

import statistics

import pytest

from slipstream.schedule.dispatch import WorkerSpec
from slipstream.schedule.rules import Rules
from slipstream.schedule.speeds import SpeedCurve
from slipstream.simulate.pace import Pace
from slipstream.simulate.system import Change, Costs, System
from slipstream.simulate.worker import SimulatedWorker
from slipstream.simulate.workloads import PRESETS, LongTail, SimulatedStep, recorded_steps
from slipstream.simulate.world import simulate

FLAT = SpeedCurve(((1, 1.0),))
SEEN = SpeedCurve(((1, 0.0084), (8, 0.0091), (32, 0.0103), (128, 0.0153), (512, 0.0369)))
PLAIN = Rules("round robin")
SYSTEMS = {
    "colocated": System(PLAIN, colocated=True),
    "apart": System(PLAIN),
    "streamed": System(PLAIN, streams=True),
    "one step behind": System(Rules("round robin", staleness=1), streams=True),
    "one after another": System(Rules("round robin", staleness=1, mixes_steps=False), streams=True),
}


def steps_of(*lengths: list[float]) -> list[SimulatedStep]:
    return [
        SimulatedStep(
            {f"{step}/{place}": length for place, length in enumerate(group)},
            {f"{step}/{place}": str(place) for place in range(len(group))},
        )
        for step, group in enumerate(lengths)
    ]


def test_two_steps_by_hand() -> None:
    """Two rollouts of 4 and 10 tokens, a second each; half a GPU-second of training a token, weights one second."""
    costs = Costs(FLAT, slots=8, gpus_a_worker=1, train_gpu_s=0.5, weights_s=1.0)
    work = steps_of([4.0, 10.0], [4.0, 10.0])

    def run(name: str) -> list[tuple[float, float, float]]:
        system = SYSTEMS[name]
        times = simulate(system, costs, work, num_gpus=2, train_gpus=0 if system.colocated else 1)
        return [(step.sampled_s, step.trained_s, step.ready_s) for step in times.steps]

    assert run("colocated") == [(10, 13.5, 14.5), (24.5, 28, 29)], "14 tokens on two GPUs: 3.5 s"
    assert run("apart") == [(10, 17, 18), (28, 35, 36)], "7 s on one"
    assert run("streamed") == [(10, 15, 16), (26, 31, 32)], "the short one is trained while the long one goes on"
    assert run("one step behind") == [(10, 15, 16), (10, 22, 23)], "there is room for the second beside the first"
    assert run("one after another") == [(10, 15, 16), (20, 25, 26)], "the second begins with the first weights, at 10"


def test_bubbles_and_the_time_of_a_step_by_hand() -> None:
    costs = Costs(FLAT, slots=8, gpus_a_worker=1, train_gpu_s=0.5)
    times = simulate(SYSTEMS["apart"], costs, steps_of(*[[4.0, 10.0]] * 5), num_gpus=2, train_gpus=1)
    assert times.step_s == 17 and times.idle_share == pytest.approx(0.5)
    with pytest.raises(ValueError, match="at least 4 steps"):
        simulate(SYSTEMS["apart"], costs, steps_of(*[[4.0, 10.0]] * 3), num_gpus=2, train_gpus=1).step_s  # noqa: B018


def test_drafts_and_a_worker_that_dies_by_hand() -> None:
    """Two rollouts of 10 tokens on two workers; one dies after 4 s, and its rollout goes on beside the other."""
    costs = Costs(
        SpeedCurve(((1, 1.0), (2, 2.0))),
        slots=8,
        gpus_a_worker=1,
        train_gpu_s=1e-9,
        prefill_share=0.5,
    )
    work = steps_of([10.0, 10.0])
    drafted = simulate(System(PLAIN, drafts=((1, 1.6), (2, 1.2))), costs, work, num_gpus=3, train_gpus=1)
    assert drafted.steps[0].sampled_s == pytest.approx(10 / 1.6)
    broken = simulate(System(PLAIN), costs, work, num_gpus=3, train_gpus=1, changes=[Change(4.0, "leave", "w1")])
    # The other has 6 to go, this one 6 and 2 for the keys of its 4: both at 2 s a token, then 2 alone.
    assert broken.steps[0].sampled_s == pytest.approx(4 + 6 * 2 + 2)
    with pytest.raises(RuntimeError, match="no worker is left"):
        gone = [Change(1.0, "leave", "w0"), Change(2.0, "leave", "w1")]
        simulate(System(PLAIN), costs, work, num_gpus=3, train_gpus=1, changes=gone)


def test_a_rollout_that_outgrows_its_forecast_is_told_of_at_that_very_token() -> None:
    worker = SimulatedWorker(WorkerSpec("w", FLAT, 4))
    worker.submit("a", 10.0, 6.0)
    worker.submit("b", 3.0, 1.0)
    worker.submit("c", 9.0, 7.0)
    times = []
    worker.withdraw("c")
    while (next_s := worker.next_s()) is not None:
        ended = worker.advance(next_s)
        times.append((next_s, [uid for _, uid in ended], worker.take_passed()))
    assert times == [(1, [], ["b"]), (3, ["b"], []), (6, [], ["a"]), (10, ["a"], [])]
    worker.submit("x", 50.0)
    worker.submit("a", 20.0, 10.0)
    worker.advance(12.0)
    worker.withdraw("a")
    worker.advance(18.0)
    worker.submit("a", 18.0, 8.0)
    worker.advance(21.0)
    assert worker.take_passed() == [], "the mark of its first stay says nothing of its second"
    worker.advance(26.0)
    assert worker.take_passed() == ["a"]


def test_rollouts_speed_up_where_drafts_are_right_more_often() -> None:
    pace = Pace(((0, 1.0), (4, 2.0), (10, 0.5)))
    assert [pace.work(tokens) for tokens in (0, 3, 4, 8, 10, 12)] == [0, 3, 4, 6, 7, 11]
    for tokens in (0.0, 2.5, 4.0, 7.0, 10.0, 31.0):
        assert pace.num_tokens(pace.work(tokens)) == pytest.approx(tokens)
    costs = Costs(FLAT, slots=8, gpus_a_worker=1, train_gpu_s=0.5)
    system = System(PLAIN, pace=pace)
    leaves = [Change(5.0, "leave", "w0"), Change(6.0, "join", "w1")]
    for changes, sampled_s in (([], 7), (leaves, 8.03)):  # at 5 s it has 6 tokens, which are computed again for 0.03
        times = simulate(system, costs, steps_of([10.0]), num_gpus=2, train_gpus=1, changes=changes)
        assert times.steps[0].sampled_s == pytest.approx(sampled_s)
    with pytest.raises(ValueError, match="stand still"):
        Pace(((0, 0.0),))
    with pytest.raises(ValueError, match="from 0 on, in order"):
        Pace(((0, 1.0), (5, 1.0), (5, 2.0)))


def test_workers_that_wait_are_lent_for_as_long_as_they_wait() -> None:
    """Sampling takes 10 s, training 7, in turns: the worker waits for 7 of 17, and the trainer cannot be lent."""
    costs = Costs(FLAT, slots=8, gpus_a_worker=1, train_gpu_s=0.5)
    work = steps_of(*[[4.0, 10.0]] * 5)
    for lends in (True, False):
        times = simulate(System(Rules("round robin", lends_idle=lends)), costs, work, num_gpus=2, train_gpus=1)
        assert times.lent_share == pytest.approx(7 / 34 if lends else 0.0)
    shared = simulate(System(Rules("round robin", lends_idle=True), colocated=True), costs, work, num_gpus=2)
    assert shared.lent_share == shared.idle_share == pytest.approx(3 / 13.5), "while they train they are not idle"


@pytest.mark.parametrize(("train_gpu_s", "num_workers"), [(0.005, 8), (0.02, 2)])
def test_workers_come_and_go_until_generation_keeps_up_with_training(train_gpu_s: float, num_workers: int) -> None:
    """A worker samples 100 tokens a second; 4 GPUs train as many as 8 workers sample, or as 2."""
    work = LongTail(400, 10_000, 0.1, 0.1).draw(num_prompts=32, prompts_per_step=32, samples=4, steps=60, seed=0)
    costs = Costs(SpeedCurve(((1, 0.01), (64, 0.64))), slots=64, gpus_a_worker=1, train_gpu_s=train_gpu_s)
    system = System(Rules(staleness=1), streams=True)
    fixed, elastic = (simulate(system, costs, work, num_gpus=8, train_gpus=4, most_workers=most) for most in (0, 16))
    assert {step.num_workers for step in fixed.steps} == {4}
    assert elastic.steps[-1].num_workers == pytest.approx(num_workers, abs=1)
    if num_workers > 4:
        assert elastic.step_s < 0.8 * fixed.step_s
    else:
        assert elastic.step_s < 1.05 * fixed.step_s and elastic.idle_share < fixed.idle_share - 0.1


def test_forecasts_get_better_once_prompts_have_come_up_before() -> None:
    work = LongTail(400, 10_000, 0.8, 0.2).draw(num_prompts=64, prompts_per_step=64, samples=4, steps=6, seed=0)
    costs = Costs(SEEN, slots=64, gpus_a_worker=1, train_gpu_s=0.001)
    outcome = simulate(SYSTEMS["apart"], costs, work, num_gpus=4, train_gpus=2)
    assert outcome.forecasts[0]["length_forecast/recall_top20"] < 0.5
    metrics = outcome.forecast_metrics()
    assert metrics["length_forecast/recall_top20"] > 0.7 and metrics["length_forecast/calibration_error"] < 0.2
    known = simulate(System(PLAIN, foresees=True), costs, work, num_gpus=4, train_gpus=2)
    assert known.forecast_metrics() == {}


def test_steps_that_come_in_turns_are_counted_in_whole_turns() -> None:
    """One step behind, two at a time: a long wait and a short one. Any number of steps must tell the same time."""
    work = PRESETS["20k"].draw(num_prompts=64, prompts_per_step=32, samples=4, steps=13, seed=0)
    costs = Costs(SEEN, slots=256, gpus_a_worker=1, train_gpu_s=1e-5)
    times = [
        simulate(SYSTEMS["one step behind"], costs, work[:count], num_gpus=2, train_gpus=1).step_s
        for count in (10, 11, 12, 13)
    ]
    assert max(times) < 1.02 * min(times)


def test_hundreds_may_end_at_the_same_moment() -> None:
    costs = Costs(FLAT, slots=512, gpus_a_worker=1, train_gpu_s=0.001)
    outcome = simulate(SYSTEMS["apart"], costs, steps_of([1000.0] * 512), num_gpus=2, train_gpus=1)
    assert outcome.steps[0].sampled_s == 1000 and len(outcome.steps[0].rollouts) == 512


def test_the_timeline_of_short_steps_keeps_its_points() -> None:
    costs = Costs(SpeedCurve(((1, 1e-4),)), slots=2, gpus_a_worker=1, train_gpu_s=1e-6)
    outcome = simulate(SYSTEMS["apart"], costs, steps_of(*[[40.0, 90.0]] * 6), num_gpus=2, train_gpus=1)
    assert len(outcome.decoding_over(10)) > 8 and set(outcome.decoding_over(10).values()) <= {0.0, 1.0}


def test_each_mechanism_makes_steps_shorter_where_training_is_a_third() -> None:
    work = PRESETS["20k"].draw(num_prompts=128, prompts_per_step=64, samples=8, steps=8, seed=0)
    costs = Costs(SEEN, slots=256, gpus_a_worker=1, train_gpu_s=1.2e-4, weights_s=2.0)
    took = {}
    for name, system in SYSTEMS.items():
        splits = [0] if system.colocated else range(4, 13, 4)
        took[name] = min(simulate(system, costs, work, num_gpus=16, train_gpus=split).step_s for split in splits)
    assert took["one step behind"] < took["streamed"] < took["apart"] and took["one step behind"] < took["colocated"]


def test_the_same_seed_gives_the_same_times() -> None:
    work = [PRESETS["5k"].draw(num_prompts=16, prompts_per_step=8, samples=4, steps=4, seed=3) for _ in range(2)]
    costs = Costs(SEEN, slots=16, gpus_a_worker=1, train_gpu_s=1e-4)
    one, other = (simulate(SYSTEMS["streamed"], costs, steps, num_gpus=4, train_gpus=1) for steps in work)
    assert one == other


def test_what_cannot_be_is_refused() -> None:
    costs = Costs(SEEN, slots=4, gpus_a_worker=4, train_gpu_s=1e-4)
    with pytest.raises(ValueError, match="leave no worker of 4"):
        simulate(SYSTEMS["apart"], costs, steps_of([1.0]), num_gpus=6, train_gpus=3)
    with pytest.raises(ValueError, match="give train_gpus"):
        simulate(SYSTEMS["apart"], costs, steps_of([1.0]), num_gpus=8)
    with pytest.raises(ValueError, match="can neither stream nor overlap"):
        System(PLAIN, colocated=True, streams=True)


# Workloads.


@pytest.mark.parametrize("name", PRESETS)
def test_drawn_lengths_have_a_long_tail(name: str) -> None:
    preset = PRESETS[name]
    work = preset.draw(num_prompts=512, prompts_per_step=256, samples=8, steps=2, seed=1)
    lengths = sorted(length for step in work for length in step.lengths.values())
    assert len(lengths) == 4096 and lengths[-1] == preset.limit
    assert statistics.median(lengths) == pytest.approx(preset.median, rel=0.15)
    assert 0.01 < sum(length == preset.limit for length in lengths) / len(lengths) < 0.1


def test_a_prompt_comes_up_once_an_epoch_and_keeps_its_length_roughly() -> None:
    work = LongTail(1000, 10**9).draw(num_prompts=8, prompts_per_step=4, samples=64, steps=4, seed=0)
    epochs = [{**one.prompts, **other.prompts} for one, other in (work[:2], work[2:])]
    assert [sorted(set(epoch.values())) for epoch in epochs] == [[str(number) for number in range(8)]] * 2

    def typical(step: SimulatedStep, prompt: str) -> float:
        return statistics.median(step.lengths[uid] for uid, whose in step.prompts.items() if whose == prompt)

    for prompt in map(str, range(8)):
        first, second = (typical(step, prompt) for step in work if prompt in step.prompts.values())
        assert first == pytest.approx(second, rel=0.35)


def test_steps_of_a_recorded_run() -> None:
    steps = recorded_steps([(2, "2/0/0", "b", 7), (1, "1/0/0", "a", 5), (1, "1/0/1", "a", 0)])
    assert steps == [
        SimulatedStep({"1/0/0": 5.0, "1/0/1": 1.0}, {"1/0/0": "a", "1/0/1": "a"}),
        SimulatedStep({"2/0/0": 7.0}, {"2/0/0": "b"}),
    ]
