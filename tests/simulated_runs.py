"""Runs whose steps take what the simulator says they take."""

from __future__ import annotations

from pathlib import Path

from slipstream.config import build_config, dump_config, load_config
from slipstream.observe.store import RunStore
from slipstream.rng import keyed_random
from slipstream.schedule.rules import MODES
from slipstream.schedule.speeds import SpeedCurve
from slipstream.simulate.against import num_steps, read_recorded
from slipstream.simulate.system import Costs, System
from slipstream.simulate.world import simulate
from slipstream.types import Request, Rollout, SamplingParams, Scored

SLOTS = 4


def write_run(folder: Path, steps: int, slowdown: float = 1.0, *, drafted: float = 0.0, learns: bool = True) -> None:
    """Six groups of two a step, every other one with equal rewards. A decoding step takes 10 ms and 1 ms a sequence,
    training 0.5 s and 2 ms a token with a gradient, the rest 50 ms, and evaluation 3 s now and then."""
    config = {"model": "tiny", "run": {"dir": str(folder)}, "engine": {"max_sequences": SLOTS}}
    config |= {"train": {"micro_batch_tokens": 80}}
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


def write_streamed_run(folder: Path, steps: int, slowdown: float = 1.0, mode: str = "sync") -> Costs:
    """The same groups sampled by one process and trained by another, as the simulator has it with the costs given back;
    from the middle on everything takes `slowdown` times as long as the stages of the first half would have it."""
    write_run(folder, steps)
    config = load_config(folder / "config.yaml")
    recorded = read_recorded(folder)
    curve = SpeedCurve(((1, 0.011), (2, 0.012), (4, 0.014)))
    costs = Costs(curve, SLOTS, 1, train_gpu_s=0.002, weights_s=0.1, update_s=0.5, micro_batch_tokens=80)
    work = [recorded.rollouts[step] for step in sorted(recorded.rollouts)]
    outcome = simulate(System(MODES[mode], streams=True), costs, work, num_gpus=2, train_gpus=1)
    (folder / "config.yaml").write_text(dump_config(config.model_copy(update={"mode": mode})))
    now_s = before_s = 0.0
    with RunStore(folder) as store:
        for step, times in enumerate(outcome.steps, 1):
            now_s += (times.trained_s - before_s) * (slowdown if step > steps // 2 else 1.0)
            before_s = times.trained_s
            store.add_event(step, now_s, "StepTrained", {"step": step})
            paces = [(10, 10 * size, 10 * curve.token_s(size)) for size in (1, 2, 4)]
            store.add_event(step, now_s, "WorkersPaced", {"step": step, "paces": paces})
            taught = recorded.teaching[step]
            row = {"timing_s/update_actor": 0.5 + 0.002 * taught, "timing_s/update_weights": 0.1, "timing_s/eval": 0.0}
            store.add_metrics(step, row | {"timing_s/gen": 1.0, "timing_s/step": 2.0})
    return costs
