"""The fleet: whoever comes and goes, every rollout is trained once, none too stale; and it can be replayed."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import event as note_event
from hypothesis import strategies as st

from slipstream.schedule.dispatch import WorkerSpec
from slipstream.schedule.events import (
    CloseStep,
    FleetEvent,
    HandedBack,
    Lend,
    Outgrew,
    Recall,
    RolloutEnded,
    RolloutsAsked,
    Sample,
    TakeBack,
    Watch,
    WeightsLive,
    WorkerJoined,
    WorkerLeft,
    from_record,
    to_record,
)
from slipstream.schedule.fleet import Fleet
from slipstream.schedule.rules import CARRYING, PLACEMENTS, TAILS, Rules
from slipstream.schedule.speeds import SpeedCurve
from slipstream.schedule.tiers import equal_tiers, two_tiers
from slipstream.simulate.system import Change, Costs, System
from slipstream.simulate.workloads import LongTail
from slipstream.simulate.world import World

POINTS = ((1, 0.0084), (8, 0.0091), (32, 0.0103), (128, 0.0153), (512, 0.0369))
CURVE = SpeedCurve(POINTS)
STEEP = SpeedCurve(((1, 0.01), (4, 0.03)))
"""So that a crowded worker is worth relieving."""


class Watched(World):
    """Asserts the invariants at every event, and keeps what was said."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.said: list[tuple[FleetEvent, list[Any]]] = []
        self.version, self.begun_with = -1, dict[str, int]()
        self.sampled_at: dict[str, str] = {}
        self.trained_in: dict[str, int] = {}
        self.lent: set[str] = set()
        super().__init__(*args, **settings)
        decide = self.fleet.on_event

        def watched(event: FleetEvent, now_s: float) -> list[Any]:
            self.hear(event)
            actions = decide(event, now_s)
            self.said.append((event, actions))
            for action in actions:
                self.check(action)
            return actions

        self.fleet.on_event = watched  # type: ignore[method-assign]

    def hear(self, event: FleetEvent) -> None:
        match event:
            case WeightsLive():
                self.version = max(self.version, event.step)
            case RolloutEnded() | HandedBack():
                del self.sampled_at[event.rollout]
            case WorkerLeft():
                self.sampled_at = {uid: name for uid, name in self.sampled_at.items() if name != event.worker}
                self.lent.discard(event.worker)
            case Outgrew():
                assert event.rollout in self.sampled_at

    def check(self, action: Any) -> None:
        match action:
            case Sample():
                assert action.rollout not in self.sampled_at and action.rollout not in self.trained_in
                self.sampled_at[action.rollout] = action.worker
                if action.num_tokens == 0:
                    self.begun_with[action.rollout] = self.version
                assert action.worker not in self.lent, "it is recalled first"
                assert self.version >= 0, "there are weights to sample with"
            case TakeBack():
                assert self.sampled_at.get(action.rollout) == action.worker
            case Lend():
                assert action.worker not in {*self.lent, *self.sampled_at.values()}
                self.lent.add(action.worker)
            case Recall():
                self.lent.remove(action.worker)
            case CloseStep():
                assert action.step == 1 + max(self.trained_in.values(), default=0), "in order, none left out"
                for uid in action.rollouts:
                    assert uid not in self.trained_in and uid not in self.sampled_at
                    self.trained_in[uid] = action.step
                    staleness = action.step - 1 - self.begun_with[uid]
                    assert 0 <= staleness <= self._system.rules.staleness, (uid, staleness)


def rules() -> st.SearchStrategy[Rules]:
    def allowed(placement: str, tail: str, staleness: int, mixes: bool, lends: bool) -> Rules:
        return Rules(placement, tail, max(staleness, tail in CARRYING), mixes or tail == "oversample", lends)

    names = st.sampled_from(list(PLACEMENTS)), st.sampled_from(list(TAILS))
    return st.builds(allowed, *names, st.integers(0, 3), st.booleans(), st.booleans())


changes = st.lists(
    st.builds(
        Change, st.floats(0, 30), st.sampled_from(["join", "leave"]), st.sampled_from(["w0", "w1", "w2", "w7", "w8"])
    ),
    max_size=12,
)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """So that small simulations have some."""
    if "whoever_comes_and_goes" in request.node.name:
        for module in ("schedule.fleet", "simulate.world"):
            monkeypatch.setattr(f"slipstream.{module}.CHUNK", 20)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rules(), changes, st.booleans(), st.booleans(), st.sampled_from([0.0, 0.05, 1.0]), st.integers(0, 99))
