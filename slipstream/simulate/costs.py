"""What steps of generation and training take on GPUs one may not have: from sizes and data sheets. Pure.

A decoding step reads the weights, and the keys of all sequences, and computes with every sequence; the parts add up.
The shares of the data sheet's figures that are reached were fitted to published times of a 7B model on an H800 (within
8 % from 1 to 512 sequences, `tests/test_simulate_study.py`). A record of `slipstream bench engine` beats all this: give
it where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slipstream.schedule.speeds import SpeedCurve
from slipstream.simulate.system import Costs
from slipstream.simulate.workloads import SimulatedStep

BANDWIDTH_REACHED, COMPUTE_REACHED, TRAINING_REACHED = 0.75, 0.45, 0.4
STEP_OVERHEAD_S = 0.002
"""Of a step, whatever it does: launches, sampling, the host."""
SPLIT_LOSS = 0.85
"""Of the speed that is left whenever a model is split over twice as many GPUs."""
WEIGHTS_OF_MEMORY, MEMORY_USED = 0.5, 0.9
MOST_SLOTS = 512
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BYTES = 2
"""Of a weight or key, in bfloat16."""
LINK_BYTES_S = 25e9
"""At which weights reach the workers."""


@dataclass(frozen=True, slots=True)
class Gpu:
    tflops: float
    """Dense, bfloat16."""
    terabytes_s: float
    gigabytes: float


GPUS = {
    "a100": Gpu(312, 2.0, 80),
    "h20": Gpu(148, 4.0, 96),
    "h800": Gpu(989, 3.35, 80),
    "h100": Gpu(989, 3.35, 80),
    "h200": Gpu(989, 4.8, 141),
    "b200": Gpu(2250, 8.0, 192),
    "l40s": Gpu(362, 0.864, 48),
    "rtx4090": Gpu(165, 1.0, 24),
}
"""By the makers' data sheets."""

KEY_BYTES = ((0.135, 23e3), (0.49, 12e3), (1.54, 29e3), (7.6, 57e3), (14.8, 197e3), (32.8, 262e3), (72.7, 328e3))
"""(billions of weights, bytes of keys and values a token) of SmolLM2 and Qwen2.5."""

TRAINING_FLOPS = {"grpo": 8, "ppo": 16}
"""A token and weight: forward and backward take 6; GRPO has the old policy's forward beside it, PPO a critic's forward
and backward and two more forwards."""


def key_bytes(billions: float) -> float:
    """Of a token, by the size of the model: on a line between the sizes that are known."""
    known = sorted(KEY_BYTES)
    if billions <= known[0][0]:
        return known[0][1]
    for (small, low), (large, high) in pairwise(known):
        if billions <= large:
            return low + (high - low) * math.log(billions / small) / math.log(large / small)
    return known[-1][1] * billions / known[-1][0]


def gpus_a_worker(billions: float, gpu: Gpu) -> int:
    """As few, in powers of two, as leave half of the memory to keys."""
    weights = BYTES * billions * 1e9
    return 1 << max(0, math.ceil(math.log2(weights / (WEIGHTS_OF_MEMORY * gpu.gigabytes * 1e9))))


def decode_curve(billions: float, gpu: Gpu, num_gpus: int, context: float) -> SpeedCurve:
    """Of a worker of so many GPUs, whose sequences have `context` tokens on average."""
    speed = num_gpus * SPLIT_LOSS ** math.log2(num_gpus)
    bytes_s = gpu.terabytes_s * 1e12 * BANDWIDTH_REACHED * speed
    weights_s = BYTES * billions * 1e9 / bytes_s
    flops_s = gpu.tflops * 1e12 * COMPUTE_REACHED * speed
    each_s = 2 * billions * 1e9 / flops_s + context * key_bytes(billions) / bytes_s
    return SpeedCurve(tuple((batch, STEP_OVERHEAD_S + weights_s + batch * each_s) for batch in BATCHES))


def typical_context(steps: Sequence[SimulatedStep]) -> float:
    """Tokens of a sequence at a random moment of its decoding: long ones are there longer."""
    lengths = [length for step in steps for length in step.lengths.values()]
    return sum(length * length for length in lengths) / (2 * sum(lengths))


MAX_BILLIONS = 100_000.0
MAX_GPUS = 65_536
"""Of one system; each is an object that every simulated event looks at."""


def check_billions(billions: float) -> None:
    if not 0 < billions <= MAX_BILLIONS:
        raise ValueError(f"a model of {billions:g} billion weights cannot be: give its size, e.g. --size 7")


def check_count(num_gpus: int, where: str) -> None:
    if num_gpus > MAX_GPUS:
        raise ValueError(f"{where}: {num_gpus:,} GPUs are more than the {MAX_GPUS:,} that are simulated at most")


def costs_of(
    billions: float,
    gpu: Gpu,
    steps: Sequence[SimulatedStep],
    *,
    training: str = "grpo",
    curve: SpeedCurve | None = None,
) -> Costs:
    """`curve`: measured, of one worker; else it is reckoned."""
    check_billions(billions)
    if training not in TRAINING_FLOPS:
        raise ValueError(f"unknown training '{training}'; known: {', '.join(TRAINING_FLOPS)}")
    size, context = gpus_a_worker(billions, gpu), typical_context(steps)
    memory = MEMORY_USED * size * gpu.gigabytes * 1e9 - BYTES * billions * 1e9
    return Costs(
        curve=curve or decode_curve(billions, gpu, size, context),
        slots=max(1, min(MOST_SLOTS, int(memory / (context * key_bytes(billions))))),
        gpus_a_worker=size,
        train_gpu_s=TRAINING_FLOPS[training] * billions * 1e9 / (gpu.tflops * 1e12 * TRAINING_REACHED),
        weights_s=BYTES * billions * 1e9 / LINK_BYTES_S,
    )
