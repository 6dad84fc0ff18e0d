"""The selector finds what pays, follows when that changes, and loses little where drafting never pays."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
from draft_worlds import World, drive, texts_with, world_with

from slipstream.draft.selector import DEFAULT_STRATEGIES, MIXED_STRATEGIES, MODEL_STRATEGIES, PREPARING, Selector
from slipstream.engine.strategy import OFF, StepResult, Strategy


def test_of_a_size_that_is_hardly_known_nothing_is_saved() -> None:
    """It would take the place of what another worker knows of it."""
    selector = Selector()
    drive(selector, world_with(0.8, 0.02), 8, 100)
    selector.choose(64)
    assert {name.split()[0] for name in selector.state_dict()} == {"8", "asking"}


def test_where_drafts_pay_most_tokens_come_from_the_best_way() -> None:
    selector = Selector()
    rate = drive(selector, world_with(0.8, 0.02), 8, 600)
    best = max(drive(Selector([OFF, s]), world_with(0.8, 0.02), 8, 600) for s in DEFAULT_STRATEGIES if s != OFF)
    assert selector.best(8).drafts_each >= 4 and rate > 0.9 * best and rate > 2.0 * 8
    assert selector.choices and "times the tokens" in selector.choices[0].reason


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_where_drafts_never_pay_hardly_anything_is_lost(batch: int) -> None:
    selector = Selector()
    rate = drive(selector, world_with(0.05, 0.2), batch, 2000)
    assert selector.best(batch) == OFF and rate > 0.97 * batch


def test_it_follows_when_the_world_changes_both_ways() -> None:
    selector = Selector()
    drive(selector, world_with(0.1, 0.1), 4, 300)
    assert selector.best(4) == OFF
    drive(selector, world_with(0.9, 0.02), 4, 4000)
    assert selector.best(4).drafts_each >= 2
    drive(selector, world_with(0.1, 0.3), 4, 4000)
    assert selector.best(4) == OFF


@pytest.mark.parametrize("growth", [1.0003, 0.9997])
def test_steps_that_take_ever_longer_are_no_reason_to_change(growth: float) -> None:
    """As texts grow, what was tried early looks fast; it is not, and trying it again and again would cost."""
    step, age = world_with(0.05, 0.2), 0

    def growing(batch: int, strategy: Strategy) -> tuple[int, float]:
        nonlocal age
        age += 1
        tokens, seconds = step(batch, strategy)
        return tokens, seconds * growth**age

    selector = Selector()
    drive(selector, growing, 64, 1500)
    assert selector.best(64) == OFF and all("is not tried" in choice.reason for choice in selector.choices)
    assert selector.rates(64)[OFF] == pytest.approx(1 / growth**age, rel=0.03)


def test_a_way_that_turns_cheaper_once_taken_says_nothing_of_the_others() -> None:
    """Its steps are made for all drafts it may have, and soon for those there are."""
    step, num_drafting = world_with(0.8, 0.02), 0

    def settling(batch: int, strategy: Strategy) -> tuple[int, float]:
        nonlocal num_drafting
        num_drafting += strategy.drafts_each > 0
        tokens, seconds = step(batch, strategy)
        return tokens, seconds * (2.0 if 0 < num_drafting < 20 else 1.0)

    selector = Selector([OFF, Strategy(8.0)])
    drive(selector, settling, 64, 120)
    assert selector.best(64) == Strategy(8.0) and selector.rates(64)[OFF] == pytest.approx(1.0, rel=0.05)


def test_sizes_of_batch_are_judged_apart() -> None:
    selector = Selector()
    drive(selector, world_with(0.9, 0.01), 2, 300)
    drive(selector, world_with(0.9, 1.5), 200, 300)
    assert selector.best(2).drafts_each >= 4 and selector.best(200) == OFF


def drive_with_some_behind(
    selector: Selector, batch: int, steps: int, time: float = 1.0, *, others_follow: bool = False
) -> int:
    """Drafts double the tokens of all but those behind, who go on in smaller batches, and steps take half as long
    again. How many steps had drafts."""
    num_drafting = 0
    for _ in range(steps):
        way = selector.choose(batch)
        behind, tokens = (1.1, 2.0 if batch == 16 else 1.1) if way.drafts_each else (1.0, 1.0)
        seconds = time * (1.5 if way.drafts_each else 1.0)
        selector.observe(StepResult(batch, way, tokens, seconds, False, None, behind, others_follow))
        num_drafting += way.drafts_each > 0
    return num_drafting


@pytest.mark.parametrize(("share_alone", "pays"), [(0.9, False), (0.2, True)])
def test_who_is_behind_counts_by_how_much_of_a_step_it_would_take_alone(share_alone: float, pays: bool) -> None:
    """Once all others have ended, it goes on alone; what they got sooner has only made steps cheaper."""
    selector = Selector([OFF, Strategy(1.0)])
    drive_with_some_behind(selector, 1, 200, share_alone)
    drive_with_some_behind(selector, 4, 200, (1 + share_alone) / 2)
    selector.take_saved_s()
    drive_with_some_behind(selector, 16, 500)
    assert (selector.best(16) != OFF) == pays
    assert (selector.take_saved_s() > 0) == pays, "what drafts save is what the rollout takes less"


def test_while_nothing_is_known_of_fewer_sequences_all_count_alike() -> None:
    selector = Selector([OFF, Strategy(1.0)])
    drive_with_some_behind(selector, 16, 500)
    assert selector.best(16) != OFF
    drive_with_some_behind(selector, 1, 200, 0.9)
    drive_with_some_behind(selector, 16, 500)
    assert selector.best(16) == OFF


def test_where_others_take_the_slots_that_get_free_all_count_alike_also_at_the_end() -> None:
    """Else drafts would be given up at the end of a rollout, and missed throughout the next."""
    selector = Selector([OFF, Strategy(1.0)])
    drive_with_some_behind(selector, 1, 200, 0.9)
    drive_with_some_behind(selector, 16, 500, others_follow=True)
    for _ in range(5):
        assert drive_with_some_behind(selector, 16, 100) > 90
        assert drive_with_some_behind(selector, 16, 300, others_follow=True) > 270


def test_a_small_gain_does_not_make_it_change() -> None:
    selector = Selector([OFF, Strategy(1.0)])

    def nearly_equal(batch: int, strategy: Strategy) -> tuple[int, float]:
        return batch, 0.98 if strategy.drafts_each else 1.0

    drive(selector, nearly_equal, 4, 500)
    assert selector.best(4) == OFF and not selector.choices


def test_what_was_learned_survives_a_checkpoint() -> None:
    selector, other = Selector(), Selector()
    drive(selector, world_with(0.9, 0.01), 8, 300)
    other.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    assert other.best(8) == selector.best(8) != OFF
    assert other.rates(8) == selector.rates(8) and other.state_dict() == selector.state_dict()
    earlier = json.loads(json.dumps(selector.state_dict()))
    del earlier["8 plain"]["beliefs"]
    older = Selector()
    older.load_state_dict(earlier)
    assert older.best(8) == selector.best(8) and older.choose(8) is not None
    Selector().load_state_dict({"8": {"best": [0.0, 2], "steps": []}})  # of an older version: learned anew


def test_a_checkpoint_may_come_at_any_step() -> None:
    """Also while a trial is not settled, and the size of batch changes before it is, as in the tail of a rollout."""
    world, batches = world_with(0.25, 0.02), [64] * 24 + [30] * 8 + [8] * 8 + [1] * 8
    selector, num_unsettled = Selector(), 0
    for batch in batches:
        drive(selector, world, batch, 5)
        num_unsettled += any(bucket.contender is not None for bucket in selector._buckets.values())
        resumed = Selector()
        resumed.load_state_dict(json.loads(json.dumps(selector.state_dict())))
        for size in (64, 30, 8, 1):
            drive(resumed, world, size, 200)
    assert num_unsettled > 5


def test_ways_that_were_never_chosen_for_a_size_are_tried_however_a_step_is_counted() -> None:
    selector = Selector()
    for _ in range(2000):
        strategy = selector.choose(3)
        selector.observe(StepResult(3, strategy, 1.0, 1.0 + 0.001 * strategy.drafts_each))
    assert set(selector.rates(3)) == set(DEFAULT_STRATEGIES[:-1]) and selector.best(3) == OFF


def test_what_cannot_win_is_not_even_tried_until_it_can() -> None:
    """Where two drafts bring a tenth of a token and cost half a step, four and eight cannot pay, and trying them would
    cost steps; the record says so. When two begin to pay, so may the others."""
    selector, chosen = Selector(), set[Strategy]()

    def step(tokens_of_two: float) -> None:
        strategy = selector.choose(200)
        chosen.add(strategy)
        share = min(strategy.drafts_each / 2, 4.0)
        tokens = 1.0 + (tokens_of_two - 1.0) * share if strategy.min_match == 1 else 1.0
        selector.observe(StepResult(200, strategy, tokens, 1.0 + 0.25 * strategy.drafts_each))

    for _ in range(500):
        step(1.1)
    assert chosen == {OFF, Strategy(0.5, 2), Strategy(2.0, 1)}
    reasons = [choice.reason for choice in selector.take_choices()]
    assert sum("is not tried" in reason for reason in reasons) == 3 and len(reasons) == 3
    for _ in range(20_000):
        step(3.0)
    assert selector.best(200) == Strategy(8.0, 1)


def test_very_many_drafts_are_tried_with_few_sequences_once_many_have_proved_best() -> None:
    most = DEFAULT_STRATEGIES[-1]
    for batch, odds, cost in ((4, 0.97, 0.001), (4, 0.5, 0.1), (64, 0.97, 0.001)):
        selector = Selector()
        drive(selector, world_with(odds, cost), batch, 800)
        assert (selector.best(batch) == most) == (most in selector.rates(batch)) == ((batch, odds) == (4, 0.97))


@pytest.mark.parametrize("gain", [1.02, 0.99])
def test_drafts_that_cost_a_little_are_given_up_and_those_that_gain_a_little_stay(gain: float) -> None:
    selector = Selector([OFF, Strategy(1.0)])
    drive(selector, lambda batch, strategy: (batch, 0.9 if strategy.drafts_each else 1.0), 4, 400)
    assert selector.best(4) == Strategy(1.0)
    drive(selector, lambda batch, strategy: (batch, 1.0 / gain if strategy.drafts_each else 1.0), 4, 2000)
    assert (selector.best(4) == OFF) == (gain < 1)


def drive_with_graphs(selector: Selector, world: World, batch: int, steps: int, price: float) -> float:
    """Seconds spent on preparing, against those of the steps: a way's first two steps prepare the others."""
    met: dict[Strategy, int] = {}
    prepared = ran = 0.0
    for _ in range(steps):
        strategy = selector.choose(batch)
        gained, took = world(batch, strategy)
        ran += took
        met[strategy] = met.get(strategy, 0) + 1
        if strategy != OFF and met[strategy] <= 2:
            prepared += price / 2
            selector.observe_preparing(batch, price / 2)
        else:
            selector.observe(StepResult(batch, strategy, gained / batch, took))
    return prepared / ran