def test_every_rollout_is_trained_once_and_none_is_too_stale_whoever_comes_and_goes(
    rule: Rules, changed: list[Change], streams: bool, foresees: bool, hand_back_s: float, seed: int
) -> None:
    steps = LongTail(40, 400).draw(num_prompts=17, prompts_per_step=12, samples=2, steps=5, seed=seed)
    costs = Costs(STEEP, slots=4, gpus_a_worker=1, train_gpu_s=0.002, weights_s=0.3, hand_back_s=hand_back_s)
    world = Watched(
        System(rule, streams=streams, foresees=foresees),
        costs,
        steps,
        num_gpus=6,
        train_gpus=3,
        changes=[*changed, Change(31.0, "join", "w9")],
    )
    outcome = world.run()
    asked = {uid for step in steps for uid in step.lengths}
    carried = asked - set(world.trained_in)
    # One group of the last step would be trained in the next; a prompt that comes up twice in a step makes a large one.
    assert len(carried) <= (4 if rule.carries else 0)
    note_event(rule.tail)
    note_event("early" if any(step < int(uid.split("/")[0]) for uid, step in world.trained_in.items()) else "not early")
    note_event("moved" if outcome.num_moved else "nothing moved")
    note_event("carried" if any(step > int(uid.split("/")[0]) for uid, step in world.trained_in.items()) else "in time")
    assert len(outcome.steps) == 5
    again = Fleet(rule, world.fleet._forecast)
    for event, actions in world.said:
        name, fields = to_record(event)
        assert again.on_event(from_record(name, json.loads(json.dumps(fields))), 0.0) == actions  # type: ignore[arg-type]


def asked(*lengths: float, step: int = 1) -> RolloutsAsked:
    return RolloutsAsked(step, tuple((f"{step}/{place}", f"p{place}") for place in range(len(lengths))))


def fleet_of(rule: Rules, *workers: str, slots: int = 4, lengths: dict[str, float] | None = None) -> Fleet:
    fleet = Fleet(rule, (lambda uid, prompt: lengths[uid]) if lengths else None)
    for worker in workers:
        assert fleet.on_event(WorkerJoined(worker, slots, POINTS), 0.0) == []
    fleet.on_event(WeightsLive(0), 0.0)
    return fleet


def test_the_longest_goes_to_a_worker_of_its_own() -> None:
    """By load: a rollout of 1,000 tokens takes a worker longer than all the others together the other one."""
    lengths = {"1/0": 100.0, "1/1": 90.0, "1/2": 1000.0, "1/3": 80.0, "1/4": 70.0}
    actions = fleet_of(Rules(), "a", "b", lengths=lengths).on_event(asked(*lengths.values()), 0.0)
    assert actions == [Sample("a", "1/2", 0), *(Sample("b", f"1/{place}", 0) for place in (0, 1, 3, 4))]


