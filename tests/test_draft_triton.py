"""The Triton kernels of the search against the numba one: the same drafts; without a GPU in Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")
from slipstream.draft import history as module
from slipstream.draft import triton_match
from slipstream.draft.history import HistoryDrafter
from slipstream.draft.shelves import Text
from slipstream.engine.sequences import Running, Seat, StepPlan
from slipstream.engine.state import StepState
from slipstream.rng import derive_seed
from slipstream.types import Request, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_SLOTS, MAX_LENGTH, MAX_DRAFTS = 6, 60, 6


def random_case(seed: int, device: torch.device) -> tuple[HistoryDrafter, StepState]:
    """Two groups in some of the slots, with texts of few kinds of tokens, one shelf longer than a block."""
    dice = random.Random(seed)

    def text(length: int) -> tuple[int, ...]:
        return tuple(dice.choice((3, 4, 5)) for _ in range(length))

    past = [Text(text(dice.randint(0, 50)), dice.randint(1, 4)) for _ in range(dice.choice((3, 40)))]
    drafter = HistoryDrafter(
        num_slots=NUM_SLOTS,
        max_drafts=MAX_DRAFTS,
        library_tokens=9000,
        longest_shelf=4000,
        device=device,
        past=lambda _: past,
        min_match=dice.randint(1, 3),
    )
    state = StepState(
        num_slots=NUM_SLOTS,
        max_length=MAX_LENGTH,
        num_table_pages=1,
        trash_page=1,
        device=device,
        max_drafts=MAX_DRAFTS,
    )
    seats = []
    sampling = SamplingParams(max_new_tokens=30)
    for group in range(2):
        prompt = text(dice.randint(1, 25))
        requests = [
            Request(f"{group}/{n}", str(group), prompt, derive_seed(seed, group, n), sampling) for n in range(2)
        ]
        drafter.expect(requests)
        for member, request in enumerate(requests):
            said = list(text(dice.randint(0, 20)))
            seats.append(Seat(2 * group + member, Running(request, said), (*prompt, *said), 0))
    state.apply(StepPlan(seats=tuple(seats)))
    drafter.follow(seats)
    state["computed"].copy_(state["known"] - 1)
    state["allotted"][:4] = 1 + MAX_DRAFTS
    state["greedy"][1] = 1
    return drafter, state


@pytest.mark.parametrize("seed", range(12))
def test_the_kernels_draft_what_numba_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    width = torch.tensor([6, 3, 6, 1, 0, 0, 0], dtype=torch.int32)
    drafter, state = random_case(seed, torch.device("cpu"))
    wanted = drafter._find(state, width)
    drafts = [state["drafts"][slot, :count].tolist() for slot, count in enumerate(wanted.tolist())]
    sources = [state["sources"][slot, :count].tolist() for slot, count in enumerate(wanted.tolist())]
    drafter, state = random_case(seed, DEVICE)
    monkeypatch.setattr(module, "KERNEL_DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(triton_match, "FEW_BLOCKS", 0 if seed % 2 else 32)
    got = drafter._find(state, width.to(DEVICE))
    assert got.tolist() == wanted.tolist() and (seed or sum(got.tolist()) > 5)
    assert [state["drafts"][slot, :count].tolist() for slot, count in enumerate(got.tolist())] == drafts
    assert [state["sources"][slot, :count].tolist() for slot, count in enumerate(got.tolist())] == sources


@pytest.mark.parametrize("few_blocks", [0, 32])
def test_of_many_places_the_last_vote(few_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may vote, in a block and in all, over several blocks, that do not say the same."""
    monkeypatch.setattr(triton_match, "FEW_BLOCKS", few_blocks)
    drafts = []
    for device, kernel_devices in ((torch.device("cpu"), {"cuda"}), (DEVICE, {"cuda", "cpu"})):
        monkeypatch.setattr(module, "KERNEL_DEVICES", kernel_devices)
        dice = random.Random(5)
        past = [Text(tuple(t for _ in range(60) for t in (7, dice.choice((3, 4, 5)))), 1) for _ in range(30)]
        drafter = HistoryDrafter(
            num_slots=1, max_drafts=4, library_tokens=8000, device=device, past=lambda _, past=past: past, min_match=1
        )
        state = StepState(num_slots=1, max_length=20, num_table_pages=1, trash_page=1, device=device, max_drafts=4)
        found = []
        for seed in range(12):
            request = Request(f"r{seed}", f"r{seed}", (7,), derive_seed(seed), SamplingParams(max_new_tokens=10))
            drafter.expect([request])
            seats = (Seat(0, Running(request, []), (7,), 0),)
            state.apply(StepPlan(seats=seats))
            drafter.follow(seats)
            count = drafter._find(state, torch.tensor([4, 0], dtype=torch.int32, device=device))[0]
            found.append(state["drafts"][0, : int(count)].tolist())
            drafter.forget(request.uid)
        drafts.append(found)
    assert drafts[0] == drafts[1] and len({tuple(line) for line in drafts[0]}) > 1
