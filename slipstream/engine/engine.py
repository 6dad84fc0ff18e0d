"""One replica: requests in, rollouts out, a packed forward at a time. The plain form, on CPU or GPU.

Owns the model copy, its KV pages and its weight version; decides nothing (the batcher does) and knows no reward, no
schedule and no trainer.

Promise: a rollout depends on (weights, prompt, seed, sampling) alone. On CPU this holds to the bit: attention is exact
by construction, and matrix products give a row the same bits as long as their height stays within
[MIN_STEP_TOKENS, CPU_STEP_TOKENS], so shorter steps are padded and longer ones never planned.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.engine.batcher import Batcher, PartialRollout, StepPlan
from slipstream.engine.pages import PagePool
from slipstream.engine.sampling import sample
from slipstream.models.cached import CachedRows, KVPages
from slipstream.models.packed import row_logits
from slipstream.models.weights import fingerprint, write_weights
from slipstream.types import EngineFacts, Request, Rollout, WeightVersion

# Measured (docs/log.md): MKL, oneDNN and OpenBLAS switch kernels below 2 or 16 rows and above 128.
MIN_STEP_TOKENS = 16
CPU_STEP_TOKENS = 128
GPU_STEP_TOKENS = 8192


class Engine:
    def __init__(self, model: PreTrainedModel, *, max_sequences: int, max_length: int) -> None:
        """`max_length`: longest prompt + response in tokens, which is the size of a KV page."""
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self._pages = KVPages(max_sequences, max_length)
        step_tokens = CPU_STEP_TOKENS if self.device.type == "cpu" else GPU_STEP_TOKENS
        self._batcher = Batcher(PagePool(max_sequences), step_tokens, max_length)
        self._version = WeightVersion(0, fingerprint(model))
        self._paused = False
        self._prefill_tokens = self._decode_tokens = self._num_forwards = 0
        self._forward_s = 0.0

    def submit(self, requests: Sequence[Request]) -> None:
        """One group of requests that share a prompt; ValueError if it cannot fit."""
        self._batcher.submit(requests)

    @property
    def has_work(self) -> bool:
        return self._batcher.has_work

    @torch.inference_mode()
    def step(self) -> list[Rollout]:
        """One packed forward; the rollouts that ended with it. Does nothing while paused or idle."""
        if self._paused or not self._batcher.has_work:
            return []
        started = time.perf_counter()
        plan = self._batcher.plan()
        for source, target, num_tokens in plan.copies:
            self._pages.copy_start(source, target, num_tokens)
        sampled = self._forward(plan)
        finished = self._batcher.commit(plan, sampled, self._version.number)
        self._num_forwards += 1
        self._decode_tokens += len(sampled)
        self._prefill_tokens += plan.num_tokens - plan.num_decode_rows
        self._forward_s += time.perf_counter() - started
        return finished

    def pause(self) -> None:
        """Stop computing; everything stays where it is."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def apply_weights(self, weights: Iterable[tuple[str, Tensor]], number: int) -> WeightVersion:
        """Overwrite the weights in place. Running sequences go on with them and record the version they ended with."""
        write_weights(self.model, weights)
        self._version = WeightVersion(number, fingerprint(self.model))
        return self._version

    def export_sequence(self, uid: str) -> PartialRollout:
        """Take a sequence out, to go on in another engine or after a restart; KeyError if it is not here."""
        return self._batcher.withdraw(uid)

    def import_sequence(self, partial: PartialRollout) -> None:
        """Go on with a sequence exported elsewhere: its keys are recomputed, its tokens stay."""
        self._batcher.submit_partial(partial)

    def facts(self) -> EngineFacts:
        pool = self._batcher.pool
        return EngineFacts(
            version=self._version,
            num_running=self._batcher.num_running,
            num_waiting=self._batcher.num_waiting,
            num_free_pages=pool.num_free,
            num_pages=pool.num_pages,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            num_forwards=self._num_forwards,
            forward_s=self._forward_s,
            paused=self._paused,
        )

    def _forward(self, plan: StepPlan) -> list[tuple[int, float]]:
        """Run the plan's rows and sample for every sampler, in order."""
        rows = [(row.page, row.start, len(row.token_ids)) for row in plan.rows]
        token_ids = [token for row in plan.rows for token in row.token_ids]
        padding = max(0, MIN_STEP_TOKENS - len(token_ids))
        rows += [(self._pages.trash_page, 0, 1)] * padding
        token_ids += [0] * padding

        ends: list[int] = []
        logits_of_sampler: list[int] = []
        at = 0
        for row in plan.rows:
            at += len(row.token_ids)
            if row.samplers:
                logits_of_sampler += [len(ends)] * len(row.samplers)
                ends.append(at - 1)
        num_wanted = len(ends)
        ends += [0] * max(0, MIN_STEP_TOKENS - num_wanted)
        logits_NV = row_logits(
            self.model,
            torch.tensor(token_ids, device=self.device),
            CachedRows(self._pages, rows, self.device),
            torch.tensor(ends, device=self.device),
        )
        samplers = [sequence for row in plan.rows for sequence in row.samplers]
        if not samplers:
            return []
        if len(samplers) != num_wanted:
            logits_NV = logits_NV[logits_of_sampler]
        tokens, logprobs = sample(
            logits_NV[: len(samplers)],
            [sequence.request.seed for sequence in samplers],
            [sequence.position for sequence in samplers],
            [sequence.request.sampling for sequence in samplers],
        )
        return list(zip(tokens, logprobs, strict=True))
