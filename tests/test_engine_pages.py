"""PagePool: free + held = all; a page is handed out only while nobody holds it; the books cannot be cheated."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.pages import PagePool, copy_rounds


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["take", "share", "give back"]), st.integers(0, 9))))
def test_any_order_of_taking_sharing_and_giving_keeps_the_books(num_pages: int, acts: list[tuple[str, int]]) -> None:
    pool, held = PagePool(num_pages), Counter[int]()
    for act, number in acts:
        if act == "take":
            taken = pool.take(min(number, pool.num_free))
            assert len(set(taken)) == len(taken) and not set(taken) & set(held)
            held.update(taken)
        elif held:
            page = sorted(held)[number % len(held)]
            (pool.share if act == "share" else pool.give_back)([page])
            held[page] += 1 if act == "share" else -1
            held = +held
        assert pool.num_held == len(held)
        assert pool.num_free + pool.num_held == pool.num_pages == num_pages


@given(st.integers(1, 4), st.integers(-2, 6))
def test_a_page_that_is_not_held_can_be_neither_given_back_nor_shared(num_pages: int, page: int) -> None:
    for act in (PagePool.give_back, PagePool.share):
        with pytest.raises(AssertionError, match=f"page {page} is not held"):
            act(PagePool(num_pages), [page])


def test_a_page_cannot_be_given_back_twice() -> None:
    pool = PagePool(2)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(AssertionError):
        pool.give_back(pages)


def test_more_pages_than_are_free_cannot_be_taken() -> None:
    with pytest.raises(AssertionError, match="3 pages asked, 2 free"):
        PagePool(2).take(3)


def test_an_engine_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)


@settings(max_examples=200)
@given(st.permutations(range(8)), st.integers(1, 7), st.randoms(use_true_random=False))
def test_copies_in_rounds_are_copies_that_read_before_any_write(order: list[int], count: int, dice: Random) -> None:
    """Each page is written once, and a page that is written may be read: rounds put the reading first, whatever the
    order within them."""
    copies = [(order[place + 1], order[place]) for place in range(count)]
    copies += [(order[0], 8 + number) for number in range(dice.randint(0, 2))]
    dice.shuffle(copies)
    before = {page: f"content of {page}" for page in range(12)}
    wanted = before | {target: before[source] for source, target in copies}
    pages = dict(before)
    for pairs in copy_rounds(copies):
        dice.shuffle(pairs)
        for source, target in pairs:
            pages[target] = pages[source]
    assert pages == wanted
    assert copy_rounds([]) == [] and copy_rounds([(1, 2), (3, 4)]) == [[(1, 2), (3, 4)]]
    assert copy_rounds([(2, 6), (5, 2)]) == [[(2, 6)], [(5, 2)]]
