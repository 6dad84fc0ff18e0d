"""How fast an engine decodes: sequences of equal length from short prompts, so that the batch stays full to the end."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from slipstream.engine.engine import PAGE_TOKENS, Engine
from slipstream.rng import derive_seed
from slipstream.types import Request, SamplingParams

PROMPT_TOKENS = 16
WARM_UP_TOKENS = 8
SPEED_TOKENS = 8
LEAST_GROWTH = 1.01


@dataclass(frozen=True, slots=True)
class EngineTiming:
    batch: int
    new_tokens: int
    tokens_per_s: float
    """Sampled tokens over the whole time, prompts included."""
    step_ms: float
    """Median over the steps that decode the whole batch."""
    step_ms_p90: float
    bandwidth_share: float
    """Bytes a step must read (weights, and keys at their mean length) over what the device could read in its time."""
    start_s: float
    """A warm-up of 8 tokens: compilation and capture included, so the first batch size takes longest."""
    num_graphs: int
    graph_bytes: int
    kv_bytes: int


def time_decoding(engine: Engine, batch: int, new_tokens: int, bytes_per_s: float) -> EngineTiming:
    """`bytes_per_s`: what the device reads at best, from `read_bandwidth`."""
    started = time.perf_counter()
    _run(engine, batch, WARM_UP_TOKENS, "warm")
    start_s = time.perf_counter() - started
    started = time.perf_counter()
    moments = _run(engine, batch, new_tokens, "timed")
    total_s = time.perf_counter() - started
    steps_ms = [1e3 * (later - earlier) for earlier, later in pairwise(moments)]
    steady_ms = steps_ms[len(steps_ms) // 10 :]
    step_ms = statistics.median(steady_ms)
    facts = engine.facts()
    bytes_per_token = _kv_bytes_per_token(engine)
    mean_keys = PROMPT_TOKENS + new_tokens / 2
    step_bytes = _weight_bytes(engine) + batch * mean_keys * bytes_per_token
    return EngineTiming(
        batch=batch,
        new_tokens=new_tokens,
        tokens_per_s=batch * new_tokens / total_s,
        step_ms=step_ms,
        step_ms_p90=statistics.quantiles(steady_ms, n=10)[-1],
        bandwidth_share=step_bytes / (step_ms / 1e3) / bytes_per_s,
        start_s=start_s,
        num_graphs=facts.num_graphs,
        graph_bytes=facts.graph_bytes,
        kv_bytes=facts.kv_bytes,
    )


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy on the device, read and written."""
    size = 1 << 30 if device.type == "cuda" else 1 << 27
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        _wait(device)
        started = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = max(best, 2 * size / (time.perf_counter() - started))
    return best


def _run(engine: Engine, batch: int, new_tokens: int, name: str, prompt_tokens: int = PROMPT_TOKENS) -> list[float]:
    """Generate, and note when each step returned."""
    sampling = SamplingParams(max_new_tokens=new_tokens)
    vocab_size = engine.model.config.get_text_config().vocab_size
    for number in range(batch):
        prompt = tuple(derive_seed(name, number, place) % vocab_size for place in range(prompt_tokens))
        engine.submit([Request(f"{name}/{number}", f"{name}/{number}", prompt, derive_seed(name, number), sampling)])
    moments = []
    while engine.has_work:
        engine.step()
        moments.append(time.perf_counter())
    _wait(engine.device)
    return moments


def _weight_bytes(engine: Engine) -> int:
    """What a step reads of the weights: all but an input embedding that is not also the head."""
    total = sum(parameter.nbytes for parameter in engine.model.parameters())
    embedding, head = engine.model.get_input_embeddings(), engine.model.get_output_embeddings()
    tied = embedding.weight is head.weight
    return total if tied else total - embedding.weight.nbytes


def _kv_bytes_per_token(engine: Engine) -> float:
    facts = engine.facts()
    return facts.kv_bytes / ((facts.num_pages + 1) * PAGE_TOKENS)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def speed_points(engine: Engine, max_sequences: int, max_length: int) -> tuple[tuple[int, float], ...]:
    """(sequences, seconds of a step) for some sizes of a batch up to the largest: what a scheduler asks of a worker."""
    prompt_tokens = min(PROMPT_TOKENS, max_length // 2)
    new_tokens = min(SPEED_TOKENS, max_length - prompt_tokens)
    measured = []
    for size in sorted({min(4**power, max_sequences) for power in range(8)}):
        _run(engine, size, 1, f"warm {size}", prompt_tokens)
        moments = [time.perf_counter(), *_run(engine, size, new_tokens, f"speed {size}", prompt_tokens)]
        steps_s = [later - earlier for earlier, later in pairwise(moments)]
        measured.append((size, statistics.median(steps_s[-new_tokens // 2 :])))
    return growing(measured)


def growing(measured: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Without the noise of a busy machine, which only ever adds: a step of fewer sequences takes no longer than one of
    more, and one of more takes a little longer, so that no sequence looks free."""
    points: list[tuple[int, float]] = []
    shortest = math.inf
    for size, seconds in reversed(measured):
        shortest = min(seconds, shortest / LEAST_GROWTH)
        points.append((size, shortest))
    return tuple(reversed(points))
