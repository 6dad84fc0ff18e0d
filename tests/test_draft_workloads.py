"""What is replayed: texts as alike as asked, and recorded runs epoch by epoch."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from slipstream.draft.workloads import Recorded, adversarial, alike, epochs_of
from slipstream.runtime.traces import read_trace


def share_given(text: tuple[int, ...], past: tuple[int, ...]) -> float:
    """Tokens that are as in the past, after one that is."""
    same = [one == other for one, other in zip(text, past, strict=True)]
    return sum(before and here for before, here in pairwise(same)) / len(text)


@pytest.mark.parametrize("likeness", [0.0, 0.5, 0.75, 0.95])
def test_texts_are_as_alike_as_asked(likeness: float) -> None:
    groups = alike(8, 4000, likeness, 50_000)
    shares = [share_given(*pair) for group in groups for pair in zip(group.texts, group.past, strict=True)]
    assert sum(shares) / len(shares) == pytest.approx(likeness, abs=0.02)


def test_misleading_texts_are_not_alike_but_everything_in_them_occurred() -> None:
    (group,) = adversarial(4, 2000, 50_000)
    assert share_given(group.texts[0], group.past[0]) < 0.01
    assert set(group.texts[0]) <= {token for text in group.past for token in text}


def test_an_epoch_knows_what_was_said_before_it() -> None:
    lines = [("a", 1, (5,)), ("a", 1, (6,)), ("b", 2, (7,)), ("a", 3, (8,)), ("a", 4, (9,)), ("b", 4, ())]
    epochs = epochs_of([Recorded(*line) for line in lines], 100, keep=2)
    assert [[group.texts for group in groups] for groups in epochs] == [
        [((5,), (6,)), ((7,),)],
        [((8,),), ()],
        [((9,),)],
    ]
    assert [group.past for group in epochs[1]] == [((5,), (6,)), ((7,),)]
    assert epochs[2][0].past == ((8,), (5,)), "the newest first, and no more than are kept"
    assert epochs[0][0].prompt_ids == epochs[2][0].prompt_ids != epochs[0][1].prompt_ids


def test_a_trace_in_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "run.rollouts.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"p": 3, "ep": 0, "r": 1.0, "t": [4, 5]}) + "\n")
    (tmp_path / "run.prompts.jsonl.gz").write_bytes(gzip.compress(b'{"p": 3, "ids": [1, 2]}\n'))
    assert read_trace(path) == [Recorded("3", 0, (4, 5), (1, 2))]
    path.write_bytes(gzip.compress(b'{"p": 3}\n'))
    with pytest.raises(ValueError, match="line 1: a line of JSON with p, ep, t"):
        read_trace(path)
    for bad in (
        b'{"p": 3, "ep": null, "t": [4]}',
        b'{"p": 3, "ep": 1, "t": 5}',
        b'{"p": 3, "ep": 1, "t": ["a"]}',
        b"[]",
    ):
        path.write_bytes(gzip.compress(bad))
        with pytest.raises(ValueError, match="line 1"):
            read_trace(path)
    for empty in (b"", b'{"p": 3, "ep": 1, "t": []}'):
        path.write_bytes(gzip.compress(empty))
        with pytest.raises(ValueError, match="no rollout with a token"):
            read_trace(path)
    with pytest.raises(ValueError, match="is not there: give the folder of a run"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"run\.db"):
        read_trace(tmp_path)
