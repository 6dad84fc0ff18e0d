"""Runs whose steps take what the simulator says they take."""

from __future__ import annotations

from pathlib import Path

from slipstream.config import build_config, dump_config
from slipstream.observe.store import RunStore
from slipstream.rng import keyed_random
from slipstream.simulate.against import num_steps
from slipstream.types import Request, Rollout, SamplingParams, Scored

SLOTS = 4


def write_run(folder: Path, steps: int, slowdown: float = 1.0, *, drafted: float = 0.0, learns: bool = True) -> None:
    """Six groups of two a step, every other one with equal rewards. A decoding step takes 10 ms and 1 ms a sequence,
    training 0.5 s and 2 ms a token with a gradient, the rest 50 ms, and evaluation 3 s now and then."""
    config = {"model": "tiny", "run": {"dir": str(folder)}, "engine": {"max_sequences": SLOTS}}
    tasks = {"train": [{"source": "gym:chain_sum", "size": 10}]}
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(build_config(config | {"tasks": tasks})))
    with RunStore(folder) as store:
        for step in range(1, steps + 1):
            dice = keyed_random("against", step)
            results, taught, lengths = [], 0, []
            for group in range(6):
                for sample in range(2):
                    length = dice.randint(5, 60)
                    request = Request(f"{step}/{group}/{sample}", f"{step}/{group}", (1,), 1, SamplingParams())
                    rollout = Rollout(request, (7,) * length, (-1.0,) * length, "stop", 0, 0)
                    results.append(Scored(rollout, "text", float(learns and sample and group % 2), {}))
                    lengths.append(float(length))
                    taught += length if learns and group % 2 else 0
            prompts = {f"{step}/{group}": (f"key {group}", "prompt") for group in range(6)}
            store.add_rollouts(step, "train", "set", prompts, results)
            pace = slowdown if step > steps // 2 else 1.0
            gen_s = pace * (0.010 * num_steps(lengths, SLOTS) + 0.001 * sum(lengths))
            train_s = pace * (0.5 + 0.002 * taught)
            eval_s = 3.0 if step % 4 == 0 else 0.0
            times = {"timing_s/gen": gen_s, "timing_s/update_actor": train_s, "timing_s/eval": eval_s}
            times["rollout/spec_drafted"] = drafted
            store.add_metrics(step, times | {"timing_s/step": gen_s + train_s + eval_s + 0.05})
