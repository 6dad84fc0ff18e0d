"""The drafter's file in a checkpoint: complete or not there, verified, and never what ends a run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from test_draft_lesson import student
from test_train_checkpoint import save

from slipstream import files
from slipstream.draft import saved
from slipstream.draft.saved import (
    DRAFTER_FILE,
    DrafterSaver,
    DrafterState,
    DrafterStateLost,
    load_drafter_state,
    save_drafter_state,
)
from slipstream.runtime.drafters import SavedDrafter
from slipstream.runtime.drafting import restore_drafter


def state(step: int, digest: str = "policy") -> DrafterState:
    torch.manual_seed(step)
    tensors = {"model.fc.weight": torch.randn(3, 4), "optimizer.step.fc.weight": torch.tensor(float(step))}
    return DrafterState(step, 10 * step, digest, tensors)


def test_round_trip(tmp_path: Path) -> None:
    save_drafter_state(tmp_path, state(3))
    loaded = load_drafter_state(tmp_path)
    assert (loaded.step, loaded.num_updates, loaded.target_digest) == (3, 30, "policy")
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in state(3).tensors.items())
    assert list(loaded.weights) == ["fc.weight"] and [path.name for path in tmp_path.iterdir()] == [DRAFTER_FILE]


def test_damage_anywhere_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(DrafterStateLost, match="is missing"):
        load_drafter_state(tmp_path)
    save_drafter_state(tmp_path, state(3))
    file = tmp_path / DRAFTER_FILE
    whole, num_missed = file.read_bytes(), 0
    for place in range(0, len(whole), 3):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            loaded = load_drafter_state(tmp_path)
        except DrafterStateLost:
            continue
        # A blank of the header, at most.
        assert (loaded.step, loaded.num_updates, loaded.target_digest) == (3, 30, "policy")
        assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in state(3).tensors.items())
        num_missed += 1
    assert num_missed < 0.05 * len(whole)
    for size in (0, 7, 60, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(DrafterStateLost, match="damaged"):
            load_drafter_state(tmp_path)


def test_the_checkpoint_does_not_wait_and_the_next_save_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), saved.save_drafter_state
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()

    def slowly(folder: Path, one: DrafterState) -> None:
        assert gate.wait(20)
        write(folder, one)

    monkeypatch.setattr(saved, "save_drafter_state", slowly)
    saver = DrafterSaver()
    saver.save(folders[0], state(1))
    assert not (folders[0] / DRAFTER_FILE).exists(), "it is under way, and we are here"
    gate.set()
    saver.save(folders[1], state(2))
    assert load_drafter_state(folders[0]).step == 1
    saver.close()
    assert load_drafter_state(folders[1]).step == 2


def test_a_write_that_fails_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(files, "flush", full)
    saver = DrafterSaver()
    saver.save(tmp_path, state(1))
    with pytest.warns(UserWarning, match="could not be saved: no space left"):
        saver.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lost_drafter_is_replaced_by_an_earlier_one_or_a_new_one(tmp_path: Path) -> None:
    learner = student()
    folders = [save(tmp_path, step, keep_last=3) for step in (1, 2, 3)]
    for step, folder in enumerate(folders, 1):
        save_drafter_state(folder, DrafterState(step, 10 * step, f"policy {step}", learner.state_dict()))
    restore_drafter(learner, folders[2], "policy 3", no_other)
    assert learner.num_updates == 30
    with pytest.warns(UserWarning, match=r"other weights.*goes on from .*step_2"):
        restore_drafter(learner, folders[2], "another policy", no_other)
    assert learner.num_updates == 20
    (folders[1] / DRAFTER_FILE).write_bytes(b"broken")
    (folders[2] / DRAFTER_FILE).unlink()
    with pytest.warns(UserWarning, match=r"step_3.*is missing; the drafter goes on from .*step_1"):
        restore_drafter(learner, folders[2], "policy 3", no_other)
    assert learner.num_updates == 10
    save_drafter_state(folders[0], state(1))  # of another shape
    fresh = student()
    with pytest.warns(UserWarning, match="a new drafter"):
        restore_drafter(fresh, folders[2], "policy 3", no_other)
    assert fresh.num_updates == 0
    other = student(seed=5)
    began_with = SavedDrafter(DrafterState(0, 0, "", other.state_dict()), tmp_path)
    with pytest.warns(UserWarning, match=r"the one of drafter\.warm_from"):
        restore_drafter(fresh, folders[2], "policy 3", lambda: began_with)
    assert all(torch.equal(one, dict(other.weights())[name]) for name, one in fresh.weights())


def no_other() -> None:
    """A run that begins with a new drafter."""