@pytest.mark.parametrize("steps", [400, 1000, 4000])
def test_a_run_pays_for_preparing_by_how_long_it_is_where_drafts_do_not(steps: int) -> None:
    price = 40.0
    share = drive_with_graphs(Selector(has_price=True), world_with(0.05, 0.2), 8, steps, price)
    assert 0 < share <= PREPARING + price / steps, "the first could not know what it takes"


def test_what_drafts_save_goes_into_preparing_better_ones() -> None:
    poor, rich = Selector(has_price=True), Selector(has_price=True)
    drive_with_graphs(poor, world_with(0.05, 0.02), 8, 1500, 25.0)
    drive_with_graphs(rich, world_with(0.9, 0.02), 8, 1500, 25.0)
    assert rich.best(8).drafts_each >= 8 and poor.best(8) == OFF
    assert len(poor.rates(8)) == 2 and len(rich.rates(8)) > 4


def test_without_a_limit_all_is_tried_whatever_it_takes() -> None:
    tried = []
    for selector in (Selector(has_price=True, preparing=math.inf), Selector(has_price=True)):
        drive_with_graphs(selector, world_with(0.3, 0.1), 8, 600, 1e6)
        tried.append(set(selector.rates(8)))
    assert tried[0] > tried[1]


def test_while_new_ways_are_too_dear_known_ones_are_tried_again() -> None:
    ways, easy, hard = [OFF, Strategy(2.0), Strategy(8.0, 1)], world_with(0.9, 0.02), world_with(0.0, 0.2)
    selector = Selector(ways, has_price=True)
    drive_with_graphs(selector, hard, 8, 400, 10_000.0)
    assert selector.best(8) == OFF and len(selector.rates(8)) == 2
    drive(selector, easy, 8, 1500)
    assert [choice.strategy for choice in selector.choices] == [Strategy(2.0), Strategy(8.0, 1)], (
        "it paid for the other"
    )


