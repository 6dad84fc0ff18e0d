"""The selector finds what pays, follows when that changes, and loses little where drafting never pays."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import deque
from collections.abc import Callable

import pytest

from slipstream.draft.selector import DEFAULT_STRATEGIES, MIXED_STRATEGIES, MODEL_STRATEGIES, PREPARING, Selector
from slipstream.engine.strategy import MATCHING, OFF, Strategy

World = Callable[[int, Strategy], tuple[int, float]]
"""Tokens and seconds of a step of a batch with a strategy."""


def drive(selector: Selector, world: World, batch: int, steps: int) -> float:
    """Tokens a second over all steps."""
    tokens, seconds = 0, 0.0
    for _ in range(steps):
        strategy = selector.choose(batch)
        gained, took = world(batch, strategy)
        selector.observe(batch, strategy, gained / batch, took)
        tokens, seconds = tokens + gained, seconds + took
    return tokens / seconds


def world_with(odds: float, cost_of_draft: float, seed: int = 0) -> World:
    dice = random.Random(seed)

    def step(batch: int, strategy: Strategy) -> tuple[int, float]:
        tokens = 0
        for _ in range(batch):
            tokens += 1
            for _ in range(int(strategy.drafts_each)):
                if dice.random() > odds:
                    break
                tokens += 1
        cost = 1.0 + cost_of_draft * strategy.drafts_each + (0.01 if strategy.drafts_each else 0.0)
        return tokens, cost * dice.uniform(0.97, 1.03)

    return step


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
    assert selector.best(batch) == OFF and rate > 0.975 * batch


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
    without_gains = json.loads(json.dumps(selector.state_dict()))
    del without_gains["8 plain"]["gains"]
    older = Selector()
    older.load_state_dict(without_gains)
    assert older.best(8) == selector.best(8) and older.choose(8) is not None
    Selector().load_state_dict({"8": {"best": [0.0, 2], "steps": []}})  # of an older version: learned anew


def test_ways_that_were_never_chosen_for_a_size_are_tried_however_a_step_is_counted() -> None:
    selector = Selector()
    for _ in range(2000):
        strategy = selector.choose(3)
        selector.observe(3, strategy, 1.0, 1.0 + 0.001 * strategy.drafts_each)
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
        selector.observe(200, strategy, tokens, 1.0 + 0.25 * strategy.drafts_each)

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
            selector.observe(batch, strategy, gained / batch, took)
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
        selector.observe(8, way, 1.0, 1.0)
    assert tried[:2] == [OFF, selector.best(16)] and selector.best(16) != DEFAULT_STRATEGIES[1]


def texts_with(easy: float, hard: float, seed: int) -> World:
    """Each sequence is easy or hard to draft until it ends."""
    dice = random.Random(seed)
    odds: list[float] = []

    def step(batch: int, strategy: Strategy) -> tuple[int, float]:
        tokens = 0
        odds.extend(dice.choice([easy, hard]) for _ in range(batch - len(odds)))
        for row in range(batch):
            tokens += 1
            for _ in range(int(strategy.drafts_each)):
                if dice.random() > odds[row]:
                    break
                tokens += 1
            if dice.random() < 1 / 60:
                odds[row] = dice.choice([easy, hard])
        return tokens, (1.0 + 0.12 * strategy.drafts_each) * dice.uniform(0.97, 1.03)

    return step


def test_where_a_way_has_its_price_the_first_shows_most_and_comes_soon() -> None:
    for ways in (DEFAULT_STRATEGIES, MODEL_STRATEGIES, MIXED_STRATEGIES):
        selector, steps = Selector(ways, has_price=True), 0
        while (way := selector.choose(8)) == OFF:
            selector.observe(8, way, 1.0, 1.0)
            steps += 1
        assert way.drafts_each == 4 and steps < 300


def test_where_the_best_way_is_none_for_stretches_the_next_best_begins_them() -> None:
    tree = Strategy(8.0, 4, 4, 3)
    selector = Selector([OFF, COPY, tree])
    for _ in range(400):
        way = selector.choose(4)
        selector.observe(4, way, {OFF: 1.0, COPY: 2.0, tree: 4.0}[way], 1.0)
    assert selector.best(4) == tree and selector.best(4, True) == COPY


def test_texts_that_are_easy_for_every_way_make_none_look_the_best() -> None:
    """Ways are tried one after another, each on what is being sampled just then."""
    ways = [OFF, Strategy(1.0, 1), Strategy(2.0, 1), Strategy(4.0, 1), Strategy(8.0, 1)]
    shares = []
    for seed in range(12):
        alone = {way: drive(Selector([OFF, way]), texts_with(0.95, 0.6, seed), 8, 3000) for way in ways[1:]}
        shares.append(drive(Selector(ways), texts_with(0.95, 0.6, seed), 8, 3000) / max(alone.values()))
    assert statistics.mean(shares) > 0.96 and min(shares) > 0.85


def test_drafts_that_are_suddenly_all_wrong_are_given_up_at_once() -> None:
    ways = [OFF, Strategy(1.0, 1), Strategy(2.0, 1), Strategy(4.0, 1), Strategy(8.0, 1)]
    rates = []
    for seed in range(6):
        selector = Selector(ways)
        drive(selector, texts_with(0.95, 0.6, seed), 8, 3000)
        assert selector.best(8).drafts_each >= 4
        rates.append(drive(selector, texts_with(0.02, 0.02, seed), 8, 400) / 8)
        assert drive(selector, texts_with(0.02, 0.02, seed), 8, 2000) > 0.98 * 8 and selector.best(8) == OFF
    assert statistics.mean(rates) > 0.91 and min(rates) > 0.89


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


# Stretches of texts that repeat others.


def drive_stretches(selector: Selector, model_knows: bool, steps: int, seed: int = 0, batch: int = 1) -> float:
    """Sequences that repeat a known text for half of their tokens, in stretches of about 400, and are new else. In a
    stretch a copy is right and cheap; the model drafts both alike, or nothing, for half a step. As on a GPU, a step is
    told of when two more were chosen. Tokens a second and sequence."""
    dice = random.Random(seed)
    lefts, are_copies, is_matching = [0] * batch, [dice.random() < 0.5 for _ in range(batch)], False
    unread: deque[tuple[Strategy, float, float, bool, bool]] = deque()
    num_tokens, seconds = 0, 0.0
    for _ in range(steps):
        strategy = selector.choose(batch, is_matching)
        num_copied = num_right = 0
        for row in range(batch):
            if lefts[row] <= 0:
                are_copies[row] = not are_copies[row]
                lefts[row] = dice.randint(300, 500) if are_copies[row] else dice.randint(250, 450)
            right = 0
            if are_copies[row] and strategy.looks_for_matches:
                right = int(strategy.drafts_each)
                num_copied += right
            elif strategy.depth and model_knows:
                right = sum(dice.random() < 0.75 for _ in range(strategy.depth))
            num_right += right
            lefts[row] -= 1 + right
        took = 1.0 + 0.03 * strategy.drafts_each**0.5 + (0.5 if strategy.depth else 0.0)
        matches = num_copied >= MATCHING * batch
        unread.append((strategy, 1.0 + num_right / batch, took * dice.uniform(0.98, 1.02), is_matching, matches))
        if len(unread) > 2:
            *seen, was_matching, is_matching = unread.popleft()
            selector.observe(batch, *seen, was_matching)
        num_tokens, seconds = num_tokens + batch + num_right, seconds + took
    return num_tokens / batch / seconds


COPY, MODEL, BOTH = Strategy(8.0, 1), Strategy(4.0, 0, 4), Strategy(8.0, 4, 4)


def test_in_a_stretch_it_copies_and_outside_it_asks_the_model() -> None:
    alone = {way: drive_stretches(Selector([OFF, way]), True, 6000) for way in (COPY, MODEL, BOTH)}
    selector = Selector([OFF, COPY, BOTH])
    rate = drive_stretches(selector, True, 6000)
    assert selector.best(1) == BOTH and selector.best(1, is_matching=True) == COPY
    assert rate > 1.03 * max(alone.values()), "better than any one way"


def test_a_way_that_finds_stretches_is_not_left_for_one_that_passes_them_by() -> None:
    """Outside of a stretch a copy is never right, and to look for one costs a little; but not to look is worse."""
    for seed in range(4):
        selector = Selector([OFF, COPY])
        assert drive_stretches(selector, False, 4000, seed) > 1.35
        assert selector.best(1) == COPY and selector.best(1, is_matching=True) == COPY


def test_what_is_prepared_outside_is_tried_in_a_stretch_whatever_may_be_spent() -> None:
    selector = Selector([OFF, Strategy(2.0, 1), COPY, Strategy(16.0, 1)])
    drive(selector, world_with(0.3, 0.1), 8, 300)
    known = set(selector.rates(8))
    for _ in range(100):
        for is_matching in (False, True):
            selector.observe_preparing(8, 1e6, is_matching)
    tried = set()
    for _ in range(200):
        way = selector.choose(8, True)
        tried.add(way)
        selector.observe(8, way, 1.0, 1.0, True)
    assert tried == known and COPY in known and Strategy(16.0, 1) not in known


def test_one_who_repeats_a_text_alone_asks_no_model() -> None:
    selector = Selector([OFF, COPY, BOTH])
    drive_stretches(selector, True, 4000)
    assert not any(selector.choose(1, True).depth for _ in range(50))
    assert any(way.depth for way in selector.rates(1))


@pytest.mark.parametrize("batch", [3, 5, 7, 12])
def test_drafts_may_be_given_up_while_a_trial_is_not_settled(batch: int) -> None:
    """Whatever falls on the same step."""
    for seed in range(30):
        easy, hard, selector = texts_with(0.7, 0.5, seed), world_with(0.0, 0.2, seed), Selector(MIXED_STRATEGIES)
        for _ in range(4):
            drive(selector, easy, batch, 150 + seed)
            drive(selector, hard, batch, 100 + seed)
        assert selector.best(batch) in MIXED_STRATEGIES


def test_both_kinds_of_texts_survive_a_checkpoint() -> None:
    selector, other = Selector([OFF, COPY, BOTH]), Selector([OFF, COPY, BOTH])
    drive_stretches(selector, True, 4000)
    other.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    for is_matching in (False, True):
        assert other.best(1, is_matching) == selector.best(1, is_matching)
    assert other.state_dict() == selector.state_dict()


def test_a_quiet_while_is_no_reason_to_stop_looking() -> None:
    """Of four sequences none repeats another now and then, for longer than a window."""
    for seed in range(3):
        selector = Selector([OFF, COPY])
        assert drive_stretches(selector, False, 3000, seed, batch=4) > 1.35 and selector.best(4) == COPY


def test_what_was_saved_before_much_was_known_is_learned_anew() -> None:
    """A batch that comes to be of another size in a stretch: nothing is known of that size, in stretches or outside."""
    selector, other = Selector([OFF, COPY]), Selector([OFF, COPY])
    selector.choose(8, is_matching=True)
    drive(selector, world_with(0.9, 0.01), 8, 300)
    assert selector.best(8) == COPY
    other.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    assert other.best(8) == other.best(8, is_matching=True) == COPY
    fewer = Selector([OFF, BOTH])
    fewer.load_state_dict(selector.state_dict())
    assert fewer.best(8) == OFF, "what was best is no choice any more"
    for one in (other, fewer):
        for _ in range(200):
            strategy = one.choose(8, is_matching=True)
            one.observe(8, strategy, 1.0 + strategy.drafts_each, 1.0, True)
        assert one.best(8, is_matching=True).drafts_each == 8


def test_a_way_chosen_for_fewer_sequences_than_came_is_no_news() -> None:
    """A tree is chosen for eight, and then eight more are seated."""
    selector = Selector(MODEL_STRATEGIES)
    selector.observe(16, MODEL_STRATEGIES[-1], 2.0, 1.0)
    assert selector.rates(16) == {}
