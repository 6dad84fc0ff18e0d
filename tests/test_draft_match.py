"""The search for drafts against its ten-line twin, and the shelves it searches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.draft import match, widths
from slipstream.draft.match import draft_plainly, draft_slots_parallel, draft_slots_serial
from slipstream.draft.shelves import (
    ALIGNMENT,
    HISTORY,
    MAX_MATCH,
    NO_TEXT,
    OWN_TEXT,
    SIBLING,
    Shelving,
    Text,
    aligned,
    lay_out,
)
from slipstream.rng import MASK32, gumbel

FEW = st.integers(3, 6)
"""Few kinds of tokens: many matches, of all lengths."""


def draft_by_kernel(
    text: list[int], shelf: list[int], weights: list[int], min_match: int, num_drafts: int, seed: int, greedy: bool
) -> tuple[list[int], list[int]]:
    """One slot, whose shelf begins a few places into the library."""
    before = 5
    library = np.array([3] * before + shelf + [NO_TEXT] * (num_drafts + 1), np.int32)
    votes = np.array([9] * before + weights + [0] * (num_drafts + 1), np.int32)
    drafts, sources = np.zeros((1, num_drafts), np.int32), np.zeros((1, num_drafts), np.int32)
    found = np.zeros(1, np.int32)
    kernel: Any = draft_slots_serial if seed % 2 else draft_slots_parallel
    kernel(
        np.array([text], np.int32), np.array([len(text)], np.int32), np.array([num_drafts], np.int32),
        np.array([greedy]), np.array([[seed & MASK32, seed >> 32]]), np.array([before]),
        np.array([before + len(shelf)]), np.array([10_000_000]), np.array([10_000_000]), library, votes,
        np.arange(len(library), dtype=np.int32) - before, min_match, drafts, sources, found,
    )  # fmt: skip
    return drafts[0, : found[0]].tolist(), sources[0, : found[0]].tolist()


@settings(max_examples=400)
@given(
    st.lists(FEW, min_size=1, max_size=40),
    st.lists(st.lists(FEW, max_size=30), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(0, 2**64 - 1),
    st.booleans(),
)
def test_the_kernel_drafts_what_the_twin_does(
    text: list[int], texts: list[list[int]], min_match: int, num_drafts: int, seed: int, greedy: bool
) -> None:
    shelf, weights = [NO_TEXT], [0]
    for number, one in enumerate(texts):
        shelf += [*one, NO_TEXT]
        weights += [1 + number % 3] * (len(one) + 1)

    def noise(index: int, token: int) -> float:
        return 0.0 if greedy else float(np.float32(gumbel(seed, len(text) + index, token)))

    padded = [*shelf, *[NO_TEXT] * (num_drafts + 1)]
    wanted = draft_plainly(text, padded, [*weights, *[0] * (num_drafts + 1)], min_match, num_drafts, noise)
    assert draft_by_kernel(text, shelf, weights, min_match, num_drafts, seed, greedy) == wanted


def test_the_longest_match_wins_and_is_followed_to_its_end() -> None:
    shelf = [NO_TEXT, 1, 2, 3, 4, 5, NO_TEXT, 9, 2, 3, 7, 7, NO_TEXT]
    drafts, _ = draft_by_kernel([8, 1, 2, 3], shelf, [1] * len(shelf), 2, 6, 0, False)
    assert drafts == [4, 5], "three tokens match there, two elsewhere"
    assert draft_by_kernel([8, 9, 3], shelf, [1] * len(shelf), 2, 6, 0, False)[0] == []


def test_votes_decide_for_greedy_rows_and_noise_for_others() -> None:
    shelf = [NO_TEXT, *[1, 2, 5, NO_TEXT] * 2, 1, 2, 6, NO_TEXT]
    weights = [1] * len(shelf)
    assert draft_by_kernel([1, 2], shelf, weights, 2, 1, 0, True)[0] == [5]
    share = np.mean([draft_by_kernel([1, 2], shelf, weights, 2, 1, seed, False)[0] == [6] for seed in range(4000)])
    assert 0.07 < share < 0.16, "one vote against two, sharpened: one in nine"
    heavy = weights[:-4] + [30] * 4
    assert draft_by_kernel([1, 2], shelf, heavy, 2, 1, 0, True)[0] == [6]


def test_blocks_of_a_long_shelf_are_all_searched() -> None:
    shelf = [NO_TEXT, *[3] * (5 * match.BLOCK), 1, 2, 8, NO_TEXT, *[4] * (2 * match.BLOCK), NO_TEXT]
    assert draft_by_kernel([1, 2], shelf, [1] * len(shelf), 2, 1, 0, True)[0] == [8]


def test_a_shelf_holds_the_prompt_the_past_and_room_for_members() -> None:
    prompt = list(range(100, 120))
    shelf = lay_out(prompt, [Text((1, 2), 3)], num_members=2, max_new_tokens=4, sibling_weight=5)
    tail = prompt[-MAX_MATCH:]
    room = [*tail, *[NO_TEXT] * 4, NO_TEXT]
    tokens, weights, sources = shelf.content.tolist()
    assert tokens == [NO_TEXT, *prompt, NO_TEXT, *tail, 1, 2, NO_TEXT, *room, *room]
    for segment in shelf.segments:
        assert tokens[segment + 20 - MAX_MATCH : segment + 20] == tail
        assert weights[segment + 20] == 5 and sources[segment + 20] == SIBLING
    assert sources[1] == OWN_TEXT and sources[22 + MAX_MATCH] == HISTORY and weights[22 + MAX_MATCH] == 3


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(1, 30), st.integers(0, 9).map(lambda which: -1 - which)), max_size=60))
def test_stretches_of_the_library_never_overlap(acts: list[int]) -> None:
    shelving, taken = Shelving(165), dict[int, int]()
    for act in acts:
        if act > 0:
            start = shelving.take(act)
            if start is not None:
                taken[start] = aligned(act)
                assert start % ALIGNMENT == 0 and act <= taken[start] < act + ALIGNMENT
            else:
                assert shelving.num_free < aligned(act) * (len(taken) + 1), "there is a stretch that is large enough"
        elif taken:
            start = sorted(taken)[act % len(taken)]
            del taken[start]
            shelving.give_back(start)
        places = [place for start, size in taken.items() for place in range(start, start + size)]
        assert len(set(places)) == len(places) and all(0 <= place < 160 for place in places)
        assert shelving.num_free + len(places) == 160
    for start in taken:
        shelving.give_back(start)
    assert shelving.take(160) == 0


def test_widths_by_hand() -> None:
    window, hits, tries = torch.tensor([2, 2, 30, 2]), torch.zeros(4), torch.zeros(4)
    tried, right = torch.tensor([2, 2, 8, 0]), torch.tensor([2, 1, 8, 0])
    widths.learn_widths(tried, right, window, hits, tries, 32)
    assert window.tolist() == [4, 2, 32, 2]
    assert hits.tolist() == [2, 1, 8, 0] and tries.tolist() == [2, 2, 8, 0]


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 32), st.integers(2, 32), st.floats(0, 50), st.floats(0, 20), st.integers(0, 1)),
        min_size=1,
        max_size=9,
    ),
    st.integers(0, 150),
    st.sampled_from(["aimd", "odds"]),
)
def test_no_more_drafts_are_given_than_fit_and_than_were_found(
    rows: list[tuple[int, int, float, float, int]], room: int, rule: widths.Rule
) -> None:
    found, window, behind = (torch.tensor([row[index] for row in rows]) for index in (0, 1, 4))
    hits = torch.tensor([row[2] for row in rows])
    caps = widths.caps(rule, window, hits, hits + torch.tensor([row[3] for row in rows]), behind)
    assert caps.shape == (len(rows), widths.LEVELS) and (caps.diff(dim=1) >= 0).all() and (caps[:, 0] == 0).all()
    given_out = widths.share_out(found, caps, torch.tensor(room))
    allowed = torch.minimum(found, caps[:, -1])
    assert (given_out <= allowed).all() and given_out.sum() == min(room, int(allowed.sum())), "no room stays empty"


def test_odds_give_the_sure_rows_more() -> None:
    hits, tries = torch.tensor([30.0, 3.0]), torch.tensor([31.0, 10.0])
    caps = widths.caps("odds", torch.tensor([2, 2]), hits, tries, torch.tensor([0, 0]))
    drafts = widths.share_out(torch.tensor([32, 32]), caps, torch.tensor(12))
    assert drafts[0] >= 8 and drafts[1] <= 2


def test_who_is_behind_has_a_draft_before_others_have_many() -> None:
    """Though it is seldom right: all others may have to wait for it."""
    hits, tries = torch.tensor([30.0, 30.0, 3.0]), torch.tensor([40.0, 40.0, 10.0])
    given = {}
    for behind in (0, 1):
        caps = widths.caps("odds", torch.tensor([2, 2, 2]), hits, tries, torch.tensor([0, 0, behind]))
        given[behind] = [widths.share_out(torch.tensor([4] * 3), caps, torch.tensor(room)).tolist() for room in (3, 6)]
    assert given == {0: [[2, 1, 0], [3, 3, 0]], 1: [[1, 1, 1], [3, 2, 1]]}
