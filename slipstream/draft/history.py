"""Drafts from what was sampled before: siblings of the group, earlier rollouts of the prompt, the sequence itself.

Owns the library on the device, in which each group has a shelf (`shelves.py`), and what each slot has earned
(`widths.py`). The search is `match.py` on CPU and `triton_match.py` on a GPU, within the step. The host only lays out
the shelf of a group that gets its first slot, and gives it back when the last member has ended.

Axes: S slots and the trash slot, B places of the library, J drafts of a slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.draft import cpu_widths, match, widths
from slipstream.draft.learned import ModelGuesser
from slipstream.draft.shelves import ALIGNMENT, MAX_MATCH, NO_TEXT, Shelving, Text, aligned, lay_out
from slipstream.engine.packing import DraftSizes
from slipstream.engine.sequences import Seat
from slipstream.engine.state import StepState, patch
from slipstream.engine.strategy import Feeding, Strategy
from slipstream.engine.trees import KeptPath
from slipstream.models.cached import KVPages, PackedRows
from slipstream.rng import MASK32
from slipstream.types import Request

_CPU: Any = SimpleNamespace(
    draft_slots_serial=match.draft_slots_serial,
    draft_slots_parallel=match.draft_slots_parallel,
    earned_widths=cpu_widths.earned_widths,
    share_out=cpu_widths.share_out,
    learn=cpu_widths.learn,
)
KERNEL_DEVICES = {"cuda"}
"""Where the Triton kernels run. Tests add the CPU, with Triton's interpreter."""
SIBLING_WEIGHT = 4
"""Votes of a text of this very policy; texts of the history have theirs from `Past`."""

Past = Callable[[tuple[int, ...]], Sequence[Text]]
"""Earlier rollouts of a prompt, by its token ids."""


@dataclass
class _Group:
    """A group with unfinished members: who writes where, and the stretch of the library, once it has one."""

    members: dict[str, int]
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    open: set[str]
    seated: set[str] = field(default_factory=set)
    """Members that have had a slot, and so may have written."""
    is_laid_out: bool = False
    start: int | None = None
    """None: not laid out yet, or the library had no room."""
    end: int = 0
    segments: tuple[int, ...] = ()
    """By member: the place in the library where position 0 of its sequence would lie."""


