"""Texts that repeat others, in stretches: the selector copies there, and does not stop looking for them elsewhere."""

from __future__ import annotations

import json
import random
from collections import deque

from draft_worlds import drive, world_with

from slipstream.draft.selector import Selector
from slipstream.engine.strategy import MATCHING, OFF, StepResult, Strategy


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
            selector.observe(StepResult(batch, *seen, was_matching))
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
    selector = Selector([OFF, Strategy(2.0, 1), COPY, Strategy(16.0, 1)], has_price=True)
    drive(selector, world_with(0.3, 0.1), 8, 4000)
    known = set(selector.rates(8))
    for _ in range(100):
        for is_matching in (False, True):
            selector.observe_preparing(8, 1e6, is_matching)
    tried = set()
    for _ in range(200):
        way = selector.choose(8, True)
        tried.add(way)
        selector.observe(StepResult(8, way, 1.0, 1.0, True))
    assert tried | {OFF} == known and COPY in known and Strategy(16.0, 1) not in known


def test_one_who_repeats_a_text_alone_asks_no_model() -> None:
    selector = Selector([OFF, COPY, BOTH])
    drive_stretches(selector, True, 4000)
    assert not any(selector.choose(1, True).depth for _ in range(50))
    assert any(way.depth for way in selector.rates(1))


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
            one.observe(StepResult(8, strategy, 1.0 + strategy.drafts_each, 1.0, True))
        assert one.best(8, is_matching=True).drafts_each == 8


def test_where_the_best_way_is_none_for_stretches_the_next_best_begins_them() -> None:
    tree = Strategy(8.0, 4, 4, 3)
    selector = Selector([OFF, COPY, tree])
    for _ in range(400):
        way = selector.choose(4)
        selector.observe(StepResult(4, way, {OFF: 1.0, COPY: 2.0, tree: 4.0}[way], 1.0))
    assert selector.best(4) == tree and selector.best(4, True) == COPY
