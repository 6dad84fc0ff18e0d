"""PagePool: free + held = all; a page is never held twice; giving back a page that is not held fails at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.pages import PagePool


@given(st.integers(1, 8), st.lists(st.integers(0, 15)))
def test_any_order_of_taking_and_giving_keeps_the_books(num_pages: int, choices: list[int]) -> None:
    """An even number takes a page, an odd one gives back a held page."""
    pool, held = PagePool(num_pages), []
    for choice in choices:
        if choice % 2 == 0:
            page = pool.take()
            if len(held) == num_pages:
                assert page is None
            else:
                assert page == min(set(range(num_pages)) - set(held)), "the lowest free page comes first"
                held.append(page)
        elif held:
            pool.give_back(held.pop(choice % len(held)))
        assert pool.num_held == len(held) == len(set(held))
        assert pool.num_free + pool.num_held == pool.num_pages == num_pages


@given(st.integers(1, 4), st.integers(-2, 6))
def test_giving_back_a_page_that_is_not_held_fails(num_pages: int, page: int) -> None:
    with pytest.raises(AssertionError, match=f"page {page} is not held"):
        PagePool(num_pages).give_back(page)


def test_a_page_cannot_be_given_back_twice() -> None:
    pool = PagePool(2)
    page = pool.take()
    assert page is not None
    pool.give_back(page)
    with pytest.raises(AssertionError):
        pool.give_back(page)


def test_an_engine_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)
