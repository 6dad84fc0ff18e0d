"""What `slipstream bench history` runs: texts replayed with and without drafts, on any shape and size of batch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from slipstream.draft.history import HistoryDrafter
from slipstream.draft.selector import Selector
from slipstream.draft.shelves import Text, shelf_tokens
from slipstream.draft.workloads import ReplayGroup, adversarial, alike, epochs_of, seed_of
from slipstream.engine.engine import Engine
from slipstream.files import check_output_file
from slipstream.history.format import words_of
from slipstream.models.precision import resolve_precision
from slipstream.runtime.benches import (
    check_positions,
    check_shape,
    describe_machine,
    load_shape,
    new_table,
    shape_width,
    write_record,
)
from slipstream.runtime.capacity import check_sequences
from slipstream.runtime.engines import choose_device
from slipstream.runtime.heap import still_heap
from slipstream.runtime.traces import read_trace
from slipstream.types import Request, SamplingParams

COLUMNS = ("workload", "off", "drafts", "gain", "a step", "right", "chosen")
MAX_DRAFTS = 32
KEPT = 16
"""Past rollouts of a prompt of a recorded run."""
MOST_WARM_UPS, FEW_GRAPHS = 5, 2
"""Walks before the one that counts, and new graphs in the last of them at most, if fewer walks shall do."""
WAVES = 3
"""Sequences for each place in the batch, so that one that ends early is followed by another, as in any long rollout."""
TIMED_S, LEAST_WALKS, MOST_WALKS = 2.0, 2, 5
"""Walks are timed until they took this long, but so many times at least and at most, and the median counts: a hiccup of
the host would decide a walk of half a second. Without drafts and with, in turns, each first as often as the other: a
GPU may become slower by a tenth."""


def bench_history(
    shape: str,
    batches: Sequence[int],
    likenesses: Sequence[float],
    *,
    new_tokens: int,
    trace: Path | None = None,
    json_file: Path | None = None,
) -> dict[str, Any]:
    """Time each workload at each size of batch; the record that is also written to `json_file`.

    Tokens a second are those while the batch is full. `gain_to_end` in the record counts the last sequences too.
    With a `trace` the workloads are its epochs, and the others are left out.
    """
    check_output_file(json_file, "--json")
    check_sequences(max(batches), new_tokens, "--batches and --new-tokens")
    check_shape(shape)
    recorded = read_trace(trace) if trace is not None else None
    device = choose_device("auto")
    dtype = resolve_precision("auto", device, shape_width(shape))
    model = load_shape(shape, dtype, device)
    vocab_size = model.config.get_text_config().vocab_size
    largest = max((token for one in recorded or () for token in (*one.token_ids, *one.prompt_ids)), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"{trace} has token ids up to {largest}, {shape} knows {vocab_size}: give --shape the model that was "
            "recorded, or one with more tokens"
        )
    console = Console()
    record = describe_machine(device, dtype)
    record |= {"what": "slipstream bench history", "shape": shape, "new_tokens": new_tokens}
    record |= {"trace": trace.name} if trace is not None else {}
    rows: list[dict[str, Any]] = []
    epochs = epochs_of(recorded or (), vocab_size, KEPT)
    for batch in batches:
        if recorded is not None:
            workloads = {f"epoch {number}": groups for number, groups in enumerate(epochs)}
        else:
            size = WAVES * batch
            workloads = {f"{share:.0%} alike": alike(size, new_tokens, share, vocab_size) for share in likenesses}
            workloads["adversarial"] = adversarial(size, new_tokens, vocab_size)
        title = f"{shape}: tokens/s without and with drafts from history, batch {batch}"
        table = new_table(title, COLUMNS, words=("workload", "chosen"))
        for row in _measure(model, batch, workloads, console, alike_cost=recorded is None):
            rows.append(row)
            on = row["history"]
            table.add_row(
                row["workload"],
                f"{row['off']['tokens_per_s']:,.0f}",
                f"{on['tokens_per_s']:,.0f}",
                f"{row['gain']:.2f}",
                f"{on['tokens_per_row']:.2f}",
                f"{on['accept_rate']:.0%}",
                on["chosen"],
            )
        console.print(table)
        write_record(record | {"rows": rows}, json_file, console)  # each time: the next batch may take minutes
    return record | {"rows": rows}


def _measure(
    model: PreTrainedModel,
    batch: int,
    workloads: Mapping[str, Sequence[ReplayGroup]],
    console: Console,
    *,
    alike_cost: bool,
) -> Iterator[dict[str, Any]]:
    """`alike_cost`: without drafts all workloads take the same."""
    plain, drafting = (Replay(model, batch, list(workloads.values()), drafts=drafts) for drafts in (False, True))
    first = next(iter(workloads.values()))
    for name, groups in workloads.items():
        groups_of = {plain: first if alike_cost else groups, drafting: groups}
        with console.status(f"{name}, batch {batch}"), still_heap():
            for replay, walked in groups_of.items():
                replay.prepare(walked)
            walks: dict[Replay, list[Walk]] = {plain: [], drafting: []}
            turn = [plain, drafting]
            while not have_walked_enough(walks.values()):
                for replay in turn:
                    walks[replay].append(replay.walk(groups_of[replay]))
                turn.reverse()
        off, on = median_rates(walks[plain]), median_rates(walks[drafting]) | drafting.take_draft_facts()
        yield {
            "workload": name,
            "batch": batch,
            "off": off,
            "history": on,
            "gain": on["tokens_per_s"] / off["tokens_per_s"],
            "gain_to_end": on["tokens_per_s_to_end"] / off["tokens_per_s_to_end"],
        }


@dataclass(frozen=True, slots=True)
class Walk:
    full_tokens: int
    full_s: float
    """Until the first sequence ended that no other followed; the whole walk, if there never were enough."""
    num_tokens: int
    seconds: float

    def rates(self) -> dict[str, float]:
        return {
            "tokens_per_s": self.full_tokens / self.full_s,
            "tokens_per_s_to_end": self.num_tokens / self.seconds,
        }


def have_walked_enough(walks: Iterable[Sequence[Walk]]) -> bool:
    return all(
        len(some) >= MOST_WALKS or (len(some) >= LEAST_WALKS and sum(walk.seconds for walk in some) >= TIMED_S)
        for some in walks
    )


def median_rates(walks: Sequence[Walk]) -> dict[str, Any]:
    rates = [walk.rates() for walk in walks]
    medians: dict[str, Any] = {name: statistics.median(one[name] for one in rates) for name in rates[0]}
    return medians | {"walks": [one["tokens_per_s"] for one in rates]}


class Replay:
    """An engine that walks workloads: to prepare graphs and choices, and then by the clock."""

    def __init__(
        self, model: PreTrainedModel, batch: int, workloads: Sequence[Sequence[ReplayGroup]], *, drafts: bool
    ) -> None:
        groups = [group for workload in workloads for group in workload]
        num_prompt = max(len(group.prompt_ids) for group in groups)
        num_new = max(len(text) for group in groups for text in (*group.texts, *group.past))
        num_texts = max(len(group.texts) + len(group.past) for group in groups)
        self._past: dict[tuple[int, ...], list[Text]] = {}
        self._selector = self._new_selector(model.device)
        drafter = None
        if drafts:
            shelf = shelf_tokens(num_prompt, num_texts, num_new)
            drafter = HistoryDrafter(
                num_slots=batch,
                max_drafts=MAX_DRAFTS,
                library_tokens=shelf * min(len(groups), batch + 1),
                longest_shelf=shelf,
                device=model.device,
                past=lambda ids: self._past.get(ids, ()),
            )
        check_positions(model, "the model", num_prompt + num_new)
        self._engine = Engine(
            model,
            max_sequences=batch,
            max_length=num_prompt + num_new,
            drafter=drafter,
            policy=self._selector if drafts else None,
        )
        if model.device.type == "cuda":
            self._engine.load_kernels()
        self._batch = batch

    @staticmethod
    def _new_selector(device: torch.device) -> Selector:
        """Who may spend what it takes: what is timed comes after."""
        return Selector(has_price=device.type == "cuda", preparing=math.inf)

    def prepare(self, groups: Sequence[ReplayGroup]) -> None:
        """Until a walk needs hardly any new graph and, with drafts, every way of drafting was tried."""
        self._past = {group.prompt_ids: [Text(words_of(text), 1) for text in group.past] for group in groups}
        # What paid for another workload says nothing about this one.
        self._selector = self._new_selector(self._engine.device)
        if self._engine.drafter is not None:
            self._engine.policy = self._selector
        for _ in range(MOST_WARM_UPS):
            num_graphs = self._engine.facts().num_graphs
            self.walk(groups)
            has_chosen = self._engine.drafter is None or self._selector.has_tried_all(self._batch)
            if has_chosen and self._engine.facts().num_graphs <= num_graphs + FEW_GRAPHS:
                break
        self._engine.take_draft_counts()

    def take_draft_facts(self) -> dict[str, Any]:
        """Of all walks since it was prepared."""
        counts = self._engine.take_draft_counts()
        return {
            "tokens_per_row": counts.num_tokens / counts.num_rows if counts.num_rows else 1.0,
            "drafts_per_row": counts.num_drafted / counts.num_rows if counts.num_rows else 0.0,
            "accept_rate": counts.num_accepted / counts.num_drafted if counts.num_drafted else 0.0,
            "chosen": str(self._selector.best(self._batch)),
            "rates": {str(way): rate for way, rate in self._selector.rates(self._batch).items()},
        }

    def walk(self, groups: Sequence[ReplayGroup]) -> Walk:
        for number, group in enumerate(groups):
            if not group.texts:
                continue
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
        return timed_walk(self._engine, self._batch)


def timed_walk(engine: Engine, batch: int) -> Walk:
    """To the end of what was submitted."""
    before, started = engine.facts().decode_tokens, time.perf_counter()
    full_tokens, full_s = 0, 0.0
    was_full = False
    while engine.has_work:
        engine.step()
        facts = engine.facts()
        was_full |= facts.num_running == batch
        if was_full and not full_s and not facts.num_waiting and facts.num_running < batch:
            full_tokens, full_s = facts.decode_tokens - before, time.perf_counter() - started
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    whole = engine.facts().decode_tokens - before, time.perf_counter() - started
    return Walk(*((full_tokens, full_s) if full_tokens else whole), *whole)
