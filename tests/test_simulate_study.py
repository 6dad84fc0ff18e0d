"""Costs from data sheets, comparisons at the best split, and plans: by published figures, by hand and by trying all."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.simulate import planning
from slipstream.simulate.costs import GPUS, costs_of, decode_curve, gpus_a_worker, key_bytes, typical_context
from slipstream.simulate.planning import Need, Offer, Plan, lengths_from, make_plans, time_plan
from slipstream.simulate.study import best_result, compare
from slipstream.simulate.systems import SYSTEMS
from slipstream.simulate.workloads import LongTail, SimulatedStep
from slipstream.simulate.world import simulate

SHORT = LongTail(median=200, limit=1000)
PUBLISHED_7B_H800 = {1: 8.4, 8: 9.1, 16: 9.5, 32: 10.3, 64: 11.7, 128: 15.3, 256: 21.5, 512: 36.9}
"""Milliseconds of a step by the number of sequences, as StreamRL's authors measured them."""


def test_decoding_takes_as_long_as_was_published() -> None:
    curve = decode_curve(7.6, GPUS["h800"], 1, context=1000)
    for batch, published in PUBLISHED_7B_H800.items():
        assert curve.token_s(batch) * 1e3 == pytest.approx(published, rel=0.08), batch


def test_workers_are_as_large_as_their_model_needs() -> None:
    sizes = {billions: gpus_a_worker(billions, GPUS["h100"]) for billions in (0.5, 7, 14, 32, 72)}
    assert sizes == {0.5: 1, 7: 1, 14: 1, 32: 2, 72: 4}
    assert gpus_a_worker(72, GPUS["h200"]) == 4 and gpus_a_worker(32, GPUS["h200"]) == 1
    assert 57e3 < key_bytes(10) < 196e3 and key_bytes(145.4) == 2 * key_bytes(72.7)
    assert key_bytes(0.01) == key_bytes(0.135)


def test_costs_of_a_workload_by_hand() -> None:
    steps = [SimulatedStep({"a": 1000.0, "b": 3000.0}, {"a": "p", "b": "p"})]
    assert typical_context(steps) == 1250, "(1000^2 + 3000^2) / 2 / 4000"
    costs = costs_of(7, GPUS["h100"], steps)
    assert costs.train_gpu_s == pytest.approx(8 * 7e9 / (989e12 * 0.4)) and costs.gpus_a_worker == 1
    assert costs.slots == 512 and costs_of(7, GPUS["rtx4090"], steps).gpus_a_worker == 2
    assert costs_of(7, GPUS["h100"], steps, training="ppo").train_gpu_s == 2 * costs.train_gpu_s


def test_a_split_is_as_good_as_the_best_of_all() -> None:
    steps = SHORT.draw(num_prompts=32, prompts_per_step=16, samples=4, steps=7, seed=0)
    costs = costs_of(7, GPUS["h100"], steps)
    system = SYSTEMS["Slipstream"]
    found = best_result("ours", system, costs, steps, 9)
    everything = [simulate(system, costs, steps, num_gpus=9, train_gpus=train).step_s for train in range(1, 9)]
    assert found.step_s == pytest.approx(min(everything)) and 0 < found.train_gpus < 9
    shared = best_result("shared", SYSTEMS["colocated"], costs, steps, 9)
    assert shared.train_gpus == 0 and shared.as_dict()["system"] == "shared"
    with pytest.raises(ValueError, match="too few for a worker of 4"):
        best_result("ours", system, costs_of(72, GPUS["h100"], steps), steps, 4)


def test_systems_come_in_the_order_in_which_they_were_published() -> None:
    """One step behind is faster than in step, drafts are faster than none, and all together fastest."""
    steps = LongTail(5200, 20_000).draw(num_prompts=64, prompts_per_step=32, samples=8, steps=8, seed=0)
    names = "colocated", "StreamRL, in step", "StreamRL", "TLT", "RhymeRL", "Slipstream"
    costs = costs_of(7, GPUS["h100"], steps)
    told: list[str] = []
    times = {
        one.name: one.step_s
        for one in compare(
            {name: SYSTEMS[name] for name in names}, costs, steps, 8, lambda done: told.append(done.name)
        )
    }
    assert told == list(names)
    assert times["StreamRL"] < times["StreamRL, in step"] and times["TLT"] < times["colocated"]
    assert times["Slipstream"] < min(time for name, time in times.items() if name != "Slipstream")


