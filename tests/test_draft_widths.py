"""The kernels for widths and texts, numba and Triton, against their plain twins."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from slipstream.draft import history as module
from slipstream.draft.history import HistoryDrafter
from slipstream.draft.shelves import Text
from slipstream.draft.widths import Rule
from slipstream.engine.packing import DraftSizes
from slipstream.engine.sequences import Running, Seat, StepPlan
from slipstream.engine.state import StepState
from slipstream.types import Request, SamplingParams

NUM_SLOTS, MAX_DRAFTS = 9, 6
GPU = torch.cuda.is_available()


def random_case(seed: int, rule: Rule, device: torch.device) -> tuple[HistoryDrafter, StepState]:
    """Slots with texts that recur, records of all kinds, and a report of a step that has just been committed."""
    dice = random.Random(seed)
    state = StepState(
        num_slots=NUM_SLOTS,
        max_length=90,
        num_table_pages=1,
        trash_page=1,
        device=device,
        max_drafts=MAX_DRAFTS,
    )
    drafter = HistoryDrafter(
        num_slots=NUM_SLOTS,
        max_drafts=MAX_DRAFTS,
        library_tokens=4000,
        device=device,
        past=lambda _: [Text((3, 4, 5) * 8, 1)],
        rule=rule,
    )
    seats = []
    for slot in range(NUM_SLOTS - 2):
        request = Request(f"r{slot}", f"g{slot}", (3, 4, 5, 3), slot, SamplingParams(max_new_tokens=60))
        drafter.expect([request])
        said = [4, 5, 3] * dice.randint(0, 9)
        seats.append(Seat(slot, Running(request, said), (3, 4, 5, 3, *said), 0))
    state.apply(StepPlan(seats=tuple(seats)))
    drafter.follow(seats)
    for slot in range(NUM_SLOTS):
        state["computed"][slot] = max(0, int(state["known"][slot]) - dice.choice((1, 1, 1, 4)))
        state["allotted"][slot] = dice.choice((1, 3, 7))
        state["live"][slot] = dice.choice((0, 1, 1, 1)) * int(slot < NUM_SLOTS - 2)
        state["behind"][slot] = dice.choice((0, 0, 1))
        drafter.window_S[slot] = dice.randint(1, MAX_DRAFTS)
        drafter.hits_S[slot] = dice.choice((0.0, 1.0, 20.0)) * dice.random()
        drafter.tries_S[slot] = drafter.hits_S[slot] + dice.choice((0.0, 1.0, 9.0)) * dice.random()
    return drafter, state


CASES = [("numba", seed) for seed in range(10)] + [("triton", seed) for seed in (range(10) if GPU else (0,))]
"""One where Triton's interpreter takes seconds for each."""


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernels of one kind run: Triton's on a GPU, or in its interpreter."""
    if request.param == "numba":
        return torch.device("cpu")
    pytest.importorskip("triton")
    monkeypatch.setattr(module, "KERNEL_DEVICES", {"cuda" if GPU else "cpu"})
    return torch.device("cuda" if GPU else "cpu")


@pytest.mark.parametrize("rule", ["aimd", "odds"])
@pytest.mark.parametrize(("device", "seed"), CASES, indirect=["device"])
def test_kernels_give_out_what_the_plain_rules_do(seed: int, rule: Rule, device: torch.device) -> None:
    in_interpreter = device.type in module.KERNEL_DEVICES and not GPU  # which takes seconds for each
    given = []
    for room in (7,) if in_interpreter else (0, 7, 100):
        drafter, state = random_case(seed, rule, device)
        other = copy.deepcopy(state)
        drafter.draft(state, torch.tensor(room, device=device), DraftSizes(state.num_slots))
        drafter.draft_plainly(other, torch.tensor(room, device=device))
        assert torch.equal(state["drafted"], other["drafted"]) and state["drafted"].sum() <= room
        given.append(int(state["drafted"].sum()))
    assert given == sorted(given) and (given[-1] > 0 or seed == 5)


@pytest.mark.parametrize(("device", "seed"), CASES, indirect=["device"])
def test_kernels_learn_what_the_plain_rules_do(seed: int, device: torch.device) -> None:
    dice = random.Random(seed)
    pairs = [random_case(seed, "odds", device) for _ in range(2)]
    for slot in range(NUM_SLOTS - 2):
        count = dice.choice((0, 1, 2, MAX_DRAFTS + 1))
        tried = max(0, count - 1) + dice.choice((0, 2)) if count else 0
        tokens = [dice.randint(3, 9) for _ in range(MAX_DRAFTS + 1)]
        right = [int(index < count - 1) for index in range(MAX_DRAFTS + 1)]
        for _, state in pairs:
            state["known"][slot] += count
            state.report[slot] = torch.tensor([count, min(tried, MAX_DRAFTS), *tokens, *tokens, *right, *tokens])
    (kernel, one), (plain, other) = pairs
    kernel.learn_texts(one)
    plain.learn_plainly(other)
    for name in ("window_S", "hits_S", "tries_S"):
        assert torch.equal(getattr(kernel, name), getattr(plain, name)), name
    assert torch.equal(kernel.library_B[:-1], plain.library_B[:-1])