def test_what_is_best_for_as_many_again_is_tried_first() -> None:
    selector = Selector()
    drive(selector, world_with(0.6, 0.05), 16, 600)
    tried: list[Strategy] = []
    for _ in range(60):
        way = selector.choose(8)
        tried += [way] * (way not in tried)
        selector.observe(StepResult(8, way, 1.0, 1.0))
    assert tried[:2] == [OFF, selector.best(16)] and selector.best(16) != DEFAULT_STRATEGIES[1]


def test_where_a_way_has_its_price_the_first_shows_most_and_comes_soon() -> None:
    for ways in (DEFAULT_STRATEGIES, MODEL_STRATEGIES, MIXED_STRATEGIES):
        selector, steps = Selector(ways, has_price=True), 0
        while (way := selector.choose(8)) == OFF:
            selector.observe(StepResult(8, way, 1.0, 1.0))
            steps += 1
        assert way.drafts_each == 4 and steps < 300


def test_texts_that_are_easy_for_every_way_make_none_look_the_best() -> None:
    """Ways are tried one after another, each on what is being sampled just then."""
    ways = [OFF, Strategy(1.0, 1), Strategy(2.0, 1), Strategy(4.0, 1), Strategy(8.0, 1)]
    seeds = range(12)
    alone = [
        statistics.mean(drive(Selector([OFF, way]), texts_with(0.95, 0.6, seed), 8, 3000) for seed in seeds)
        for way in ways[-2:]  # fewer drafts give less
    ]
    shares = [drive(Selector(ways), texts_with(0.95, 0.6, seed), 8, 3000) / max(alone) for seed in seeds]
    assert statistics.mean(shares) > 0.96 and min(shares) > 0.86


