"""A file is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.files import replacing


def test_a_file_is_replaced_at_once_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "one"
    for text in ("first", "second"):
        with replacing(path) as partial:
            partial.write_text(text)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "one"
    path.write_text("first")
    with pytest.raises(type(error)), replacing(path) as partial:
        partial.write_text("half of the sec")
        raise error
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]