def test_a_target_is_reached_with_fewer_gpus_and_the_cheaper_kind() -> None:
    need = Need(7, SHORT, prompts=8, samples=4)
    offers = [Offer.parse("h100:8@2.0"), Offer.parse("h200:8@2.1")]
    fastest, reaches = make_plans(offers, need)
    assert reaches and fastest[0].step_s == min(plan.step_s for plan in fastest) and len(fastest) == 4
    modest = Need(7, SHORT, prompts=8, samples=4, target=fastest[0].rollouts_a_s / 4)
    cheapest, reaches = make_plans(offers, modest)
    assert reaches and cheapest[0].rollouts_a_s >= 0.95 * (modest.target or 0) and cheapest[0].num_gpus < 8
    costs = [plan.cost or 0 for plan in cheapest if plan.rollouts_a_s >= (modest.target or 0)]
    assert cheapest[0].cost == min(costs)
    _, reaches = make_plans(offers[:1], Need(7, SHORT, prompts=8, samples=4, target=1e6))
    assert not reaches


OFFERS = {
    "one kind": ["h100:7@2"],
    "a dear kind and a cheap one": ["h100:4@6", "h20:5@.3"],
    "kinds of one price": ["h100:3@2", "h200:4@2.1"],
    "without prices": ["h100:4", "h20:4"],
}


@pytest.mark.parametrize("offers", OFFERS.values(), ids=OFFERS.keys())
def test_no_plan_that_reaches_the_target_is_cheaper(offers: list[str]) -> None:
    """Against every number of GPUs of each kind on each side, by both meanings of cheapest."""
    parsed = [Offer.parse(text) for text in offers]
    need = Need(7, LongTail(300, 2000), prompts=4, samples=5)
    every = [
        time_plan(sampling, sampling_gpus, training, train_gpus, need)
        for sampling in parsed
        for training in parsed
        for sampling_gpus in range(1, sampling.count + 1)
        for train_gpus in range(2, training.count + 1)
        if sampling is not training or sampling_gpus + train_gpus <= sampling.count
    ]
    target = statistics.median(plan.rollouts_a_s for plan in every)
    reaching = [plan for plan in every if plan.rollouts_a_s >= target]

    def hourly(plan: Plan) -> float:
        return plan.num_gpus if plan.rent is None else plan.rent

    for cheapest, price in ("step", lambda plan: hourly(plan) * plan.step_s), ("hour", hourly):
        plans, reaches = make_plans(parsed, dataclasses.replace(need, target=target, cheapest=cheapest))
        assert reaches and price(plans[0]) == min(map(price, reaching))
        for plan in plans:
            kinds = plan.sampling.gpu, plan.training.gpu
            rivals = [price(one) for one in reaching if (one.sampling.gpu, one.training.gpu) == kinds]
            assert not rivals or price(plan) == min(rivals), "each is the cheapest of its kinds"


