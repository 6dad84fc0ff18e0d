"""That a process gets the GPU that it was given, and takes no more than its part of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from slipstream.config import build_config
from slipstream.engine.engine import GRAPH_BYTES
from slipstream.models.shapes import random_model
from slipstream.runtime.engines import WORKSPACE_BYTES, fit_memory
from slipstream.runtime.processes import Doorbell, Link, Pipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def count_gpus(pipe: Pipe) -> None:
    pipe.say(torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_a_process_sees_the_gpu_that_it_was_given_and_no_other(tmp_path: Path) -> None:
    """None at all, where it is given one that is not there: torch had not looked before."""
    for gpu, expected in (("0", 1), ("63", 0), (None, torch.cuda.device_count())):
        bell = Doorbell()
        link = Link("count", tmp_path / "count.log", 1, count_gpus, bell=bell, gpu=gpu)
        until_s = time.monotonic() + 120
        while not (said := link.receive()):
            assert time.monotonic() < until_s and not link.is_gone, link.how_it_ended()
            bell.wait(0.5)
        assert said == [expected]
        link.close()


def test_keys_and_values_fit_into_a_part_of_the_gpu_or_the_worker_says_what_to_write() -> None:
    tree = {"model": "tiny", "run": {"dir": "x"}, "tasks": {"train": [{"source": "gcd", "size": 4}]}, "mode": "sync"}
    tree |= {"engine": {"max_sequences": 256, "max_prompt_tokens": 1024}, "sampling": {"max_new_tokens": 3072}}
    config = build_config(tree)
    model = random_model("smollm2-135m", dtype=torch.bfloat16, device=torch.device("cuda"))
    token_bytes = 2 * 30 * 3 * 64 * 2
    wanted = 256 * 4096
    assert fit_memory(config, model, None).engine.kv_tokens == wanted, "all that it wants, if there is room"
    part = 4 << 30
    fixed = torch.cuda.memory_allocated() + GRAPH_BYTES + WORKSPACE_BYTES
    fitted = fit_memory(config, model, fixed + part)
    assert fitted.engine.kv_tokens == part // token_bytes < wanted
    with pytest.raises(ValueError, match=r"smaller rollout\.workers"):
        fit_memory(config, model, fixed)
    given = build_config(tree | {"engine": {"kv_tokens": 8192}})
    assert fit_memory(given, model, 0).engine.kv_tokens == 8192, "what the recipe says is done"
