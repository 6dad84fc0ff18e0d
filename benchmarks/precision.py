"""float32 and bfloat16 in turns, by the width of a model: from which on `auto` should mean bfloat16 on this machine.

    python benchmarks/precision.py --out benchmarks/results/precision-amx.json

Llamas of random weights. Decoding: milliseconds a step of a full batch. Training: seconds of a step of the trainer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from slipstream.config import Algorithm, Training
from slipstream.engine.engine import Engine
from slipstream.engine.measure import PROMPT_TOKENS, time_decoding
from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.precision import WIDE, has_native_bfloat16
from slipstream.models.weights import cast_weights
from slipstream.rng import keyed_random
from slipstream.runtime.benches import describe_machine
from slipstream.train.trainer import Trainer
from slipstream.types import TrainSample

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD = 32
PROMPT, RESPONSE = 24, 72
NEW_TOKENS = 48
SAMPLES = 24


def llama(width: int, layers: int, vocab_size: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=8 * width // 3 // HEAD * HEAD,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def engine_of(model: PreTrainedModel, dtype: torch.dtype, batch: int) -> Engine:
    served = type(model)(model.config).requires_grad_(False).eval()
    served.set_attn_implementation(ATTENTION_NAME)
    cast_weights(served, dtype)
    return Engine(served, max_sequences=batch, max_length=PROMPT_TOKENS + NEW_TOKENS)


def samples_of(vocab_size: int) -> list[TrainSample]:
    dice = keyed_random("samples", vocab_size)
    texts = [dice.choices(range(5, vocab_size), k=PROMPT + RESPONSE) for _ in range(SAMPLES)]
    return [
        TrainSample(f"0/{number}", tuple(text[:PROMPT]), tuple(text[PROMPT:]), (-9.0,) * RESPONSE, (-1.0) ** number)
        for number, text in enumerate(texts)
    ]


def measure(model: PreTrainedModel, batches: list[int], rounds: int) -> dict[str, Any]:
    """Of each work the times in both formats, and how many times as fast bfloat16 was in the same round."""
    engines = {(name, batch): engine_of(model, dtype, batch) for name, dtype in DTYPES.items() for batch in batches}
    trainers = {
        name: Trainer(model, Training(lr=1e-6, precision=name), Algorithm(), temperature=1.0, max_new_tokens=RESPONSE)  # type: ignore[arg-type]
        for name in DTYPES
    }
    samples = samples_of(model.config.vocab_size)
    works = [*(f"batch {batch}" for batch in batches), "training"]
    taken: dict[str, dict[str, list[float]]] = {work: {name: [] for name in DTYPES} for work in works}
    for number in range(rounds + 1):
        for name in DTYPES:
            times = [time_decoding(engines[name, batch], batch, NEW_TOKENS, 1.0).step_ms / 1e3 for batch in batches]
            began_s = time.perf_counter()
            trainers[name].step(samples)
            times.append(time.perf_counter() - began_s)
            if number:  # the first compiles and packs
                for work, seconds in zip(works, times, strict=True):
                    taken[work][name].append(seconds)
    return {work: summary(seconds) for work, seconds in taken.items()}


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    gains = [plain / half for plain, half in zip(seconds["float32"], seconds["bfloat16"], strict=True)]
    medians = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    return medians | {"gain": statistics.median(gains), "range": [min(gains), max(gains)]}


def told(work: dict[str, Any]) -> str:
    least, most = work["range"]
    return f"{work['gain']:.2f} ({least:.2f}-{most:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="96,128,192,256,320,384,576")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not has_native_bfloat16(CPU):
        raise SystemExit("this processor has no instructions for bfloat16: auto means float32, there is nothing to ask")
    widths, batches = ([int(one) for one in text.split(",")] for text in (arguments.widths, arguments.batches))
    if any(width % HEAD for width in widths):
        raise SystemExit(f"--widths: multiples of {HEAD}, which is the size of a head")
    record = describe_machine(CPU, *DTYPES.values()) | {"what": "benchmarks/precision.py", "layers": arguments.layers}
    record |= {"vocab_size": arguments.vocab_size, "rounds": arguments.rounds, "auto_from": WIDE, "rows": []}
    for width in widths:
        works = measure(llama(width, arguments.layers, arguments.vocab_size), batches, arguments.rounds)
        record["rows"].append({"width": width} | works)
        shown = ", ".join(f"{work} {told(one)}" for work, one in works.items())
        print(f"width {width}: bfloat16 is so many times as fast: {shown}", flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
