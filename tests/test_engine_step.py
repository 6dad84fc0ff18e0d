"""The step's kernels against their plain twins: the same rows, the same state, the same report, to the bit."""

from __future__ import annotations

import random

import pytest
import torch
from reports import lines_of, log_kept_of
from torch import Tensor

from slipstream.engine import packing, step
from slipstream.engine.sampling import Samples
from slipstream.engine.slots import NO_TOKEN, read_report
from slipstream.engine.state import StepState

pytest.importorskip("triton")
from slipstream.engine import triton_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_SLOTS, MAX_LENGTH, MAX_DRAFTS = 13, 40, 5


def random_state(seed: int, *, idle: bool = False) -> StepState:
    """Slots that are idle, prefilling, decoding, scripted, about to end; stop tokens that will come up."""
    dice = random.Random(seed)
    state = StepState(
        num_slots=NUM_SLOTS,
        max_length=MAX_LENGTH,
        num_table_pages=3,
        trash_page=9,
        device=DEVICE,
        max_drafts=MAX_DRAFTS,
    )
    state["drafts"].copy_(
        torch.randint(3, 6, (NUM_SLOTS + 1, MAX_DRAFTS), generator=torch.Generator().manual_seed(seed))
    )
    state["sources"].copy_(1 + torch.arange(MAX_DRAFTS) % 3)
    state["drafts"][NUM_SLOTS] = 0
    state["tokens"].copy_(
        torch.randint(3, 90, (NUM_SLOTS + 1, MAX_LENGTH), generator=torch.Generator().manual_seed(seed))
    )
    state["tokens"][NUM_SLOTS] = 0
    for slot in range(NUM_SLOTS):
        known = dice.randint(1, MAX_LENGTH - 2)
        state["known"][slot] = known
        state["computed"][slot] = dice.choice([known - 1, dice.randint(0, known - 1)])
        state["limit"][slot] = dice.randint(known + 1, min(known + 9, MAX_LENGTH))
        state["allotted"][slot] = dice.choice([0, 1, 1, 5, 50])
        if state["computed"][slot] == known - 1:
            state["drafted"][slot] = dice.randint(0, min(MAX_DRAFTS, int(state["limit"][slot]) - known - 1))
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


def sizes(state: StepState, *, padding: int = 0, with_drafts: bool = True) -> packing.StepSizes:
    due = state["known"] - state["computed"]
    count = torch.minimum(state["allotted"], due + state["drafted"] * with_drafts) * state["live"]
    num_samples = int(((count - due + 1).clamp(min=0) * (count > 0)).sum())
    num_tokens, num_rows = int(count.sum()), int((count > 0).sum())
    return packing.StepSizes(
        num_tokens=max(1, num_tokens + padding),
        num_rows=max(1, num_rows + min(padding, 2)),
        num_samples=max(1, num_samples + padding),
        with_drafts=with_drafts,
        with_cuts=False,
    )


def same(plain: Tensor, kernel: Tensor) -> bool:
    return plain.dtype == kernel.dtype and torch.equal(plain, kernel)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("with_drafts", [False, True])
def test_the_kernels_pack_and_commit_what_the_plain_step_does(seed: int, padding: int, with_drafts: bool) -> None:
    states = [random_state(seed, idle=seed == 7) for _ in range(2)]
    size = sizes(states[0], padding=padding, with_drafts=with_drafts)
    limits = [state.limits_of(size.num_tokens, size.num_samples) for state in states]
    rooms = packing.room_for_drafts(states[0], limits[0]), triton_step.room_for_drafts(states[1], limits[1])
    assert int(rooms[0]) == int(rooms[1])
    plain, kernels = (module.pack(state, size) for module, state in zip((packing, triton_step), states, strict=True))
    for name in ("ids_T", "sample_start_R1", "sampled_at_N"):
        assert same(getattr(plain, name), getattr(kernels, name)), name
    for part, records in (("rows", (plain.rows, kernels.rows)), ("sampling", (plain.sampling, kernels.sampling))):
        for name in type(records[0]).__dataclass_fields__.keys() - {"branches"}:
            assert same(getattr(records[0], name), getattr(records[1], name)), (part, name)
    sampled = torch.randint(3, 6, (size.num_samples,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    sampled[0] = -1 if seed % 2 else sampled[0]
    logprobs = -torch.rand(size.num_samples, device=DEVICE)
    for module, state, packed in zip((step, triton_step), states, (plain, kernels), strict=True):
        module.commit(state, packed, Samples(sampled, logprobs, logprobs / 8))
    assert same(states[0]._block, states[1]._block)
    reports = [lines_of(read_report(state.report[:NUM_SLOTS].cpu().numpy())) for state in states]
    assert reports[0] == reports[1]
    kept = [log_kept_of(read_report(state.report[:NUM_SLOTS].cpu().numpy())) for state in states]
    assert kept[0] == kept[1] == {slot: [one / 8 for one in line[1]] for slot, line in reports[0].items()}
    assert seed == 7 or reports[0], "something was sampled"
    had_drafts = any(num_drafted for _, _, _, num_drafted in reports[0].values())
    assert with_drafts or not had_drafts
    assert seed != 3 or had_drafts == with_drafts


def test_drafts_are_taken_as_far_as_they_are_right() -> None:
    """By hand: slot 0 has two right drafts of three, slot 1 a right one that ends it, slot 2 none that is right."""
    for pack, commit in ((packing.pack, step.commit), (triton_step.pack, triton_step.commit)):
        state = StepState(num_slots=3, max_length=20, num_table_pages=1, trash_page=1, device=DEVICE, max_drafts=3)
        for name, values in {"known": 5, "computed": 4, "limit": 20, "live": 1, "allotted": 4, "drafted": 3}.items():
            state[name][:3] = values
        state["stops"].fill_(NO_TOKEN)
        state["stops"][1, 0] = 12
        state["drafts"][:3] = torch.tensor([11, 12, 13])
        state["sources"][:3] = torch.tensor([1, 2, 3])
        packed = pack(state, packing.StepSizes(12, 3, 12, with_drafts=True, with_cuts=False))
        sampled = torch.tensor([11, 12, 9, 8, 11, 12, 13, 14, 7, 12, 13, 14], device=DEVICE)
        commit(state, packed, Samples(sampled, torch.arange(12.0, device=DEVICE), -torch.arange(12.0, device=DEVICE)))
        report = lines_of(read_report(state.report.cpu().numpy()))
        assert report == {
            0: ([11, 12, 9], [0, 1, 2], [1, 2, 0], 3),
            1: ([11, 12], [4, 5], [1, 2], 3),
            2: ([7], [8], [0], 3),
        }
        kept = log_kept_of(read_report(state.report.cpu().numpy()))
        assert kept == {0: [0, -1, -2], 1: [-4, -5], 2: [-8]}
        assert state["known"][:3].tolist() == [8, 7, 6] and state["computed"][:3].tolist() == [7, 6, 5]
        assert state["live"][:3].tolist() == [1, 0, 1]
        assert state["tokens"][0, 5:8].tolist() == [11, 12, 9]


def test_a_slot_that_is_left_out_is_noticed() -> None:
    state, other = random_state(1), random_state(1)
    running = int((other["live"] * other["allotted"]).nonzero()[0])
    other["live"][running] = 0
    assert not same(packing.pack(state, sizes(state)).ids_T, triton_step.pack(other, sizes(state)).ids_T)
