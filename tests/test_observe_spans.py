"""A rollout's text by where its tokens came from: pieces that make the whole, in the store and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.models.loading import load_tokenizer
from slipstream.observe.report import write_report
from slipstream.observe.spans import find_decoder, spans
from slipstream.observe.store import RunStore
from slipstream.types import Request, Rollout, SamplingParams, Scored

LETTERS = {4: b"h", 5: b"i", 6: "é".encode()[:1], 7: "é".encode()[1:], 2: b""}


def decode(ids: Sequence[int]) -> str:
    return b"".join(LETTERS[token] for token in ids).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("token_ids", "origins", "wanted"),
    [
        ((4, 5, 4), (0, 2, 2), [("h", 0), ("ih", 2)]),
        ((6, 7, 4), (0, 1, 0), [("é", 1), ("h", 0)]),
        ((4, 5, 2), (0, 0, 3), [("hi", 0)]),
        ((), (), []),
    ],
    ids=["neighbours of one origin", "half a character has no text yet", "a token without text", "nothing"],
)
def test_pieces_by_hand(token_ids: tuple[int, ...], origins: tuple[int, ...], wanted: list[tuple[str, int]]) -> None:
    assert spans(token_ids, origins, decode) == wanted


def run_with_drafts(folder: Path) -> None:
    request = Request("1/0/0", "1/0", (1,), 7, SamplingParams())
    tokenizer = load_tokenizer("tiny")
    ids = tuple(tokenizer("7 <b> 8", add_special_tokens=False)["input_ids"])
    rollout = Rollout(request, ids, (-1.0,) * len(ids), "stop", 1, 1, origins=(0, 0, *[2] * (len(ids) - 2)))
    with RunStore(folder) as store:
        store.add_rollouts(1, "train", "train", {"1/0": ("key", "question")}, [Scored(rollout, "7 <b> 8", 1.0, {})])
        shares = {"rollout/spec_share_sibling": 0.1, "rollout/spec_share_history": 0.5, "rollout/spec_saved_s": 65.0}
        store.add_metrics(
            1, {"reward/mean": 1.0, "rollout/spec_accept_length": 2.5, "rollout/spec_accept_rate": 0.7} | shares
        )
        assert store.origins_of("1/0/0") == rollout.origins and store.origins_of("1/0/1") == ()
    tokenizer.save_pretrained(folder / "checkpoints" / "step_1")


def test_the_page_colours_a_rollout(tmp_path: Path) -> None:
    run_with_drafts(tmp_path)
    html = write_report(tmp_path).read_text()
    assert '7 <span class="from2">&lt;b&gt; 8</span>' in html
    assert "1m05s of rollout saved" in html and "Tokens that were drafts" in html


def test_without_a_checkpoint_the_page_says_what_is_missing(tmp_path: Path) -> None:
    run_with_drafts(tmp_path)
    for file in (tmp_path / "checkpoints" / "step_1").iterdir():
        file.unlink()
    assert find_decoder(tmp_path) is None
    assert "once a checkpoint holds a tokenizer.json" in write_report(tmp_path).read_text()
    (tmp_path / "checkpoints" / "step_1" / "tokenizer.json").write_text("{half a fi")
    assert find_decoder(tmp_path) is None


def test_the_newest_checkpoint_by_number_and_only_the_beginning_of_a_long_text(tmp_path: Path) -> None:
    run_with_drafts(tmp_path)
    (tmp_path / "checkpoints" / "step_1").rename(tmp_path / "checkpoints" / "step_10")
    (tmp_path / "checkpoints" / "step_9").mkdir()
    (tmp_path / "checkpoints" / "step_9" / "tokenizer.json").write_text("{")
    assert find_decoder(tmp_path) is not None
    pieces = spans((4, 5) * 5000, (0, 1) * 5000, decode)
    assert len(pieces) == 1000 and "".join(text for text, _ in pieces) == "hi" * 500


def test_what_is_forgotten_leaves_no_origins(tmp_path: Path) -> None:
    run_with_drafts(tmp_path)
    with RunStore(tmp_path) as store:
        store.forget_after(0, 0)
        assert store.origins_of("1/0/0") == () and not store.rollouts()


def test_a_store_from_before_drafts_is_read(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        store._connection.execute("DROP TABLE drafts")
    with RunStore(tmp_path, read_only=True) as store:
        assert store.origins_of("1/0/0") == ()


def test_a_rollout_that_is_added_again_has_its_own_origins(tmp_path: Path) -> None:
    run_with_drafts(tmp_path)
    request = Request("1/0/0", "1/0", (1,), 7, SamplingParams())
    with RunStore(tmp_path) as store:
        again = Scored(Rollout(request, (4,), (-1.0,), "stop", 1, 1), "h", 1.0, {})
        store.add_rollouts(1, "train", "train", {"1/0": ("key", "question")}, [again])
        assert store.origins_of("1/0/0") == () and store.rollouts()[0].token_ids == (4,)