@pytest.mark.parametrize("most", [2, 4096])
def test_prompts_that_never_came_up_are_told_apart_by_their_tokens(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with token 7 have had long rollouts: a new one of them goes to a worker of its own, and a replay agrees.
    Of closed steps no more are kept than may be, of open ones all."""
    monkeypatch.setattr("slipstream.schedule.fleet.DESCRIBED", most)

    def asked_by_tokens(step: int) -> RolloutsAsked:
        prompts = tuple((f"p{step}/{place}", (place, 7 if place == 3 else 9, step)) for place in range(5))
        rollouts = tuple((f"{step}/{place}", prompt) for place, (prompt, _) in enumerate(prompts))
        return RolloutsAsked(step, rollouts, prompts=prompts)

    fleet, again = fleet_of(Rules(), "a", "b"), fleet_of(Rules(), "a", "b")
    for step in range(1, 6):
        events: list[FleetEvent] = [asked_by_tokens(step)]
        lengths = {f"{step}/{place}": 1000 if place == 3 else 10 for place in range(5)}
        actions = fleet.on_event(events[0], 0.0)
        workers = {action.rollout: action.worker for action in actions if isinstance(action, Sample)}
        events += [RolloutEnded(uid, lengths[uid]) for uid in workers]
        events.append(WeightsLive(step))
        said = [actions, *(fleet.on_event(event, 0.0) for event in events[1:])]
        for event, wanted in zip(events, said, strict=True):
            name, fields = to_record(event)
            assert again.on_event(from_record(name, json.loads(json.dumps(fields))), 0.0) == wanted  # type: ignore
        assert len(fleet._described) == min(most, 5 * step)
    alone = workers[f"{step}/3"]
    assert [uid for uid, worker in workers.items() if worker == alone] == [f"{step}/3"]


def test_what_is_begun_early_has_its_prompts_too() -> None:
    fleet = fleet_of(Rules(tail="oversample", staleness=1, mixes_steps=True), "a", slots=64)
    for step in (1, 2):
        prompts = tuple((f"p{step}/{place}", (place, step)) for place in range(10))
        fleet.on_event(RolloutsAsked(step, tuple((f"{step}/{p}", p) for p, _ in prompts), prompts=prompts), 0.0)
    assert {prompt for prompt in fleet._described if prompt.startswith("p2/")} != set()


def test_a_worker_that_runs_dry_relieves_the_most_crowded() -> None:
    fleet = fleet_of(Rules("round robin", "move"), "a", "b", slots=64)
    fleet.on_event(asked(*[50.0] * 41), 0.0)
    for place in range(1, 39, 2):
        fleet.on_event(RolloutEnded(f"1/{place}", 5), 1.0)
    moved = fleet.on_event(RolloutEnded("1/39", 5), 1.0)
    assert len(moved) == 10 and all(isinstance(action, TakeBack) and action.worker == "a" for action in moved)
    assert isinstance(moved[0], TakeBack)
    assert fleet.on_event(HandedBack(moved[0].rollout, 17), 1.0) == [Sample("b", moved[0].rollout, 17)]


def test_one_that_ends_before_it_is_taken_back_is_not_sampled_again() -> None:
    fleet = fleet_of(Rules("round robin", "move"), "a", "b", slots=64)
    fleet.on_event(asked(*[50.0] * 40), 0.0)
    for place in range(1, 39, 2):
        fleet.on_event(RolloutEnded(f"1/{place}", 5), 1.0)
    (first, *_) = fleet.on_event(RolloutEnded("1/39", 5), 1.0)
    assert isinstance(first, TakeBack)
    assert not any(isinstance(action, Sample) for action in fleet.on_event(RolloutEnded(first.rollout, 60), 1.1))


def test_what_a_dead_worker_had_comes_before_a_later_step() -> None:
    fleet = fleet_of(Rules("round robin", staleness=1), "a", "b", slots=2)
    fleet.on_event(asked(5.0, 5.0, 5.0, 5.0), 0.0)
    fleet.on_event(asked(5.0, 5.0, step=2), 0.0)
    assert fleet.on_event(WorkerLeft("b", ()), 1.0) == []
    order = [fleet.on_event(RolloutEnded(uid, 5), 2.0) for uid in ("1/0", "1/2", "1/1", "1/3")]
    assert [action.rollout for actions in order for action in actions if isinstance(action, Sample)] == [
        *("1/1", "1/3"),
        *("2/0", "2/1"),
    ]


@pytest.mark.parametrize("placement", ["least load", "round robin"])
def test_steps_are_not_mixed_where_they_must_not_be(placement: str) -> None:
    fleet = fleet_of(Rules(placement, staleness=1, mixes_steps=False), "a", slots=4)
    fleet.on_event(asked(5.0, 5.0), 0.0)
    assert fleet.on_event(asked(5.0, step=2), 0.0) == []
    assert fleet.on_event(RolloutEnded("1/0", 5), 1.0) == []
    assert Sample("a", "2/0", 0) in fleet.on_event(RolloutEnded("1/1", 5), 1.0)


def test_what_a_dead_worker_had_goes_on_elsewhere_with_its_tokens() -> None:
    fleet = fleet_of(Rules(), "a", "b", slots=2)
    fleet.on_event(asked(5.0, 5.0), 0.0)
    assert fleet.on_event(WorkerLeft("a", (("1/0", 3),)), 1.0) == [Sample("b", "1/0", 3)]
    assert fleet.on_event(WorkerLeft("b", (("1/0", 4), ("1/1", 2))), 1.0) == [], "nobody is left, and nothing is lost"
    assert fleet.on_event(WorkerJoined("c", 2, POINTS), 2.0) == [Sample("c", "1/0", 4), Sample("c", "1/1", 2)]


def test_a_step_waits_for_the_weights_it_needs() -> None:
    fleet = fleet_of(Rules(staleness=1), "a")
    assert fleet.on_event(asked(5.0), 0.0) == [Sample("a", "1/0", 0)]
    assert fleet.on_event(asked(5.0, step=2), 0.0) == [Sample("a", "2/0", 0)]
    assert fleet.on_event(asked(5.0, step=3), 0.0) == []
    assert fleet.on_event(RolloutEnded("1/0", 5), 1.0) == [CloseStep(1, ("1/0",))]
    assert fleet.on_event(WeightsLive(1), 2.0) == [Sample("a", "3/0", 0)]


def test_groups_that_take_too_long_go_on_in_the_next_step_once() -> None:
    fleet = fleet_of(Rules(tail="carry", staleness=1), "a", slots=64)
    fleet.on_event(asked(*[5.0] * 20), 0.0)
    for place in range(17):
        assert fleet.on_event(RolloutEnded(f"1/{place}", 5), 1.0) == []
    (closed,) = fleet.on_event(RolloutEnded("1/17", 5), 1.0)
    assert closed == CloseStep(1, tuple(f"1/{place}" for place in range(18)))
    fleet.on_event(WeightsLive(1), 2.0)
    fleet.on_event(asked(*[5.0] * 20, step=2), 2.0)
    for place in range(20):
        assert fleet.on_event(RolloutEnded(f"2/{place}", 5), 3.0) == [], "the carried ones must come with this step"
    assert fleet.on_event(RolloutEnded("1/18", 9), 4.0) == []
    (closed,) = fleet.on_event(RolloutEnded("1/19", 9), 4.0)
    assert isinstance(closed, CloseStep) and set(closed.rollouts) >= {"1/18", "1/19", "2/0"}


def test_with_more_groups_than_a_step_needs_the_first_that_are_done_make_it_up() -> None:
    fleet = fleet_of(Rules(tail="oversample", staleness=1), "a", slots=64)
    begun = fleet.on_event(asked(*[5.0] * 10), 0.0)
    early = fleet.on_event(asked(*[5.0] * 10, step=2), 0.0)
    assert len(begun) == 10 and early == [Sample("a", "2/0", 0), Sample("a", "2/1", 0)], "a fifth of the next step"
    for uid in ("2/1", *(f"1/{place}" for place in range(8))):
        assert fleet.on_event(RolloutEnded(uid, 5), 1.0) == [], "nine groups are done, ten are needed"
    (closed,) = fleet.on_event(RolloutEnded("1/8", 5), 1.0)
    assert closed == CloseStep(1, (*(f"1/{place}" for place in range(9)), "2/1"))
    others = fleet.on_event(WeightsLive(1), 2.0)
    assert [one.rollout for one in others if isinstance(one, Sample)] == [f"2/{place}" for place in range(2, 10)]
    for uid in ("1/9", *(f"2/{place}" for place in range(2, 10))):
        assert fleet.on_event(RolloutEnded(uid, 5), 3.0) == [], "what was begun early is not put off again"
    (closed,) = fleet.on_event(RolloutEnded("2/0", 9), 4.0)
    assert isinstance(closed, CloseStep) and set(closed.rollouts) == {"1/9", "2/0", *(f"2/{n}" for n in range(2, 10))}


def test_only_what_outgrew_its_forecast_goes_on_in_the_next_step() -> None:
    lengths = {f"1/{place}": 100.0 for place in range(20)}
    fleet = fleet_of(Rules(tail="outliers", staleness=1), "a", slots=64, lengths=lengths)
    assert Sample("a", "1/0", 0, tell_at=150) in fleet.on_event(asked(*lengths.values()), 0.0)
    for place in range(18):
        assert fleet.on_event(RolloutEnded(f"1/{place}", 5), 1.0) == []
    assert fleet.on_event(Outgrew("1/18"), 2.0) == [], "the other one may still end as forecast"
    assert fleet.on_event(Outgrew("1/3"), 2.0) == [], "that one has ended"
    (closed,) = fleet.on_event(Outgrew("1/19"), 2.0)
    assert isinstance(closed, CloseStep) and len(closed.rollouts) == 18
    assert fleet.on_event(Outgrew("1/4"), 3.0) == [], "its step is closed"


def test_after_a_chunk_a_rollout_goes_where_it_is_faster() -> None:
    fleet = fleet_of(Rules("round robin", "chunks"), "a", "b", slots=64)
    assert Sample("a", "1/0", 0, tell_at=2048) in fleet.on_event(asked(*[50.0] * 40), 0.0)
    assert fleet.on_event(Outgrew("1/0"), 1.0) == [Watch("a", "1/0", 4096)], "b is as crowded"
    for place in range(1, 40, 2):
        fleet.on_event(RolloutEnded(f"1/{place}", 5), 1.0)
    assert fleet.on_event(Outgrew("1/0"), 2.0) == [TakeBack("a", "1/0")]
    assert fleet.on_event(HandedBack("1/0", 4100), 2.0) == [Sample("b", "1/0", 4100, tell_at=6148)]


def test_nothing_is_sampled_before_there_are_weights() -> None:
    for rule in (Rules(staleness=1), Rules(tail="oversample", staleness=1)):
        fleet = Fleet(rule)
        fleet.on_event(WorkerJoined("a", 4, POINTS), 0.0)
        assert fleet.on_event(asked(5.0, 5.0, 5.0, 5.0, 5.0), 0.0) == []
        assert len(fleet.on_event(WeightsLive(0), 1.0)) == 4


def test_a_worker_without_work_is_lent_and_recalled_before_it_gets_some() -> None:
    fleet = Fleet(Rules(lends_idle=True))
    assert fleet.on_event(WorkerJoined("a", 4, POINTS), 0.0) == [Lend("a")]
    fleet.on_event(WeightsLive(0), 0.0)
    assert fleet.on_event(asked(5.0, 5.0), 0.0) == [Recall("a"), Sample("a", "1/0", 0), Sample("a", "1/1", 0)]
    assert fleet.on_event(RolloutEnded("1/0", 5), 1.0) == []
    assert fleet.on_event(RolloutEnded("1/1", 5), 1.0) == [CloseStep(1, ("1/0", "1/1")), Lend("a")]


@settings(max_examples=60)
@given(st.lists(st.floats(1, 5000), min_size=1, max_size=80), st.integers(1, 20))
def test_ranking_groups_deal_out_everything_once_and_shorter_ones_to_earlier_workers(
    lengths: list[float], num_workers: int
) -> None:
    by_uid = {str(place): length for place, length in enumerate(lengths)}
    workers = [WorkerSpec(f"w{number}", CURVE, 8) for number in range(num_workers)]
    for place in (equal_tiers, two_tiers):
        plan = place(by_uid, workers)
        assert sorted(uid for uids in plan.values() for uid in uids) == sorted(by_uid)
    spans = [[by_uid[uid] for uid in uids] for uids in equal_tiers(by_uid, workers[:16]).values() if uids]
    assert all(max(one) <= min(other) for one, other in pairwise(spans)), "a group for each worker, shortest first"


def test_two_tiers_give_long_groups_more_workers() -> None:
    lengths = {str(place): 100.0 * 1.05**place for place in range(128)}
    workers = [WorkerSpec(f"w{number}", CURVE, 256) for number in range(16)]
    sizes = [len(uids) for uids in two_tiers(lengths, workers).values()]
    assert sizes[0] > 2 * sizes[-1], "few long ones a worker"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"placement": "random"}, "known: least load"),
        ({"tail": "drop"}, "known: whole, move"),
        ({"tail": "carry"}, "needs a staleness of 1"),
        ({"tail": "oversample", "staleness": 1, "mixes_steps": False}, "needs mixes_steps"),
    ],
)
def test_rules_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Rules(**settings)


def test_a_prompt_that_comes_up_twice_in_a_step_is_one_group_of_it() -> None:
    """At the end of an epoch, with groups that replace others."""
    fleet = fleet_of(Rules(), "a", slots=64)
    said = fleet.on_event(RolloutsAsked(1, (("1/0", "p"), ("1/1", "q"))), 0.0)
    said += fleet.on_event(RolloutEnded("1/0", 5), 1.0)
    said += fleet.on_event(RolloutsAsked(1, (("1/2", "p"),)), 1.0)
    said += fleet.on_event(RolloutEnded("1/2", 5), 2.0)
    assert not any(isinstance(action, CloseStep) for action in said)
    said = fleet.on_event(RolloutEnded("1/1", 5), 3.0)
    assert said == [CloseStep(1, ("1/1", "1/0", "1/2"))]
