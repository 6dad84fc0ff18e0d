"""What training the drafter beside the tail of a rollout costs, and how much of it fits there.

    python benchmarks/drafter_tail.py --shape qwen2.5-1.5b --sequences 8 --new-tokens 2048

A policy with random weights decodes the sequences of a tail, in turns without and with updates beside them, as
`runtime/tail.py` lets them run; the tokens are compared. Needs a CUDA device; on a CPU (`--shape` is ignored, a tiny
model, no graphs) it only shows that it runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from slipstream.draft.history import HistoryDrafter
from slipstream.draft.learned import ModelGuesser
from slipstream.draft.online import DrafterTrainer
from slipstream.engine.engine import Engine
from slipstream.engine.strategy import OFF, Always, Strategy
from slipstream.models.loading import load_model
from slipstream.models.packed import document_hidden
from slipstream.models.shapes import random_model
from slipstream.models.weights import cast_weights
from slipstream.rng import derive_seed
from slipstream.runtime.drafting import Publisher
from slipstream.runtime.tail import TailTrainer
from slipstream.types import Request, SamplingParams

TEXTS, TEXT_TOKENS, PROMPT_TOKENS = 16, 1500, 24


def teach(policy: Any, device: torch.device, memory_gb: float, folder: Path) -> DrafterTrainer:
    """A drafter with texts to learn from, shown one at a time."""
    trainer = DrafterTrainer(
        policy, lr=3e-4, temperature=1.0, memory_bytes=int(memory_gb * 1e9), disk_bytes=10**10, folder=folder
    )
    dice = torch.Generator().manual_seed(0)
    for _ in range(TEXTS):
        ids = torch.randint(5, 60, (TEXT_TOKENS,), generator=dice).to(device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            last = document_hidden(policy, ids, [TEXT_TOKENS])
        trainer.collect(ids, [TEXT_TOKENS], [TEXT_TOKENS - PROMPT_TOKENS], last)
    return trainer


def walk(engine: Engine, tail: TailTrainer | None, sequences: int, new_tokens: int) -> tuple[float, list[Any], int]:
    """Seconds while all sequences run, without the first steps; tokens; steps."""
    sampling = SamplingParams(max_new_tokens=new_tokens)
    prompt = tuple(range(5, 5 + PROMPT_TOKENS))
    engine.submit([Request(f"0/{i}", "0", prompt, derive_seed(0, i), sampling) for i in range(sequences)])
    finished: list[Any] = []
    num_steps, begun_s = 0, 0.0
    while engine.has_work:
        finished += engine.step()
        num_steps += 1
        if num_steps == 20:
            begun_s = time.perf_counter()
        if tail is not None:
            facts = engine.facts()
            tail.after_step(facts.num_running, facts.num_waiting, facts.num_unread, engine.last_kind)
    seconds = time.perf_counter() - begun_s
    if tail is not None:
        tail.stop()
    return seconds, sorted((one.request.uid, one.token_ids) for one in finished), num_steps - 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=0, help="drafts of the learned drafter in each step")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--memory-gb", type=float, default=2.0, help="less than the texts need: some come from the disk"
    )
    parser.add_argument("--folder", type=Path, default=Path("lessons-of-the-benchmark"))
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu:
        policy = random_model(options.shape, dtype=torch.float32, device=device)
    else:
        policy = load_model("tiny", dtype=torch.float32, device=device)
    served = copy.deepcopy(policy).requires_grad_(False)
    if on_gpu:
        cast_weights(served, torch.bfloat16)
    guesser = ModelGuesser(num_slots=options.sequences)
    drafter = HistoryDrafter(
        num_slots=options.sequences, max_drafts=8, library_tokens=0, device=device, guesser=guesser
    )
    strategy = Strategy(float(options.depth), 0, options.depth) if options.depth else OFF
    engine = Engine(
        served,
        max_sequences=options.sequences,
        max_length=PROMPT_TOKENS + options.new_tokens,
        drafter=drafter,
        policy=Always(strategy),
    )
    held = torch.cuda.memory_reserved() if on_gpu else 0
    learner = teach(policy, device, options.memory_gb, options.folder)
    publisher = Publisher(learner, engine)
    publisher.publish()
    learner.train(5)
    begun_s = time.perf_counter()
    learner.train(8)
    update_s = (time.perf_counter() - begun_s) / 8
    taken_gb = (torch.cuda.memory_reserved() - held) / 1e9 if on_gpu else 0.0
    print(json.dumps({"update_alone_ms": 1e3 * update_s, "captured": learner.trains_aside, "memory_gb": taken_gb}))
    tail = TailTrainer(learner, publisher.publish, updates=10**9, record=lambda item: None)
    walk(engine, None, options.sequences, options.new_tokens)  # graphs are captured
    alone, beside, told, tokens = [], [], {}, []
    for _ in range(options.turns):
        seconds, texts, num_steps = walk(engine, None, options.sequences, options.new_tokens)
        alone.append(seconds / num_steps)
        tokens.append(texts)
        tail.add_lessons(TEXTS)
        seconds, texts, num_steps = walk(engine, tail, options.sequences, options.new_tokens)
        beside.append(seconds / num_steps)
        tokens.append(texts)
        num_updates, told = tail.take()
        row = {"step_alone_ms": 1e3 * alone[-1], "step_beside_ms": 1e3 * beside[-1], "updates": num_updates, **told}
        print(json.dumps(row))
    slowdown = statistics.median(beside) / statistics.median(alone) - 1
    same = all(texts == tokens[0] for texts in tokens)
    print(json.dumps({"slowdown": slowdown, "same_tokens": same, "shape": options.shape if on_gpu else "tiny"}))
    learner.close()


if __name__ == "__main__":
    main()
