"""Who holds which KV page. Pure accounting: no tensors.

A page may have several holders: the members of a group share the pages of their prompt.

Invariants, asserted by `tests/test_engine_pages.py`: free + held = all; a page is handed out only while nobody holds
it; giving back a page that is not held is our mistake and fails at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def copy_rounds(copies: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Copies (from, to), all of which read before any writes, as rounds that may be done one after another, and each in
    any order: a page that is read is written in a later round. A page given back and handed out in one plan is both."""
    waiting, rounds = list(copies), list[list[tuple[int, int]]]()
    while waiting:
        read = {source for source, _ in waiting}
        ready = [(source, target) for source, target in waiting if target not in read - {source}]
        assert ready, "pages would be copied in a circle"
        # What is written now may be read by nobody who still waits, nor by another of this round.
        rounds.append(ready)
        waiting = [pair for pair in waiting if pair not in ready]
    return rounds


class PagePool:
    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError("an engine needs at least one page of KV")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._holders)

    def take(self, count: int) -> list[int]:
        """Free pages, which the caller now holds; ask `num_free` first."""
        assert count <= len(self._free), f"{count} pages asked, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One holder more for each page."""
        for page in pages:
            assert page in self._holders, f"page {page} is not held"
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One holder less; the last one frees the page."""
        for page in pages:
            assert page in self._holders, f"page {page} is not held"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                self._free.append(page)
