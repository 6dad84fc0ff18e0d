"""What a step takes the host: planning it, telling the device, and taking in what came of it.

    python benchmarks/engine_host.py --batches 8,64,256 --out benchmarks/results/engine_host.json

On a GPU this happens while earlier steps run, and costs nothing as long as it takes less time than they do. Here the
model takes none: what it would have sampled is written where the host reads it, one token for each sequence, and for
one in eight that has drafts up to four more. Sequences have lengths that differ, and others take their place. "Texts":
for each group, earlier rollouts of its prompt are laid out where drafts would come from.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from slipstream.draft.history import HistoryDrafter
from slipstream.draft.selector import Selector
from slipstream.draft.shelves import Text, shelf_tokens
from slipstream.engine.engine import Engine
from slipstream.engine.fitting import fitted
from slipstream.engine.sequences import StepPlan
from slipstream.engine.strategy import OFF, Always, DraftPolicy, StepDrafts, Strategy
from slipstream.history.format import words_of
from slipstream.models.loading import load_model
from slipstream.runtime.benches import describe_machine
from slipstream.runtime.heap import still_heap
from slipstream.types import Request, SamplingParams

CPU = torch.device("cpu")
MAX_LENGTH, PROMPT_TOKENS, SAMPLES = 700, 60, 8
WARM_UP, STEPS, ROUNDS = 300, 400, 5
POLICIES = ("no drafter", "off", "4 drafts", "selector", "off, texts")


class Host:
    """An engine whose steps take no time, kept full."""

    def __init__(self, batch: int, policy_name: str) -> None:
        self.batch, self.policy_name = batch, policy_name
        policy: DraftPolicy | None = None
        if policy_name != "no drafter":
            ways = {"off": OFF, "4 drafts": Strategy(4.0, 1), "off, texts": OFF}
            policy = Always(ways[policy_name]) if policy_name in ways else Selector()
        shelf = shelf_tokens(PROMPT_TOKENS, 2 * SAMPLES, MAX_LENGTH)
        past = [Text(words_of(range(number, number + 256)), 4) for number in range(SAMPLES)]
        drafter = HistoryDrafter(
            num_slots=batch,
            max_drafts=32,
            library_tokens=2 * shelf * (batch // SAMPLES + 1) if "texts" in policy_name else 0,
            device=CPU,
            past=lambda prompt_ids: past,
        )
        model = load_model("tiny", dtype=torch.float32, device=CPU)
        self.engine = Engine(
            model,
            max_sequences=batch,
            max_length=MAX_LENGTH,
            drafter=drafter if policy is not None else None,
            policy=policy,
            steps_ahead=2,
        )
        batcher = self.engine._batcher
        batcher.max_step_tokens, batcher._fit_drafts = 2048, fitted  # as on a GPU
        self.engine._run_step = self._run_step  # type: ignore[method-assign]
        self.dice, self.num_groups = np.random.default_rng(0), 0

    def _run_step(self, plan: StepPlan, drafts: StepDrafts) -> bool:
        report = self.engine._state.report.numpy()
        width = (report.shape[1] - 2) // 4
        slots = plan.samplers.slot_R
        count = np.ones(len(slots), int)
        if plan.num_drafts:
            right = (self.dice.random(len(slots)) < 1 / 8) * self.dice.integers(1, 5, len(slots))
            count += np.minimum(right, plan.samplers.drafts_R)
        report[:, :2] = 0
        report[slots, 0], report[slots, 1] = count, count - 1
        report[slots, 2 : 2 + width] = 7
        report[slots, 2 + 2 * width : 2 + 3 * width] = np.arange(width) < (count - 1)[:, None]
        return True

    def walk(self, num_steps: int) -> float:
        """Microseconds a step."""
        started = time.perf_counter()
        for _ in range(num_steps):
            while self.engine.facts().num_waiting < self.batch:
                self._submit()
            self.engine.step()
        return (time.perf_counter() - started) / num_steps * 1e6

    def _submit(self) -> None:
        length = int(np.clip(self.dice.lognormal(4.6, 0.8), 20, MAX_LENGTH - PROMPT_TOKENS))
        name, prompt = str(self.num_groups), tuple(range(5, 5 + PROMPT_TOKENS))
        sampling = SamplingParams(max_new_tokens=length, stop_token_ids=(2,))
        self.engine.submit([Request(f"{name}/{one}", name, prompt, one, sampling) for one in range(SAMPLES)])
        self.num_groups += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="8,64,256")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    record = describe_machine(CPU, torch.float32) | {"what": "benchmarks/engine_host.py", "rows": []}
    for batch in map(int, arguments.batches.split(",")):
        hosts = [Host(batch, name) for name in POLICIES]
        with still_heap():
            for host in hosts:
                host.walk(WARM_UP)
            walks = [[host.walk(STEPS) for host in hosts] for _ in range(ROUNDS)]
        for host, times in zip(hosts, zip(*walks, strict=True), strict=True):
            row = {"batch": batch, "policy": host.policy_name, "us": statistics.median(times), "us_least": min(times)}
            record["rows"].append(row)
            print(f"batch {batch}, {host.policy_name}: {row['us']:.0f} us a step (least {row['us_least']:.0f})")
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
