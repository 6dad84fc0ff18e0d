"""Seconds of a step of the trainer, by shape and length: documents attended to all at once, and one by one.

    python benchmarks/training.py --shapes smollm2-135m --out benchmarks/results/training.json
    python benchmarks/training.py --shapes qwen2.5-1.5b --micro-batch-tokens 8192 --out training-1.5b.json

Random weights; responses with a long tail around each mean, in micro-batches as in smollm2-reasoner. A
step is forward, backward and optimizer; the forward alone gives log-probabilities. Both ways take turns. Then a step
under the profiler: the share of it in which the GPU computes, and the kernels that take longest. Last, updates of the
drafter that learns beside it. Without a GPU both ways are the same one, and there is nothing to profile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from slipstream.config import Algorithm, Training
from slipstream.draft.online import DrafterTrainer
from slipstream.models.attention import AttentionForm, Documents
from slipstream.models.precision import use_batch_invariant_products
from slipstream.rng import keyed_random
from slipstream.runtime.benches import describe_machine, load_shape
from slipstream.runtime.engines import choose_device
from slipstream.train.packing import document_tokens
from slipstream.train.trainer import Trainer
from slipstream.types import TrainSample

PROMPT = 50
SPREAD = 1.0
"""Of the logarithm of lengths: one in a hundred responses is six times as long as the mean."""
KERNELS = 14
UPDATES = 32


@contextmanager
def one_by_one() -> Iterator[None]:
    at_once = Documents.attend

    def attend(self: Documents, _: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        return self.attend_one_by_one(query, key, value, form)

    Documents.attend = attend  # type: ignore[method-assign]
    try:
        yield
    finally:
        Documents.attend = at_once  # type: ignore[method-assign]


def make_samples(mean: int, num_tokens: int, vocab_size: int) -> list[TrainSample]:
    """As many as have so many tokens together."""
    dice = keyed_random("samples", mean)
    samples: list[TrainSample] = []
    while num_tokens > 0:
        length = 1 + min(round(dice.lognormvariate(0.0, SPREAD) * mean / 2.718**0.5), 12 * mean)
        prompt, response = (tuple(dice.choices(range(5, vocab_size), k=count)) for count in (PROMPT, length))
        sign = 1.0 if len(samples) % 2 else -1.0
        samples.append(TrainSample(f"{len(samples) // 8}/{len(samples)}", prompt, response, (-9.0,) * length, sign))
        num_tokens -= document_tokens(prompt, response)
    return samples


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def profiled(work: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Nothing without a GPU."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        took_s = seconds_of(work, device)
    rows = [row for row in trace.key_averages() if row.self_device_time_total > 0]
    rows.sort(key=lambda row: -row.self_device_time_total)
    busy_s = sum(row.self_device_time_total for row in rows) / 1e6
    return {
        "profiled_s": took_s,
        "busy_s": busy_s,
        "launches": sum(row.count for row in rows),
        "kernels": [
            {"name": row.key[:90], "ms": row.self_device_time_total / 1e3, "calls": row.count} for row in rows[:KERNELS]
        ],
    }


def measure(trainer: Trainer, mean: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    samples = make_samples(mean, num_tokens, trainer.model.config.get_text_config().vocab_size)
    num_packed = sum(document_tokens(sample.prompt_ids, sample.response_ids) for sample in samples)
    works = (partial(trainer.step, samples), partial(trainer.logprobs_of, samples))
    found: dict[str, list[float]] = {name: [] for name in ("step", "forward", "step_one_by_one", "forward_one_by_one")}
    for number in range(rounds + 1):
        times = [seconds_of(work, trainer.device) for work in works]
        with one_by_one():
            times += [seconds_of(work, trainer.device) for work in works]
        if number:  # the first compiles, and allocates what later ones find
            for values, took_s in zip(found.values(), times, strict=True):
                values.append(took_s)
    num_weights = sum(parameter.numel() for parameter in trainer.parameters)
    medians = {f"{name}_s": statistics.median(values) for name, values in found.items()}
    row: dict[str, Any] = {"mean": mean, "samples": len(samples), "packed_tokens": num_packed, **medians}
    row |= {f"{name}_range_s": [min(values), max(values)] for name, values in found.items()}
    row["tokens_per_s"] = num_packed / row["step_s"]
    row["tflops"] = 6e-12 * num_weights * row["tokens_per_s"]
    row["gain"] = row["step_one_by_one_s"] / row["step_s"]
    row["forward_gain"] = row["forward_one_by_one_s"] / row["forward_s"]
    return row | profiled(works[0], trainer.device)


def measure_drafter(trainer: Trainer, mean: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Taught by the rollouts of one forward."""
    samples = make_samples(mean, num_tokens, trainer.model.config.get_text_config().vocab_size)
    texts = [(*sample.prompt_ids, *sample.response_ids[:-1]) for sample in samples]
    ids_T = torch.tensor([token for text in texts for token in text], device=trainer.device)
    lengths = [len(text) for text in texts]
    drafter = DrafterTrainer(trainer.model, lr=5e-4, temperature=1.0, memory_bytes=8 << 30)
    drafter.collect(
        ids_T, lengths, [len(sample.response_ids) for sample in samples], trainer.policy.hidden(ids_T, lengths)
    )
    work = partial(drafter.train, UPDATES)
    times = [seconds_of(work, trainer.device) / UPDATES for _ in range(rounds + 1)][1:]
    row = {"mean": mean, "updates": UPDATES, "update_s": statistics.median(times), "range_s": [min(times), max(times)]}
    row |= profiled(work, trainer.device)
    drafter.close()
    return row


