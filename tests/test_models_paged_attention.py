"""The paged Triton kernel against its plain twin; without a GPU, in Triton's interpreter.

Axes as in `models/paged_attention.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from slipstream.models.attention import AttentionForm
from slipstream.models.cached import Branches, KVPages, PackedRows, attend_rows_plainly
from slipstream.models.moving import copy_pages, move_keys
from slipstream.models.paged_attention import attend_paged

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE_TOKENS, SPLIT_TOKENS = 16, 32
LAYOUTS = [
    (8, 2, 32),
    (14, 2, 64),
    (9, 3, 64),
    (12, 2, 128),
    (28, 4, 128),
    (16, 16, 64),
    (32, 8, 128),
    (4, 1, 256),
    (8, 8, 80),
    (40, 8, 128),
    (5, 1, 96),
    (24, 2, 64),
    (33, 1, 16),
]
SLOW = () if DEVICE.type == "cuda" else pytest.mark.slow
"""What Triton's interpreter takes seconds for."""
QUICK_LAYOUTS = [pytest.param(*layout, marks=SLOW if layout[1] >= 8 else ()) for layout in LAYOUTS]
FORMS = {
    "plain": AttentionForm(0.2),
    "window": AttentionForm(0.2, sliding_window=21),
    "narrow window": AttentionForm(0.2, sliding_window=3),
    "softcap": AttentionForm(0.2, softcap=1.5),
    "sinks": AttentionForm(0.2, sinks_H=torch.linspace(-2, 3, 6, device=DEVICE)),
    "all": AttentionForm(0.2, 40, 1.5, torch.linspace(-2, 3, 6, device=DEVICE)),
}
QUICK_FORMS = [
    pytest.param(form, id=name, marks=() if name in ("plain", "narrow window", "all") else SLOW)
    for name, form in FORMS.items()
]
"""What the others have, the last has too."""
attend_in_short_splits = partial(attend_paged, split_tokens=SPLIT_TOKENS)


