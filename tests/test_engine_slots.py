"""The compiled loops over slots do what they do uncompiled, and by hand."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from reports import report_from, report_of

from slipstream.engine import slots
from slipstream.engine.sequences import Running, Samplers
from slipstream.engine.slots import SlotTable
from slipstream.types import Request, SamplingParams

NUM_SLOTS, MAX_LENGTH, WIDTH = 12, 40, 5


def outcome(loop: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """What it gives, and what it makes of its arguments."""
    changed = copy.deepcopy(arguments)
    given = loop(*changed)
    parts: list[Any] = []
    for value in (*given, *changed):
        parts += value if isinstance(value, tuple) else [value]
    return [(value.dtype, value.tolist()) if isinstance(value, np.ndarray) else value for value in parts]


def random_table(dice: np.random.Generator) -> tuple[SlotTable, np.ndarray]:
    """Some slots taken, in any state; and a report about some of them."""
    table = SlotTable(NUM_SLOTS, MAX_LENGTH)
    for slot in range(NUM_SLOTS):
        if dice.random() < 0.7:
            sampling = SamplingParams(
                max_new_tokens=int(dice.integers(3 * WIDTH, 20)), stop_token_ids=(3, 4)[: slot % 3]
            )
            request = Request(str(slot), "g", (7,) * int(dice.integers(1, 9)), 0, sampling)
            sequence = Running(request, slot=slot, seat=100 - slot)
            table.seat(sequence, num_computed=int(dice.integers(0, sequence.num_known)), num_paged=8)
            if dice.random() < 0.5:  # it decodes
                table["known"][slot] += 2
                table["launched"][slot] = table["known"][slot] - 1
                table["hoped"][slot], table["new"][slot] = dice.integers(0, 9), 2
            table["is_watched"][slot] = dice.random() < 0.2
    counts = dice.integers(0, WIDTH + 1, (NUM_SLOTS, 1))
    drafted = np.minimum(WIDTH - 1, counts + dice.integers(0, 2, (NUM_SLOTS, 1))) * (counts > 0)
    origins = dice.integers(0, 5, (NUM_SLOTS, WIDTH))
    tokens = dice.integers(-1, 9, (NUM_SLOTS, WIDTH))
    logprobs, log_kept = (dice.integers(0, 99, (NUM_SLOTS, WIDTH)) for _ in range(2))
    parts = counts, drafted, tokens, logprobs, origins, log_kept
    return table, np.concatenate(parts, 1).astype(np.int32)


@pytest.mark.parametrize("seed", range(20))
def test_compiled_loops_give_what_they_give_uncompiled(seed: int) -> None:
    dice = np.random.default_rng(seed)
    table, lines = random_table(dice)
    for budget in (1, 5, 30):
        table["left"][:] = dice.integers(0, 9, NUM_SLOTS)
        arguments: tuple[Any, ...] = table._table, table.in_turn, budget > 1
        assert outcome(slots._note_behind, arguments) == outcome(slots._note_behind.py_func, arguments)
        table.note_behind(are_any=budget > 1)
        table["left"][:] = 20
        arguments = table._table, table.in_turn, budget
        assert outcome(slots._share_out, arguments) == outcome(slots._share_out.py_func, arguments)
        shares = table.share_out(budget)
        arguments = table._table, shares.slot_R, shares.tokens_R, shares.num_decoding, budget % 4
        assert outcome(slots._reach, arguments) == outcome(slots._reach.py_func, arguments)
        drafts_R, _ = table.reach(shares, budget % 4)
        arguments = table._table, shares.slot_R, shares.tokens_R, drafts_R
        assert outcome(slots._launch, arguments) == outcome(slots._launch.py_func, arguments)
        samplers, _ = table.launch(shares, drafts_R)
        samplers.seat_R[::3] -= 1  # taken out meanwhile
        bits, kept_bits = table._logprob_SL.view(np.int32), table._log_kept_SL.view(np.int32)
        texts = table._token_SL, bits, table._origin_SL, kept_bits
        arguments = table._table, table._stops_SE, texts, samplers.slot_R, samplers.seat_R, samplers.drafts_R, lines, 5
        assert outcome(slots._take_in, arguments) == outcome(slots._take_in.py_func, arguments)
    assert outcome(slots._summed, (lines, 5)) == outcome(slots._summed.py_func, (lines, 5))


def test_a_loop_that_does_otherwise_is_noticed() -> None:
    table, lines = random_table(np.random.default_rng(0))

    def with_one_token(table: Any, in_turn: Any, _: int) -> Any:
        return slots._share_out(table, in_turn, 1)

    arguments = table._table, table.in_turn, 30
    assert outcome(slots._share_out, arguments) != outcome(with_one_token, arguments)
    assert outcome(slots._summed, (lines, 5)) != outcome(lambda lines, _: slots._summed(lines[1:], 5), (lines, 5))


def test_what_slots_sampled_by_hand() -> None:
    """Slot 0 meets a stop token, 1 has all its tokens, 2 goes on, and 3 was taken by another meanwhile."""
    table = SlotTable(4, MAX_LENGTH)
    sampling = SamplingParams(max_new_tokens=3, stop_token_ids=(9,))
    running = [Running(Request(str(slot), "g", (7, 7), 0, sampling), slot=slot, seat=10 + slot) for slot in range(4)]
    for sequence in running:
        table.seat(sequence, num_computed=1, num_paged=16)
    shares = table.share_out(4)
    samplers, allotments = table.launch(shares, table.reach(shares, 2)[0])
    assert samplers.drafts_R.tolist() == [2, 2, 2, 2] and allotments.tolist() == [[slot, 3] for slot in range(4)]
    samplers = Samplers(samplers.slot_R, np.array([10, 11, 12, 99]), samplers.drafts_R)
    report = report_of(
        {
            0: ([5, 9], [-1.0, -2.0], [1, 0], 2),
            1: ([5, 6, 7], [-1.0] * 3, [4, 4, 0], 2),
            2: ([5], [-3.0], [0], 2),
            3: ([8], [-9.0], [0], 0),
        }
    )
    table["is_behind"][1:] = 1
    taken_in = table.take_in(samplers, report, version=6)
    assert taken_in.ended == [(0, 2, True), (1, 3, False)] and taken_in.num_tokens == 6
    assert (taken_in.num_behind, taken_in.tokens_behind) == (2, 4), "the third was taken by another"
    partial = table.sampled_from(running[0], 1)
    assert (partial.token_ids, partial.logprobs, partial.log_kept) == ((9,), (-2.0,), ())
    assert table.num_sampled(running[3]) == 0
    assert table["hoped"].tolist() == [0, 0, 0, 2] and table["known"].tolist() == [4, 5, 3, 3]
    table.vacate(running[1], keeps_origins=True)
    assert running[1].token_ids == [5, 6, 7] and running[1].origins == [4, 4, 0] and running[1].first_version == 6
    assert table.in_turn.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("left", "behind"),
    [
        ([5, 9, 7, 7, 8, 3, 3, 1], [1, 4]),
        ([9], [0]),
        ([4, 9], [1]),
        ([9, 9, 9, 9, 9, 9, 9, 4], [0, 1, 2, 3, 4, 5, 6]),
        ([9, 8, 8, 4, 4, 4, 4, 4], [0]),
        ([9, 4, 4, 4, 4, 4, 4, 4], [0]),
        ([4, 4, 4, 4], [0, 1, 2, 3]),
    ],
)
def test_a_quarter_is_behind_or_all_who_are_last(left: list[int], behind: list[int]) -> None:
    table = SlotTable(9, MAX_LENGTH)
    for slot, count in enumerate(left):
        request = Request(str(slot), "g", (7, 7), 0, SamplingParams(max_new_tokens=count))
        table.seat(Running(request, slot=slot, seat=slot), num_computed=1, num_paged=16)
    assert table.note_behind(are_any=True).tolist() == [[slot, int(slot in behind)] for slot in range(len(left))]
    assert table.note_behind(are_any=True).tolist() == [], "the device knows"
    assert np.flatnonzero(table["is_behind"]).tolist() == behind
    assert table.note_behind(are_any=False).tolist() == [[slot, 0] for slot in behind]


def test_who_takes_a_slot_does_not_stop_where_the_one_before_would() -> None:
    table = SlotTable(1, MAX_LENGTH)
    for stops, expected in (((9, 2**40), [(0, 1, True)]), ((), [])):
        request = Request("r", "g", (7, 7), 0, SamplingParams(max_new_tokens=3, stop_token_ids=stops))
        sequence = Running(request, slot=0, seat=len(stops))
        table.seat(sequence, num_computed=1, num_paged=16)
        shares = table.share_out(4)
        samplers, _ = table.launch(shares, table.reach(shares, 0)[0])
        assert table.take_in(samplers, report_of({0: ([9], [0.0], [0], 0)}), version=1).ended == expected
        table.vacate(sequence, keeps_origins=False)


def test_a_report_of_more_tokens_than_may_be_is_refused() -> None:
    table = SlotTable(1, MAX_LENGTH)
    request = Request("r", "g", (7, 7), 0, SamplingParams(max_new_tokens=2))
    table.seat(Running(request, slot=0, seat=0), num_computed=1, num_paged=16)
    shares = table.share_out(4)
    samplers, _ = table.launch(shares, table.reach(shares, 0)[0])
    with pytest.raises(AssertionError, match="more tokens than it may sample"):
        table.take_in(samplers, report_of({0: ([5] * 3, [0.0] * 3, [0] * 3, 2)}), version=1)


def test_only_who_decodes_has_drafts() -> None:
    table = SlotTable(2, MAX_LENGTH)
    for slot, num_prompt in enumerate((2, 9)):
        request = Request(str(slot), "g", (7,) * num_prompt, 0, SamplingParams(max_new_tokens=9))
        table.seat(Running(request, slot=slot, seat=slot), num_computed=1, num_paged=16)
    drafts_R, needed_R = table.reach(table.share_out(4), 3)
    assert drafts_R.tolist() == [3, 0] and needed_R.tolist() == [5, 4]


def test_what_a_report_sums_up_to() -> None:
    report = report_from([[1, 4, 0], [0], [3, 2]], [3, 0, 2])
    assert (report.num_rows, report.num_from, report.num_drafted) == (3, [2, 1, 1, 1, 1], 5)
    assert report.by_drafted[:4] == [1, 0, 1, 1] and report.by_right[:3] == [1, 0, 2]
    assert report_of({4: ([7, -1], [0.0, 0.0], [1, 0], 1), 5: ([7], [0.0], [0], 1)}).broken == [4]
