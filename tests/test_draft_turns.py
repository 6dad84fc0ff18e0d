"""In which rollouts a model that drafts is asked at all: one that costs more than it saves is left alone in most."""

from __future__ import annotations

import json
import random

import pytest

from slipstream.draft.asking import ALLOWED, LEAST_STEPS, Asking
from slipstream.draft.bucket import FEEDING
from slipstream.draft.selector import MIXED_STRATEGIES, MODEL_STRATEGIES, Selector
from slipstream.engine.strategy import OFF, Feeding, StepResult, Strategy


def rollout(
    selector: Selector, dice: random.Random, sizes: dict[int, int], odds: float, cost: float
) -> dict[str, float]:
    """Down through so many steps of each size; in how many a model was asked, told, or told nothing, and what they took
    more than without. `cost`: of a draft, in steps, of eight sequences and fewer; of more it is three times that."""
    counts = {"asked": 0, "told": 0, "alone": 0, "lost_s": 0.0}
    for batch, steps in sizes.items():
        for _ in range(steps):
            way = selector.choose(batch)
            counts["asked" if way.depth else "told" if selector.feed(batch) else "alone"] += 1
            right = [next((at for at in range(way.depth) if dice.random() > odds), way.depth) for _ in range(batch)]
            each, seconds = sum(right) / batch, 1.0 + cost * way.depth * (1 if batch <= 8 else 3)
            selector.observe(StepResult(batch, way, 1.0 + each, seconds, False, each if way.depth else None))
            counts["lost_s"] += seconds - (1.0 + each)
    return counts


def test_a_model_that_was_left_alone_is_left_alone_after_a_checkpoint() -> None:
    """Also if it has other weights by then, and until the same rollout as if there had been no checkpoint."""
    sizes, unbroken, dice = {64: 50, 16: 100, 4: 350}, Selector(MODEL_STRATEGIES), random.Random(3)
    while unbroken._asking.is_on:
        rollout(unbroken, dice, sizes, odds=0.33, cost=0.5)
    resumed = Selector(MODEL_STRATEGIES, has_model=False)
    resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
    num_alone = 0
    for selector in (unbroken, resumed):
        selector.note_new_model()
    while not unbroken._asking.is_on:
        assert not resumed._asking.is_on
        for selector in (unbroken, resumed):
            rollout(selector, random.Random(num_alone), sizes, odds=0.33, cost=0.5)
        num_alone += 1
    assert num_alone > 2 and resumed._asking.is_on


