"""Texts to learn from: what does not fit into memory lies on the disk, and nothing stays there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.draft.lessons import Lessons, SpilledText, Text

WIDTH = 4


def text(length: int, first: int = 0, num_prompt: int = 2) -> Text:
    ids = torch.arange(first, first + length)
    features = (ids % 100).unsqueeze(1).expand(-1, 3 * WIDTH).to(torch.bfloat16).contiguous()
    return Text(ids, features, features[:, :WIDTH].contiguous(), num_prompt)


SIZE = text(10).num_bytes


def kept(lessons: Lessons) -> list[int]:
    """First tokens of all texts, each seen as it was added."""
    windows = lessons.draw(10_000, 0)
    for window in windows:
        assert torch.equal(window.features_TF[:, 0].long(), window.ids_T % 100) and window.last_TD.shape[1] == WIDTH
        assert window.features_TF.dtype == torch.bfloat16 and window.num_prompt == 2
    return sorted(int(window.ids_T[0]) for window in windows)


def files(folder: Path) -> int:
    return len(list(folder.glob("*"))) if folder.is_dir() else 0


def test_what_does_not_fit_into_memory_is_read_back_from_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "lessons"
    lessons = Lessons(2 * SIZE, 3 * SIZE, folder)
    assert not lessons.has_spilled
    for first in (0, 20, 40, 60, 80, 100):
        lessons.add(text(10, first))
    assert kept(lessons) == [0, 20, 40, 60, 80] and len(lessons) == 5
    assert lessons.num_dropped == 1 and lessons.has_spilled and files(folder) == 3
    lessons.begin_step()
    assert kept(lessons) == [40, 60, 80] and files(folder) == 3, "the longer half, which here is the later one"
    for first in (120, 140):
        lessons.add(text(10, first))
    assert kept(lessons) == [40, 60, 80, 120, 140] and files(folder) == 3
    lessons.add(text(10, 160))
    assert kept(lessons) == [60, 80, 120, 140, 160] and lessons.num_dropped == 1, "an old one made room"
    lessons.begin_step()
    assert kept(lessons) == [140, 160] and files(folder) == 1
    lessons.close()
    assert not folder.exists() and len(lessons) == 0


def test_long_texts_stay_for_another_step() -> None:
    lessons = Lessons(100 * SIZE)
    for length in (9, 3, 12, 6):
        lessons.add(text(length, 100 * length))
    lessons.begin_step()
    assert kept(lessons) == [900, 1200]
    lessons.begin_step()
    assert len(lessons) == 0


def test_a_long_text_is_shown_in_part_and_others_as_they_fit() -> None:
    lessons = Lessons(100 * SIZE)
    lessons.add(text(100, num_prompt=30))
    firsts = set()
    for number in range(50):
        (window,) = lessons.draw(16, 0, number)
        assert torch.equal(window.ids_T, torch.arange(window.first, window.first + 16))
        firsts.add(window.first)
    assert min(firsts) >= 30 and max(firsts) <= 84 and len(firsts) > 20, "what was sampled is what is asked about"
    for first in (200, 300, 400):
        lessons.add(text(10, first))
    drawn = [lessons.draw(25, 0, number) for number in range(50)]
    assert {len(windows) for windows in drawn} == {1, 2}
    assert all(sum(len(window.ids_T) for window in windows) <= 25 for windows in drawn)


def test_what_a_crash_left_is_removed_and_what_is_lost_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "lessons"
    for _ in range(2):
        lessons = Lessons(0, 10 * SIZE, folder)  # the second finds what the first, never closed, left behind
        assert files(folder) == 0
        for first in (0, 20, 40):
            lessons.add(text(10, first))
        assert files(folder) == 3
    broken, gone, _ = (one for one in lessons._new if isinstance(one, SpilledText))
    broken.path.write_bytes(b"not a file of tensors")
    gone.path.unlink()
    with pytest.warns(UserWarning, match="cannot be read back"):
        assert kept(lessons) == [40]
    lessons.begin_step()


def test_a_disk_that_refuses_costs_texts_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "lessons").write_text("a file where the folder should be")
    lessons = Lessons(SIZE, 10 * SIZE, tmp_path / "lessons")
    lessons.add(text(10))
    with pytest.warns(UserWarning, match="no more texts"):
        lessons.add(text(10, 20))
    lessons.add(text(10, 40))
    assert kept(lessons) == [0] and lessons.num_dropped == 2


def test_that_there_is_room_for_nothing_is_said() -> None:
    lessons = Lessons(SIZE - 1)
    with pytest.warns(UserWarning, match=r"nothing to learn from: neither drafter\.memory_gb nor drafter\.disk_gb"):
        lessons.add(text(10))
    assert len(lessons) == 0 and lessons.num_dropped == 1
