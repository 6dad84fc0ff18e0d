"""The pipeline by events in any order that the world allows. The words of the module's head: a step is asked for when
`rules.oldest_version` is live, and not before; each group that is kept is fed once at most, to the step it was asked
for, and only while that step is the one in training; a step is trained once the step before it is concluded; with
`in_order` groups are fed and trained in the order of their prompts; every prompt that was asked for is trained on,
dropped for want of a signal, or in `Save.under_way`; after StopAsked no group is asked for or fed.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import Config, build_config
from slipstream.schedule.events import (
    Action,
    Evaluate,
    Evaluated,
    Event,
    Feed,
    Finish,
    Generate,
    GroupScored,
    PushWeights,
    Record,
    RunBegan,
    Save,
    Saved,
    StepTrained,
    StopAsked,
    Train,
    WeightsLive,
    from_record,
    to_record,
)
from slipstream.schedule.pipeline import Pipeline
from slipstream.schedule.rules import MODES, oldest_version
from slipstream.schedule.scheduler import Scheduler

NEW = RunBegan(0, 0, False)


def settings_of(mode: str, **changes: Any) -> Config:
    task = {"source": "gcd", "size": 9}
    sections: dict[str, Any] = {
        "mode": mode,
        "rollout": {"workers": 1 if mode == "colocated" else 2},
        "run": {"dir": "runs/x", "save_every": 2},
        "tasks": {"train": [task], "eval": {"held": task}},
        "train": {"steps": 5, "prompts_per_step": 3},
        "eval": {"every": 2},
    }
    for name, section in changes.items():
        sections[name] = sections.get(name, {}) | section
    return build_config({"model": "tiny"} | sections)


def has_signal(position: int) -> bool:
    return position % 3 > 0


@dataclass
class FakeWorld:
    """Does everything sooner or later, in an order by chance, and checks the invariants."""

    config: Config
    chance: random.Random
    first: RunBegan = NEW
    stop_after: int | None = None
    """Events, after which somebody presses Ctrl-C."""
    asked: dict[int, list[int]] = field(default_factory=dict)
    fed: dict[int, list[int]] = field(default_factory=dict)
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    recorded: list[int] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    live: int = -1
    finished: str | None = None

    def run(self) -> FakeWorld:
        decider: Scheduler | Pipeline
        decider = Scheduler(self.config) if self.config.mode == "colocated" else Pipeline(self.config)
        self.newest = self.first.step
        self.sampling: list[Event] = []
        self.at_the_trainer: list[Event] = []
        """One after the other; what the workers and the grader do comes in any order."""
        self.stopped = False
        inbox: list[Event] = [self.first]
        num_events = 0
        while self.finished is None:
            for event in inbox:
                if isinstance(event, StepTrained):
                    self.newest = event.step
                if isinstance(event, WeightsLive):
                    self.live = event.step
                for action in decider.on_event(event, 0.0):
                    self.perform(action)
            num_events += 1
            if num_events == self.stop_after:
                self.stopped = True
                inbox = [StopAsked("interrupted")]
            else:
                inbox = [self.next_event()] if self.finished is None else []
            assert num_events < 2000
        return self

    def next_event(self) -> Event:
        queues = [queue for queue in (self.sampling, self.at_the_trainer) if queue]
        assert queues, "nothing is under way and the run does not end"
        if self.chance.choice(queues) is self.at_the_trainer:
            return self.at_the_trainer.pop(0)
        if not self.sampling:
            return self.at_the_trainer.pop(0)
        return self.sampling.pop(self.chance.randrange(len(self.sampling)))

    def perform(self, action: Action) -> None:
        match action:
            case Generate():
                assert not self.stopped
                assert action.position not in [one for positions in self.asked.values() for one in positions]
                if self.config.mode != "colocated":
                    staleness = MODES[self.config.mode].staleness
                    assert self.live >= oldest_version(action.step, staleness)
                    assert action.step - 1 - self.live <= staleness, "the bound, by hand"
                self.asked.setdefault(action.step, []).append(action.position)
                self.sampling.append(GroupScored(action.step, action.position, 8, 0, has_signal(action.position)))
            case Feed():
                assert not self.stopped and action.step == self.newest + 1
                assert action.position in self.asked[action.step]
                assert action.position not in self.fed.get(action.step, [])
                self.fed.setdefault(action.step, []).append(action.position)
            case Train():
                assert action.step == self.newest + 1 and not any(one.step == action.step for one in self.scores())
                assert not self.recorded or action.step == self.recorded[-1] + 1, "the one before is concluded"
                fed = self.fed.get(action.step, [])
                assert list(action.positions[: len(fed)]) == fed
                self.trained[action.step] = action.positions
                self.at_the_trainer.append(StepTrained(action.step))
            case PushWeights():
                self.at_the_trainer.append(WeightsLive(action.step))
            case Evaluate():
                assert action.step == self.live and not self.stopped
                self.sampling.append(Evaluated(action.step))
            case Record():
                self.recorded.append(action.step)
            case Save():
                assert action.step == self.newest
                self.saves.append(action)
                self.at_the_trainer.append(Saved(action.step))
            case Finish():
                self.finished = action.reason

    def scores(self) -> list[GroupScored]:
        return [event for event in self.sampling if isinstance(event, GroupScored)]


CHANGES = st.fixed_dictionaries(
    {
        "train": st.fixed_dictionaries({"deterministic": st.booleans(), "prompts_per_step": st.integers(1, 4)}),
        "algorithm": st.fixed_dictionaries(
            {"dynamic_sampling": st.booleans(), "name": st.sampled_from(["grpo", "reinforce++"])}
        ),
    }
)


@settings(max_examples=150)
@given(st.sampled_from(sorted(MODES)), CHANGES, st.integers(0, 10**6))
def test_every_step_is_trained_once_on_what_was_asked_for_it(mode: str, changes: Any, seed: int) -> None:
    config = settings_of(mode, **changes)
    world = FakeWorld(config, random.Random(seed)).run()
    assert world.finished == "done" and world.recorded == [0, 1, 2, 3, 4, 5]
    assert [save.step for save in world.saves] == [0, 2, 4, 5]
    for step, positions in world.trained.items():
        kept = [one for one in world.asked[step] if has_signal(one) or not config.algorithm.dynamic_sampling]
        assert sorted(positions) == sorted(kept)
        if config.train.deterministic or config.algorithm.compares_whole_steps:
            assert list(positions) == sorted(positions)
        assert not config.algorithm.compares_whole_steps or step not in world.fed
    asked = sorted(one for positions in world.asked.values() for one in positions)
    assert asked == list(range(len(asked))), "no prompt is left out"


@settings(max_examples=60)
@given(st.booleans(), st.integers(1, 4), st.integers(0, 10**6))
def test_in_order_a_synchronous_run_trains_as_a_colocated_one(dynamic: bool, prompts: int, seed: int) -> None:
    changes: dict[str, Any] = {
        "algorithm": {"dynamic_sampling": dynamic},
        "train": {"deterministic": True, "prompts_per_step": prompts},
    }
    streamed = FakeWorld(settings_of("sync", **changes), random.Random(seed)).run()
    plain = FakeWorld(settings_of("colocated", **changes), random.Random(seed + 1)).run()
    assert streamed.trained == plain.trained


@settings(max_examples=150)
@given(st.sampled_from(sorted(MODES)), CHANGES, st.integers(0, 10**6), st.integers(1, 60))
def test_a_run_that_is_stopped_and_resumed_asks_for_every_prompt_once(
    mode: str, changes: Any, seed: int, stop_after: int
) -> None:
    config = settings_of(mode, **changes)
    before = FakeWorld(config, random.Random(seed), stop_after=stop_after).run()
    if before.finished == "done":
        return
    trained = {step: positions for step, positions in before.trained.items() if step <= before.newest}
    save = before.saves[-1] if before.saves else Save(0, 0, False)
    assert save.step == before.newest
    name, fields = to_record(save)
    save = from_record(name, json.loads(json.dumps(fields)))  # type: ignore[assignment]
    first = RunBegan(save.step, save.position, save.concluded, save.under_way)
    after = FakeWorld(config, random.Random(seed + 1), first).run()
    assert after.finished == "done"
    assert sorted({*trained, *after.trained}) == [1, 2, 3, 4, 5] and not trained.keys() & after.trained.keys()
    asked = [one for step in trained for one in before.asked[step]]
    asked += [one for positions in after.asked.values() for one in positions]
    assert sorted(asked) == list(range(len(asked)))


def test_the_next_step_is_asked_for_while_one_is_sampled() -> None:
    pipeline = Pipeline(settings_of("async", eval={"before_train": False}))
    pipeline.on_event(NEW, 0.0)
    asked = [one for one in pipeline.on_event(WeightsLive(0), 0.0) if isinstance(one, Generate)]
    assert [(one.step, one.position) for one in asked] == [(1, 0), (1, 1), (1, 2), (2, 3), (2, 4), (2, 5)]
    assert not any(isinstance(one, Feed) for one in pipeline.on_event(GroupScored(2, 4, 8, 0, True), 0.0))
    assert pipeline.on_event(GroupScored(1, 1, 8, 0, True), 0.0) == [Feed(1, 1)]


def test_in_order_a_group_waits_for_those_before_it() -> None:
    pipeline = Pipeline(settings_of("sync", eval={"before_train": False}, train={"deterministic": True}))
    pipeline.on_event(NEW, 0.0)
    pipeline.on_event(WeightsLive(0), 0.0)
    assert pipeline.on_event(GroupScored(1, 2, 8, 0, True), 0.0) == []
    assert pipeline.on_event(GroupScored(1, 0, 8, 0, True), 0.0) == [Feed(1, 0)]
    assert pipeline.on_event(GroupScored(1, 1, 8, 0, True), 0.0) == [Feed(1, 1), Feed(1, 2), Train(1, (0, 1, 2))]


@pytest.mark.parametrize(("mode", "staleness"), [("sync", 0), ("async", 1), ("rhyme", 1)])
def test_the_bound_of_each_mode(mode: str, staleness: int) -> None:
    assert MODES[mode].staleness == staleness
    assert [oldest_version(step, staleness) for step in (1, 2, 3)] == ([0, 1, 2] if not staleness else [0, 0, 1])


def test_a_resumed_step_with_more_groups_than_it_needs_takes_no_prompt_back() -> None:
    """It was under way with two rounds of dynamic sampling, and with newer weights more of them have a signal."""
    config = settings_of("async", algorithm={"dynamic_sampling": True}, train={"steps": 9, "prompts_per_step": 2})
    pipeline = Pipeline(config)
    actions = pipeline.on_event(RunBegan(2, 8, True, ((2, (4, 5, 6, 7)),)), 0.0)
    actions += pipeline.on_event(WeightsLive(2), 0.0)
    asked = [(one.step, one.position) for one in actions if isinstance(one, Generate)]
    assert asked == [(3, 4), (3, 5), (3, 6), (3, 7), (4, 8), (4, 9)]
    for step, position in asked:
        actions = pipeline.on_event(GroupScored(step, position, 8, 0, True), 0.0)
        asked += [(one.step, one.position) for one in actions if isinstance(one, Generate)]
    positions = [position for _, position in asked]
    assert len(set(positions)) == len(positions), "no prompt twice"