@pytest.mark.parametrize("num_short", [1, 5])
def test_a_model_that_never_pays_is_left_alone_until_what_it_lost_is_little(num_short: int) -> None:
    """However dear it is, and if it learns, twice as much: it is asked sooner. `num_short`: rollouts instead of one."""
    sizes, shares_asked = {batch: steps // num_short for batch, steps in ((64, 50), (16, 100), (4, 350))}, []
    for learns, cost in ((False, 0.5), (False, 0.36), (True, 0.5), (True, 0.36)):
        selector, dice = Selector(MODEL_STRATEGIES), random.Random(3)
        lost_s = num_asked = 0.0
        for _ in range(40 * num_short):
            if learns:
                selector.note_new_model()
            counts = rollout(selector, dice, sizes, odds=0.33, cost=cost)
            lost_s += counts["lost_s"]
            is_alone = counts["told"] <= 1  # the first step shows that a rollout has begun
            num_asked += not is_alone
            assert counts["asked"] == 0 or not is_alone
            assert counts["alone"] >= sum(sizes.values()) - 1 if is_alone else counts["alone"] <= 1
        assert lost_s < (0.021 if learns else 0.011) * 40 * 500
        shares_asked.append(num_asked / (40 * num_short))
    frozen_dear, frozen, learning_dear, learning = shares_asked
    assert 0.05 < frozen_dear < frozen < learning < 0.45 and frozen_dear < 0.6 * learning_dear < learning


@pytest.mark.parametrize("copies_bring", [0.0, 1.6])
def test_a_model_is_compared_with_what_would_run_without_it(copies_bring: float) -> None:
    """It is better than no drafts, but copies are better still, or there are none."""
    selector, dice, num_told, took_s, lost_s = Selector(MIXED_STRATEGIES), random.Random(1), 0, 0.0, 0.0
    for _ in range(20):
        for batch, steps in {64: 200, 16: 150, 4: 350}.items():
            for _ in range(steps):
                way = selector.choose(batch)
                is_fed = way.depth > 0 or selector.feed(batch) > Feeding.NOTHING
                num_told += is_fed
                tokens = 1.0 + (1.4 if way.depth else min(copies_bring, 0.8 * way.drafts_each))
                seconds = 1.0 + 0.02 * way.drafts_each + 0.05 * way.depth + 0.01 * is_fed
                of_model = 0.6 * (tokens - 1.0) if way.depth else None
                took_s += seconds
                lost_s += seconds - tokens / (1.0 + copies_bring) * 1.04 if way.depth else 0.01 * is_fed
                seconds *= dice.uniform(0.99, 1.01)
                selector.observe(StepResult(batch, way, tokens, seconds, False, of_model, is_fed=is_fed))
    share = num_told / (20 * 700)
    if copies_bring:
        assert share < 0.4 and lost_s < ALLOWED * took_s, (share, lost_s / took_s)
    else:
        assert share > 0.95, share


@pytest.mark.parametrize(("price", "pays"), [(0.06, False), (0.005, True)])
def test_a_model_that_saves_less_than_it_takes_to_tell_it_is_left_alone_in_most_rollouts(
    price: float, pays: bool
) -> None:
    """It pays for the last few, and for all of them it has to be told what is said."""
    selector, dice = Selector(MODEL_STRATEGIES, has_model=False), random.Random(7)
    are_told = []
    for number in range(14):
        if number == 1:
            selector.note_new_model()
        num_told = 0
        for batch, steps in {64: 600, 4: 150}.items():
            for _ in range(steps):
                way = selector.choose(batch)
                is_fed = way.depth > 0 or selector.feed(batch) > Feeding.NOTHING
                num_told += is_fed
                tokens = 1.0 + 0.5 * (way.depth > 0)
                seconds = (1.0 + (0.3 if batch == 4 else 1.0) * way.depth + price * is_fed) * dice.uniform(0.98, 1.02)
                step = StepResult(
                    batch, way, tokens, seconds, False, tokens - 1.0 if way.depth else None, is_fed=is_fed
                )
                selector.observe(step)
        are_told.append(num_told > 100)
    turns = selector.take_turns()
    # Told, as it was, until the rollout after it was taught; then by turns, with what it lost.
    assert [turn.is_asked for turn in turns] == [number % 2 == 0 for number in range(len(turns))]
    assert turns[0].reason == "it has been taught" and (len(turns) == 1) == pays and selector.take_turns() == []
    assert pays or ("it saved -" in turns[1].reason and "it lost" in turns[2].reason), turns
    assert not are_told[0] and (sum(are_told) > 10) == pays and are_told[1]
    assert pays or sum(are_told) in (3, 4), are_told


@pytest.mark.parametrize("num_many", [300, 4000, 5500])
def test_a_model_that_pays_for_the_last_few_alone_is_found(num_many: int) -> None:
    """However long there are many, for whom it does not."""
    selector, dice = Selector(MODEL_STRATEGIES), random.Random(4)
    sizes = {64: num_many, 16: 100, 8: 200, 4: 200, 2: 200}
    counts = [rollout(selector, dice, sizes, odds=0.7, cost=0.15) for _ in range(3)]
    assert counts[-1]["asked"] > 300 and counts[-1]["alone"] == 0


def test_rollouts_of_a_few_steps_are_enough_to_ask_in() -> None:
    selector, dice = Selector(MODEL_STRATEGIES, has_model=False), random.Random(6)
    rollout(selector, dice, {8: 10, 2: 10}, odds=0.9, cost=0.1)
    selector.note_new_model()
    counts = [rollout(selector, dice, {8: 10, 2: 10}, odds=0.9, cost=0.1) for _ in range(40)]
    assert sum(one["asked"] for one in counts[-10:]) > 120 and not any(one["alone"] for one in counts)


def test_a_trial_of_a_model_ends_with_the_rollout_in_which_it_was_told() -> None:
    selector, dice = Selector(MODEL_STRATEGIES), random.Random(5)
    num_steps = 0
    while num_steps < LEAST_STEPS or not selector.choose(4).depth:  # until it is in the middle of a trial
        way = selector.choose(4)
        selector.observe(StepResult(4, way, 1.0, 1.0 + way.depth, False, 0.0 if way.depth else None))
        num_steps += 1
    for _ in range(3):
        selector.observe(StepResult(16, selector.choose(16), 1.0, 1.0))
    assert selector.feed(4) == Feeding.NOTHING and selector.choose(4) == OFF
    assert rollout(selector, dice, {4: 100}, odds=0.0, cost=1.0)["asked"] == 0


def test_a_model_that_paid_for_long_and_does_no_more_is_soon_left_alone() -> None:
    """What it saved long ago is no reason to go on telling it."""
    asking = Asking(has_model=True)
    for gain_s, num_rollouts in ((0.1, 30), (-0.05, 6)):
        for _ in range(num_rollouts):
            for size in (*[64] * 300, *[4] * 300):
                asking.note_gain(gain_s)
                asking.note_step(size, 1.0, lambda: True)
        assert asking.is_on == (gain_s > 0)


@pytest.mark.parametrize("is_best_anew", [1, 2])
def test_what_trials_lost_before_a_model_was_best_is_forgiven_once(is_best_anew: int) -> None:
    asking = Asking(has_model=True)

    def rollouts(num_steps: int, gain_s: float) -> None:
        for size in (*[64] * (num_steps // 2), *[4] * (num_steps // 2), 64):
            asking.note_gain(gain_s)
            asking.note_step(size, 1.0, lambda: True)

    rollouts(LEAST_STEPS - 100, -0.5)
    for _ in range(is_best_anew):
        asking.note_use()
        rollouts(20, -0.1)
        assert asking.is_on, "it has been the best for twenty steps"
    rollouts(LEAST_STEPS, 0.01)
    assert asking.is_on, "by then it has saved more than it lost since it is the best"
    rollouts(200, -0.1)
    asking.note_use()
    rollouts(20, -0.1)
    assert not asking.is_on


def test_a_model_found_to_be_the_best_is_not_left_alone_for_what_it_took_to_find_it() -> None:
    """Texts repeated others at first, where copies gave more than the model that was told of it all."""
    copies, way = Strategy(4.0, 1), Strategy(4.0, 8, 4)
    selector, seconds = Selector([OFF, copies, way]), {OFF: 1.0, copies: 1.1, way: 1.3}
    easy, hard = {OFF: 1.0, copies: 3.0, way: 1.8}, {OFF: 1.0, copies: 1.1, way: 3.0}

    def steps(num_steps: int, tokens: dict[Strategy, float], batch: int) -> None:
        for _ in range(num_steps):
            chosen = selector.choose(batch)
            of_model = 0.6 * (tokens[way] - 1.0) if chosen.depth else None
            is_fed = chosen.depth > 0 or selector.feed(batch) > Feeding.NOTHING
            selector.observe(
                StepResult(batch, chosen, tokens[chosen], seconds[chosen], of_model=of_model, is_fed=is_fed)
            )

    steps(LEAST_STEPS, easy, 8)
    assert selector.best(8) == copies
    while selector.best(8) != way:
        steps(1, hard, 8)
    for _ in range(2):
        steps(10, hard, 2)
        steps(1, hard, 8)
    assert selector.best(8) == way and selector.feed(8) == Feeding.KEYS
    assert not selector.take_turns()


@pytest.mark.parametrize("tokens", [1.3, 4.0])
def test_to_tell_a_model_takes_a_share_of_the_step_however_many_tokens_it_gives(tokens: float) -> None:
    copies, lost = Strategy(4.0, 1), []
    selector = Selector([OFF, copies, Strategy(4.0, 8, 4)])
    for _ in range(200):
        chosen, before_s = selector.choose(8), selector._asking._gain_s
        each, seconds = (tokens, 1.1) if chosen == copies else (1.0, 1.0 + 0.2 * chosen.depth)
        selector.observe(StepResult(8, chosen, each, seconds, of_model=0.0 if chosen.depth else None, is_fed=True))
        if chosen == copies:
            lost.append(before_s - selector._asking._gain_s)
    assert len(lost) > 100 and lost == pytest.approx([FEEDING * 1.1] * len(lost))


def test_what_a_model_saved_before_it_was_best_anew_is_not_forgotten() -> None:
    asking = Asking(has_model=True)
    for number, size in enumerate((*[64] * 1000, *[4] * 1000, 64, *[64] * 350, *[4] * 350, 64)):
        if number == 2001:
            asking.note_use()
        asking.note_gain(0.1 if number < 2001 else -0.02)
        asking.note_step(size, 1.0, lambda: True)
    assert asking.is_on, "it saved 100 s, and then lost 14"


@pytest.mark.parametrize(("loses", "is_best_at"), [(0.04, 3600), (0.15, 3600), (0.15, 2000), (0.15, None)])
def test_what_is_forgiven_is_made_up_for_before_a_model_is_asked_again(loses: float, is_best_at: int | None) -> None:
    """One that never pays, and is the best by chance when that is forgiven the most."""
    asking, lost_s, told, in_use_until, num_steps = Asking(has_model=True), 0.0, 0, 0, 200_000
    for step in range(num_steps):
        told = told + 1 if asking.is_on else 0
        lost_s += loses * asking.is_on
        if asking.is_on:
            asking.note_gain(-loses)
        if told == is_best_at:
            asking.note_use()
            in_use_until = step + 500
        in_use = step < in_use_until
        asking.note_step(64 if step % 4000 < 3000 else 4, 1.0, lambda in_use=in_use: in_use)  # type: ignore[misc]
    assert 0.5 * ALLOWED < lost_s / num_steps < 1.3 * ALLOWED, lost_s / num_steps


def test_a_model_that_is_the_best_where_texts_are_repeated_is_in_use_too() -> None:
    """What is the best outside makes too few drafts to be tried there."""
    one, way = Strategy(1.0, 2), Strategy(2.0, 8, 2)
    selector, asking = Selector([OFF, one, way]), Asking(has_model=True)
    tokens, seconds = {OFF: 1.0, one: 1.5, way: 1.4}, {OFF: 1.0, one: 1.02, way: 1.05}
    for _ in range(600):
        chosen = selector.choose(8)
        of_model = 0.4 if chosen.depth else None
        selector.observe(StepResult(8, chosen, tokens[chosen], seconds[chosen], of_model=of_model, is_fed=True))
    assert selector.best(8) == one and selector._asking._used_from == asking._used_from
    assert selector.best(8, is_matching=True) == way and selector._asking._used_from == 600
