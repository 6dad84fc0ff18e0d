"""Checkpoints: round trip, kills at bad moments, damage, and a disk that is really full."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from slipstream.models.attention import ATTENTION_NAME
from slipstream.models.tiny import build_tiny_tokenizer
from slipstream.train import checkpoint as checkpoint_module
from slipstream.train.checkpoint import (
    CheckpointNotSaved,
    latest_checkpoint,
    load_checkpoint,
    load_trainer_state,
    save_checkpoint,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENIZER = build_tiny_tokenizer()


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def save(run_dir: Path, step: int, keep_last: int = 2, **changes: Any) -> Path:
    contents: dict[str, Any] = {
        "model": tiny_llama(step),
        "tokenizer": TOKENIZER,
        "trainer_state": {"steps_done": step, "moments": torch.full((5,), step / 3)},
        "run_state": {"data_position": step * 10},
    }
    return save_checkpoint(run_dir, step, keep_last=keep_last, **{**contents, **changes})


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_round_trip(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    path = save(tmp_path, 7, files={"more.bin": b"as it is"})
    assert (path / "more.bin").read_bytes() == b"as it is" and "more.bin" in (path / "manifest.json").read_text()
    assert path == tmp_path / "checkpoints" / "step_7" == latest_checkpoint(tmp_path)
    assert (tmp_path / "latest").read_text() == "checkpoints/step_7\n"
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.path, loaded.run_state) == (7, path, {"data_position": 70})
    assert torch.equal(load_trainer_state(loaded.path)["moments"], torch.full((5,), 7 / 3))
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.float32 and model.lm_head.weight is model.model.embed_tokens.weight
    for name, value in tiny_llama(7).state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert ATTENTION_NAME not in (path / "config.json").read_text(), "others must be able to load it"
    assert AutoTokenizer.from_pretrained(path)("12")["input_ids"] == TOKENIZER("12")["input_ids"]


def test_keep_last_and_saving_a_step_again(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    assert names(tmp_path) == ["step_10", "step_3"]
    save(tmp_path, 10, run_state={"data_position": -1})
    assert names(tmp_path) == ["step_10", "step_3"]
    assert load_checkpoint(tmp_path / "checkpoints" / "step_10").run_state == {"data_position": -1}
    # Resumed from step 3: step 10 is another branch's future, neither counted nor touched; `latest` leads the way.
    save(tmp_path, 4, keep_last=1)
    assert names(tmp_path) == ["step_10", "step_4"]
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_4"


def test_leftovers_of_a_killed_save_are_ignored_then_removed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    shutil.copytree(path, tmp_path / "checkpoints" / ".tmp-step_2")
    (tmp_path / "checkpoints" / ".tmp-step_2" / "trainer.pt").unlink()
    assert latest_checkpoint(tmp_path) == path
    save(tmp_path, 3)
    assert names(tmp_path) == ["step_1", "step_3"]


def test_killed_while_replacing_a_step(tmp_path: Path) -> None:
    # Between the two renames step_1 is not there; the old one is still found.
    path = save(tmp_path, 1)
    replaced = path.rename(path.with_name("step_1.replaced"))
    assert latest_checkpoint(tmp_path) == replaced
    assert load_checkpoint(replaced).step == 1
    save(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step_2"]


@pytest.mark.parametrize("moment", ["save_pretrained", "_flush_tree", "_move_into_place", "_write_atomically"])
def test_killed_at_any_moment_leaves_a_checkpoint_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A real kill: the child exits without any clean-up in the middle of its save."""
    save(tmp_path, 1, keep_last=1)
    model = tiny_llama(2)
    if (child := os.fork()) == 0:
        target = model if moment == "save_pretrained" else checkpoint_module
        setattr(target, moment, lambda *arguments, **named: os._exit(9))
        save(tmp_path, 2, keep_last=1, model=model)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    path = latest_checkpoint(tmp_path)
    assert path is not None and load_checkpoint(path).step == 1
    save(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step_2"]


@pytest.mark.parametrize(
    ("name", "damage", "complaint"),
    [
        ("model.safetensors", "flip", "model.safetensors has other content"),
        ("trainer.pt", "truncate", "trainer.pt has 10 bytes instead of"),
        ("run_state.json", "remove", "run_state.json is missing"),
        ("manifest.json", "truncate", "manifest.json is damaged"),
        ("manifest.json", "remove", "manifest.json is missing"),
    ],
)
def test_damage_is_named_and_others_are_offered(tmp_path: Path, name: str, damage: str, complaint: str) -> None:
    other, path = save(tmp_path, 1), save(tmp_path, 2)
    content = bytearray((path / name).read_bytes())
    if damage == "remove":
        (path / name).unlink()
    else:
        content[-1] ^= 1
        (path / name).write_bytes(content if damage == "flip" else content[:10])
    with pytest.raises(ValueError, match=complaint) as caught:
        load_checkpoint(path)
    assert f"--resume-from {other}" in str(caught.value) and str(path) in str(caught.value)
    (other / "trainer.pt").unlink()
    with pytest.raises(ValueError, match="no other intact checkpoint"):
        load_checkpoint(path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        load_checkpoint(tmp_path / "checkpoints" / "step_5")


def test_state_that_is_not_json_leaves_nothing_behind(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(TypeError):
        save(tmp_path, 2, run_state={"bad": object()})
    assert names(tmp_path) == ["step_1"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("large", ["model", "trainer_state"])
def test_full_disk(small_disk: Path, large: str) -> None:
    first = save(small_disk, 1)
    used_bytes = shutil.disk_usage(small_disk).used
    changes: dict[str, Any] = {"trainer_state": {"moments": torch.zeros(200_000)}}
    if large == "model":
        config = LlamaConfig(vocab_size=3000, hidden_size=64, intermediate_size=16, num_hidden_layers=1)
        changes = {"model": LlamaForCausalLM(config)}
    with pytest.raises(CheckpointNotSaved) as caught:
        save(small_disk, 2, **changes)
    message = str(caught.value)
    assert isinstance(caught.value, OSError)
    assert "step_2" in message and "MB are free" in message and f"{first} is intact" in message
    assert names(small_disk) == ["step_1"] and shutil.disk_usage(small_disk).used == used_bytes
    assert latest_checkpoint(small_disk) == first and load_checkpoint(first).step == 1


def test_refused_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, for machines where nothing can be mounted."""
    first = save(tmp_path, 1)

    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "_flush_tree", refuse)
    with pytest.raises(CheckpointNotSaved, match="No space left on device"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step_1"] and latest_checkpoint(tmp_path) == first


def test_manifest_lists_every_file(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert {*listed, "manifest.json"} == {
        file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()
    }
