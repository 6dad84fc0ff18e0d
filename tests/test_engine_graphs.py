"""The sizes that steps are padded to. Graphs themselves need a GPU: `tests/test_gpu.py`."""

from __future__ import annotations

from itertools import pairwise

from slipstream.engine.graphs import fitted, padded

COUNTS = range(1, 4097)


def test_a_step_is_padded_up_and_never_out_of_order() -> None:
    sizes = [padded(count) for count in COUNTS]
    assert all(size >= count for size, count in zip(sizes, COUNTS, strict=True))
    assert all(smaller <= larger for smaller, larger in pairwise(sizes))
    assert all(padded(size) == size for size in sizes), "a padded size needs no more padding"


def test_powers_of_two_are_exact() -> None:
    assert [padded(count) for count in (1, 2, 4, 8)] == [1, 2, 4, 8]
    assert all(padded(1 << power) == 1 << power for power in range(12))


def test_padding_costs_less_than_a_quarter_with_few_sizes() -> None:
    assert max(padded(count) / count for count in COUNTS if count > 32) < 1.25
    assert len({padded(count) for count in range(1, 2049)}) == 31


def test_drafts_fill_one_of_few_sizes() -> None:
    assert fitted(16, 128) == 112, "128 tokens instead of 160 with 16 of padding"
    assert fitted(64, 128) == 128 and fitted(64, 256) == 192 and fitted(1, 8) == 7 and fitted(1, 1) == 1
    assert fitted(65, 5) == 15, "below 80 there is no size with room for any"
    sizes = set()
    for num_rows in range(1, 300):
        for num_drafts in (1, 3, num_rows, 4 * num_rows, 8 * num_rows):
            drafts = fitted(num_rows, num_drafts)
            size = num_rows + drafts
            assert drafts > 0 and padded(size) == size
            assert size <= padded(num_rows + num_drafts), "never more than padding would have cost"
            assert size > (num_rows + num_drafts) / (1.5 if size >= 16 else 2) or num_drafts < num_rows
            if num_drafts >= num_rows:
                sizes.add(size)
    assert len(sizes) <= 20
