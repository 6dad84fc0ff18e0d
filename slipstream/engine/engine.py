"""One replica: requests in, rollouts out, a packed forward at a time, on CPU or GPU.

Owns the model copy, its KV pages, the state of its slots and its weight version; decides nothing (the batcher does) and
knows no reward, no schedule and no trainer. On a GPU a step is a CUDA graph, and its results are read while the next
one runs; on CPU it runs eagerly and is read at once.

Promise: a rollout depends on (weights, prompt, seed, sampling) alone, to the bit. Attention and sampling are exact by
construction. Matrix products give a row the same bits on a CPU at the heights that `models/heights.py` finds, to which
they are padded (`models/products.py`), or the whole step for a model that is not wholly fused, whose elementwise
operations `models/elementwise.py` pads; on a GPU by the settings of `models/precision.py`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.engine.ahead import Ahead
from slipstream.engine.batcher import Batcher
from slipstream.engine.drafting import Drafter
from slipstream.engine.first_runs import FirstRuns
from slipstream.engine.fitting import coarsely, fitted, padded
from slipstream.engine.graphs import GraphPool
from slipstream.engine.packing import Launch, launches_of, padded_launches_of
from slipstream.engine.pages import PagePool, copy_rounds
from slipstream.engine.sequences import PartialRollout, Report, StepPlan
from slipstream.engine.slots import read_report
from slipstream.engine.state import Launched, StepState
from slipstream.engine.step import draft_step, run_step
from slipstream.engine.stopping import Decode, StopTexts
from slipstream.engine.strategy import (
    OFF,
    Always,
    Demand,
    DraftCounts,
    DraftPolicy,
    Feeding,
    StepDrafts,
    are_matching,
    result_of,
)
from slipstream.models.cached import KVPages
from slipstream.models.elementwise import AlikeEverywhere
from slipstream.models.heights import MOST_ROWS, StepHeights, common_heights
from slipstream.models.memory import WeightMemory
from slipstream.models.precision import check_batch_invariance, use_batch_invariant_products
from slipstream.models.recognise import fuse, is_fused
from slipstream.models.weights import fingerprint, write_weights
from slipstream.types import EngineFacts, Request, Rollout, WeightVersion

MIN_STEP_TOKENS = 16
"""On a CPU, of a model that is not wholly fused: below, some libraries compute a row in another way (docs/log.md)."""
GPU_STEP_TOKENS = 2048
GPU_STEPS_AHEAD = 2
"""One would do if the host were never late; with two, it may once be late by a whole step (docs/log.md)."""
PAGE_TOKENS = 64
GRAPH_BYTES = 4 << 30

RunningSequences = Literal["keep", "wait", "abort"]
"""On new weights, running sequences go on with them, or end first, or begin again from their prompt."""


class BrokenLogits(RuntimeError):
    """The model gave logits that are not numbers. The sequences named were dropped; the engine goes on with others."""


class Engine:
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_sequences: int,
        max_length: int,
        kv_tokens: int | None = None,
        exact: bool = True,
        fused: bool = True,
        graphs: bool = True,
        steps_ahead: int | None = None,
        drafter: Drafter | None = None,
        policy: DraftPolicy | None = None,
        decode: Decode | None = None,
        others_follow: bool = False,
    ) -> None:
        """`max_length`: longest prompt + response in tokens. `kv_tokens`: by default as many as `max_sequences` of that
        length need; with fewer, sequences are preempted under pressure and computed again. `fused` and `graphs` off
        give the plain twin. `steps_ahead`: steps launched before one is read; by default 2 on a GPU, else 0.
        `decode`: for requests with stop texts. `others_follow`: they wait for slots elsewhere."""
        self.device = next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        if on_gpu and exact:
            use_batch_invariant_products()
            check_batch_invariance(model)
        self.model = model.eval()
        assert fused or not is_fused(model), "another engine has fused this model: the plain twin needs its own copy"
        self.fusion = fuse(model) if fused else None
        self._heights: StepHeights | None = None
        self._forward_in: AbstractContextManager[object] = nullcontext()
        if not on_gpu:
            any_height = not exact or (self.fusion is not None and self.fusion.any_height)
            self._heights = StepHeights(
                range(1, MOST_ROWS + 1) if any_height else common_heights(model, least=MIN_STEP_TOKENS)
            )
            if not any_height:
                self._forward_in = AlikeEverywhere()
        table_pages = -(-max_length // PAGE_TOKENS)
        if self.fusion is not None:
            self.fusion.know_positions(table_pages * PAGE_TOKENS)
        pool = PagePool(-(-kv_tokens // PAGE_TOKENS) if kv_tokens else max_sequences * table_pages)
        self._batcher = Batcher(
            pool,
            num_slots=max_sequences,
            max_step_tokens=GPU_STEP_TOKENS if self._heights is None else self._heights.most,
            max_length=max_length,
            page_tokens=PAGE_TOKENS,
            stop_texts=None if decode is None else StopTexts(decode),
            keeps_origins=drafter is not None,
            others_follow=others_follow,
            **({"fit_drafts": fitted} if on_gpu and graphs else {}),
        )
        self._pages = KVPages(pool.num_pages, PAGE_TOKENS)
        self._state = StepState(
            num_slots=max_sequences,
            max_length=max_length,
            num_table_pages=table_pages,
            trash_page=self._pages.trash_page,
            device=self.device,
            max_drafts=drafter.max_drafts if drafter is not None else 0,
        )
        assert (drafter is None) == (policy is None), "a drafter needs a policy, and a policy a drafter"
        self.drafter, self.policy = drafter, policy
        self._has_model = drafter is not None and drafter.has_model
        if drafter is not None:
            drafter.attach(model, self._pages, max_length)
        self._demand, self._are_matching, self._feeding = Demand(), False, Feeding.NOTHING
        self._last_done: torch.cuda.Event | float | None = None
        """When the step before the next one to be read was done, if nothing came between."""
        self._graphs = GraphPool(GRAPH_BYTES, self._is_busy) if on_gpu and graphs else None
        self._ahead = Ahead((GPU_STEPS_AHEAD if on_gpu else 0) if steps_ahead is None else steps_ahead)
        self._unread: deque[Launched] = deque()
        self._ready: list[Rollout] = []
        self._version = WeightVersion(0, fingerprint(model))
        self._paused = False
        self._weight_memory = WeightMemory(model, self.fusion)
        self.last_kind: Hashable = None
        """Of the step that was read last: those of a kind take as long as each other; None: as no other."""
        self._prefill_tokens = self._num_forwards = 0
        self._draft_counts = DraftCounts()
        self._forward_s = self._prefill_s = 0.0

    @torch.inference_mode()
    def load_kernels(self, *, with_cuts: bool = False) -> None:
        """Run all kinds of steps once and make most graphs, before any other step (`first_runs.py`). Nothing depends on
        it but time: some seconds. `with_cuts`: requests will have top-k, top-p or min-p."""
        is_new = not self._num_forwards and not self.has_work and self._weight_memory.is_there
        assert is_new, "kernels are loaded before anything else is done"
        ways = Always(OFF).ways if self.policy is None else self.policy.ways
        sizes = {"num_slots": self._state.num_slots, "max_tokens": self._batcher.max_step_tokens}
        first = FirstRuns(ways=ways, has_model=self._has_model, with_cuts=with_cuts, **sizes)
        for launch in first.runs():
            self._perform(launch, self._limits(launch))
        if self._graphs is not None:
            self._graphs.note_runs(first.runs())
            for launch in first.graphs():
                self._graphs.make(launch, partial(self._perform, launch, self._limits(launch)))
            self._ahead.note_prepared(first.prepared())
        self._pages.copy(*torch.full((2, 1), self._pages.trash_page, device=self.device))

    def submit(self, requests: Sequence[Request]) -> None:
        """One group of requests that share a prompt; ValueError if it cannot fit."""
        self._batcher.submit(requests)
        if self.drafter is not None:
            self.drafter.expect(requests)

    @property
    def has_work(self) -> bool:
        return self._batcher.has_work or bool(self._ready)

    @torch.inference_mode()
    def step(self) -> list[Rollout]:
        """One packed forward; the rollouts known to have ended. Does nothing while paused or idle."""
        if not self._paused and self._batcher.has_work:
            assert self._weight_memory.is_there, "the engine's weights were put to sleep; apply_weights first"
            started, stalled_s = time.perf_counter(), self._stalled_s
            self._batcher.seat()
            drafts = self._decide_drafts()
            plan = self._batcher.plan(drafts.room, self._state.max_drafts)
            try:
                self._launch(plan, drafts)
            except Exception:
                self._forget_launched(plan)
                raise
            # On a GPU earlier steps are read while this one waits or runs; nothing to run means all must be read.
            while len(self._unread) > (self._ahead.num_steps if plan.num_tokens else 0):
                self._read(self._unread.popleft())
            seconds = time.perf_counter() - started
            self._forward_s += seconds
            if plan.num_tokens:
                self._prefill_s += (seconds - self._stalled_s + stalled_s) * plan.num_prefilled / plan.num_tokens
        if not self._batcher.has_work:
            self._last_done = None
            self._unread.clear()  # what ran after the last sequence had ended
        finished, self._ready = self._ready, []
        return finished

    def pause(self) -> None:
        """Stop computing; everything stays where it is."""
        self._paused = True

    def resume(self) -> None:
        self._paused, self._last_done = False, None

    @torch.inference_mode()
    def apply_weights(
        self, weights: Iterable[tuple[str, Tensor]], number: int, running: RunningSequences = "keep"
    ) -> WeightVersion:
        """Overwrite the weights in place; graphs stay valid. Rollouts record versions of their first and last token."""

        def write(model: PreTrainedModel) -> WeightVersion:
            write_weights(model, weights)
            return WeightVersion(number, fingerprint(model))

        return self.change_weights(write, running)

    @torch.inference_mode()
    def change_weights(
        self, write: Callable[[PreTrainedModel], WeightVersion], running: RunningSequences = "keep"
    ) -> WeightVersion:
        """As `apply_weights`; `write` changes the model in place and says which version it is then."""
        if running == "wait":
            self._finish_running()
        elif running == "abort":
            self._batcher.restart_begun()
        with self._weight_memory.being_written():
            self._version = write(self.model)
        self._batcher.send_back_unbegun()
        self._batcher.forget_prompts()
        return self._version

    @torch.inference_mode()
    def sleep(self, *, weights: bool = False) -> None:
        """Give the memory of the keys, and of the weights if asked, back to the device, e.g. for training on it.

        Running sequences keep their tokens and are computed again. Keys come back by themselves; once weights are gone,
        `apply_weights` must come before the next step. CUDA graphs go too, since they hold addresses.
        """
        while self._unread:
            self._read(self._unread.popleft())
        self._batcher.send_back_running()
        self._batcher.forget_prompts()
        self._pages.clear()
        if self._graphs is not None:
            self._graphs.clear()
            self._ahead.clear()
        if weights:
            self._weight_memory.give_back()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def export_sequence(self, uid: str) -> PartialRollout:
        """Take a sequence out, to go on in another engine or after a restart; KeyError if it is not here."""
        return self._withdraw(uid)

    def import_sequence(self, partial: PartialRollout) -> None:
        """Go on with a sequence exported elsewhere: its keys are recomputed, its tokens stay."""
        self._batcher.submit_partial(partial)
        if self.drafter is not None:
            self.drafter.expect([partial.request])

    def grown_since(self, known: Mapping[str, int]) -> list[PartialRollout]:
        """What sequences that are running have beyond the number of tokens that is known of each."""
        return self._batcher.grown_since(known)

    def facts(self) -> EngineFacts:
        pool = self._batcher.pool
        return EngineFacts(
            version=self._version,
            num_running=self._batcher.num_running,
            num_waiting=self._batcher.num_waiting,
            num_free_pages=pool.num_free,
            num_pages=pool.num_pages,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._batcher.num_sampled,
            num_forwards=self._num_forwards,
            num_preempted=self._batcher.num_preempted,
            forward_s=self._forward_s,
            prefill_s=self._prefill_s,
            kv_bytes=self._pages.num_bytes,
            num_graphs=len(self._graphs) if self._graphs is not None else 0,
            graph_bytes=self._graphs.num_bytes if self._graphs is not None else 0,
            graph_s=self._stalled_s,
            num_unread=len(self._unread),
            paused=self._paused,
        )

    @property
    def _stalled_s(self) -> float:
        return self._graphs.stalled_s if self._graphs is not None else 0.0

    def take_draft_counts(self) -> DraftCounts:
        """What came of drafts since this was last asked."""
        counts, self._draft_counts = self._draft_counts, DraftCounts()
        return counts

    def _finish_running(self) -> None:
        assert not self._paused, "a paused engine cannot finish its sequences"
        self._batcher.admits_fresh = False
        try:
            while self._batcher.num_begun:
                self._ready = self.step()
        finally:
            self._batcher.admits_fresh = True

    def _decide_drafts(self) -> StepDrafts:
        policy, batch, is_matching = self.policy, max(1, self._batcher.num_running), self._are_matching
        chosen, best = (policy.choose(batch, is_matching), policy.best(batch, is_matching)) if policy else (OFF, OFF)
        num_tokens = self._ahead.enough * math.ceil(1 + best.drafts_each)
        self._ahead.begin_step(len(self._unread), partial(self._may_run_ahead, num_tokens))
        strategy = self._ahead.way(batch, chosen, best)
        if strategy.depth:
            self._feeding = Feeding.ALL
        elif policy is not None and self._has_model and not is_matching:
            # Who was asked before a stretch of repeated text is asked after it, which may be any moment.
            self._feeding = policy.feed(batch)
        return StepDrafts(batch, is_matching, strategy, self._demand.room(strategy, batch), self._feeding)

    def _may_run_ahead(self, num_tokens: int) -> bool:
        """Without taking pages from anybody, or leaving slots to who has ended while others wait for one."""
        batcher = self._batcher
        return self._graphs is not None and not batcher.num_waiting and batcher.has_pages_for(num_tokens)

    def _launch(self, plan: StepPlan, drafts: StepDrafts) -> None:
        """Tell the device what changes and start the step; returns before a GPU is done with it."""
        for pairs in copy_rounds(plan.copies):
            copies = torch.tensor(pairs)
            if self.device.type == "cuda":
                copies = copies.pin_memory().to(self.device, non_blocking=True)
            self._pages.copy(*copies.T)
        self._state.apply(plan)
        if self.drafter is not None:
            self.drafter.follow(plan.seats)
            self.drafter.tune(drafts.strategy)
        if not plan.num_tokens:
            return
        stalled_s = self._stalled_s
        was_prepared = self._run_step(plan, drafts)
        if self.policy is not None and plan.num_drafts and self._stalled_s > stalled_s:
            self.policy.observe_preparing(drafts.batch, self._stalled_s - stalled_s, drafts.is_matching)
        self._unread.append(Launched(plan, drafts, was_prepared, self._version.number, *self._state.request_report()))
        self._num_forwards += 1
        self._prefill_tokens += plan.num_prefilled

    def _run_step(self, plan: StepPlan, drafts: StepDrafts) -> bool:
        """With the drafting before it; whether it took as long as such a step will."""
        launches = self._launches(plan, drafts, padded)
        if self._graphs is not None:
            launches = self._graphs.fit(launches, partial(self._launches, plan, drafts, coarsely))
            larger = self._graphs.meanwhile(launches)
            if larger is not None and not self._graphs.is_spent and self._ahead.can_wait:
                self._ahead.wait()
            if larger is not None and (self._graphs.is_spent or self._ahead.is_waiting):
                launches = larger
        if len(launches) > 1:
            self._state.set_limits(self._limits(launches[-1]))
        are_prepared = [self._run(launch) for launch in launches]
        return all(are_prepared) and not self._ahead.is_waiting

    def _run(self, launch: Launch) -> bool:
        """By its graph, if there is one; whether it took as long as it will."""
        body = partial(self._perform, launch, self._state.limits if launch.drafting is None else self._limits(launch))
        if self._graphs is None:
            body()
            return True
        was_prepared = self._graphs.is_prepared(launch)
        self._graphs.run(launch, body)
        return was_prepared

    def _perform(self, launch: Launch, limits: Tensor) -> None:
        if launch.drafting is not None:
            assert self.drafter is not None
            draft_step(self._state, launch.drafting, self.drafter, limits)
        if launch.step is not None:
            run_step(self.model, self._pages, self._state, launch.step, self.drafter, forward_in=self._forward_in)

    def _is_busy(self) -> bool:
        """Whether a GPU still has steps to run."""
        return bool(self._unread) and not self._unread[-1].done.query()  # type: ignore[union-attr]

    def _limits(self, launch: Launch) -> Tensor:
        """What drafts of it have room in: the step it goes with, or, if it is launched apart, the one to come."""
        step = launch.step
        return self._state.limits if step is None else self._state.limits_of(step.num_tokens, step.num_samples)

    def _launches(self, plan: StepPlan, drafts: StepDrafts, pad: Callable[[int], int]) -> list[Launch]:
        if self._heights is not None:
            return launches_of(plan, drafts, self._heights.pad)
        return padded_launches_of(plan, drafts, pad, self._state.num_slots)

    def _tell_policy(self, launched: Launched, report: Report) -> None:
        """How long the step took, if it only decoded, needed no preparation and came right after another.

        Sequences that had ended in a step launched earlier ran for nothing: they say nothing of what drafts give."""
        before, self._last_done = self._last_done, launched.done
        plan, batcher = launched.plan, self._batcher
        if before is None or not launched.was_prepared or plan.num_prefilled or not report.num_rows:
            return
        seconds = launched.seconds_since(before)
        self._ahead.observe(seconds)
        if self.policy is not None:
            behind = batcher.tokens_behind, batcher.others_follow
            self.policy.observe(result_of(launched.drafts, plan, report, seconds, *behind))

    def _withdraw(self, uid: str) -> PartialRollout:
        partial = self._batcher.withdraw(uid)
        if self.drafter is not None:
            self.drafter.forget(uid)
        return partial

    def _forget_launched(self, plan: StepPlan) -> None:
        """A launch failed half-way: what is running is computed again from the tokens that are known."""
        self._unread.clear()
        self._batcher.vacate_again(plan)
        self._batcher.send_back_running()

    def _read(self, launched: Launched) -> None:
        """Wait for a step's report and commit it; what has ended is ready to be given out."""
        if isinstance(launched.done, torch.cuda.Event):
            launched.done.synchronize()
        report, self.last_kind = read_report(launched.report.numpy()), launched.kind
        broken = self._batcher.uids_of(launched.plan, report.broken)
        for uid in broken:
            self._withdraw(uid)
        finished = self._batcher.commit(launched.plan, report, launched.version)
        self._ready += finished
        if self.drafter is not None:
            for rollout in finished:
                self.drafter.forget(rollout.request.uid)
            self._draft_counts.add(report)
            self._are_matching = launched.drafts.strategy.looks_for_matches and are_matching(report)
            self._demand.observe(launched.drafts, launched.plan.num_drafts, report.num_drafted)
        self._tell_policy(launched, report)
        if broken:
            raise BrokenLogits(
                f"the model gave logits that are not numbers (NaN or infinite) for {broken[0]} and {len(broken) - 1} "
                "more: its weights are broken, or it overflows in this number format (try engine.dtype: float32)"
            )
