"""Which tokens a step runs and samples at: the plain twins of the kernels in `triton_step.py`, and what they give.

It follows from the state on the device alone; the host only gives sizes that are large enough.

Axes: T packed tokens (padded), R rows (padded), N samples (padded), S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.engine.fitting import coarsely
from slipstream.engine.sampling import SamplingRows
from slipstream.engine.sequences import StepPlan
from slipstream.engine.state import StepState
from slipstream.engine.strategy import Feeding, StepDrafts
from slipstream.models.cached import PackedRows
from slipstream.rng import MASK32

SAMPLED_SHARE = 8
"""A step with prompts has room for a sample in so many tokens, or for one in every slot."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """At least what the live slots need; the rest is padding. A CUDA graph is made for one of these."""

    num_tokens: int
    num_rows: int
    num_samples: int
    with_drafts: bool
    """Whether there are any."""
    with_cuts: bool
    """Whether any slot has top-k, top-p or min-p."""
    tree_depth: int = 0
    """From 1 on, drafts are trees, so deep at most."""
    feeding: Feeding = Feeding.ALL
    """What a learned drafter gets of it."""

    @property
    def kind(self) -> Hashable:
        return self.with_drafts, self.with_cuts, self.tree_depth, self.feeding

    @property
    def room(self) -> tuple[int, ...]:
        return self.num_tokens, self.num_samples


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Of the drafting before a step."""

    num_rows: int
    """At least the slots that decode."""
    depth: int = 0
    """How many tokens ahead a learned drafter goes, if there is one."""
    branches: int = 1
    """Alternatives that it pursues at each; from 2 on, drafts are trees."""
    searches: bool = True
    """Whether drafts are looked for in the library."""

    @property
    def kind(self) -> Hashable:
        return self.depth, self.branches, self.searches

    @property
    def room(self) -> tuple[int, ...]:
        return (self.num_rows,)


@dataclass(frozen=True, slots=True)
class Launch:
    """What is launched at once, as one CUDA graph if there is one: drafting, a step, or both."""

    drafting: DraftSizes | None
    step: StepSizes | None

    @property
    def kind(self) -> Hashable:
        return self.drafting and self.drafting.kind, self.step and self.step.kind

    @property
    def room(self) -> tuple[int, ...]:
        return (*(self.drafting.room if self.drafting else ()), *(self.step.room if self.step else ()))

    @property
    def feeding_more(self) -> Launch:
        """The same, but that a learned drafter gets something where nothing would do."""
        if self.step is None or self.step.feeding != Feeding.NOTHING:
            return self
        return replace(self, step=replace(self.step, feeding=Feeding.KEYS))

    @property
    def has_prompts(self) -> bool:
        """Whether tokens run that nothing is sampled after."""
        return self.step is not None and self.step.num_tokens > self.step.num_samples


def launches_of(plan: StepPlan, drafts: StepDrafts, pad: Callable[[int], int]) -> list[Launch]:
    """Of a step in the size it has, but for what `pad` adds."""
    num_samples = len(plan.samplers) + plan.num_drafts
    sizes = pad(plan.num_tokens), plan.num_rows, pad(num_samples)
    return _launches(plan, drafts, *sizes, num_askers=plan.num_rows)


