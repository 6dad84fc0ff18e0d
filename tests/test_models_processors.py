"""What depends on the processor is found out when an engine starts, on kinds of processors that this one is not too."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest
import torch
from processors import PROCESSORS, environment
from tiny_models import COMMON, group
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.engine.engine import Engine
from slipstream.models import heights
from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.heights import MOST_ROWS, Form, heights_of, multiply_at
from slipstream.models.threads import use_threads
from slipstream.types import Rollout

HEIGHTS = (1, 2, 3, 5, 7, 9, 13, 16, 17, 30, 33, 57, 64, 99)
OTHERS = 23


def products() -> dict[str, bool]:
    """Whether a row of products of each kind is the same at some heights as it is alone, padded as the trial says; and
    whether it would be so unpadded."""
    found = {"padded": True, "unpadded": True}
    for way in ("linear", "packed", "transposed"):
        for num_outputs, num_inputs in ((37, 65), (200, 256)):
            form = Form(num_outputs, num_inputs, True, torch.float32, way)  # type: ignore[arg-type]
            if way == "packed" and not heights.can_pack(torch.float32):
                continue
            weight_NK, row_1K = heights._what_cancels(form)
            multiply = heights._multiplier(form, weight_NK, torch.randn(num_outputs) * 1e-2)
            at, every = heights_of(form), tuple(range(1, MOST_ROWS + 1))
            for height in HEIGHTS:
                x_MK = torch.randn(height, num_inputs)
                x_MK[height // 2] = row_1K[0]
                for name, chosen in (("padded", at), ("unpadded", every)):
                    alone = multiply_at(chosen, multiply, row_1K)[0]
                    found[name] &= torch.equal(multiply_at(chosen, multiply, x_MK)[height // 2], alone)
    return found


def rollouts_are_the_same(fused: bool) -> bool:
    """One alone and among others, of a model with odd sizes."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 40, "intermediate_size": 75, "initializer_range": 0.3}
    model = LlamaForCausalLM(LlamaConfig(**COMMON | sizes)).eval()
    model.set_attn_implementation(ATTENTION_NAME)

    def run(num_others: int) -> Rollout:
        engine = Engine(model, max_sequences=num_others + 1, max_length=64, fused=fused)
        for name, num_samples in (("others", num_others), ("mine", 1)):
            if num_samples:
                engine.submit(group(name, tuple(range(3, 20)), num_samples))
        rollouts: dict[str, Rollout] = {}
        while engine.has_work:
            rollouts |= {rollout.request.uid: rollout for rollout in engine.step()}
        return rollouts["mine/0"]

    return all(run(num_others) == run(0) for num_others in (4, OTHERS))


def tell() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    use_threads(2)
    kernels = torch.backends.cpu.get_cpu_capability()
    print(json.dumps({"kernels": kernels, **products(), **{str(f): rollouts_are_the_same(f) for f in (False, True)}}))


@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_engine_on_another_processor_finds_out_at_which_heights_products_are_the_same(processor: str) -> None:
    chosen = environment(processor)
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        chosen.pop(name, None)  # our own kernels need no trial, and compiling them takes half a minute
    done = subprocess.run([sys.executable, __file__], env=chosen, check=True, stdout=subprocess.PIPE, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["padded"] and said["False"] and said["True"], said
    if "ATEN_CPU_CAPABILITY" in chosen and torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert said["kernels"] == {"avx2": "AVX2", "sse": "DEFAULT"}[processor]
        assert not said["unpadded"], "here the trial would have nothing to find"


if __name__ == "__main__":
    tell()
