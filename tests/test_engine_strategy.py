"""A step is made for the drafts there are, and sequences match when they repeat known texts."""

from __future__ import annotations

import numpy as np
import pytest
from reports import report_from

from slipstream.engine.fitting import fitted
from slipstream.engine.sequences import Samplers, StepPlan
from slipstream.engine.strategy import MODEL_ORIGIN, OFF, Demand, StepDrafts, Strategy, are_matching, result_of


@pytest.mark.parametrize(
    ("origins", "expected"),
    [([], False), ([[], [0]], False), ([[1, 2, 0]], True), ([[4, 4, 4, 0]], False), ([[3, 3, 3, 3, 0], [0], []], True)],
)
def test_sequences_match_when_two_drafts_each_were_right_copies(origins: list[list[int]], expected: bool) -> None:
    assert are_matching(report_from(origins)) == expected


@pytest.mark.parametrize(("depth", "had_room", "of_model"), [(4, True, 0.5), (4, False, None), (0, True, None)])
def test_a_model_was_asked_if_the_way_asks_one_and_drafts_had_room(
    depth: int, had_room: bool, of_model: float | None
) -> None:
    drafts = StepDrafts(2, False, Strategy(4.0, 1, depth), room=8)
    plan = StepPlan(samplers=Samplers(np.arange(2)), num_drafts=8 * had_room)
    result = result_of(drafts, plan, report_from([[MODEL_ORIGIN, 0], [0]]), 1.0, None)
    assert result.of_model == of_model and (result.batch, result.tokens_each) == (2, 1.5)


def see(demand: Demand, strategy: Strategy, batch: int, drafts: float, steps: int, *, on_gpu: bool = False) -> int:
    """Steps with so many drafts a sequence to be had; the room of the last."""
    given = 0
    for _ in range(steps):
        asked = demand.room(strategy, batch)
        given = fitted(batch, asked) if on_gpu and asked else asked
        demand.observe(StepDrafts(batch, False, strategy, asked), given, min(given, round(drafts * batch)))
    return given


def test_a_step_is_made_for_the_drafts_there_are() -> None:
    demand, strategy = Demand(), Strategy(8.0)
    assert demand.room(strategy, 64) == 512 and demand.room(OFF, 64) == 0
    assert see(demand, strategy, 64, 0.0, 1) > 0 and demand.room(strategy, 64) >= 384, "one step without says little"
    assert see(demand, strategy, 64, 39 / 64, 30) == 48, "the least of 512, 384, 256, ... that holds 39 and a few more"
    assert see(demand, strategy, 64, 99.0, 12) == 512, "steps that were full grow again"
    assert demand.room(Strategy(0.5), 1) == 1


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 5, 7, 16, 33, 64, 100, 256])
def test_nothing_to_draft_leaves_room_to_find_out_that_there_is_again(batch: int, on_gpu: bool) -> None:
    demand, strategy = Demand(), Strategy(8.0)
    assert see(demand, strategy, batch, 0.0, 200, on_gpu=on_gpu) < batch + 8
    most = fitted(batch, 8 * batch) if on_gpu else 8 * batch
    assert see(demand, strategy, batch, 99.0, 40, on_gpu=on_gpu) == most


def test_what_was_needed_long_ago_or_by_a_very_different_strategy_counts_no_more() -> None:
    demand = Demand()
    see(demand, Strategy(4.0, 1), 64, 1.0, 60)
    assert demand.room(Strategy(8.0, 1), 64) == 128, "what the other needed, and half as much more"
    assert demand.room(Strategy(8.0, 2), 64) == 512, "it may match more or less often"
    see(demand, OFF, 64, 0.0, 150)
    assert demand.room(Strategy(8.0, 1), 64) == 512


def test_one_that_had_no_room_to_spare_says_nothing_about_another() -> None:
    demand = Demand()
    see(demand, Strategy(2.0, 1), 64, 99.0, 60)
    assert demand.room(Strategy(8.0, 1), 64) == 512
