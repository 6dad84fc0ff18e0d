"""What the device knows of every slot: one block of 32-bit numbers, with a named view for each field.

The host changes it by patches (place, value), all of a step in one copy and one scatter; the step changes it itself as
sequences go on. The last slot is the trash slot: never live, one trash page, the home of padding.

A step reports what each slot sampled: how many tokens (0 for none), how many drafts were tried for them, the tokens,
their log-probabilities as float32 bits, their origins (0 if sampled, else the source of the accepted draft), and the
log of the mass that cuts kept at each, as float32 bits.

Axes: S slots and the trash slot, L tokens of a sequence, W pages of a slot, E stop tokens, J drafts of a slot.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.sequences import Seat, StepPlan
from slipstream.engine.slots import MAX_STOP_TOKENS, NO_TOKEN
from slipstream.engine.strategy import StepDrafts, size_of
from slipstream.rng import MASK32
from slipstream.types import SamplingParams

_FIELDS = (
    "known",  # tokens in the buffer: prompt and sampled
    "computed",  # of these, tokens with keys
    "limit",  # known tokens at which the sequence ends
    "allotted",  # tokens it may run in a step
    "live",  # 1 while it goes on
    "behind",  # 1 if all others may have to wait for it: drafts for it, if in a chain, are favoured
    "drafted",  # tokens that were drafted to follow those known
    "scripted",  # 1 if its tokens are in the buffer already and are walked, not sampled
    "seed_low",
    "seed_high",
    "inverse_temperature",
    "greedy",
    "top_k",
    "top_p",
    "min_p",
)
_FLOATS = ("inverse_temperature", "top_p", "min_p")


class StepState:
    def __init__(
        self,
        *,
        num_slots: int,
        max_length: int,
        num_table_pages: int,
        trash_page: int,
        device: torch.device,
        max_drafts: int = 0,
    ) -> None:
        lines = num_slots + 1
        widths = {
            **dict.fromkeys(_FIELDS, 1),
            "stops": MAX_STOP_TOKENS,
            "table": num_table_pages,
            "tokens": max_length,
            "drafts": max_drafts,
            "sources": max_drafts,
            "parents": max_drafts,  # in a tree: the draft that a draft follows, -1 for the last known token
        }
        starts = accumulate((lines * width for width in widths.values()), initial=0)
        self._layout = {name: (start, width) for (name, width), start in zip(widths.items(), starts, strict=False)}
        self.num_slots = num_slots
        self.max_drafts = max_drafts
        self._block = torch.zeros(lines * sum(widths.values()), dtype=torch.int32, device=device)
        self["table"].fill_(trash_page)
        self.report = torch.zeros(lines, 2 + 4 * (max_drafts + 1), dtype=torch.int32, device=device)
        """A line a slot: the number of tokens, of drafts, then tokens, log-probabilities, origins and kept masses."""
        self.limits = torch.zeros(2, dtype=torch.int32, device=device)
        """Tokens and samples that the next step has room for, for graphs that steps of all sizes share."""
        self._set_limits = self.limits
        self._limits: dict[tuple[int, int], Tensor] = {}

    @property
    def trash_slot(self) -> int:
        return self.num_slots

    def __getitem__(self, name: str) -> Tensor:
        """The view of a field: [S], or [S, width] for stops, table, tokens, drafts, sources and parents."""
        start, width = self._layout[name]
        view = self._block[start : start + (self.num_slots + 1) * width]
        if name in _FLOATS:
            return view.view(torch.float32)
        return view if name in _FIELDS else view.view(self.num_slots + 1, width)

    def request_report(self) -> tuple[Tensor, torch.cuda.Event | float]:
        """Of the step launched last, as it will be; and when: an event of the GPU, or the time on a CPU."""
        if not self.report.is_cuda:
            return self.report.clone(), time.perf_counter()
        host = torch.empty(self.report.shape, dtype=self.report.dtype, pin_memory=True)
        host.copy_(self.report, non_blocking=True)
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        return host, done

    def limits_of(self, num_tokens: int, num_samples: int) -> Tensor:
        """On the device, one for each pair, made when it is first asked for, before a graph that holds it."""
        pair = num_tokens, num_samples
        if pair not in self._limits:
            self._limits[pair] = limits = torch.empty_like(self.limits)
            for place, number in enumerate(pair):
                limits[place].fill_(number)  # to copy them would wait for all steps under way
        return self._limits[pair]

    def set_limits(self, limits: Tensor) -> None:
        """Those of the next step, by `limits_of`."""
        if self._set_limits is not limits:
            self._set_limits = limits
            self.limits.copy_(limits)

    def apply(self, plan: StepPlan) -> None:
        """Tell the device what the plan changes, without waiting for it."""
        writes = {self._place("live", slot): 0 for slot in plan.vacated}
        places, values = [], []
        for seat in plan.seats:
            writes.update(self._seat_writes(seat))
            tokens = (*seat.token_ids, *seat.sequence.request.script_ids[len(seat.sequence.token_ids) :])
            places.append(np.arange(len(tokens)) + self._place("tokens", seat.slot))
            values.append(np.array(tokens))
        for name, changes in (("allotted", plan.allotments), ("behind", plan.behind)):
            if len(changes):
                places.append(self._layout[name][0] + changes[:, 0])
                values.append(changes[:, 1])
        if plan.pages:
            numbers = np.fromiter(chain.from_iterable(plan.pages), np.int64, 3 * len(plan.pages))
            slots, indices, pages = numbers.reshape(-1, 3).T
            start, width = self._layout["table"]
            places.append(start + slots * width + indices)
            values.append(pages)
        if writes:
            places.append(np.fromiter(writes.keys(), np.int64, len(writes)))
            values.append(np.fromiter(writes.values(), np.int64, len(writes)))
        if places:
            patch(self._block, np.concatenate(places), np.concatenate(values))

    def _place(self, name: str, slot: int, index: int = 0) -> int:
        start, width = self._layout[name]
        return start + slot * width + index

    def _seat_writes(self, seat: Seat) -> dict[int, int]:
        request = seat.sequence.request
        fields = {
            "known": len(seat.token_ids),
            "computed": seat.num_computed,
            "limit": len(request.prompt_ids) + request.sampling.max_new_tokens,
            "live": 1,
            "drafted": 0,
            "scripted": int(bool(request.script_ids)),
            "seed_low": request.seed & MASK32,
            "seed_high": request.seed >> 32,
            **_sampling_fields(request.sampling),
        }
        writes = {self._place(name, seat.slot): value for name, value in fields.items()}
        stops = request.sampling.stop_token_ids
        padded = (*stops, *[NO_TOKEN] * (MAX_STOP_TOKENS - len(stops)))
        return writes | {self._place("stops", seat.slot, i): token for i, token in enumerate(padded)}


def patch(block: Tensor, places: NDArray[np.int64], values: NDArray[np.int64]) -> None:
    """Write into a block of 32-bit numbers, without waiting for the device. Of a value the low 32 bits count, which may
    be those of an unsigned number. All in one copy: with sequences of many lengths there is a patch in nearly every
    step, and its launches are what it takes."""
    cut = places.nbytes
    packed = torch.empty(cut + 4 * len(values), dtype=torch.uint8, pin_memory=block.is_cuda)
    written = packed.numpy()
    written[:cut].view(np.int64)[:] = places
    written[cut:].view(np.int32)[:] = values
    packed = packed.to(block.device, non_blocking=True)
    block.index_copy_(0, packed[:cut].view(torch.int64), packed[cut:].view(torch.int32))


@lru_cache
def _sampling_fields(sampling: SamplingParams) -> dict[str, int]:
    return {
        "inverse_temperature": _float_bits(1.0 / sampling.temperature if sampling.temperature else 1.0),
        "greedy": int(sampling.temperature == 0),
        "top_k": sampling.top_k,
        "top_p": _float_bits(sampling.top_p),
        "min_p": _float_bits(sampling.min_p),
    }


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way: what it will report, and when."""

    plan: StepPlan
    drafts: StepDrafts
    was_prepared: bool
    """Whether its CUDA graph was there already, if it has one."""
    version: int
    report: Tensor
    done: torch.cuda.Event | float
    """When the report is there."""

    @property
    def kind(self) -> Hashable:
        """Steps of one kind take about as long as each other; those with prompts (None) as no other."""
        drafts = self.drafts
        return None if self.plan.num_prefilled else (size_of(drafts.batch), drafts.strategy, drafts.feeding)

    def seconds_since(self, earlier: torch.cuda.Event | float) -> float:
        """From the end of another step to its own."""
        if isinstance(self.done, torch.cuda.Event):
            assert isinstance(earlier, torch.cuda.Event)
            return earlier.elapsed_time(self.done) / 1e3
        assert isinstance(earlier, float)
        return self.done - earlier


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
