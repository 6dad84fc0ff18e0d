"""The step's kernels against their plain twins: the same rows, the same state, the same report, to the bit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from slipstream.engine import step
from slipstream.engine.state import NO_TOKEN, StepState

pytest.importorskip("triton")
from slipstream.engine import triton_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_SLOTS, MAX_LENGTH = 13, 40


def random_state(seed: int, *, idle: bool = False) -> StepState:
    """Slots that are idle, prefilling, decoding, scripted, about to end; stop tokens that will come up."""
    dice = random.Random(seed)
    state = StepState(num_slots=NUM_SLOTS, max_length=MAX_LENGTH, num_table_pages=3, trash_page=9, device=DEVICE)
    state["tokens"].copy_(
        torch.randint(3, 90, (NUM_SLOTS + 1, MAX_LENGTH), generator=torch.Generator().manual_seed(seed))
    )
    state["tokens"][NUM_SLOTS] = 0
    for slot in range(NUM_SLOTS):
        known = dice.randint(1, MAX_LENGTH - 2)
        state["known"][slot] = known
        state["computed"][slot] = dice.choice([known - 1, dice.randint(0, known - 1)])
        state["limit"][slot] = dice.randint(known + 1, min(known + 3, MAX_LENGTH))
        state["allotted"][slot] = dice.choice([0, 1, 1, 5, 50])
        state["live"][slot] = 0 if idle else dice.choice([0, 1, 1])
        state["scripted"][slot] = dice.choice([0, 0, 1])
        state["seed_low"][slot] = dice.randint(-(2**31), 2**31 - 1)
        state["seed_high"][slot] = dice.randint(-(2**31), 2**31 - 1)
        state["inverse_temperature"][slot] = dice.random() + 0.5
        state["greedy"][slot] = dice.choice([0, 1])
        state["top_k"][slot] = dice.choice([0, 7])
        state["top_p"][slot] = dice.random()
        state["min_p"][slot] = dice.random()
        state["stops"][slot] = dice.choice([NO_TOKEN, dice.randint(3, 12)])
    return state


def sizes(state: StepState) -> tuple[int, int]:
    count = torch.minimum(state["allotted"], state["known"] - state["computed"]) * state["live"]
    return int(count.sum()), int((count > 0).sum())


def same(plain: Tensor, kernel: Tensor) -> bool:
    return plain.dtype == kernel.dtype and torch.equal(plain, kernel)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("padding", [0, 3])
def test_the_kernels_pack_and_commit_what_the_plain_step_does(seed: int, padding: int) -> None:
    states = [random_state(seed, idle=seed == 7) for _ in range(2)]
    num_tokens, num_rows = sizes(states[0])
    num_tokens, num_rows = max(1, num_tokens + padding), max(1, num_rows + min(padding, 2))
    plain, kernels = (
        [*module.pack(state, num_tokens, num_rows)] for module, state in zip((step, triton_step), states, strict=True)
    )
    assert same(plain[0], kernels[0])
    for records in zip(plain[1:], kernels[1:], strict=True):
        for name in type(records[0]).__slots__:
            assert same(getattr(records[0], name), getattr(records[1], name)), name
    sampled = torch.randint(3, 12, (num_rows,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    sampled[0] = -1 if seed % 2 else sampled[0]
    logprobs = -torch.rand(num_rows, device=DEVICE)
    for module, state, packed in zip((step, triton_step), states, (plain, kernels), strict=True):
        module.commit(state, packed[1], sampled, logprobs)
    assert same(states[0]._block, states[1]._block)
    assert same(states[0].report[:, :NUM_SLOTS], states[1].report[:, :NUM_SLOTS])
    assert seed == 7 or bool((states[0].report[0] != NO_TOKEN).any()), "something was sampled"


def test_a_slot_that_is_left_out_is_noticed() -> None:
    state, other = random_state(1), random_state(1)
    running = int((other["live"] * other["allotted"]).nonzero()[0])
    other["live"][running] = 0
    num_tokens, num_rows = sizes(state)
    assert not same(step.pack(state, num_tokens, num_rows)[0], triton_step.pack(other, num_tokens, num_rows)[0])
