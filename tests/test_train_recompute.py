"""Gradient checkpointing: the same gradient, fewer numbers kept, and no trace in the model."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tiny_models import FAMILIES, VOCABULARY, build_family
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.config import Algorithm, Training
from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.recognise import fuse
from slipstream.train.sharding import decoder_layers
from slipstream.train.trainer import Trainer
from slipstream.types import TrainSample

pytestmark = pytest.mark.usefixtures("one_thread")


def make_samples() -> list[TrainSample]:
    draw = random.Random(3)
    samples = []
    for number in range(6):
        prompt, response = ([draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 20))] for _ in range(2))
        behaviour = tuple(draw.uniform(-5, -3) for _ in response)
        samples.append(TrainSample(f"0/{number}/0", tuple(prompt), tuple(response), behaviour, draw.uniform(-2, 2)))
    return samples


def gradient(model: PreTrainedModel, precision: str, *, recomputes: bool) -> tuple[Tensor, int, int]:
    """And the number of times that layers ran, and of numbers that the graph kept at the end of forwards."""
    training = Training(micro_batch_tokens=60, precision=precision, gradient_checkpointing=recomputes)
    trainer = Trainer(model, training, Algorithm(), temperature=1.0, max_new_tokens=20)
    runs, kept = 0, 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    def run(*_: object) -> None:
        nonlocal runs
        runs += 1

    # Of the layer's first product: hooks of the layer itself do not run again, and the last is not needed again.
    first = next(module for module in decoder_layers(model)[0].modules() if isinstance(module, torch.nn.Linear))
    handle = first.register_forward_hook(run)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        trainer.accumulate_gradients(make_samples(), None)
    handle.remove()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found, runs, kept


@pytest.mark.parametrize("family", ["llama", "gemma2", "smollm3", "gpt_neox", "gpt_oss", "qwen3_moe"])
def test_the_same_bits_computed_twice(family: str) -> None:
    model = build_family(family, ATTENTION_NAME)
    expected, runs, kept = gradient(model, "float32", recomputes=False)
    got, runs_again, kept_again = gradient(model, "float32", recomputes=True)
    assert torch.equal(got, expected)
    assert kept_again < 0.5 * kept
    assert runs_again == 2 * runs > 0


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_under_autocast_and_with_several_updates() -> None:
    model = build_family("llama", ATTENTION_NAME)
    expected, *_ = gradient(model, "bfloat16", recomputes=False)
    got, *_ = gradient(model, "bfloat16", recomputes=True)
    assert torch.equal(got, expected)
    found = []
    for recomputes in (False, True):
        training = Training(
            micro_batch_tokens=60, updates_per_step=2, precision="float32", gradient_checkpointing=recomputes
        )
        twin = build_family("llama", ATTENTION_NAME)
        trainer = Trainer(twin, training, Algorithm(kl_coef=0.1), temperature=1.0, max_new_tokens=20)
        trainer.reference = build_family("llama", ATTENTION_NAME)
        shown: list[int] = []
        trainer.on_hidden = lambda batch, hidden_TD, shown=shown: shown.append(len(batch.lengths))  # type: ignore[misc]
        trainer.step(make_samples())
        assert sum(shown) == 6, "hidden states are shown once"
        found.append(torch.cat([parameter.detach().flatten() for parameter in twin.parameters()]))
    assert torch.equal(*found)


def test_an_engine_made_from_the_model_is_fused_as_ever() -> None:
    model = build_family("llama", ATTENTION_NAME)
    gradient(model, "float32", recomputes=True)
    assert all("forward" not in vars(module) for module in model.modules())
    assert len(fuse(copy.deepcopy(model).requires_grad_(False)).fused) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_found(family: str) -> None:
    layers = decoder_layers(build_family(family, ATTENTION_NAME))
    assert len(layers) == 4 and len({type(layer) for layer in layers}) == 1
