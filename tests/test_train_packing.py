"""Packing: the invariants of the module's head, for any lengths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.train.packing import document_tokens, pack, plan_micro_batches

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(LENGTHS, st.integers(1, 80))
def test_every_sample_once_and_within_the_limit(lengths: list[int], max_tokens: int) -> None:
    plan = plan_micro_batches(lengths, max_tokens)
    assert sorted(index for members in plan for index in members) == list(range(len(lengths)))
    for members in plan:
        assert sum(lengths[index] for index in members) <= max_tokens or len(members) == 1
        assert members == sorted(members)
    assert plan == plan_micro_batches(lengths, max_tokens)
    # First fit: no two micro-batches could be one.
    totals = sorted(sum(lengths[index] for index in members) for members in plan)
    assert len(totals) < 2 or totals[0] + totals[1] > max_tokens


def test_first_fit_decreasing_by_hand() -> None:
    # Decreasing: 6 (index 1), 5 (index 0), 5 (index 3), 4 (index 2), 12 alone; limit 10.
    assert plan_micro_batches([5, 6, 4, 5, 12], 10) == [[4], [1, 2], [0, 3]]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 99), min_size=1, max_size=6), st.lists(st.integers(0, 99), min_size=1, max_size=6)
        ),
        min_size=1,
        max_size=8,
    )
)
def test_packed_positions_predict_their_targets(pairs: list[tuple[list[int], list[int]]]) -> None:
    packed = pack(pairs)
    assert packed.lengths == [document_tokens(*pair) for pair in pairs]
    assert packed.response_lengths == [len(response) for _, response in pairs]
    assert packed.targets_N == [token for _, response in pairs for token in response]
    assert len(packed.token_ids_T) == sum(packed.lengths)
    cursor, start = 0, 0
    for (prompt, response), length in zip(pairs, packed.lengths, strict=True):
        whole = [*prompt, *response]
        assert packed.token_ids_T[start : start + length] == whole[:-1]
        for offset in range(len(response)):
            local = packed.positions_N[cursor] - start
            assert whole[local + 1] == packed.targets_N[cursor] and local == len(prompt) - 1 + offset
            cursor += 1
        start += length