def show_profile(row: dict[str, Any]) -> None:
    if "busy_s" in row:
        print(f"  under the profiler {row['profiled_s']:.3f} s, the GPU busy for {row['busy_s']:.3f}:")
        for kernel in row["kernels"]:
            print(f"  {kernel['ms']:9.2f} ms  x{kernel['calls']:<6} {kernel['name']}")


def write(file: Path | None, record: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="smollm2-135m")
    parser.add_argument("--means", default="90,500", help="response tokens")
    parser.add_argument("--tokens", type=int, default=49152, help="of a step, prompts among them")
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--free-products", action="store_true", help="products as torch has them, not as beside an exact engine"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, means = choose_device("auto"), [int(mean) for mean in arguments.means.split(",")]
    if device.type == "cuda" and not arguments.free_products:
        use_batch_invariant_products()
    record: dict[str, Any] = {"free_products": arguments.free_products, "rows": [], "drafter": []}
    for shape in arguments.shapes.split(","):
        model = load_shape(shape, torch.float32, device)
        training = Training(micro_batch_tokens=arguments.micro_batch_tokens, lr=1e-6)
        trainer = Trainer(model, training, Algorithm(), temperature=1.0, max_new_tokens=1 << 14)
        record = describe_machine(device, trainer.policy.dtype) | {"what": "benchmarks/training.py"} | record
        for mean in means:
            row = {"shape": shape} | measure(trainer, mean, arguments.tokens, arguments.rounds)
            record["rows"].append(row)
            print(
                f"{shape}, {row['samples']} responses of {mean} on average: a step {row['step_s']:.3f} s "
                f"({row['tokens_per_s']:,.0f} tokens/s, {row['tflops']:.1f} TFLOP/s), {row['gain']:.2f} times as fast "
                f"as one by one; a forward {row['forward_s']:.3f} s, {row['forward_gain']:.2f} times",
                flush=True,
            )
            show_profile(row)
            write(arguments.out, record)
        for mean in means:  # after the others: from now on the model shows its hidden states
            row = {"shape": shape} | measure_drafter(trainer, mean, arguments.micro_batch_tokens, arguments.rounds)
            record["drafter"].append(row)
            print(f"{shape}, responses of {mean}: an update of the drafter {1e3 * row['update_s']:.2f} ms", flush=True)
            show_profile(row)
            write(arguments.out, record)
        trainer.let_go()
        del model, trainer


if __name__ == "__main__":
    main()
