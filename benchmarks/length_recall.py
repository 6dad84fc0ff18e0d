"""Who will be long? Of the longest 20, 10 and 5 % of a step's rollouts, the share that was forecast to be among them.

    python benchmarks/length_recall.py TRACE --out benchmarks/results/length_recall.json

TRACE is a folder with a recorded run: rollouts.jsonl.gz (ep, p, t) and prompts.jsonl.gz (p, ids). Compared are the
prompt's past (from the second epoch on), the lengths of its first two samples, both, a bound (the mean that a prompt's
samples turn out to have, which nobody knows before), and a regression for prompts never seen: it learns from half of
the prompts of an epoch and is asked about the other half, from token ids or from the mean hidden states of the model
that is told with --model. A drawn workload stands beside it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.rng import keyed_random
from slipstream.schedule.lengths import LengthForecaster, tail_recall
from slipstream.schedule.ranker import Features, LengthRanker, token_features
from slipstream.simulate.workloads import PRESETS

SHARES = (0.2, 0.1, 0.05)
PROBES = 2
"""Samples of a group that have ended, where its progress is known."""
Groups = dict[str, list[float]]


def read_trace(folder: Path) -> tuple[list[Groups], dict[str, list[int]]]:
    """Lengths by epoch and prompt, and the prompts."""

    def lines(pattern: str) -> list[dict[str, Any]]:
        (file,) = folder.glob(pattern)
        with gzip.open(file, "rt") as stream:
            return [json.loads(line) for line in stream]

    epochs: dict[int, Groups] = {}
    for row in lines("*grpo.rollouts.jsonl.gz"):
        epochs.setdefault(row["ep"], {}).setdefault(str(row["p"]), []).append(float(max(1, len(row["t"]))))
    prompts = {str(row["p"]): row["ids"] for row in lines("*grpo.prompts.jsonl.gz")}
    return [epochs[number] for number in sorted(epochs)], prompts


def recalls(forecast: Callable[[str, int], float], groups: Groups, skip: int = 0) -> list[float]:
    """For each of SHARES; `skip`: samples of a group that have ended and need no forecast."""
    actual = {f"{p}/{i}": length for p, group in groups.items() for i, length in enumerate(group) if i >= skip}
    # Of equal forecasts chance decides, not the prompts' names.
    dice = keyed_random("ties", len(actual))
    foreseen = {uid: forecast(uid.rpartition("/")[0], skip) * (1 + 1e-9 * dice.random()) for uid in actual}
    return [tail_recall(foreseen, actual, share) for share in SHARES]


def of_history(epochs: list[Groups]) -> dict[str, list[list[float]]]:
    forecaster = LengthForecaster()
    without_past = LengthForecaster()
    found: dict[str, list[list[float]]] = {"past": [], "progress": [], "both": [], "bound": []}
    for number, groups in enumerate(epochs):
        if number:
            means = {prompt: statistics.fmean(group) for prompt, group in groups.items()}
            found["bound"].append(recalls(lambda prompt, _, means=means: means[prompt], groups))
            found["past"].append(recalls(lambda prompt, _: forecaster.forecast(prompt), groups))
            for name, who in (("progress", without_past), ("both", forecaster)):

                def forecast(prompt: str, skip: int, who: LengthForecaster = who, groups: Groups = groups) -> float:
                    return who.forecast(prompt, ended_siblings=groups[prompt][:skip])

                found[name].append(recalls(forecast, groups, PROBES))
        forecaster.learn_step(groups)
    return found


def of_ranker(epochs: list[Groups], features: Mapping[str, Features]) -> list[list[float]]:
    """Both halves of the prompts take turns at being new."""
    order = sorted(features)
    keyed_random("halves").shuffle(order)
    halves = set(order[: len(order) // 2]), set(order[len(order) // 2 :])
    found = []
    for seen, new in (halves, halves[::-1]):
        ranker = LengthRanker()
        for groups in epochs:
            ranker.learn_step(features, {prompt: group for prompt, group in groups.items() if prompt in seen})
            unseen = {prompt: group for prompt, group in groups.items() if prompt in new}
            found.append(recalls(lambda prompt, _, ranker=ranker: ranker.forecast(features[prompt]), unseen))
    return found


def hidden_features(prompts: Mapping[str, list[int]], name: str) -> dict[str, Features]:
    import torch

    from slipstream.models.loading import load_model
    from slipstream.models.packed import document_hidden

    model = load_model(name, dtype=torch.float32, device=torch.device("cpu"), seed=0)
    found: dict[str, Features] = {}
    with torch.inference_mode():
        for prompt, ids in prompts.items():
            found[prompt] = document_hidden(model, torch.tensor(ids), [len(ids)]).mean(0).double().numpy()
    return found


def mean_of(rows: list[list[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", help="whose hidden states describe prompts, e.g. smollm2")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    epochs, prompts = read_trace(arguments.trace)
    record: dict[str, Any] = {"what": "benchmarks/length_recall.py", "shares": SHARES, "recorded": {}, "drawn": {}}
    recorded = {name: mean_of(rows) for name, rows in of_history(epochs).items()}
    recorded["token ids, never seen"] = mean_of(
        of_ranker(epochs, {p: token_features(ids) for p, ids in prompts.items()})
    )
    if arguments.model:
        recorded["hidden states, never seen"] = mean_of(of_ranker(epochs, hidden_features(prompts, arguments.model)))
    record["recorded"] = recorded
    for name in ("20k",):
        steps = PRESETS[name].draw(num_prompts=256, prompts_per_step=256, samples=8, steps=5, seed=0)
        drawn: list[Groups] = []
        for step in steps:
            groups: Groups = {}
            for uid, length in step.lengths.items():
                groups.setdefault(step.prompts[uid], []).append(length)
            drawn.append(groups)
        record["drawn"][name] = {kind: mean_of(rows) for kind, rows in of_history(drawn).items()}
    for part in (recorded, *record["drawn"].values()):
        for kind, values in part.items():
            print(f"{kind:28s}", np.round(values, 2))
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
