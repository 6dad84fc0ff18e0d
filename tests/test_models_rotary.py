"""What is looked up by position is what would have been computed, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fused_models import (
    DEVICE,
    MIXED,
    NUM_PAGES,
    PAGE_TOKENS,
    PREFILL,
    RECOGNISED,
    SEQUENCES,
    WIDTH,
    build,
    forward,
    logits,
)

from slipstream.models.attention import Documents, attending
from slipstream.models.cached import KVPages
from slipstream.models.recognise import fuse
from slipstream.models.rotary import Rotary

POSITIONS = WIDTH * PAGE_TOKENS


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_fused_model_gives_the_same_bits_with_tables(name: str) -> None:
    model = build(name).to(DEVICE)  # type: ignore[arg-type]
    fusion = fuse(model)
    assert fusion.rotary is not None
    computed = logits(model)
    calls = []
    module, compute = model.base_model.rotary_emb, fusion.rotary._compute
    fusion.rotary._compute = lambda *given: (calls.append(given[1].shape[1]), compute(*given))[1]
    fusion.know_positions(POSITIONS)
    looked_up = logits(model)
    assert torch.equal(looked_up, computed)
    assert set(calls) == {POSITIONS} and len(calls) <= 2, "once for each kind of layer"
    fusion.know_positions(POSITIONS - 1)
    assert torch.equal(logits(model), computed) and len(calls) <= 2, "it knows them already"
    with attending(Documents([7])):
        given = module(torch.zeros(1, 7, 4, device=DEVICE), torch.arange(7, device=DEVICE).unsqueeze(0), *extra(calls))
    assert not isinstance(given, Rotary), "whoever has no pages is given what there was"


def extra(calls: list[int]) -> tuple[str, ...]:
    """Of a model with two kinds of layers, one."""
    return ("full_attention",) if len(calls) == 2 else ()


def test_a_longer_sequence_gets_a_longer_table_and_the_old_one_stays() -> None:
    model = build("llama").to(DEVICE)  # type: ignore[arg-type]
    fusion, pages = fuse(model), KVPages(NUM_PAGES, PAGE_TOKENS)
    assert fusion.rotary is not None
    wanted = forward(model, pages, PREFILL), forward(model, pages, MIXED)
    fusion.know_positions(max(map(len, SEQUENCES)))
    first = forward(model, pages, PREFILL)
    (before,) = fusion.rotary._tables.values()
    fusion.know_positions(POSITIONS)
    (after,) = fusion.rotary._tables.values()
    second = forward(model, pages, MIXED)
    assert torch.equal(first, wanted[0]) and torch.equal(second, wanted[1])
    assert len(after[0]) == POSITIONS > len(before[0]) and torch.equal(after[0][: len(before[0])], before[0])
    assert any(before is kept for tables in fusion.rotary._outgrown for kept in tables.values())
