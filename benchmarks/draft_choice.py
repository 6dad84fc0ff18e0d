"""How to choose among past continuations: by the sampling noise, by count or by age, on a run that was recorded.

    slipstream train quickstart run.dir=runs/recorded tasks.train.0.size=128 train.steps=24
    python benchmarks/draft_choice.py runs/recorded --out benchmarks/results/draft_choice.json

Every rollout from the second visit of its prompt on is walked as the engine would: drafts after the longest match among
the prompt's last 16 rollouts and the text itself, as many as the window allows (2, and 2 more whenever all were right,
32 at most), accepted as far as they are what was sampled. The seeds of the run give the noise that was at work. Only
the choice differs: `noise` weighs votes against the noise as the drafter does, `raw noise` without its sharpening,
`count` takes the most votes, `newest` the newest rollout.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numba
import numpy as np
from transformers import AutoTokenizer

from slipstream.config import load_config
from slipstream.draft.match import MAX_PLACES, SHARPNESS, find_places
from slipstream.draft.shelves import NO_TEXT, Text, lay_out
from slipstream.draft.votes import texts_of
from slipstream.engine.sampling import gumbel_of
from slipstream.history.store import PastRollout
from slipstream.models.rendering import render_prompts
from slipstream.observe.store import RunStore, StoredRollout
from slipstream.runtime.prompts import load_training_problems

KEPT, MAX_WINDOW = 16, 32
CHOICES = ("noise", "raw noise", "count", "newest")


@numba.njit(cache=True)
def walk(text, num_prompt, shelf_3B, own, low, high, choice, min_match):  # type: ignore[no-untyped-def]
    """Steps, drafts, drafts that were right, and how often the first of a step was."""
    places = np.empty(MAX_PLACES, np.int64)
    library, weights = shelf_3B[0], shelf_3B[1]
    known, window = num_prompt, 2
    steps, drafted, right, firsts, firsts_right = 0, 0, 0, 0, 0
    while known < len(text):
        count = find_places(text, known, library, 0, len(library), min_match, places)
        accepted, tried = 0, 0
        while count > 0 and tried < window and known + tried < len(text) - 1:
            best, best_score = NO_TEXT, -np.inf
            for place in places[:count]:
                token = library[place + 1 + tried]
                if token == NO_TEXT:
                    continue
                votes = 0.0
                for other in places[:count]:
                    if library[other + 1 + tried] == token:
                        votes += weights[other]
                if choice <= 1:
                    sharpness = SHARPNESS if choice == 0 else 1.0
                    score = sharpness * np.log(votes) + gumbel_of(low, high, known + tried, token)
                elif choice == 2:
                    score = votes
                else:
                    # The newest lie first, after the prompt, which is older than any.
                    score = -float(place) if place > num_prompt + 1 else -float(len(library) + place)
                if score > best_score:
                    best, best_score = token, score
            if best == NO_TEXT:
                break
            is_right = text[known + tried] == best and accepted == tried
            firsts += tried == 0
            firsts_right += is_right and tried == 0
            accepted += is_right
            tried += 1
            kept = 0
            for place in places[:count]:
                if library[place + tried] == best:
                    places[kept] = place
                    kept += 1
            count = kept
        if tried > 0:
            window = min(window + 2, MAX_WINDOW) if accepted == tried else 2
        new = min(accepted + 1, len(text) - known)
        library[own + known - num_prompt : own + known - num_prompt + new] = text[known : known + new]
        known += new
        steps += 1
        drafted += tried
        right += accepted
    return steps, drafted, right, firsts, firsts_right


def past_of(rollouts: list[StoredRollout]) -> list[Text]:
    """Newest first, with the votes the engine would give them."""
    newest = sorted(rollouts, key=lambda one: (-one.step, one.sample))[:KEPT]
    facts = [
        PastRollout(one.prompt_key, one.token_ids, one.reward, one.step, one.first_version, one.last_version)
        for one in newest
    ]
    return texts_of(facts)


def measure(run: Path, min_match: int) -> dict[str, Any]:
    config = load_config(run / "config.yaml")
    tokenizer = AutoTokenizer.from_pretrained(sorted(run.glob("checkpoints/step_*"))[-1])
    prompts = render_prompts(tokenizer, load_training_problems(config), config.engine.max_prompt_tokens)
    ids_by_key = {prompt.key: prompt.token_ids for prompt in prompts}
    visits: dict[str, dict[int, list[StoredRollout]]] = defaultdict(lambda: defaultdict(list))
    with RunStore(run, read_only=True) as store:
        for rollout in store.rollouts(kind="train"):
            visits[rollout.prompt_key][rollout.step].append(rollout)
    totals: dict[tuple[int, str], np.ndarray] = defaultdict(lambda: np.zeros(6, np.int64))
    for by_step in visits.values():
        past: list[StoredRollout] = []
        for epoch, step in enumerate(sorted(by_step)):
            group = by_step[step]
            prompt_ids = ids_by_key[group[0].prompt_key]
            for rollout in group if past else ():
                text = np.array([*prompt_ids, *rollout.token_ids], np.int32)
                for number, choice in enumerate(CHOICES):
                    shelf = lay_out(prompt_ids, past_of(past), 1, rollout.length, sibling_weight=4)
                    own = shelf.segments[0] + len(prompt_ids)
                    seed = rollout.seed & 0xFFFFFFFF, rollout.seed >> 32
                    counts = walk(text, len(prompt_ids), shelf.content, own, *seed, number, min_match)
                    totals[epoch, choice] += (rollout.length, *counts)
            past += group
    rows = []
    for (epoch, choice), (tokens, steps, drafted, right, firsts, firsts_right) in sorted(totals.items()):
        rows.append(
            {
                "epoch": epoch,
                "choice": choice,
                "tokens_a_step": float(tokens / steps),
                "drafts_right": float(right / max(1, drafted)),
                "first_right": float(firsts_right / max(1, firsts)),
                "share_drafted": float(right / tokens),
                "tokens": int(tokens),
            }
        )
    return {"min_match": min_match, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--min-match", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    record = {"what": "benchmarks/draft_choice.py"} | measure(arguments.run, arguments.min_match)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print("epoch  choice     tokens a step  drafts right  first right")
    for row in record["rows"]:
        print(
            f"{row['epoch']:5}  {row['choice']:9}  {row['tokens_a_step']:13.3f}  {row['drafts_right']:12.1%}  "
            f"{row['first_right']:11.1%}"
        )


if __name__ == "__main__":
    main()