def test_drafts_that_are_suddenly_all_wrong_are_given_up_at_once() -> None:
    ways = [OFF, Strategy(1.0, 1), Strategy(2.0, 1), Strategy(4.0, 1), Strategy(8.0, 1)]
    rates = []
    for seed in range(6):
        selector = Selector(ways)
        drive(selector, texts_with(0.95, 0.6, seed), 8, 3000)
        assert selector.best(8).drafts_each >= 4
        rates.append(drive(selector, texts_with(0.02, 0.02, seed), 8, 400) / 8)
        assert drive(selector, texts_with(0.02, 0.02, seed), 8, 2000) > 0.98 * 8 and selector.best(8) == OFF
    assert statistics.mean(rates) > 0.9 and min(rates) > 0.86


@pytest.mark.parametrize("num_hard", range(40, 130, 20))
def test_drafts_given_up_for_a_few_hard_texts_are_soon_made_again(num_hard: int) -> None:
    selector = Selector([OFF, Strategy(4.0, 1)])
    easy, hard = world_with(0.8, 0.05), world_with(0.0, 0.05)
    drive(selector, easy, 64, 600)
    drive(selector, hard, 64, num_hard)
    assert selector.best(64) == OFF
    drive(selector, easy, 64, 75)
    assert selector.best(64) != OFF


def test_drafts_given_up_for_many_hard_texts_are_tried_less_and_less_often() -> None:
    selector, hard = Selector([OFF, Strategy(4.0, 1)]), world_with(0.0, 0.05)
    drive(selector, world_with(0.8, 0.05), 64, 600)
    drive(selector, hard, 64, 200)
    assert drive(selector, hard, 64, 1000) > 0.985 * 64 and selector.best(64) == OFF


@pytest.mark.parametrize("batch", [8, 64])
def test_drafts_that_pay_no_more_are_left_once_and_not_taken_again(batch: int) -> None:
    ways = [OFF, Strategy(1.0, 1), Strategy(2.0, 1), Strategy(4.0, 1), Strategy(8.0, 1)]

    def world_of(gain: float, seed: int) -> World:
        dice = random.Random(seed)

        def step(size: int, strategy: Strategy) -> tuple[int, float]:
            if strategy == OFF:
                return size, dice.uniform(0.97, 1.03)
            cost = 1.3 + 0.05 * strategy.drafts_each
            odds = (gain * cost - 1.0) / strategy.drafts_each
            right = sum(int(strategy.drafts_each) * (dice.random() < odds) for _ in range(size))
            return size + right, cost * dice.uniform(0.97, 1.03)

        return step

    for seed in range(3):
        selector = Selector(ways)
        drive(selector, world_of(1.4, seed), batch, 3000)
        assert selector.best(batch) != OFF
        selector.take_choices()
        assert drive(selector, world_of(0.9, seed + 50), batch, 600) > 0.95 * batch
        assert len([choice for choice in selector.choices if "gives" in choice.reason]) <= 4


@pytest.mark.parametrize("batch", [3, 5, 7, 12])
def test_drafts_may_be_given_up_while_a_trial_is_not_settled(batch: int) -> None:
    """Whatever falls on the same step."""
    for seed in range(15):
        easy, hard, selector = texts_with(0.7, 0.5, seed), world_with(0.0, 0.2, seed), Selector(MIXED_STRATEGIES)
        for _ in range(4):
            drive(selector, easy, batch, 150 + seed)
            drive(selector, hard, batch, 100 + seed)
        assert selector.best(batch) in MIXED_STRATEGIES


def test_a_way_chosen_for_fewer_sequences_than_came_is_no_news() -> None:
    """A tree is chosen for eight, and then eight more are seated."""
    selector = Selector(MODEL_STRATEGIES)
    selector.observe(StepResult(16, MODEL_STRATEGIES[-1], 2.0, 1.0))
    assert selector.rates(16) == {}
