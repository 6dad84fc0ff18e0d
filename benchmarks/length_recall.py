"""Who will be long, and what does it cost not to know?

    python benchmarks/length_recall.py TRACE --model smollm2 --fine-tune smollm2 --out FILE

TRACE is a folder with *grpo.rollouts.jsonl.gz (ep, p, t) and *grpo.prompts.jsonl.gz (p, ids) of a run. Compared are the
prompt's past, the lengths of its first two samples, both, forecasts for prompts never seen, the same forecast for all,
and a bound (the mean that a prompt's samples turn out to have, which nobody knows before). Prompts never seen are
forecast by a regression on token ids, or on the mean hidden states of the model told with --model, and by the tuned
top layers of that told with --fine-tune: each half of the prompts by what has learned from the other half, that
epoch's included. All are judged from the second epoch on. A drawn workload stands beside it.

Of each: the recall of the longest 20, 10 and 5 %, the mean length / the mean forecast, the calibration error
(`schedule/lengths.py`), and how much later workers end by a plan that is made with the forecasts and never mended, than
by the same plan made with the true lengths (`to known`), and than if rollouts go round (`to round robin`).
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from slipstream.rng import keyed_random
from slipstream.schedule.dispatch import DISPATCHES, WorkerSpec
from slipstream.schedule.lengths import LengthForecaster, forecast_metrics
from slipstream.schedule.ranker import Features, LengthRanker, token_features
from slipstream.simulate.costs import GPUS, costs_of
from slipstream.simulate.worker import makespan_s
from slipstream.simulate.workloads import PRESETS, recorded_steps

PROBES = 2
"""Samples of a group that have ended, where its progress is known."""
WORKERS, BILLIONS, GPU = 16, 7.0, "h800"
"""Who decodes the rollouts of a step."""
PLANS = ("deadline", "skewness split")
Groups = dict[str, list[float]]
"""Lengths of one epoch, by prompt."""


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


def draw(preset: str) -> list[Groups]:
    drawn: list[Groups] = []
    for step in PRESETS[preset].draw(num_prompts=256, prompts_per_step=256, samples=8, steps=5, seed=0):
        groups: Groups = {}
        for uid, length in step.lengths.items():
            groups.setdefault(step.prompts[uid], []).append(length)
        drawn.append(groups)
    return drawn


def crew(epochs: Sequence[Groups]) -> list[WorkerSpec]:
    rows = [
        (number, f"{prompt}/{i}", prompt, round(length))
        for number, groups in enumerate(epochs)
        for prompt, group in groups.items()
        for i, length in enumerate(group)
    ]
    costs = costs_of(BILLIONS, GPUS[GPU], recorded_steps(rows))
    return [WorkerSpec(f"w{number}", costs.curve, costs.slots) for number in range(WORKERS)]


def judge(
    forecast: Callable[[str], float], groups: Groups, workers: list[WorkerSpec], skip: int = 0
) -> dict[str, float]:
    """Of one epoch. `skip`: samples of a group that have ended and need no forecast."""
    actual = {f"{p}/{i}": length for p, group in groups.items() for i, length in enumerate(group) if i >= skip}
    # Of equal forecasts chance decides, not the prompts' names.
    dice = keyed_random("ties", len(actual))
    by_prompt = {prompt: forecast(prompt) for prompt in groups}
    foreseen = {uid: by_prompt[uid.rpartition("/")[0]] * (1 + 1e-9 * dice.random()) for uid in actual}

    def end_s(plan: str, lengths: Mapping[str, float]) -> float:
        return max(makespan_s(DISPATCHES[plan](lengths, workers), actual, workers).values())

    found = forecast_metrics(foreseen, actual)
    for plan in PLANS:
        planned_s = end_s(plan, foreseen)
        found[f"{plan} to known"] = planned_s / end_s(plan, actual)
        found[f"{plan} to round robin"] = planned_s / end_s("round robin", actual)
    return found


def of_history(epochs: Sequence[Groups]) -> dict[str, dict[str, float]]:
    workers = crew(epochs)
    forecaster, without_past = LengthForecaster(), LengthForecaster()
    forecaster.learn_step(epochs[0])
    found = []
    for groups in epochs[1:]:
        found.append(of_epoch(forecaster, without_past, groups, workers))
        forecaster.learn_step(groups)
    return {name: mean_of([rows[name] for rows in found]) for name in found[0]}


def of_epoch(
    forecaster: LengthForecaster, without_past: LengthForecaster, groups: Groups, workers: list[WorkerSpec]
) -> dict[str, dict[str, float]]:
    def after_probes(who: LengthForecaster) -> Callable[[str], float]:
        return lambda prompt: who.forecast(prompt, ended_siblings=groups[prompt][:PROBES])

    means = {prompt: statistics.fmean(group) for prompt, group in groups.items()}
    return {
        "all alike": judge(lambda prompt: forecaster.forecast("never seen"), groups, workers),
        "past": judge(forecaster.forecast, groups, workers),
        "progress": judge(after_probes(without_past), groups, workers, PROBES),
        "both": judge(after_probes(forecaster), groups, workers, PROBES),
        "bound": judge(means.__getitem__, groups, workers),
    }


class Learner(Protocol):
    """Learns from the prompts of a step, and is asked about others."""

    def learn_step(self, lengths: Groups) -> None: ...

    def score(self, prompts: Sequence[str]) -> dict[str, float]: ...


class Regression:
    def __init__(self, features: Mapping[str, Features]) -> None:
        self._ranker, self._features = LengthRanker(), features

    def learn_step(self, lengths: Groups) -> None:
        self._ranker.learn_step(self._features, lengths)

    def score(self, prompts: Sequence[str]) -> dict[str, float]:
        return {prompt: self._ranker.forecast(self._features[prompt]) for prompt in prompts}


class FineTuned:
    def __init__(self, model: Any, prompts: Mapping[str, list[int]]) -> None:
        from slipstream.train.length_model import LengthModel

        self._length_model, self._prompts = LengthModel(model), prompts

    def learn_step(self, lengths: Groups) -> None:
        start_s = time.perf_counter()
        self._length_model.learn_step(self._prompts, lengths)
        print(f"learned from {len(lengths)} prompts in {time.perf_counter() - start_s:.0f} s", flush=True)

    def score(self, prompts: Sequence[str]) -> dict[str, float]:
        return self._length_model.score({prompt: self._prompts[prompt] for prompt in prompts})


def of_new_prompts(epochs: Sequence[Groups], make: Callable[[], Learner]) -> dict[str, float]:
    """Two learners, each told of one half of the prompts and asked about the other."""
    workers = crew(epochs)
    order = sorted(epochs[0])
    keyed_random("halves").shuffle(order)
    halves = order[: len(order) // 2], order[len(order) // 2 :]
    pairs = [(make(), seen, new) for seen, new in (halves, halves[::-1])]
    found = []
    for number, groups in enumerate(epochs):
        forecasts: dict[str, float] = {}
        for learner, seen, new in pairs:
            learner.learn_step({prompt: groups[prompt] for prompt in seen})
            forecasts |= learner.score(new)
        if number:
            found.append(judge(forecasts.__getitem__, groups, workers))
    return mean_of(found)


def load(name: str) -> Any:
    import torch

    from slipstream.models.loading import load_model

    return load_model(name, dtype=torch.float32, device=torch.device("cpu"), seed=0)


def hidden_features(prompts: Mapping[str, list[int]], model: Any) -> dict[str, Features]:
    import torch

    from slipstream.models.packed import document_hidden

    with torch.inference_mode():
        return {
            prompt: document_hidden(model, torch.tensor(ids), [len(ids)]).mean(0).double().numpy()
            for prompt, ids in prompts.items()
        }


def mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def show(rows: Mapping[str, dict[str, float]]) -> None:
    names = list(next(iter(rows.values())))
    print(" | ".join(["", *(name.removeprefix("length_forecast/") for name in names), ""]).strip())
    for kind, row in rows.items():
        print(f"{kind:26s}", " ".join(f"{row[name]:6.2f}" for name in names), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", help="whose hidden states describe prompts, e.g. smollm2")
    parser.add_argument("--fine-tune", help="whose top layers learn the lengths, e.g. smollm2")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    epochs, prompts = read_trace(arguments.trace)
    drawn = of_history(draw("20k"))
    show(drawn)
    recorded = of_history(epochs)
    features = {prompt: token_features(ids) for prompt, ids in prompts.items()}
    recorded["token ids, never seen"] = of_new_prompts(epochs, lambda: Regression(features))
    if arguments.model:
        hidden = hidden_features(prompts, load(arguments.model))
        recorded["hidden states, never seen"] = of_new_prompts(epochs, lambda: Regression(hidden))
    show(recorded)
    if arguments.fine_tune:
        model = load(arguments.fine_tune)
        recorded["fine-tuned, never seen"] = of_new_prompts(epochs, lambda: FineTuned(model, prompts))
        show(recorded)
    record = {
        "what": "benchmarks/length_recall.py",
        "models": {"hidden states": arguments.model, "fine-tuned": arguments.fine_tune},
        "workers": {"number": WORKERS, "billions": BILLIONS, "gpu": GPU},
        "recorded": recorded,
        "drawn": {"20k": drawn},
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