def padded_launches_of(plan: StepPlan, drafts: StepDrafts, pad: Callable[[int], int], num_slots: int) -> list[Launch]:
    """Of a step in one of the sizes that `pad` gives. Of those with prompts there are few, since their graphs are made
    while the GPU has nothing else to do, as a rollout begins: they sample in more places than they need, and a learned
    drafter gets all or nothing, both of which cost some per cent of them."""
    # Drafting with some rows more takes no longer, for a model has its weights to read and texts are quickly searched.
    num_tokens, num_askers = pad(plan.num_tokens), min(coarsely(max(1, plan.num_rows)), num_slots)
    num_samples = max(1, len(plan.samplers) + plan.num_drafts)
    if plan.num_prefilled:
        few = min(num_tokens // SAMPLED_SHARE, num_slots)
        num_samples = few if num_samples <= few else min(num_tokens, max(num_samples, num_slots))
    num_samples = min(num_tokens, pad(num_samples))
    if num_tokens > num_samples and drafts.feeding:
        drafts = replace(drafts, feeding=Feeding.ALL)
    return _launches(plan, drafts, num_tokens, min(num_tokens, num_slots), num_samples, num_askers=num_askers)


def _launches(
    plan: StepPlan, drafts: StepDrafts, num_tokens: int, num_rows: int, num_samples: int, *, num_askers: int
) -> list[Launch]:
    """What a learned drafter does has a graph of its own, which steps of all sizes share; what is quickly found is
    part of the step's, since a second launch takes the host longer than that."""
    strategy = drafts.strategy
    # Prompts beside trees would be computed a token at a time.
    branches = strategy.branches if plan.num_drafts and not plan.num_prefilled else 1
    step = StepSizes(
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_samples=num_samples,
        with_drafts=plan.num_drafts > 0,
        with_cuts=plan.with_cuts,
        tree_depth=strategy.depth if branches > 1 else 0,
        feeding=drafts.feeding,
    )
    if not plan.num_drafts:
        return [Launch(None, step)]
    drafting = DraftSizes(num_askers, strategy.depth, branches, strategy.min_match > 0)
    return [Launch(drafting, None), Launch(None, step)] if strategy.depth else [Launch(drafting, step)]


@dataclass(frozen=True, slots=True)
class PackedStep:
    ids_T: Tensor
    rows: PackedRows
    sample_start_R1: Tensor
    """int32: row r owns the samples from sample_start_R1[r] up to that of r + 1."""
    sampled_at_N: Tensor
    """The packed token whose logits a sample comes from."""
    sampling: SamplingRows
    num_drafts: int
    """That a row can have in this step."""


def pack(state: StepState, sizes: StepSizes) -> PackedStep:
    """The tokens to run, slot by slot, where they belong, and which of them are sampled at, and how."""
    num_rows, device = sizes.num_rows, state.report.device
    known_S, computed_S = state["known"], state["computed"]
    # Slots that run move to the front, in order; those that do not all land on one place too many, which is dropped.
    count_S = torch.minimum(state["allotted"], known_S - computed_S + _drafted(state, sizes)) * state["live"]
    count_S = count_S.clamp(min=0)
    runs_S = count_S > 0
    row_S = torch.where(runs_S, runs_S.cumsum(0) - 1, num_rows)
    slots_S = torch.arange(len(count_S), device=device)
    slot_R1 = torch.full((num_rows + 1,), state.trash_slot, device=device).scatter_(0, row_S, slots_S)
    slot_R1[num_rows:].fill_(state.trash_slot)
    slot_R = slot_R1[:num_rows]
    length_R = computed_S[slot_R] + count_S[slot_R]
    start_R1 = _starts(count_S[slot_R])
    row_T, offset_T = _places(start_R1, sizes.num_tokens)
    slot_T = slot_R1[row_T]
    position_T = ((computed_S[slot_T] + offset_T) * (row_T < num_rows)).long()
    drafted_T = position_T - known_S[slot_T]
    ids_T = state["tokens"][slot_T, position_T.clamp(max=state["tokens"].shape[1] - 1)]
    if sizes.with_drafts:
        drafts_T = state["drafts"][slot_T, drafted_T.clamp(0, state.max_drafts - 1)]
        ids_T = torch.where(drafted_T >= 0, drafts_T, ids_T)

    num_samples_R = (length_R - known_S[slot_R] + 1).clamp(min=0) * (count_S[slot_R] > 0)
    sample_start_R1 = _starts(num_samples_R)
    row_N, offset_N = _places(sample_start_R1, sizes.num_samples)
    real_N = row_N < num_rows
    sampled_at_N = start_R1[(row_N + 1).clamp(max=num_rows)] - num_samples_R[row_N.clamp(max=num_rows - 1)] + offset_N
    rows = PackedRows(slot_T, position_T, slot_R, start_R1, length_R, state["table"])
    slot_N = slot_R1[row_N]
    return PackedStep(
        ids_T=ids_T.long(),
        rows=rows,
        sample_start_R1=sample_start_R1,
        sampled_at_N=(sampled_at_N * real_N).long(),
        sampling=sampling_rows(state, slot_N, ((known_S[slot_N] + offset_N) * real_N).long()),
        num_drafts=state.max_drafts if sizes.with_drafts else 0,
    )


def room_for_drafts(state: StepState, limits: Tensor) -> Tensor:
    """A number on the device: how many drafts fit beside the tokens that must run; `limits`: tokens and samples."""
    due_S = (state["known"] - state["computed"]) * state["live"]
    count_S = torch.minimum(state["allotted"], due_S)
    num_samplers = ((count_S == due_S) & (count_S > 0)).sum()
    num_tokens, num_samples = limits.unbind()
    return torch.minimum(num_tokens - count_S.sum(), num_samples - num_samplers)


def _drafted(state: StepState, sizes: StepSizes) -> Tensor:
    """Drafts left by an earlier step do not count when this one has none."""
    return state["drafted"] if sizes.with_drafts else torch.zeros_like(state["drafted"])


def _starts(count_R: Tensor) -> Tensor:
    start_R1 = torch.zeros(len(count_R) + 1, dtype=torch.int32, device=count_R.device)
    torch.cumsum(count_R, 0, dtype=torch.int32, out=start_R1[1:])
    return start_R1


def _places(start_R1: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The row of each of `num` places, R for padding, and the place within it."""
    place_T = torch.arange(num, dtype=torch.int32, device=start_R1.device)
    row_T = torch.searchsorted(start_R1[1:], place_T, right=True)
    return row_T, place_T - start_R1[row_T]


def sampling_rows(state: StepState, slot_N: Tensor, position_N: Tensor) -> SamplingRows:
    """How the tokens at these positions of these slots are sampled."""
    seed_N2 = torch.stack([state["seed_low"][slot_N], state["seed_high"][slot_N]], 1).long() & MASK32
    return SamplingRows(
        seed_N2=seed_N2,
        position_N=position_N,
        inverse_temperature_N=state["inverse_temperature"][slot_N],
        greedy_N=state["greedy"][slot_N] > 0,
        top_k_N=state["top_k"][slot_N].long(),
        top_p_N=state["top_p"][slot_N],
        min_p_N=state["min_p"][slot_N],
    )
