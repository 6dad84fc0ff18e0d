"""What asks for more than the machine has is refused before anything is loaded, with a value that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.config import build_config
from slipstream.recipe import shipped_recipes
from slipstream.runtime.capacity import Machine, check_capacity, check_start, this_machine

SMALL = Machine(num_cores=2, memory_bytes=7 << 30, has_gpu=False)


def config_of(**changes: Any) -> Any:
    return build_config(
        {"model": "tiny", "run": {"dir": "r"}, "tasks": {"train": [{"source": "gcd", "size": 9}]}} | changes
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"threads": 100_000}}, "train.threads=100,000: this machine has 2 cores"),
        ({"mode": "sync", "rollout": {"threads": 100_000}}, "rollout.threads=100,000: this machine has 2 cores"),
        ({"mode": "sync", "train": {"ranks": 100_000}}, "train.ranks + rollout.workers = 100,001 processes"),
        ({"mode": "sync", "rollout": {"scale": {"max": 1000}}}, "train.ranks + rollout.workers = 1,001 processes"),
        ({"reward": {"workers": 2**31 - 1}}, "reward.workers: 2,147,483,647 take at least"),
        (
            {"train": {"prompts_per_step": 2**31 - 1}},
            "train.prompts_per_step x train.samples_per_prompt: 17,17",
        ),
        ({"train": {"samples_per_prompt": 2**31 - 1}}, "train.prompts_per_step x train.samples_per_prompt"),
        (
            {"algorithm": {"dynamic_sampling": True, "max_sampling_rounds": 2**31 - 1}},
            "max_sampling_rounds",
        ),
        ({"eval": {"samples_per_prompt": 2**31 - 1}}, "eval.samples_per_prompt"),
        ({"warmup": {"sequences_per_step": 2**31 - 1}}, "warmup.sequences_per_step"),
        ({"engine": {"max_sequences": 2**31 - 1}}, "engine.max_sequences x"),
        ({"engine": {"kv_tokens": 2**31 - 1}}, "engine.kv_tokens: 2,147,483,647 take at least 6,144.0 GiB"),
        ({"sampling": {"max_new_tokens": 2**30}}, "engine.max_sequences x (engine.max_prompt_tokens"),
        ({"device": "cuda"}, "device=cuda, but this machine has no GPU"),
        ({"draft": {"library_tokens": 2**31 - 1}}, "draft.library_tokens"),
        (
            {"tasks": {"train": [{"source": "gcd", "size": 2**31 - 1}]}},
            "tasks.train.0.size: 2,147,483,647 take",
        ),
        (
            {"tasks": {"train": [{"source": "gcd", "size": 9}], "eval": {"x": {"source": "gcd", "size": 2**31 - 1}}}},
            "tasks.eval.x.size",
        ),
    ],
)
def test_what_no_machine_of_this_size_can_hold_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"(at most|fewer|write)") as caught:
        check_capacity(config_of(**changes), SMALL)
    assert message in str(caught.value)


def test_a_larger_machine_takes_what_a_small_one_refuses() -> None:
    config = config_of(engine={"kv_tokens": 8 << 20}, train={"threads": 128})
    with pytest.raises(ValueError, match="threads"):
        check_capacity(config, SMALL)
    check_capacity(config, Machine(num_cores=64, memory_bytes=64 << 30, has_gpu=False))


def test_keys_and_values_may_be_in_the_memory_of_a_gpu_and_rows_of_a_file_are_as_many_as_it_has() -> None:
    kv = {"engine": {"kv_tokens": 2**31 - 1}}
    check_capacity(config_of(**kv), Machine(2, 8 << 30, has_gpu=True))
    with pytest.raises(ValueError, match="kv_tokens"):
        check_capacity(config_of(**kv, device="cpu"), Machine(2, 8 << 30, has_gpu=True))
    check_capacity(config_of(tasks={"train": [{"source": "x.jsonl", "size": 2**31 - 1}]}), SMALL)


@pytest.mark.parametrize("config", ['{"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}'])
def test_a_folder_says_what_a_token_of_its_model_takes(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    check_capacity(config_of(model=str(tmp_path), engine={"kv_tokens": 14_000}), SMALL)
    with pytest.raises(ValueError, match=r"engine\.kv_tokens: 15,000 take at least 7\.3 GiB.*at most 14,336 fit"):
        check_capacity(config_of(model=str(tmp_path), engine={"kv_tokens": 15_000}), SMALL)


@pytest.mark.parametrize("content", [b"\xff", b"[]", b"{}", b'{"num_hidden_layers": "x", "num_attention_heads": 0}'])
def test_a_folder_that_says_nothing_is_left_to_whoever_loads_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    check_capacity(config_of(model=str(tmp_path)), SMALL)


def test_recipes_that_come_with_slipstream_fit_a_small_machine() -> None:
    from slipstream.config import load_config

    for path in shipped_recipes().values():
        check_capacity(load_config(path), SMALL)


def test_a_run_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("x" * 300)):
        with pytest.raises(ValueError, match=r"run\.dir .*choose another folder"):
            check_start(config_of(run={"dir": str(folder)}))
    check_start(config_of(run={"dir": str(tmp_path / "a" / "b")}))
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"], "nothing is made"
    assert this_machine().num_cores >= 1 and this_machine().memory_bytes > 1 << 20
