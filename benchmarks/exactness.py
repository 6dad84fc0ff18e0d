"""Prompts sampled alone, in batches of several sizes, under forced preemption and with drafts: the same tokens?

    python benchmarks/exactness.py --out benchmarks/results/exactness.json

Random weights of a known shape, temperature 1. Every way of running must give the rollouts of the first, tokens and
log-probabilities, to the bit. On a GPU then the same without batch-invariant products: the share of tokens that still
match. The exact part runs in a process of its own, since cuBLAS may read its workspace sizes once. For the price in
time compare `slipstream bench engine` with and without `--no-exact`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from slipstream.draft.history import HistoryDrafter
from slipstream.draft.shelves import Text, shelf_tokens
from slipstream.engine.engine import Engine
from slipstream.engine.strategy import Always, Strategy
from slipstream.models.precision import Precision, resolve_precision
from slipstream.models.shapes import random_model
from slipstream.rng import derive_seed
from slipstream.runtime.benches import describe_machine, shape_width
from slipstream.runtime.engines import choose_device
from slipstream.types import Request, Rollout, SamplingParams

PROMPT_TOKENS = (5, 90)
Rollouts = dict[str, Rollout]


def requests_for(num_prompts: int, new_tokens: int) -> list[Request]:
    sampling = SamplingParams(max_new_tokens=new_tokens)
    requests = []
    for number in range(num_prompts):
        length = PROMPT_TOKENS[0] + derive_seed("length", number) % (PROMPT_TOKENS[1] - PROMPT_TOKENS[0])
        prompt = tuple(100 + derive_seed("prompt", number, place) % 40000 for place in range(length))
        requests.append(Request(f"p{number}", f"p{number}", prompt, derive_seed("seed", number), sampling))
    return requests


def generate(engine: Engine, requests: list[Request]) -> Rollouts:
    for request in requests:
        engine.submit([request])
    rollouts: Rollouts = {}
    while engine.has_work:
        rollouts |= {rollout.request.uid: rollout for rollout in engine.step()}
    return rollouts


def draft_from(reference: Rollouts, num_slots: int, max_length: int, device: torch.device) -> dict[str, Any]:
    """A drafter that knows each rollout with every tenth token another."""
    past = {
        rollout.request.prompt_ids: [
            Text(tuple(token ^ (place % 10 == 9) for place, token in enumerate(rollout.token_ids)), 1)
        ]
        for rollout in reference.values()
    }
    shelf = shelf_tokens(PROMPT_TOKENS[1], 2, max_length)
    drafter = HistoryDrafter(
        num_slots=num_slots,
        max_drafts=16,
        library_tokens=(num_slots + 1) * shelf,
        longest_shelf=shelf,
        device=device,
        past=lambda prompt_ids: past[prompt_ids],
    )
    return {"drafter": drafter, "policy": Always(Strategy(4.0, 2))}


def compare(
    shape: str, dtype: Precision, num_prompts: int, new_tokens: int, num_alone: int, exact: bool
) -> list[dict[str, Any]]:
    device = choose_device("auto")
    model = random_model(shape, dtype=resolve_precision(dtype, device, shape_width(shape)), device=device)
    requests = requests_for(num_prompts, new_tokens)
    max_length = PROMPT_TOKENS[1] + new_tokens
    ways: dict[str, dict[str, Any]] = {
        "batch of 256": {"max_sequences": 256},
        "batch of 64": {"max_sequences": 64},
        "batch of 7": {"max_sequences": 7},
        "64, a third of the memory": {"max_sequences": 64, "kv_tokens": 64 * max_length // 3},
        "64, with drafts": {"max_sequences": 64},
        "7, with drafts": {"max_sequences": 7},
        "64, with drafts, a third of the memory": {"max_sequences": 64, "kv_tokens": 64 * max_length // 3},
        "alone": {"max_sequences": 1},
    }
    reference: Rollouts = {}
    rows = []
    for name, sizes in ways.items():
        asked = requests[:num_alone] if name == "alone" else requests
        drafting = draft_from(reference, sizes["max_sequences"], max_length, device) if "drafts" in name else {}
        engine = Engine(model, max_length=max_length, exact=exact, **sizes, **drafting)
        rollouts = generate(engine, asked)
        reference = reference or rollouts
        pairs = [(rollouts[request.uid], reference[request.uid]) for request in asked]
        tokens = [(a, b) for one, other in pairs for a, b in zip(one.token_ids, other.token_ids, strict=False)]
        rows.append(
            {
                "way": name,
                "exact": exact,
                "rollouts": len(pairs),
                "identical": sum(one == other for one, other in pairs),
                "token_match": sum(a == b for a, b in tokens) / len(tokens),
                "preempted": engine.facts().num_preempted,
                "drafts_accepted": engine.take_draft_counts().num_accepted,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--alone", type=int, default=64, help="prompts that also run one after another")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["exact", "inexact"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        sizes = arguments.prompts, arguments.new_tokens, arguments.alone
        rows = compare(arguments.shape, arguments.dtype, *sizes, exact=arguments.only == "exact")
        arguments.out.write_text(json.dumps(rows))
        return
    device = choose_device("auto")
    resolved = resolve_precision(arguments.dtype, device, shape_width(arguments.shape))
    rows = []
    for only in ("exact", "inexact") if device.type == "cuda" else ("exact",):
        with tempfile.NamedTemporaryFile() as part:
            subprocess.run([sys.executable, *sys.argv, "--only", only, "--out", part.name], check=True)
            rows += json.loads(Path(part.name).read_text())
    record = describe_machine(device, resolved) | {"shape": arguments.shape, "rows": rows}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    wrong = [row["way"] for row in rows if row["exact"] and row["identical"] != row["rollouts"]]
    sys.exit(f"not identical: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
