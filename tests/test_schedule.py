"""The scheduler by hand-written sequences of events, and the order of prompts.

The words of the module's head: a step trains on groups in the order of their prompts, whatever order they were scored
in; prompts are consumed in order, none twice; actions depend on the events alone, never on the time; after StopAsked
the last trained step is saved and the run finishes; no new group, step or evaluation begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import Config, build_config
from slipstream.schedule.events import (
    BY_NAME,
    Action,
    CloseStep,
    DraftChosen,
    DrafterAsked,
    EndSession,
    Evaluate,
    Evaluated,
    Event,
    Feed,
    Finish,
    Generate,
    GroupScored,
    HandedBack,
    Lend,
    LessonsAdded,
    NotExact,
    Outgrew,
    Publish,
    PushWeights,
    Recall,
    Record,
    Rest,
    RolloutEnded,
    RolloutsAsked,
    RoundDone,
    RunBegan,
    Sample,
    Save,
    Saved,
    StepTrained,
    StopAsked,
    StopTraining,
    TakeBack,
    Train,
    TrainRound,
    Watch,
    WeightsLive,
    WorkerJoined,
    WorkerLeft,
    WorkersPaced,
    WorkersWanted,
    from_record,
    to_record,
)
from slipstream.schedule.order import PromptOrder
from slipstream.schedule.scheduler import Scheduler

NEW, RESUMED, CUT_SHORT = RunBegan(0, 0, False), RunBegan(4, 12, True), RunBegan(4, 12, False)


def settings_of(*, with_eval: bool = True, **changes: dict[str, Any]) -> Config:
    """Two steps of three prompts; evaluation and checkpoints at the ends only, unless `changes` say otherwise."""
    task = {"source": "gcd", "size": 9}
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": "runs/x", "save_every": 99},
        "tasks": {"train": [task], "eval": {"held": task} if with_eval else {}},
        "train": {"steps": 2, "prompts_per_step": 3},
        "eval": {"every": 0},
    }
    for name, section in changes.items():
        sections[name] = sections.get(name, {}) | section
    return build_config({"model": "tiny"} | sections)


def scored(step: int, position: int, differ: bool = True) -> GroupScored:
    return GroupScored(step, position, num_scored=8, num_unscored=0, rewards_differ=differ)


def tell(scheduler: Scheduler, *events: Event) -> list[Action]:
    """The actions that follow from the last of the events."""
    actions: list[Action] = []
    for event in events:
        actions = scheduler.on_event(event, now_s=0.0)
    return actions


def asked(step: int, *positions: int) -> list[Action]:
    return [Generate(step, position) for position in positions]


def world(action: Action, differ: Sequence[bool] = ()) -> list[Event]:
    """What an obedient world reports; `differ` says by position whether a group has a signal."""
    match action:
        case Generate():
            has_signal = differ[action.position] if action.position < len(differ) else True
            return [scored(action.step, action.position, has_signal)]
        case Train():
            return [StepTrained(action.step)]
        case PushWeights():
            return [WeightsLive(action.step)]
        case Evaluate():
            return [Evaluated(action.step)]
        case Save():
            return [Saved(action.step)]
        case _:
            return []


def play(config: Config, first: Event = NEW, *, stop_before: int = -1, differ: Sequence[bool] = ()) -> list[Action]:
    """Drive a run to its end; `stop_before`: ask to stop before the n-th event is told. All actions, in order."""
    scheduler, inbox, done = Scheduler(config), [first], []
    for number in range(500):
        assert inbox, "nothing is under way, and the run has not finished"
        event: Event = StopAsked("tired") if number == stop_before else inbox.pop(0)
        for action in scheduler.on_event(event, now_s=float(number)):
            done.append(action)
            if isinstance(action, Finish):
                return done
            inbox += world(action, differ)
    raise AssertionError("the run does not end")


def test_the_order_of_actions_in_a_whole_run() -> None:
    assert play(settings_of()) == [
        PushWeights(0), Evaluate(0), Record(0), Save(0, 0, True),
        *asked(1, 0, 1, 2), Train(1, (0, 1, 2)), PushWeights(1), Record(1),
        *asked(2, 3, 4, 5), Train(2, (3, 4, 5)), PushWeights(2), Evaluate(2), Record(2), Save(2, 6, True),
        Finish("done"),
    ]  # fmt: skip


def test_nothing_but_the_start_is_done_in_a_run_of_no_steps() -> None:
    actions = play(settings_of(train={"steps": 0}))
    assert actions == [PushWeights(0), Evaluate(0), Record(0), Save(0, 0, True), Finish("done")]


@settings(max_examples=40)
@given(st.permutations(range(5)), st.lists(st.booleans(), min_size=5, max_size=5))
def test_groups_scored_in_any_order_give_the_same_actions(order: list[int], differ: list[bool]) -> None:
    config = settings_of(train={"prompts_per_step": 5}, algorithm={"dynamic_sampling": True}, with_eval=False)

    def last_actions(positions: Sequence[int]) -> list[Action]:
        scheduler = Scheduler(config)
        tell(scheduler, NEW, WeightsLive(0), Saved(0))
        early = [tell(scheduler, scored(1, position, differ[position])) for position in positions[:-1]]
        assert not any(early), "nothing follows before the round is complete"
        return tell(scheduler, scored(1, positions[-1], differ[positions[-1]]))

    assert last_actions(order) == last_actions(range(5))


def test_without_dynamic_sampling_groups_without_a_signal_stay() -> None:
    assert Train(1, (0, 1, 2)) in play(settings_of(), differ=[False] * 3)


def test_dynamic_sampling_replaces_groups_without_a_signal_round_by_round() -> None:
    config = settings_of(algorithm={"dynamic_sampling": True}, train={"steps": 1}, with_eval=False)
    actions = play(config, differ=[True, False, False, False, True, True])
    assert actions[3:] == [
        *asked(1, 0, 1, 2), *asked(1, 3, 4), *asked(1, 5),
        Train(1, (0, 4, 5)), PushWeights(1), Record(1), Save(1, 6, True), Finish("done"),
    ]  # fmt: skip


def test_dynamic_sampling_gives_up_after_its_rounds_and_trains_on_what_there_is() -> None:
    algorithm = {"dynamic_sampling": True, "max_sampling_rounds": 2}
    config = settings_of(algorithm=algorithm, train={"steps": 2}, with_eval=False)
    actions = play(config, differ=[False, True, False, False, False])
    assert actions[3:9] == [*asked(1, 0, 1, 2), *asked(1, 3, 4), Train(1, (1,))]
    assert asked(2, 5, 6, 7) == [action for action in actions if isinstance(action, Generate) and action.step == 2]
    assert Train(1, ()) in play(config, differ=[False] * 6)


@settings(max_examples=40)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_prompts_are_consumed_in_order_and_none_twice(differ: list[bool], rounds: int) -> None:
    config = settings_of(
        train={"steps": 4}, algorithm={"dynamic_sampling": True, "max_sampling_rounds": rounds}, with_eval=False
    )
    actions = play(config, RunBegan(0, 7, False), differ=differ)
    positions = [action.position for action in actions if isinstance(action, Generate)]
    assert positions == list(range(7, 7 + len(positions)))
    trained = [position for action in actions if isinstance(action, Train) for position in action.positions]
    assert trained == sorted(set(trained)) and set(trained) <= set(positions)


@pytest.mark.parametrize(
    ("evaluation", "steps"),
    [
        ({"every": 0}, [0, 5]),
        ({"every": 2}, [0, 2, 4, 5]),
        ({"every": 5}, [0, 5]),
        ({"every": 2, "before_train": False}, [2, 4, 5]),
        ({"every": 99, "before_train": False}, [5]),
    ],
)
def test_evaluation_is_due(evaluation: dict[str, Any], steps: list[int]) -> None:
    actions = play(settings_of(train={"steps": 5}, eval=evaluation))
    assert [action.step for action in actions if isinstance(action, Evaluate)] == steps
    without = play(settings_of(train={"steps": 5}, eval=evaluation, with_eval=False))
    assert not [action for action in without if isinstance(action, Evaluate)], "there is nothing to evaluate on"


@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (5, [0, 5]), (99, [0, 5])])
def test_a_checkpoint_is_due(every: int, steps: list[int]) -> None:
    actions = play(settings_of(train={"steps": 5}, run={"save_every": every}))
    saves = [action for action in actions if isinstance(action, Save)]
    assert [save.step for save in saves] == steps
    assert all(save.concluded and save.position == 3 * save.step for save in saves)


def test_every_step_is_recorded_once_in_order() -> None:
    actions = play(settings_of(train={"steps": 5}, eval={"every": 2}, run={"save_every": 2}))
    assert [action.step for action in actions if isinstance(action, Record)] == [0, 1, 2, 3, 4, 5]


def test_actions_do_not_depend_on_the_time() -> None:
    one, other = Scheduler(settings_of()), Scheduler(settings_of())
    events = [NEW, WeightsLive(0), Evaluated(0), Saved(0), scored(1, 1), scored(1, 0), scored(1, 2)]
    for number, event in enumerate(events):
        assert one.on_event(event, 0.0) == other.on_event(event, 1e9 - number)


# What stops in each phase: events before the stop, actions of the stop itself, events after it, actions of each.
BEGUN = [NEW, WeightsLive(0), Evaluated(0), Saved(0)]
GROUPS = [scored(1, 0), scored(1, 1), scored(1, 2)]
LAST = [*BEGUN, *GROUPS, StepTrained(1), WeightsLive(1), scored(2, 3), scored(2, 4), scored(2, 5)]
STOPS: dict[str, tuple[list[Event], list[Action], list[tuple[Event, list[Action]]]]] = {
    "before the weights are live": (
        [NEW],
        [],
        [(WeightsLive(0), [Save(0, 0, False)]), (Saved(0), [Finish("tired")])],
    ),
    "during the first evaluation": ([NEW, WeightsLive(0)], [Save(0, 0, False)], [(Saved(0), [Finish("tired")])]),
    "during the first save": (BEGUN[:3], [], [(Saved(0), [Finish("tired")])]),
    "during groups": (
        [*BEGUN, GROUPS[0]],
        [Save(0, 0, True)],
        [(GROUPS[1], []), (GROUPS[2], []), (Saved(0), [Finish("tired")])],
    ),
    "during training": (
        [*BEGUN, *GROUPS],
        [],
        [
            (StepTrained(1), [PushWeights(1)]),
            (WeightsLive(1), [Record(1), Save(1, 3, True)]),
            (Saved(1), [Finish("tired")]),
        ],
    ),
    "while weights are pushed": (
        [*BEGUN, *GROUPS, StepTrained(1)],
        [],
        [(WeightsLive(1), [Record(1), Save(1, 3, True)]), (Saved(1), [Finish("tired")])],
    ),
    "during groups of a later step": (
        LAST[:-2],
        [Save(1, 3, True)],
        [(Saved(1), [Finish("tired")])],
    ),
    "during training before an evaluation": (
        LAST,
        [],
        [(StepTrained(2), [PushWeights(2)]), (WeightsLive(2), [Save(2, 6, False)]), (Saved(2), [Finish("tired")])],
    ),
    "during the last evaluation": (
        [*LAST, StepTrained(2), WeightsLive(2)],
        [Save(2, 6, False)],
        [(Saved(2), [Finish("tired")])],
    ),
}


@pytest.mark.parametrize("phase", STOPS)
def test_a_stop_saves_the_last_trained_step_and_finishes(phase: str) -> None:
    before, actions, after = STOPS[phase]
    scheduler = Scheduler(settings_of())
    tell(scheduler, *before)
    assert tell(scheduler, StopAsked("tired")) == actions
    assert tell(scheduler, StopAsked("again")) == [], "the first reason counts"
    for event, wanted in after:
        assert tell(scheduler, event) == wanted


@pytest.mark.parametrize("number", range(19))
@pytest.mark.parametrize("with_eval", [True, False])
def test_a_stopped_and_resumed_run_does_what_an_unbroken_one_does(number: int, with_eval: bool) -> None:
    """Stop before any event: the resumed run trains, evaluates and records what is left, nothing twice."""
    config = settings_of(with_eval=with_eval, run={"save_every": 1}, eval={"every": 1})
    unbroken = play(config)
    stopped = play(config, stop_before=number)
    if stopped == unbroken:
        return  # it was over before
    assert stopped[-1] == Finish("tired")
    saves = [action for action in stopped if isinstance(action, Save)]
    resumed = play(config, RunBegan(saves[-1].step, saves[-1].position, saves[-1].concluded))

    def kept(actions: list[Action], kind: type) -> list[Action]:
        return [action for action in actions if isinstance(action, kind)]

    for kind in (Train, Record):
        assert kept(stopped, kind) + kept(resumed, kind) == kept(unbroken, kind), kind
    assert resumed[-1] == Finish("done")
    assert kept(resumed, Save)[-1:] in ([], kept(unbroken, Save)[-1:])


def test_a_concluded_step_is_not_evaluated_or_recorded_again() -> None:
    config = settings_of(train={"steps": 5}, eval={"every": 4})
    assert play(config, RESUMED)[:4] == [PushWeights(4), *asked(5, 12, 13, 14)]


def test_a_step_cut_short_is_evaluated_and_recorded_first() -> None:
    config = settings_of(train={"steps": 5}, eval={"every": 4}, run={"save_every": 4})
    actions = play(config, CUT_SHORT)
    assert actions[:5] == [PushWeights(4), Evaluate(4), Record(4), Save(4, 12, True), Generate(5, 12)]


def test_a_finished_run_that_is_resumed_finishes() -> None:
    assert play(settings_of(train={"steps": 4}), RESUMED) == [PushWeights(4), Finish("done")]


def test_a_finished_run_goes_on_when_more_steps_are_asked_for() -> None:
    assert Train(5, (12, 13, 14)) in play(settings_of(train={"steps": 5}), RESUMED)


EVERY_KIND = [
    WorkersWanted(3, "as was asked for"),
    WorkersPaced(2, ((4, 9, 0.5),)),
    NEW, scored(1, 2, False), StepTrained(1), WeightsLive(1), Evaluated(1), Saved(1), StopAsked("tired"),
    NotExact("it has experts"), DraftChosen(8, "2 drafts, 2+", "it pays"), DrafterAsked(False, "it does not"),
    Generate(1, 2), Feed(1, 2), Train(1, (2, 3)), Train(1, ()), PushWeights(1), Evaluate(1), Record(1),
    Save(1, 3, False), Save(1, 9, True, ((1, (3, 4)), (2, (5, 6, 7)))), Finish("done"),
    WorkerJoined("a", 8, ((1, 0.5), (8, 1.0))), WorkerLeft("a", (("1/0/0", 5),)), RolloutsAsked(1, (("1/0/0", "p"),)),
    RolloutEnded("1/0/0", 7), HandedBack("1/0/0", 5), Sample("a", "1/0/0", 5), TakeBack("a", "1/0/0"),
    CloseStep(1, ("1/0/0",)), Outgrew("1/0/0"), Lend("a"), Recall("a"), Watch("a", "1/0/0", 9),
    LessonsAdded(3), Rest(("a", "b")), RoundDone(1),
    TrainRound(1, "a", ("a", "b")), StopTraining("a"), Publish(1, "a"), EndSession(1),
]  # fmt: skip


def test_events_and_actions_survive_the_event_log() -> None:
    assert {type(item).__name__ for item in EVERY_KIND} == set(BY_NAME)
    for item in EVERY_KIND:
        name, fields = to_record(item)
        assert from_record(name, json.loads(json.dumps(fields))) == item


def test_what_is_only_for_the_record_leads_to_nothing() -> None:
    for item in (DraftChosen(8, "off", "it pays"), DrafterAsked(True, "it has been taught")):
        assert Scheduler(settings_of()).on_event(item, 0.0) == []


def test_a_replayed_log_gives_the_same_actions() -> None:
    config = settings_of(train={"steps": 3}, eval={"every": 2})
    recorded, scheduler, inbox = [], Scheduler(config), [NEW]
    while inbox:
        event = inbox.pop(0)
        actions = scheduler.on_event(event, 0.0)
        recorded.append((to_record(event), [to_record(action) for action in actions]))
        inbox += [fact for action in actions for fact in world(action)]
    replayed = Scheduler(config)
    for (name, fields), actions in recorded:
        event = from_record(name, fields)
        assert [to_record(action) for action in replayed.on_event(event, 5.0)] == actions  # type: ignore[arg-type]


@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(0, 3))
def test_every_epoch_is_a_permutation(num_prompts: int, seed: int, epoch: int) -> None:
    order = PromptOrder(num_prompts, seed)
    indices = [order.at(epoch * num_prompts + place) for place in range(num_prompts)]
    assert sorted(indices) == list(range(num_prompts))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    forward = [PromptOrder(20, 1).at(position) for position in range(60)]
    shared = PromptOrder(20, 1)
    assert [shared.at(position) for position in reversed(range(60))] == forward[::-1]
    assert forward[:20] != forward[20:40] != forward[40:]
    assert [PromptOrder(20, 2).at(position) for position in range(20)] != forward[:20]
