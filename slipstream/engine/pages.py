"""Who holds which KV page. Pure accounting: no tensors.

Invariants, asserted by `tests/test_engine_pages.py`: free + held = all; a page is never held twice; giving back a
page that is not held is our mistake and fails at once.
"""

from __future__ import annotations

import heapq


class PagePool:
    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError("an engine needs at least one page of KV")
        self.num_pages = num_pages
        # A heap, so that pages in use stay dense at the low end: batched attention reads up to the highest one.
        self._free = list(range(num_pages))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def take(self) -> int | None:
        """A free page, the lowest first; None when all are held."""
        if not self._free:
            return None
        page = heapq.heappop(self._free)
        self._held.add(page)
        return page

    def give_back(self, page: int) -> None:
        assert page in self._held, f"page {page} is not held"
        self._held.remove(page)
        heapq.heappush(self._free, page)
