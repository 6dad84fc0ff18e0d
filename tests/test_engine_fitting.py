"""In which sizes steps run on a GPU: few graphs, enough room, and never much more work than was asked for.

Graphs themselves need a GPU: `tests/test_gpu.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.fitting import PATIENCE, SMALL, Fitting, coarsely, fitted, has_room, padded

COUNTS = range(1, 4097)


@dataclass(frozen=True)
class Size:
    kind: str
    room: tuple[int, ...]


def fine(*counts: int, kind: str = "step") -> Size:
    return Size(kind, tuple(map(padded, counts)))


def coarse(*counts: int, kind: str = "step") -> Size:
    return Size(kind, tuple(map(coarsely, counts)))


@given(st.lists(st.tuples(st.integers(1, 700), st.integers(1, 700)), max_size=200))
def test_whatever_is_asked_for_has_room_and_little_waste(asked: list[tuple[int, int]]) -> None:
    fitting: Fitting[Size] = Fitting()
    for counts in asked:
        size = fine(*counts)
        chosen = fitting.choose(size, coarse(*counts))
        assert has_room(chosen, size)
        for room, count in zip(chosen.room, counts, strict=True):
            assert count <= room <= max(8, 2 * padded(count) if padded(count) <= SMALL else 1.5 * padded(count))
        fitting.add(chosen)


def test_a_shrinking_batch_needs_few_graphs() -> None:
    fitting: Fitting[Size] = Fitting()
    graphs = set()
    for count in range(512, 0, -1):
        chosen = fitting.choose(fine(count), coarse(count))
        fitting.add(chosen)
        graphs.add(chosen)
    assert len(graphs) <= 20 < len({fine(count) for count in range(1, 513)})


def test_a_size_that_is_asked_for_often_gets_its_own() -> None:
    fitting: Fitting[Size] = Fitting()
    fitting.add(coarse(192))
    chosen = [fitting.choose(fine(160), coarse(160)) for _ in range(PATIENCE + 1)]
    assert set(chosen[:-1]) == {coarse(192)}
    assert chosen[-1] == fine(160)


def test_a_small_one_never_does_since_the_larger_takes_no_longer() -> None:
    fitting: Fitting[Size] = Fitting()
    fitting.add(fine(48, 128))
    assert {fitting.choose(fine(40, 112), coarse(40, 112)) for _ in range(PATIENCE + 2)} == {fine(48, 128)}


def test_the_smallest_that_has_room_and_only_of_the_same_kind() -> None:
    fitting: Fitting[Size] = Fitting()
    for size in (fine(64), fine(48), fine(40, kind="drafts"), fine(128)):
        fitting.add(size)
    assert fitting.choose(fine(34), coarse(34)) == fine(48)
    assert fitting.choose(fine(34, kind="drafts"), coarse(34, kind="drafts")) == fine(40, kind="drafts")
    assert fitting.choose(fine(34, kind="tree"), coarse(34, kind="tree")) == coarse(34, kind="tree")


def test_once_graphs_are_gone_none_is_chosen_for_being_there() -> None:
    fitting: Fitting[Size] = Fitting()
    fitting.add(fine(64))
    assert fitting.choose(fine(40), coarse(40)) == fine(64)
    fitting.clear()
    assert fitting.choose(fine(40), coarse(40)) == coarse(40) == fine(48)


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


def test_coarse_sizes_are_fewer_of_the_same() -> None:
    for count in COUNTS:
        assert count <= padded(count) <= coarsely(count) <= max(1, 1.5 * count + 1 if count > 16 else 2 * count)
        assert padded(coarsely(count)) == coarsely(count), "so that graphs are shared"
    assert len({coarsely(count) for count in range(1, 2049)}) == 19
