"""The sequences that have a slot, in columns, and what a step does to hundreds of them at once. No tensors.

The batcher alone changes it. A free slot has seat -1, nothing allotted, and whatever else the last sequence left there.
The loops are compiled: a step of a small model is over before Python has gone through its sequences. Uncompiled they do
the same, which `tests/test_engine_slots.py` asserts.

Axes: S slots, R slots that run with a plan, or sample with it, W numbers of a slot's line in a report, O origins, E
stop tokens, L tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from slipstream.engine.sequences import Ints, PartialRollout, Report, Running, Samplers
from slipstream.types import ORIGIN_NAMES

MAX_STOP_TOKENS = 8
"""Of one request: the device compares every sampled token with all of them."""
NO_TOKEN = -2
"""No stop token; no draft."""
BROKEN = -1
"""In a report, as a token: the logits were not numbers."""
BEHIND = 4
"""One in so many sequences is behind, those that may still sample most."""

_COLUMNS = (
    "seat",  # as in `Running`, or -1
    "turn",  # who is served first: the lowest
    "max_keys",
    "paged",  # keys that its pages have room for
    "launched",  # tokens whose keys are computed, or will be by the steps launched so far; with drafts at least so many
    "known",  # tokens it has, or will have after the steps launched so far; with drafts at least so many
    "hoped",  # tokens beyond one each that steps launched and not yet read may give, if their drafts are accepted
    "left",  # tokens it may still sample, by what was read
    "new",  # tokens that were read since it took its seat
    "allotted",  # tokens it may run, as the device knows; -1 if it is to be told in any case
    "first_version",
    "cuts_tail",  # 1 if its distribution is cut
    "is_watched",  # 1 if it may end by a stop text
    "is_behind",  # 1 if all others may have to wait for it, as the device knows; -1 if it is to be told in any case
)
Table = NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Of a step's tokens."""

    slot_R: Ints
    tokens_R: Ints
    num_decoding: int
    """How many of them decode, who come first."""

    @property
    def num_tokens(self) -> int:
        return int(self.tokens_R.sum())

    def of(self, are_here_R: NDArray[np.bool_]) -> Shares:
        """Of these alone."""
        num_decoding = int(are_here_R[: self.num_decoding].sum())
        return Shares(self.slot_R[are_here_R], self.tokens_R[are_here_R], num_decoding)


@dataclass(frozen=True, slots=True)
class TakenIn:
    """What came of a step."""

    ended: list[tuple[int, int, bool]]
    """(slot, how many new tokens, whether the last is a stop token) of those who have ended, or may have by their
    text."""
    num_tokens: int
    num_behind: int
    """Sequences in it that are behind by now; when it was launched others may have been."""
    tokens_behind: int
    """Theirs."""