def make_rows(
    counts: list[int],
    lengths: list[int],
    *,
    pad_tokens: int = 0,
    pad_rows: int = 0,
    pad_pages: int = 0,
    page_tokens: int = PAGE_TOKENS,
) -> PackedRows:
    """Row r is the last `counts[r]` of `lengths[r]` positions of slot num_rows - 1 - r; its pages are scattered."""
    num_rows, width = len(counts), max(-(-length // page_tokens) for length in lengths)
    num_pages = num_rows * width
    scattered = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7)).view(num_rows, width)
    table = torch.full((num_rows + 1, width + pad_pages), num_pages)
    slots = [num_rows - 1 - row for row in range(num_rows)]
    for slot, length in zip(slots, lengths, strict=True):
        used = -(-length // page_tokens)
        table[slot, :used] = scattered[slot, :used]
    slot_T = [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
    position_T = [at for count, n in zip(counts, lengths, strict=True) for at in range(n - count, n)]
    starts = torch.tensor([0, *counts, *([0] * pad_rows)]).cumsum(0)

    def long(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=DEVICE)

    return PackedRows(
        slot_T=long(slot_T + [num_rows] * pad_tokens),
        position_T=long(position_T + [0] * pad_tokens),
        slot_R=long(slots + [num_rows] * pad_rows),
        start_R1=starts.int().to(DEVICE),
        length_R=long(lengths + [0] * pad_rows).int(),
        table_SW=table.int().to(DEVICE),
    )


def make_pages(
    rows: PackedRows, num_kv_heads: int, size: int, dtype: torch.dtype = torch.float32, page_tokens: int = PAGE_TOKENS
) -> Tensor:
    """Random pages; no number at all on the trash page and past the end of each row."""
    generator = torch.Generator(DEVICE).manual_seed(size)
    num_pages = int(rows.table_SW.max()) + 1
    shape = num_pages, num_kv_heads, page_tokens, size
    pages = torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)
    pages[-1] = float("nan")
    for slot, length in zip(rows.slot_R.tolist(), rows.length_R.tolist(), strict=True):
        if length % page_tokens:
            pages[rows.table_SW[slot, length // page_tokens], :, length % page_tokens :] = float("nan")
    return pages


def make_query(rows: PackedRows, num_heads: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(1)
    shape = num_heads, len(rows.slot_T), size
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype).transpose(0, 1)  # as models give it


def error(got: Tensor, query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, form: AttentionForm) -> float:
    expected = attend_rows_plainly(query.double(), keys.double(), values.double(), rows, form)
    return float((got.double() - expected).abs().max() / expected.abs().max())


def take(rows: PackedRows, row: int, first: int, count: int) -> PackedRows:
    """A batch of `count` of a row's tokens alone, from the `first`: the row at an earlier time, or a piece of it."""
    start, end = rows.start_R1[row : row + 2].tolist()
    tokens = slice(start + first, start + first + count)
    return replace(
        rows,
        slot_T=rows.slot_T[tokens],
        position_T=rows.position_T[tokens],
        slot_R=rows.slot_R[row : row + 1],
        start_R1=torch.tensor([0, count], dtype=torch.int32, device=DEVICE),
        length_R=rows.length_R[row : row + 1] - (end - start) + first + count,
    )


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), QUICK_LAYOUTS)
def test_mixed_rows_equal_the_plain_twin(num_heads: int, num_kv_heads: int, size: int) -> None:
    """Decode, a verify of 5, a prefill of 33, a row whose keys fill its page, rows without tokens, padding tokens."""
    rows = make_rows([1, 5, 33, 1], [70, 37, 36, 32], pad_tokens=3, pad_rows=2, pad_pages=1)
    query = make_query(rows, num_heads, size)
    keys, values = (make_pages(rows, num_kv_heads, size) for _ in range(2))
    form = AttentionForm(size**-0.5)
    got = attend_in_short_splits(query, keys, values, rows, form, num_workers=1)
    assert error(got, query, keys, values, rows, form) < 1e-5
    assert got[-3:].eq(0).all()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_equals_the_plain_twin(form: AttentionForm) -> None:
    """With values of another size than keys."""
    rows = make_rows([1, 13, 3], [90, 71, 3], pad_tokens=2, pad_rows=3)
    query, keys, values = make_query(rows, 6, 32), make_pages(rows, 2, 32), make_pages(rows, 2, 24)
    results = [attend_in_short_splits(query, keys, values, rows, form, num_workers=n) for n in (1, 2)]
    assert error(results[0], query, keys, values, rows, form) < 1e-5
    assert results[0][-2:].eq(0).all()
    assert torch.equal(*results)


@pytest.mark.parametrize("form", QUICK_FORMS)
def test_decode_verify_and_chunked_prefill_agree_in_every_bit(form: AttentionForm) -> None:
    """And with every batch: other rows, padding tokens, empty rows, a wider table, other workers."""
    assert_pieces_agree(form, torch.float32, 6, 1, 32, count=10, length=70, num_decoded=2)


def assert_pieces_agree(
    form: AttentionForm, dtype: torch.dtype, num_heads: int, num_kv_heads: int, size: int, count: int, length: int,
    num_decoded: int, page_tokens: int = PAGE_TOKENS, split_tokens: int = SPLIT_TOKENS,
) -> None:  # fmt: skip
    rows = make_rows([2, count, 1], [9, length, 65], page_tokens=page_tokens)
    query = make_query(rows, num_heads, size, dtype)
    keys, values = (make_pages(rows, num_kv_heads, size, dtype, page_tokens) for _ in range(2))
    attend = partial(attend_paged, split_tokens=split_tokens)
    whole = attend(query, keys, values, rows, form)
    cuts = [*range(0, count - num_decoded, 7), *range(count - num_decoded, count + 1)]
    for first, end in pairwise(cuts):
        alone = take(rows, 1, first, end - first)
        tokens = slice(2 + first, 2 + end)
        piece = attend(query[tokens], keys, values, alone, form, num_workers=1 + first % 3)
        assert torch.equal(piece, whole[tokens]), (first, end)

    # At most as many tokens as rows: the smaller block of rows.
    padded = make_rows(
        [2, count, 1], [9, length, 65], pad_tokens=4, pad_rows=count + 4, pad_pages=5, page_tokens=page_tokens
    )
    query = torch.cat([query, query[:4]])
    assert torch.equal(attend(query, keys, values, padded, form)[:-4], whole)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter's products")
def test_the_interpreter_multiplies_a_row_alike_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with numpy, whose library does not on some processors: here it adds a little to rows of larger products."""
    numpys = np.matmul

    def matmul(x: np.ndarray, y: np.ndarray, **kwargs: Any) -> np.ndarray:
        product: np.ndarray = numpys(x, y, **kwargs)
        return product * np.float32(1 + 1e-3 * (len(x) > 16))

    monkeypatch.setattr(np, "matmul", matmul)
    assert_pieces_agree(FORMS["plain"], torch.float32, 6, 1, 32, count=3, length=20, num_decoded=1)


def test_a_wrong_page_changes_the_result() -> None:
    rows = make_rows([1, 5], [70, 37])
    query, keys, values = make_query(rows, 6, 32), make_pages(rows, 2, 32), make_pages(rows, 2, 32)
    form = FORMS["plain"]
    right = attend_in_short_splits(query, keys, values, rows, form)
    rows.table_SW[rows.slot_R[1], 1] = rows.table_SW[rows.slot_R[0], 1]
    wrong = attend_in_short_splits(query, keys, values, rows, form)
    assert torch.equal(wrong[:1], right[:1])
    assert all((wrong[1:] - right[1:]).abs().amax((1, 2)) > 1e-3)


def test_a_window_hides_what_lies_outside_it() -> None:
    rows = make_rows([2], [90])
    query, keys, values = make_query(rows, 6, 32), make_pages(rows, 2, 32), make_pages(rows, 2, 32)
    before = attend_in_short_splits(query, keys, values, rows, FORMS["window"], num_workers=2)
    page = rows.table_SW[0, (89 - 21) // PAGE_TOKENS]
    values[page, :, (89 - 21) % PAGE_TOKENS] += 1.0
    after = attend_in_short_splits(query, keys, values, rows, FORMS["window"], num_workers=2)
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])


def test_half_precision_stays_near_the_plain_twin() -> None:
    rows = make_rows([1, 5], [70, 37])
    query = make_query(rows, 6, 32, torch.float16)
    keys, values = (make_pages(rows, 2, 32, torch.float16) for _ in range(2))
    got = attend_in_short_splits(query, keys, values, rows, FORMS["plain"])
    assert got.dtype == torch.float16
    assert error(got, query, keys, values, rows, FORMS["plain"]) < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), LAYOUTS)
def test_bfloat16_on_the_gpu(num_heads: int, num_kv_heads: int, size: int) -> None:
    form = AttentionForm(size**-0.5)
    for counts in ([1] * 9, [1, 1, 1, 1, 40, 5, 6, 300, 4]):
        lengths = [1, 2, 64, 65, 500, 512, 1025, 8191, 32768]
        rows = make_rows(counts, lengths, pad_tokens=5, pad_rows=5, page_tokens=64)
        query = make_query(rows, num_heads, size, torch.bfloat16)
        keys, values = (make_pages(rows, num_kv_heads, size, torch.bfloat16, 64) for _ in range(2))
        got = attend_paged(query, keys, values, rows, form)
        expected = attend_rows_plainly(query.double(), keys.double(), values.double(), rows, form)
        assert got[-5:].eq(0).all()
        difference_T = (got.double() - expected)[:-5].norm(dim=(1, 2)) / expected[:-5].norm(dim=(1, 2))
        assert difference_T.max() < 1e-2
    for window in (None, 700):
        form = AttentionForm(size**-0.5, window)
        assert_pieces_agree(form, torch.bfloat16, num_heads, num_kv_heads, size, 40, 2100, 6, 64, 512)


@pytest.mark.parametrize("form", ["plain", "window", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_along_a_path_the_bits_are_those_of_the_text(form: str, dtype: torch.dtype) -> None:
    """Two alternatives behind a text of 45, and one more behind the second: each attends as if the others were not
    there. Then the second path's keys move, and are found where they moved to."""
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter has no bfloat16")
    known, table = 45, make_rows([1, 1], [60, 60]).table_SW
    pages = KVPages(8, PAGE_TOKENS)
    generator = torch.Generator(DEVICE).manual_seed(3)
    for layer in range(2):
        pages.layers[layer] = tuple(  # type: ignore[assignment]
            torch.randn(9, 2, PAGE_TOKENS, 32, generator=generator, device=DEVICE, dtype=dtype) for _ in range(2)
        )
    keys, values = pages.layers[0]
    query = torch.randn(4, 6, 32, generator=generator, device=DEVICE, dtype=dtype)
    ways = [[], [known], [known + 1], [known + 1, known + 2]]

    def number(values: list[int]) -> Tensor:
        return torch.tensor(values, device=DEVICE)

    lengths = number([known + len(way) for way in ways])
    rows = PackedRows(
        slot_T=number([0] * 4),
        position_T=lengths - 1,
        slot_R=number([0] * 4),
        start_R1=torch.arange(5, dtype=torch.int32, device=DEVICE),
        length_R=lengths.int(),
        table_SW=table,
        branches=Branches(
            place_T=number([known - 1, known, known + 1, known + 2]),
            fork_T=number([2**30, known, known, known]).int(),
            path_TD=torch.tensor([[*way, 0, 0][:2] for way in ways], dtype=torch.int32, device=DEVICE),
        ),
    )
    attended = attend_in_short_splits(query, keys, values, rows, FORMS[form])
    assert error(attended, query, keys, values, rows, FORMS[form]) < (1e-5 if dtype == torch.float32 else 2e-2)
    size = PAGE_TOKENS
    for place, way in enumerate(ways):
        copies = [tensor.clone() for tensor in (keys, values)]
        for copied, tensor in zip(copies, (keys, values), strict=True):
            for position, at in enumerate(way, start=known):
                copied[table[0, position // size], :, position % size] = tensor[table[0, at // size], :, at % size]
        alone = replace(rows, branches=None)
        alone = take(alone, place, 0, 1)
        text = attend_in_short_splits(query[place : place + 1], *copies, alone, FORMS[form])
        assert torch.equal(text[0], attended[place])
    moved = [number([[known + 1, known + 2]]), number([[known, known + 1]])]
    plain = KVPages(8, PAGE_TOKENS, {layer: (k.clone(), v.clone()) for layer, (k, v) in pages.layers.items()})
    plain.move_plainly(table, number([0]), *moved)
    move_keys(pages, table, number([0]), *moved)
    for layer in range(2):
        assert all(torch.equal(*pair) for pair in zip(pages.layers[layer], plain.layers[layer], strict=True))
    text = attend_in_short_splits(query[3:], keys, values, take(replace(rows, branches=None), 3, 0, 1), FORMS[form])
    assert torch.equal(text[0], attended[3])


def test_pages_are_copied_in_all_layers_at_once() -> None:
    """Layers of two shapes, as a drafter's beside the policy's may be."""
    draw = torch.Generator().manual_seed(5)
    layers = {
        layer: tuple(torch.randn(9, heads, PAGE_TOKENS, size, generator=draw).to(DEVICE) for _ in range(2))
        for layer, (heads, size) in enumerate([(2, 32), (3, 20), (2, 32)])
    }
    pages = KVPages(8, PAGE_TOKENS, layers)  # type: ignore[arg-type]
    plain = KVPages(8, PAGE_TOKENS, {layer: (k.clone(), v.clone()) for layer, (k, v) in layers.items()})
    pairs = torch.tensor([[0, 5], [3, 6], [0, 7]], device=DEVICE)
    plain.copy_plainly(*pairs.T)
    copy_pages(pages, *pairs.T)
    for layer in layers:
        assert all(torch.equal(*pair) for pair in zip(pages.layers[layer], plain.layers[layer], strict=True))
        assert torch.equal(pages.layers[layer][0][7], pages.layers[layer][0][0])
