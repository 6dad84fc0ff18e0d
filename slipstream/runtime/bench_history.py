"""What `slipstream bench history` runs: texts replayed with and without drafts, on any shape and size of batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from slipstream.draft.history import HistoryDrafter
from slipstream.draft.selector import Selector
from slipstream.draft.shelves import Text, shelf_tokens
from slipstream.draft.workloads import GROUP, PROMPT_TOKENS, ReplayGroup, adversarial, alike, seed_of
from slipstream.engine.engine import Engine
from slipstream.models.precision import resolve_precision
from slipstream.runtime.benches import check_shape, describe_machine, load_shape, new_table, write_record
from slipstream.runtime.local import choose_device
from slipstream.types import Request, SamplingParams

COLUMNS = ("workload", "batch", "off", "drafts", "gain", "a step", "right", "chosen")
MAX_DRAFTS = 32
MOST_WARM_UPS = 6


def bench_history(
    shape: str,
    batches: Sequence[int],
    likenesses: Sequence[float],
    *,
    new_tokens: int,
    json_file: Path | None,
) -> dict[str, Any]:
    """Time each workload at each size of batch; the record that is also written to `json_file`."""
    check_shape(shape)
    device = choose_device("auto")
    dtype = resolve_precision("auto", device)
    model = load_shape(shape, dtype, device)
    vocab_size = model.config.get_text_config().vocab_size
    console = Console()
    title = f"{shape}: tokens/s without and with drafts from history"
    table = new_table(title, COLUMNS, words=("workload", "chosen"))
    rows: list[dict[str, Any]] = []
    for batch in batches:
        workloads = {f"{likeness:.0%} alike": alike(batch, new_tokens, likeness, vocab_size) for likeness in likenesses}
        workloads["adversarial"] = adversarial(batch, new_tokens, vocab_size)
        plain = Replay(model, batch, new_tokens, drafts=False)
        drafting = Replay(model, batch, new_tokens, drafts=True)
        for name, groups in workloads.items():
            with console.status(f"{name}, batch {batch}"):
                off, on = plain.measure(groups), drafting.measure(groups)
            row = {"workload": name, "batch": batch, "off": off, "history": on}
            row["gain"] = on["tokens_per_s"] / off["tokens_per_s"]
            rows.append(row)
            table.add_row(
                name,
                str(batch),
                f"{off['tokens_per_s']:,.0f}",
                f"{on['tokens_per_s']:,.0f}",
                f"{row['gain']:.2f}",
                f"{on['tokens_per_row']:.2f}",
                f"{on['accept_rate']:.0%}",
                on["chosen"],
            )
    console.print(table)
    record = {"what": "slipstream bench history", "shape": shape, "new_tokens": new_tokens, "rows": rows}
    record = describe_machine(device, dtype) | record
    write_record(record, json_file, console)
    return record


class Replay:
    """An engine that walks workloads, once to prepare graphs and choices and once by the clock."""

    def __init__(self, model: PreTrainedModel, batch: int, new_tokens: int, *, drafts: bool) -> None:
        max_length = PROMPT_TOKENS + new_tokens
        self._past: dict[tuple[int, ...], list[Text]] = {}
        self._selector = Selector()
        drafter = None
        if drafts:
            shelf = shelf_tokens(PROMPT_TOKENS, 2 * batch, new_tokens)
            drafter = HistoryDrafter(
                num_slots=batch,
                max_drafts=MAX_DRAFTS,
                library_tokens=2 * shelf,
                longest_shelf=min(shelf, shelf_tokens(PROMPT_TOKENS, 2 * GROUP, new_tokens)),
                device=model.device,
                past=lambda ids: self._past.get(ids, ()),
            )
        self._engine = Engine(
            model,
            max_sequences=batch,
            max_length=max_length,
            drafter=drafter,
            policy=self._selector if drafts else None,
        )
        self._batch = batch

    def measure(self, groups: Sequence[ReplayGroup]) -> dict[str, Any]:
        self._past = {group.prompt_ids: [Text(text, 1) for text in group.past] for group in groups}
        self._selector = Selector()  # what paid for another workload says nothing about this one
        if self._engine.drafter is not None:
            self._engine.policy = self._selector
        for _ in range(MOST_WARM_UPS):
            self._walk(groups)
            if self._engine.drafter is None or self._selector.has_tried_all(self._batch):
                break
        self._engine.take_draft_counts()
        started = time.perf_counter()
        num_tokens = self._walk(groups)
        seconds = time.perf_counter() - started
        counts = self._engine.take_draft_counts()
        return {
            "tokens_per_s": num_tokens / seconds,
            "tokens_per_row": counts.num_tokens / counts.num_rows if counts.num_rows else 1.0,
            "accept_rate": counts.num_accepted / counts.num_drafted if counts.num_drafted else 0.0,
            "chosen": str(self._selector.best(self._batch)),
        }

    def _walk(self, groups: Sequence[ReplayGroup]) -> int:
        num_tokens = 0
        for number, group in enumerate(groups):
            self._engine.submit(
                [
                    Request(
                        uid=f"{number}/{member}",
                        group=str(number),
                        prompt_ids=group.prompt_ids,
                        seed=seed_of(number, member),
                        sampling=SamplingParams(max_new_tokens=len(text)),
                        script_ids=text,
                    )
                    for member, text in enumerate(group.texts)
                ]
            )
        while self._engine.has_work:
            num_tokens += sum(len(rollout.token_ids) for rollout in self._engine.step())
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize()
        return num_tokens