class SlotTable:
    def __init__(self, num_slots: int, max_length: int) -> None:
        self._table: Table = np.zeros(num_slots, [(name, np.int64) for name in _COLUMNS])
        self["seat"].fill(-1)
        self._stops_SE = np.full((num_slots, MAX_STOP_TOKENS), NO_TOKEN)
        # What was read since a sequence took its seat.
        self._token_SL = np.zeros((num_slots, max_length), np.int32)
        self._logprob_SL = np.zeros((num_slots, max_length), np.float32)
        self._origin_SL = np.zeros((num_slots, max_length), np.int8)
        self._log_kept_SL = np.zeros((num_slots, max_length), np.float32)
        self._in_turn: Ints | None = None
        self._num_turns = 0
        self._compile()

    def _compile(self) -> None:
        """Now, and not within the first steps, which are timed."""
        shares = self.share_out(0)
        samplers, _ = self.launch(shares, self.reach(shares, 0)[0])
        self.take_in(samplers, read_report(np.zeros((len(self._table), 6), np.int32)), 0)
        self.note_behind(are_any=False)

    def __getitem__(self, column: str) -> Ints:
        return self._table[column]

    def seat(self, sequence: Running, *, num_computed: int, num_paged: int) -> None:
        """In the slot and the seat that it has been given, with so many of its tokens computed, and keys paged."""
        slot, sampling = sequence.slot, sequence.request.sampling
        row = dict.fromkeys(_COLUMNS, 0) | {
            "seat": sequence.seat,
            "turn": self._take_turns(1),
            "max_keys": sequence.max_keys,
            "paged": num_paged,
            "launched": num_computed,
            "known": sequence.num_known,
            "left": sampling.max_new_tokens - len(sequence.token_ids),
            "allotted": -1,
            "first_version": sequence.first_version,
            "cuts_tail": sampling.cuts_tail,
            "is_watched": bool(sampling.stop),
            "is_behind": -1,
        }
        self._table[slot] = tuple(row.values())
        self._stops_SE[slot] = NO_TOKEN
        self._stops_SE[slot, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self._in_turn = None

    def vacate(self, sequence: Running, *, keeps_origins: bool) -> None:
        """It takes along what it has sampled."""
        slot = sequence.slot
        new = slice(self["new"][slot])
        sequence.token_ids += self._token_SL[slot, new].tolist()
        sequence.logprobs += self._logprob_SL[slot, new].tolist()
        if keeps_origins:
            sequence.origins += self._origin_SL[slot, new].tolist()
        if self["cuts_tail"][slot]:
            sequence.log_kept += self._log_kept_SL[slot, new].tolist()
        sequence.first_version = int(self["first_version"][slot])
        self["seat"][slot], self["allotted"][slot] = -1, 0
        self._in_turn = None

    def _take_turns(self, count: int) -> int:
        """So many after all that were taken; the first of them."""
        self._num_turns += count
        return self._num_turns - count

    @property
    def in_turn(self) -> Ints:
        """Slots that are taken, those first whose turn comes first."""
        if self._in_turn is None:
            taken = np.flatnonzero(self["seat"] >= 0)
            self._in_turn = taken[np.argsort(self["turn"][taken])]
        return self._in_turn

    def share_out(self, budget: int) -> Shares:
        """Of `budget` tokens. One for each who decodes, then prompts."""
        slot_R, tokens_R, num_decoding, are_all_served = _share_out(self._table, self.in_turn, budget)
        if not are_all_served:  # the served go to the back, so that everyone's turn comes
            self["turn"][slot_R] = self._take_turns(len(slot_R)) + np.arange(len(slot_R))
            self._in_turn = None
        return Shares(slot_R, tokens_R, num_decoding)

    def reach(self, shares: Shares, drafts_each: int) -> tuple[Ints, Ints]:
        """How many drafts each may run beside its share, and for how many keys it needs pages then.

        Only one who decodes has drafts, and not beyond the last token it may sample.
        """
        return _reach(self._table, shares.slot_R, shares.tokens_R, shares.num_decoding, drafts_each)

    def launch(self, shares: Shares, drafts_R: Ints) -> tuple[Samplers, Ints]:
        """Count what is about to run: those who sample with it, since it leaves nothing that they know to be run; and
        rows of (slot, tokens) of whom the device knows otherwise."""
        slots, seats, drafts, allotments = _launch(self._table, shares.slot_R, shares.tokens_R, drafts_R)
        return Samplers(slots, seats, drafts), allotments

    def note_behind(self, *, are_any: bool) -> Ints:
        """Find out who is behind, or that nobody is: rows of (slot, 0 or 1) of whom it was otherwise."""
        return _note_behind(self._table, self.in_turn, are_any)

    def take_in(self, samplers: Samplers, report: Report, version: int) -> TakenIn:
        """What they sampled. Who was taken out meanwhile will compute it again."""
        bits_SL, kept_bits_SL = self._logprob_SL.view(np.int32), self._log_kept_SL.view(np.int32)
        texts = self._token_SL, bits_SL, self._origin_SL, kept_bits_SL
        who = samplers.slot_R, samplers.seat_R, samplers.drafts_R
        ended, *sums = _take_in(self._table, self._stops_SE, texts, *who, report.lines, version)
        return TakenIn([(slot, num_new, bool(is_stopped)) for slot, num_new, is_stopped in ended.tolist()], *sums)

    def sampled_from(self, sequence: Running, first: int) -> PartialRollout:
        """Of all it has sampled, what it has from token `first` on."""
        slot = sequence.slot
        new = slice(max(0, first - len(sequence.token_ids)), self["new"][slot])
        log_kept = self._log_kept_SL[slot, new].tolist() if self["cuts_tail"][slot] else ()
        return PartialRollout(
            sequence.request,
            (*sequence.token_ids[first:], *self._token_SL[slot, new].tolist()),
            (*sequence.logprobs[first:], *self._logprob_SL[slot, new].tolist()),
            int(self["first_version"][slot]),
            (*sequence.log_kept[first:], *log_kept),
        )

    def num_sampled(self, sequence: Running) -> int:
        return len(sequence.token_ids) + int(self["new"][sequence.slot])


def read_report(lines: NDArray[np.int32]) -> Report:
    """Of a step, a line a slot; see `StepState`."""
    num_rows, num_from, by_drafted, by_right, broken = _summed(lines, len(ORIGIN_NAMES))
    return Report(lines, num_rows, num_from.tolist(), by_drafted.tolist(), by_right.tolist(), broken.tolist())


@numba.njit(cache=True)
def _share_out(table: Table, in_turn: Ints, budget: int) -> tuple[Ints, Ints, int, bool]:
    known, launched, max_keys = table["known"], table["launched"], table["max_keys"]
    slot_R, tokens_R = np.empty_like(in_turn), np.ones_like(in_turn)
    num_rows = num_decoding = 0
    for slot in in_turn:
        if known[slot] <= max_keys[slot] and known[slot] - launched[slot] == 1:
            num_decoding += 1
            if num_rows < budget:
                slot_R[num_rows] = slot
                num_rows += 1
    are_all_served = num_decoding == num_rows
    num_decoding, budget = num_rows, budget - num_rows
    for slot in in_turn:
        due = known[slot] - launched[slot]
        if budget > 0 and due > 1 and known[slot] <= max_keys[slot]:
            slot_R[num_rows], tokens_R[num_rows] = slot, min(due, budget)
            budget -= tokens_R[num_rows]
            num_rows += 1
    return slot_R[:num_rows], tokens_R[:num_rows], num_decoding, are_all_served


@numba.njit(cache=True)
def _reach(table: Table, slot_R: Ints, tokens_R: Ints, num_decoding: int, drafts_each: int) -> tuple[Ints, Ints]:
    launched, hoped, max_keys = table["launched"], table["hoped"], table["max_keys"]
    drafts_R, needed_R = np.zeros_like(slot_R), np.empty_like(slot_R)
    for row in range(len(slot_R)):
        slot = slot_R[row]
        most = launched[slot] + hoped[slot] + tokens_R[row]
        if row < num_decoding:
            drafts_R[row] = max(0, min(max_keys[slot] - most, drafts_each))
        needed_R[row] = min(most + drafts_R[row], max_keys[slot])
    return drafts_R, needed_R


@numba.njit(cache=True)
def _launch(table: Table, slot_R: Ints, tokens_R: Ints, drafts_R: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    launched, known, hoped, allotted = table["launched"], table["known"], table["hoped"], table["allotted"]
    slots, seats, drafts = np.empty_like(slot_R), np.empty_like(slot_R), np.empty_like(slot_R)
    allotted_S, num_samplers = np.zeros(len(table), np.int64), 0
    for row in range(len(slot_R)):
        slot = slot_R[row]
        allotted_S[slot] = tokens_R[row] + drafts_R[row]
        launched[slot] += tokens_R[row]
        if launched[slot] == known[slot]:
            known[slot] += 1
            hoped[slot] += drafts_R[row]
            slots[num_samplers], seats[num_samplers], drafts[num_samplers] = slot, table["seat"][slot], drafts_R[row]
            num_samplers += 1
    allotments, num_changed = np.empty((len(table), 2), np.int64), 0
    for slot in range(len(table)):
        if allotted[slot] != allotted_S[slot]:
            allotted[slot] = allotted_S[slot]
            allotments[num_changed, 0], allotments[num_changed, 1] = slot, allotted_S[slot]
            num_changed += 1
    return slots[:num_samplers], seats[:num_samplers], drafts[:num_samplers], allotments[:num_changed]


@numba.njit(cache=True)
def _take_in(
    table: Table,
    stops_SE: Ints,
    texts: tuple[Any, Any, Any, Any],
    slot_R: Ints,
    seat_R: Ints,
    drafts_R: Ints,
    lines_SW: NDArray[np.int32],
    version: int,
) -> tuple[Ints, int, int, int]:
    known, launched, hoped, left, new = table["known"], table["launched"], table["hoped"], table["left"], table["new"]
    first_version, token_SL, bits_SL, origin_SL = table["first_version"], texts[0], texts[1], texts[2]
    kept_bits_SL, width = texts[3], (lines_SW.shape[1] - 2) // 4
    ended, num_ended, num_sampled = np.empty((len(slot_R), 3), np.int64), 0, 0
    num_behind = tokens_behind = 0
    for row in range(len(slot_R)):
        slot = slot_R[row]
        if table["seat"][slot] != seat_R[row]:
            continue
        num_new, is_stopped = lines_SW[slot, 0], False
        assert num_new <= left[slot], "a slot reports more tokens than it may sample"  # and would write beyond its line
        for place in range(num_new):
            token, at = lines_SW[slot, 2 + place], new[slot] + place
            token_SL[slot, at] = token
            bits_SL[slot, at] = lines_SW[slot, 2 + width + place]
            origin_SL[slot, at] = lines_SW[slot, 2 + 2 * width + place]
            kept_bits_SL[slot, at] = lines_SW[slot, 2 + 3 * width + place]
            for stop in stops_SE[slot]:
                is_stopped |= token == stop
        # It was counted as having one.
        known[slot] += num_new - 1
        launched[slot] += num_new - 1
        hoped[slot] -= drafts_R[row]
        new[slot] += num_new
        left[slot] -= num_new
        num_sampled += num_new
        if table["is_behind"][slot] > 0 and num_new:
            num_behind += 1
            tokens_behind += num_new
        if first_version[slot] < 0:
            first_version[slot] = version
        if is_stopped or left[slot] <= 0 or table["is_watched"][slot]:
            ended[num_ended, 0], ended[num_ended, 1], ended[num_ended, 2] = slot, num_new, is_stopped
            num_ended += 1
    return ended[:num_ended], num_sampled, num_behind, tokens_behind


@numba.njit(cache=True)
def _note_behind(table: Table, in_turn: Ints, are_any: bool) -> Ints:
    is_behind, behind_R = table["is_behind"], are_behind(table["left"][in_turn])
    changed, num_changed = np.empty((len(in_turn), 2), np.int64), 0
    for row, slot in enumerate(in_turn):
        now = int(are_any and behind_R[row])
        if is_behind[slot] != now:
            is_behind[slot] = now
            changed[num_changed, 0], changed[num_changed, 1] = slot, now
            num_changed += 1
    return changed[:num_changed]


@numba.njit(cache=True)
def are_behind(left_R: Ints) -> NDArray[np.bool_]:
    """Of sequences that may still sample so many tokens: a quarter at most, or all who have as many as the last."""
    if not len(left_R):
        return np.zeros(0, np.bool_)
    rising_R, num_behind = np.sort(left_R), -(-len(left_R) // BEHIND)
    next_one = rising_R[max(0, len(left_R) - num_behind - 1)]
    return left_R >= min(next_one + 1, rising_R[-1])


@numba.njit(cache=True)
def _summed(lines_SW: NDArray[np.int32], num_origins: int) -> tuple[int, Ints, Ints, Ints, Ints]:
    width, num_rows = (lines_SW.shape[1] - 2) // 4, 0
    from_O, broken, num_broken = np.zeros(num_origins, np.int64), np.empty(len(lines_SW), np.int64), 0
    by_drafted, by_right = np.zeros(width, np.int64), np.zeros(width + 1, np.int64)
    for slot in range(len(lines_SW)):
        num_new = lines_SW[slot, 0]
        if num_new == 0:
            continue
        num_rows += 1
        num_right, is_broken = 0, False
        for place in range(num_new):
            origin = lines_SW[slot, 2 + 2 * width + place]
            from_O[origin] += 1
            num_right += origin > 0
            is_broken |= lines_SW[slot, 2 + place] == BROKEN
        by_drafted[lines_SW[slot, 1]] += 1
        by_right[num_right] += 1
        if is_broken:
            broken[num_broken] = slot
            num_broken += 1
    return num_rows, from_O, by_drafted, by_right, broken[:num_broken]
