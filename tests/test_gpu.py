"""What only a GPU can show; the rest of the suite runs without one."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine.engine import Engine
from slipstream.models.attention import AttentionForm, Documents
from slipstream.models.loading import load_model
from slipstream.rng import derive_seed
from slipstream.types import Request, Rollout, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_all_documents_at_once_equal_one_by_one_with_gradients() -> None:
    torch.manual_seed(0)
    lengths = [1, 70, 33, 128, 5]
    documents = Documents(lengths)
    for window in (None, 16):
        form = AttentionForm(scaling=0.2, sliding_window=window)
        inputs = [
            torch.randn(sum(lengths), heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (6, 2, 2)
        ]
        weight = torch.randn(sum(lengths), 6, 64, device="cuda")
        results = []
        for way in (documents.attend_one_by_one, lambda *args: documents.attend(0, *args)):
            out = way(*inputs, form)
            grads = torch.autograd.grad((out.float() * weight).sum(), inputs)
            results.append([out, *grads])
        for plain, fast in zip(*results, strict=True):
            error = (plain.float() - fast.float()).abs().max() / plain.float().abs().max()
            assert error < 2e-2, (window, error)


def generate(engine: Engine, num_groups: int) -> list[Rollout]:
    sampling = SamplingParams(max_new_tokens=64)
    for group in range(num_groups):
        requests = [
            Request(f"0/{group}/{i}", f"0/{group}", (5, 6, 7, 8 + group), derive_seed(0, group, i), sampling)
            for i in range(8)
        ]
        engine.submit(requests)
    rollouts: list[Rollout] = []
    while engine.has_work:
        rollouts += engine.step()
    return rollouts


def test_the_gpu_engine_agrees_with_the_cpu_engine_in_float32() -> None:
    """Not bit for bit (other kernels), but the same tokens wherever no near-tie decides."""
    by_device = {}
    for device in ("cpu", "cuda"):
        model = load_model("tiny", dtype=torch.float32, device=torch.device(device))
        rollouts = generate(Engine(model, max_sequences=32, max_length=128), 4)
        by_device[device] = {rollout.request.uid: rollout.token_ids for rollout in rollouts}
    same = [by_device["cpu"][uid] == by_device["cuda"][uid] for uid in by_device["cpu"]]
    assert sum(same) >= 0.9 * len(same)