@pytest.mark.parametrize("target", [2.0, 8.0, 12.0])
@pytest.mark.parametrize("cheapest", ["step", "hour"])
def test_of_many_gpus_a_few_plans_are_simulated_and_a_cheap_one_found(
    target: float, cheapest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against every plan, with step times of a formula, since a simulation of each would take hours."""
    tried: set[tuple[Offer, Offer]] = set()

    def by_formula(sampling: Offer, num_sampling: int, training: Offer, num_training: int, need: Need) -> Plan:
        used = dataclasses.replace(sampling, count=num_sampling), dataclasses.replace(training, count=num_training)
        tried.add(used)
        step_s = max(1500 / num_sampling + 15, (1000 if training.gpu == "h100" else 6700) / num_training)
        return Plan(*used, step_s, 0.0, 0.0, need.prompts * need.samples / step_s)

    monkeypatch.setattr(planning, "time_plan", by_formula)
    h100, h20 = Offer.parse("h100:32@2.5"), Offer.parse("h20:64@1")
    need = Need(7, LongTail(300, 2000), prompts=128, samples=8, target=target, cheapest=cheapest)
    every = [
        by_formula(sampling, num_sampling, training, num_training, need)
        for sampling, training in ((h100, h100), (h100, h20), (h20, h100), (h20, h20))
        for num_sampling in range(1, sampling.count + 1)
        for num_training in range(2, training.count + 1)
        if sampling is not training or num_sampling + num_training <= sampling.count
    ]
    tried.clear()
    plans, reaches = make_plans([h100, h20], need)
    price = (lambda plan: plan.cost or 0) if cheapest == "step" else (lambda plan: plan.rent or 0)
    assert reaches and price(plans[0]) <= 1.05 * min(price(plan) for plan in every if plan.rollouts_a_s >= target)
    assert len(tried) < len(every) / 20


def test_a_step_on_the_smallest_fleet_may_cost_more(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --size 1.5 --gpus h20:5@.3 --target 2 --prompts 8 --samples 4 --median 300 --limit 1200"
    found = []
    for option in ([], ["--cheapest", "hour"]):
        with pytest.raises(SystemExit) as caught:
            main([*words.split(), *option, "--json"])
        assert caught.value.code == 0
        found.append(json.loads(capsys.readouterr().out)["plans"][0])
    by_step, by_hour = found
    assert by_step["cost"] < by_hour["cost"] and by_step["rent"] > by_hour["rent"] and by_hour["num_gpus"] == 2
    with pytest.raises(SystemExit):
        main(words.split())
    printed = capsys.readouterr().out
    assert "rent an hour" in printed and "cost a step" in printed and "--cheapest hour" in printed
    with pytest.raises(SystemExit) as caught:
        main([*words.split(), "--cheapest", "month"])
    assert caught.value.code == 2 and "--cheapest month: write one of step, hour" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["plan --gpus h100:4 --prompts 8 --samples 2", "simulate --prompts 8 --gpus 4 --systems colocated"]
)
def test_what_only_the_simulator_has_is_called_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for training in ("grpo", "ppo"):
        with pytest.raises(SystemExit, match="0"):
            main([*command.split(), "--training", training])
        printed = " ".join(capsys.readouterr().out.split())
        assert ("PPO is simulated only: slipstream train has no critic." in printed) == (training == "ppo")


@pytest.mark.parametrize("target", [23.956, 5.0])
def test_a_target_that_all_gpus_reach_is_reached(target: float) -> None:
    """The search must judge by what the plan is judged by."""
    need = Need(7, LongTail(300, 2000), prompts=24, samples=4, target=target)
    plans, reaches = make_plans([Offer.parse("h100:16")], need)
    assert reaches and plans[0].rollouts_a_s >= target and plans[0].num_gpus < 16


def test_few_prompts_with_many_samples_are_as_much_work_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is simulated in part, but a prompt is not cut."""
    monkeypatch.setattr(planning, "MOST_ROLLOUTS", 64)
    times = []
    for prompts, samples in ((2, 128), (16, 16)):
        (plan,), _ = make_plans([Offer.parse("h100:16")], Need(7, LongTail(300, 2000, 0.01), prompts, samples))
        times.append(plan.step_s)
    assert times[0] == pytest.approx(times[1], rel=0.35)


def test_plans_hold_their_model() -> None:
    """72B: workers of 4 that are whole, and 21 GPUs to train it."""
    (plan,), _ = make_plans([Offer.parse("h100:33")], Need(72, SHORT, prompts=8, samples=2))
    assert plan.sampling.count % 4 == 0 and plan.training.count >= 21 and plan.num_gpus <= 33
    with pytest.raises(ValueError, match="what trains them"):
        make_plans([Offer.parse("h100:5")], Need(72, SHORT, prompts=8, samples=2))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tpu:4", "known: a100"),
        ("h100", "is not like h100:64"),
        ("h100:four", "is not like"),
        ("h100:0", "at least one GPU"),
        ("h100:2@-1", "a price above 0"),
        ("h100:2@nan", "a price above 0"),
    ],
)
def test_offers_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Offer.parse(text)
    assert Offer.parse(" h100:64@2.5") == Offer("h100", 64, 2.5) and Offer.parse("h20:1").price is None