class HistoryDrafter:
    def __init__(
        self,
        *,
        num_slots: int,
        max_drafts: int,
        library_tokens: int,
        device: torch.device,
        past: Past = lambda prompt_ids: (),
        longest_shelf: int | None = None,
        min_match: int = 2,
        rule: widths.Rule = "odds",
        guesser: ModelGuesser | None = None,
    ) -> None:
        """`guesser`: drafts where nothing matches, for strategies that ask it."""
        self.max_drafts = max_drafts
        self.guesser = guesser
        self._past = past
        library_tokens -= library_tokens % ALIGNMENT
        self._longest_shelf = min(library_tokens, longest_shelf or library_tokens)
        self._rule: widths.Rule = rule
        self._groups: dict[str, _Group] = {}
        self._shelving = Shelving(library_tokens)
        self.num_unserved = 0
        self.spent_s = 0.0

        def new(count: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        self._min_match = min_match
        self.min_match = new(1, min_match)
        """Tokens that must match; on the device, so that it can be changed under a graph."""
        # One place more at the end, where drafts that reach past the last shelf find nothing.
        self._shelves_3B = new(3 * aligned(library_tokens + max_drafts + 1)).view(3, -1)
        self.library_B, self.weights_B, self.sources_B = self._shelves_3B[:, : library_tokens + max_drafts + 1]
        self.library_B.fill_(NO_TEXT)
        # One block, since sequences come and go all the time and each launch to tell of it takes as long as a kernel.
        self._block = new(7 * 4 * (num_slots // 4 + 1)).view(7, -1)
        lines = [line[: num_slots + 1] for line in self._block]
        self.start_S, self.end_S, self.base_S, self.own_S, self.window_S = lines[:5]
        self.hits_S, self.tries_S = (line.view(torch.float32) for line in lines[5:])
        self.window_S.fill_(widths.START_WIDTH)

    @property
    def has_model(self) -> bool:
        return self.guesser is not None

    def attach(self, target: PreTrainedModel, pages: KVPages, max_length: int) -> None:
        if self.guesser is not None:
            self.guesser.attach(target, pages, max_length)

    def draft(self, state: StepState, room: Tensor, sizes: DraftSizes) -> None:
        assert sizes.depth <= self.max_drafts, "deeper than a slot has room for"
        if sizes.branches > 1:
            self._draft_trees(state, room, sizes)
            return
        if self.library_B.device.type in KERNEL_DEVICES:
            from slipstream.draft import triton_widths  # a machine without a GPU may lack triton

            record = self.window_S, self.hits_S, self.tries_S
            width_S = triton_widths.earned_widths(state, self._rule, *record, self.max_drafts)
            found_S = self._find_or_guess(state, width_S, sizes)
            triton_widths.share_out(state, self._rule, found_S, *record, room)
            return
        started = time.perf_counter()
        is_aimd = self._rule == "aimd"
        earned = [tensor.numpy() for tensor in (self.window_S, self.hits_S, self.tries_S)]
        known, computed, allotted, limit = (state[name].numpy() for name in ("known", "computed", "allotted", "limit"))
        width_S = torch.empty_like(self.window_S)
        live = state["live"].numpy()
        _CPU.earned_widths(is_aimd, live, known, computed, allotted, limit, *earned, self.max_drafts, width_S.numpy())
        found_S = self._find_or_guess(state, width_S, sizes)
        behind, drafted = state["behind"].numpy(), state["drafted"].numpy()
        _CPU.share_out(is_aimd, found_S.numpy(), *earned, behind, int(room), drafted)
        self.spent_s += time.perf_counter() - started

    def _draft_trees(self, state: StepState, room: Tensor, sizes: DraftSizes) -> None:
        """The library's continuations as ever, as far as trees are deep, and trees for all others; each slot has as
        much of the room as any other, the model's likeliest drafts coming first."""
        assert self.guesser is not None, "trees are of a learned drafter"
        width_S = self._allowed(state)
        found_S = self._find_if(sizes, state, width_S.clamp(max=sizes.depth))
        found_S = self.guesser.guess_trees(state, width_S, found_S, sizes)
        share = room // (found_S > 0).sum().clamp(min=1)
        state["drafted"].copy_(torch.minimum(found_S, share))

    def _allowed(self, state: StepState) -> Tensor:
        """Drafts that each slot may have, whatever it has earned."""
        decodes_S = (state["live"] > 0) & (state["known"] - state["computed"] == 1)
        width_S = torch.minimum(state["allotted"] - 1, state["limit"] - state["known"] - 1)
        return torch.where(decodes_S, width_S.clamp(0, self.max_drafts), 0)

    def draft_plainly(self, state: StepState, room: Tensor) -> None:
        """The plain twin of `draft`."""
        caps_SK = widths.caps(self._rule, self.window_S, self.hits_S, self.tries_S, state["behind"])
        width_S = torch.minimum(self._allowed(state), caps_SK[:, -1])
        found_S = self._find(state, width_S)
        state["drafted"].copy_(widths.share_out(found_S, caps_SK, room))

    def _find_or_guess(self, state: StepState, width_S: Tensor, sizes: DraftSizes) -> Tensor:
        found_S = self._find_if(sizes, state, width_S)
        if self.guesser is not None and sizes.depth:
            found_S = self.guesser.guess(state, width_S, found_S, sizes)
        return found_S

    def _find_if(self, sizes: DraftSizes, state: StepState, width_S: Tensor) -> Tensor:
        return self._find(state, width_S) if sizes.searches and self._longest_shelf else torch.zeros_like(width_S)

    def _find(self, state: StepState, width_S: Tensor) -> Tensor:
        """Write drafts and sources; how many were found, at most `width_S`."""
        if width_S.device.type in KERNEL_DEVICES:
            from slipstream.draft import triton_match  # a machine without a GPU may lack triton

            return triton_match.draft_slots(
                state,
                width_S,
                *(self.start_S, self.end_S, self.base_S, self.own_S),
                *(self.library_B, self.weights_B, self.sources_B),
                min_match=self.min_match,
                longest_shelf=self._longest_shelf,
            )
        found_S = torch.zeros_like(width_S)
        seed_S2 = torch.stack([state["seed_low"], state["seed_high"]], 1).long() & MASK32
        is_short = int((self.end_S - self.start_S).sum()) < match.SERIAL_PLACES
        find = _CPU.draft_slots_serial if is_short else _CPU.draft_slots_parallel
        find(
            *(state[name].numpy() for name in ("tokens", "known")),
            width_S.numpy(),
            (state["greedy"] > 0).numpy(),
            seed_S2.numpy(),
            *(tensor.numpy() for tensor in (self.start_S, self.end_S, self.base_S, self.own_S)),
            *(tensor.numpy() for tensor in (self.library_B, self.weights_B, self.sources_B)),
            self._min_match,
            *(state[name].numpy() for name in ("drafts", "sources")),
            found_S.numpy(),
        )
        return found_S

    def learn(self, state: StepState, rows: PackedRows, kept: KeptPath | None, feeding: Feeding) -> None:
        if self.guesser is not None:
            self.guesser.learn(state, rows, kept, feeding)
        self.learn_texts(state)

    def learn_texts(self, state: StepState) -> None:
        """Texts go on; rows that had drafts earn more or fewer."""
        if self.library_B.device.type in KERNEL_DEVICES:
            from slipstream.draft import triton_widths

            shelves = self.base_S, self.start_S, self.end_S, self.library_B
            triton_widths.learn(state, *shelves, self.window_S, self.hits_S, self.tries_S, self.max_drafts)
            return
        started = time.perf_counter()
        _CPU.learn(
            *(tensor.numpy() for tensor in (state.report, state["live"], state["known"], self.base_S)),
            (self.end_S > self.start_S).numpy(),
            *(tensor.numpy() for tensor in (self.library_B, self.window_S, self.hits_S, self.tries_S)),
            self.max_drafts,
        )
        self.spent_s += time.perf_counter() - started

    def learn_plainly(self, state: StepState) -> None:
        """The plain twin of `learn_texts`."""
        width = self.max_drafts + 1
        count_S, tried_S = state.report[:, 0], state.report[:, 1]
        tokens_SJ, origins_SJ = state.report[:, 2 : 2 + width], state.report[:, 2 + 2 * width : 2 + 3 * width]
        index_J = torch.arange(width, device=count_S.device)
        new_SJ = (index_J < count_S.unsqueeze(1)) & (self.end_S > self.start_S).unsqueeze(1)
        first_S = self.base_S + state["known"] - count_S
        nowhere = len(self.library_B) - 1
        place_SJ = torch.where(new_SJ, first_S.unsqueeze(1) + index_J, nowhere).long()
        self.library_B.scatter_(0, place_SJ.flatten(), torch.where(new_SJ, tokens_SJ, NO_TEXT).flatten())
        right_S = ((origins_SJ > 0) & (index_J < count_S.unsqueeze(1))).sum(1)
        # A right draft that ended its sequence leaves those after it untried.
        tried_S = torch.where(state["live"] > 0, tried_S, torch.minimum(tried_S, count_S))
        widths.learn_widths(tried_S, right_S.int(), self.window_S, self.hits_S, self.tries_S, self.max_drafts)

    def tune(self, strategy: Strategy) -> None:
        min_match = strategy.min_match or MAX_MATCH + 1
        if min_match != self._min_match:
            self._min_match = min_match
            self.min_match.fill_(min_match)

    def expect(self, requests: Sequence[Request]) -> None:
        first = requests[0]
        members = {request.uid: member for member, request in enumerate(requests)}
        max_new_tokens = max(request.sampling.max_new_tokens for request in requests)
        self._groups |= dict.fromkeys(members, _Group(members, first.prompt_ids, max_new_tokens, set(members)))

    def follow(self, seats: Sequence[Seat]) -> None:
        lines = []
        for seat in seats:
            request = seat.sequence.request
            group = self._groups[request.uid]
            if not group.is_laid_out:
                self._lay_out(group)
            if group.start is None:
                lines.append((seat.slot, 0, 0, 0, 0))
                continue
            base = group.segments[group.members[request.uid]]
            if seat.sequence.token_ids or request.uid in group.seated:
                self._write_text(group, base, seat.sequence.token_ids)
            group.seated.add(request.uid)
            own = base + max(0, len(group.prompt_ids) - MAX_MATCH)
            lines.append((seat.slot, group.start, group.end, base, own))
        if not lines:
            return
        width = min(widths.START_WIDTH, self.max_drafts)
        numbers = np.array([(*line, width, 0, 0) for line in lines])
        places = numbers[:, :1] + self._block.shape[1] * np.arange(len(self._block))
        patch(self._block.view(-1), places.ravel(), numbers[:, 1:].ravel())

    def forget(self, uid: str) -> None:
        group = self._groups.pop(uid)
        group.open.discard(uid)
        if not group.open and group.start is not None:
            self._shelving.give_back(group.start)

    def _lay_out(self, group: _Group) -> None:
        if not self._longest_shelf:  # without a library, only a learned drafter drafts
            group.is_laid_out = True
            return
        past = [Text(text.token_ids[: group.max_new_tokens], text.weight) for text in self._past(group.prompt_ids)]
        shelf = lay_out(group.prompt_ids, past, len(group.members), group.max_new_tokens, SIBLING_WEIGHT)
        while past and shelf.content.shape[1] > self._longest_shelf:
            past.pop()  # the oldest
            shelf = lay_out(group.prompt_ids, past, len(group.members), group.max_new_tokens, SIBLING_WEIGHT)
        group.is_laid_out = True
        size = shelf.content.shape[1]
        group.start = self._shelving.take(size) if size <= self._longest_shelf else None
        if group.start is None:
            self.num_unserved += 1
            return
        group.end = group.start + size
        group.segments = tuple(group.start + segment for segment in shelf.segments)
        self._shelves_3B[:, group.start : group.end] = self._to_device(torch.from_numpy(shelf.content))

    def _write_text(self, group: _Group, base: int, token_ids: Sequence[int]) -> None:
        """What the sequence has said so far, over what it may have said from an earlier seat."""
        text = np.full(group.max_new_tokens, NO_TEXT, np.int32)
        text[: len(token_ids)] = token_ids
        self.library_B[base + len(group.prompt_ids) :][: len(text)] = self._to_device(torch.from_numpy(text))

    def _to_device(self, content: Tensor) -> Tensor:
        if not self.library_B.is_cuda:
            return content
        return content.pin_memory().to(self.library_B.device, non_blocking=True)