def test_lengths_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="above the median"):
        lengths_from(500, 400)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


SMALL = ["--size", "7", "--gpus", "4", "--prompts", "4", "--samples", "2", "--steps", "6", "--lengths", "5k"]


def test_simulate_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, record = tmp_path / "simulated.html", tmp_path / "simulated.json"
    two = ["--systems", "colocated; Slipstream", "--scaling", "2,4", "--html", str(page), "--json", str(record)]
    assert run("simulate", *SMALL, *two) == 0
    shown = capsys.readouterr().out
    assert "7B on 4 H100, 8 rollouts a step" in shown and "reckoned from data sheets" in shown
    found: dict[str, Any] = json.loads(record.read_text())
    assert [one["system"] for one in found["results"]] == ["colocated", "Slipstream"]
    assert found["results"][0]["speedup"] == 1 and set(found["scaling"]["Slipstream"]) == {"2", "4"}
    assert "Idle GPU-time by number of GPUs" in page.read_text()


def test_lengths_that_grow_and_workers_that_are_rented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, record = tmp_path / "simulated.html", tmp_path / "simulated.json"
    more = ["--growth", "1.1", "--rent", "8", "--html", str(page), "--json", str(record)]
    assert run("simulate", *SMALL, "--systems", "colocated; Slipstream", *more) == 0
    found = json.loads(record.read_text())
    assert [one["system"] for one in found["results"]] == ["colocated", "Slipstream", "Slipstream, renting"]
    fixed, renting = found["results"][1:]
    assert renting["step_s"] <= 1.01 * fixed["step_s"] and "length_forecast/recall_top20" in fixed
    assert "speed-up over colocated" in capsys.readouterr().out and "In numbers" in page.read_text()


def test_a_measured_curve_takes_the_place_of_data_sheets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"shape": "mine", "batch": batch, "step_ms": 5.0 + batch} for batch in (1, 64)]
    curve = tmp_path / "engine.json"
    curve.write_text(json.dumps({"rows": rows}))
    chosen = ["--systems", "colocated", "--curve", str(curve)]
    assert run("simulate", *SMALL, *chosen, "--shape", "mine") == 0
    assert "6.0 ms a token alone" in " ".join(capsys.readouterr().out.split())
    assert run("simulate", *SMALL, *chosen, "--shape", "other") == 2
    assert "only mine" in capsys.readouterr().err
    assert run("simulate", *SMALL, *chosen) == 2 and "Give --shape" in capsys.readouterr().err


def test_plan_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--prompts", "4", "--samples", "2", "--median", "100", "--limit", "500"]
    assert run("plan", "--gpus", "h100:4@2.5", *small, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reaches_target"] and found["plans"][0]["cost"] > 0
    assert run("plan", "--gpus", "h100:4", *small) == 0
    assert "no price" in capsys.readouterr().out
    assert run("plan", "--gpus", "h100:4", *small, "--target", "1000000", "--json") == 2
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("simulate --gpus 0", "at least 1 is needed"),
        ("simulate --curve nowhere.json", "bench engine --json nowhere.json"),
        ("simulate --systems mine", "known: colocated; one step behind"),
        ("simulate --steps 3", "at least 8 are needed"),
        ("simulate --lengths 7k", "known: 5k, 10k"),
        ("simulate --training sft", "known: grpo, ppo"),
        ("simulate --scaling 8,x", "--scaling takes whole numbers"),
        ("simulate --size nan", "cannot be"),
        ("simulate --shape mine", "give both"),
        ("simulate --against here --html page.html", "leave out --html"),
        ("plan --gpus h100:1 --size 70", "offer more GPUs"),
        ("plan --gpus h100:8 --target 0", "above 0"),
    ],
)
def test_wrong_input_has_a_clear_answer(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments.split()) == 2
    assert says in capsys.readouterr().err
