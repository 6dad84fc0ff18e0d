"""A drafter that several train: the average of what each learned, published whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import pytest
import torch
from test_draft_history import generate, groups
from test_draft_learned import target
from test_draft_lesson import show, student, windows_of
from torch import Tensor

from slipstream.draft import together, versions
from slipstream.draft.online import DrafterTrainer
from slipstream.draft.reading import Reader
from slipstream.draft.saved import DRAFTER_FILE, WEIGHTS, DrafterState, DrafterStateLost, save_drafter_state
from slipstream.draft.together import Average, Member, Share
from slipstream.engine.engine import Engine
from slipstream.models.packed import document_hidden
from slipstream.models.weights import cast_weights

pytestmark = pytest.mark.usefixtures("one_thread")


TEXTS = {"a": [[5, 6, 7, *range(40, 52)], [5, 6, 8, *range(60, 80)]], "b": [[5, 6, 9, *range(20, 44)]]}


T = TypeVar("T")


def done(pieces: Generator[None, None, T], most: int = 1000) -> T | None:
    """What comes of it; None if it takes more pieces than this, after which it is given up."""
    for _ in range(most + 1):
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result
    pieces.close()
    return None


def average(parts: Iterable[tuple[Mapping[str, Tensor], int]]) -> dict[str, Tensor]:
    mean = Average()
    for weights, num_updates in parts:
        mean.add(weights, num_updates)
    return mean.weights


def test_an_average_by_hand() -> None:
    first, second = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([4.0, -4.0])}
    assert average([(first, 2), (second, 1)])["w"].tolist() == pytest.approx([2.0, 0.0], abs=1e-6)
    assert average([(first, 2), (second, 1), ({"w": torch.tensor([6.0, 8.0])}, 3)])["w"].tolist() == pytest.approx(
        [(2 * 1 + 4 + 3 * 6) / 6, (2 * 2 - 4 + 3 * 8) / 6]
    )
    assert average([(first, 3), (second, 0)])["w"].tolist() == [1.0, 2.0], "who learned nothing has no say"
    assert average([(first, 0)]) == {} == average([])
    assert first["w"].tolist() == [1.0, 2.0], "a copy"
    with pytest.raises(ValueError, match="different drafters"):
        average([(first, 1), ({"v": torch.tensor([1.0, 2.0])}, 1)])


def test_it_is_computed_in_float32_and_of_equals_it_is_the_same() -> None:
    torch.manual_seed(0)
    coarse = [{"w": torch.randn(500).bfloat16()} for _ in range(3)]
    exact = sum(number * one["w"].double() for number, one in zip((3, 5, 7), coarse, strict=True)) / 15
    got = average(zip(coarse, (3, 5, 7), strict=True))["w"]
    assert got.dtype == torch.float32 and torch.allclose(got.double(), exact, atol=1e-6)  # type: ignore[union-attr]
    same = {"w": torch.randn(500)}
    assert torch.equal(average([(same, 3), (same, 7), (same, 1)])["w"], same["w"])


def state(number: int) -> DrafterState:
    tensors = {"model.w": torch.full((3,), float(number)), "optimizer.exp_avg.w": torch.full((3,), -float(number))}
    return DrafterState(0, 10 * number, "policy", tensors)


def publish(folder: Path, state: DrafterState, writer: str) -> int:
    """As a leader does it, without turning to anything else."""
    while True:
        number = versions.next_number(folder)
        versions.prepare(folder, number, state, writer)
        if versions.commit(folder, number, writer):
            return number


def test_versions_are_numbered_whole_and_few(tmp_path: Path) -> None:
    with pytest.raises(DrafterStateLost, match="no drafter"):
        versions.load_newest(tmp_path / "none")
    versions.publish_first(tmp_path, state(5), "a")
    versions.publish_first(tmp_path, state(6), "b")
    assert versions.load_newest(tmp_path).num_updates == 50, "the first that was there"
    assert [publish(tmp_path, state(number), "a") for number in (7, 8, 9)] == [1, 2, 3]
    assert versions.numbers(tmp_path) == [2, 3] and {path.name for path in tmp_path.iterdir()} == {"000002", "000003"}
    newest = versions.load_newest(tmp_path)
    assert (newest.step, newest.num_updates, list(newest.tensors)) == (3, 90, ["model.w"])
    assert list(versions.load_optimizer(tmp_path, 3)) == ["optimizer.exp_avg.w"]
    file = tmp_path / "000003" / DRAFTER_FILE
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.warns(UserWarning, match="passed over"):
        assert versions.load_newest(tmp_path).step == 2
    shutil.rmtree(tmp_path / "000003")
    (tmp_path / "000002").rename(tmp_path / "000003")
    with pytest.raises(DrafterStateLost, match="holds version 2"):
        versions.load_version(tmp_path, 3)


def test_nothing_is_published_by_who_dies_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions.publish_first(tmp_path, state(1), "a")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(versions.os, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path, state(2), "a")
    assert versions.numbers(tmp_path) == [0]


def test_two_at_once_are_both_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions.publish_first(tmp_path, state(1), "a")
    rename, others = versions.os.rename, [state(2)]

    def late(source: Path, goal: Path) -> None:
        if others:
            publish(tmp_path, others.pop(), "b")
        rename(source, goal)

    monkeypatch.setattr(versions.os, "rename", late)
    assert publish(tmp_path, state(3), "a") == 2
    assert [versions.load_version(tmp_path, number).num_updates for number in (1, 2)] == [20, 30]


@pytest.fixture(autouse=True)
def files_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "PIECE_S", 60.0)


def publish_once(trainer: DrafterTrainer, folder: Path) -> None:
    """What members begin with, as a run does it."""
    if not versions.numbers(folder):
        versions.publish_first(folder, DrafterState(0, trainer.num_updates, "policy", trainer.state_dict()), "run")


def member(name: str, folder: Path, seed: int = 0) -> Member:
    trainer = student(seed)
    show(trainer, target(), TEXTS[name])
    publish_once(trainer, folder)
    return Member(trainer, folder, name=name, target_digest="policy")


def weights_of(trainer: DrafterTrainer) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in trainer.weights()}


def test_two_members_train_rounds_as_by_hand(tmp_path: Path) -> None:
    folder, shares = tmp_path / "versions", [Share(tmp_path / "a", 3), Share(tmp_path / "b", 1)]
    a, b = member("a", folder), member("b", folder, seed=1)
    twins = [student(0), student(0)]
    twins[1]._seed = 1
    for twin, name in zip(twins, "ab", strict=True):
        show(twin, target(), TEXTS[name])
    for number in (1, 2, 3):
        assert done(a.train(number - 1, 3, tmp_path / "a")) == 3
        assert done(b.train(number - 1, 1, tmp_path / "b")) == 1
        twins[0].train(3)
        twins[1].train(1)
        mean = average([(weights_of(twins[0]), 3), (weights_of(twins[1]), 1)])
        assert done(a.lead(shares)) == (number, 4 * number)
        published = versions.load_version(folder, number)
        assert published.num_updates == 4 * number
        assert all(torch.equal(published.weights[name], mean[name]) for name in mean)
        for twin in twins:
            twin.model.load_state_dict(mean, strict=False)
            twin.num_updates = 4 * number
    # Who was not there in the last round goes on from the leader's moments, and then as the leader would.
    late = member("a", folder)
    done(late.train(3, 2, tmp_path / "late"))
    done(a.train(3, 2, tmp_path / "a"))
    assert all(torch.equal(one, weights_of(a.trainer)[name]) for name, one in weights_of(late.trainer).items())
    moments = versions.load_optimizer(folder, 3)
    assert moments.keys() == {name for name in a.trainer.state_dict() if not name.startswith(WEIGHTS)} and moments


def test_it_stops_between_two_updates_and_gives_that_round_up(tmp_path: Path) -> None:
    a = member("a", tmp_path / "versions")
    assert done(a.train(0, 9, tmp_path / "a"), most=2) is None and not (tmp_path / "a").exists()
    assert a.give_up() == 3 and a.give_up() == 0, "told once"
    assert done(a.train(0, 2, tmp_path / "a"), most=1) is None, "in its last update"
    assert done(a.train(0, 2, tmp_path / "a")) == 2
    assert done(a.lead([Share(tmp_path / "a", 2)]), most=0) is None and versions.numbers(a.folder) == [0]
    assert done(a.lead([Share(tmp_path / "a", 2)])) == (1, 2), "from the version it began with"


def test_who_is_called_away_while_a_file_is_written_waits_for_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large drafter that takes seconds. What was begun is seen by nobody, and is over before the next begins."""
    monkeypatch.setattr(together, "PIECE_S", 0.001)
    a, may_write = member("a", tmp_path / "versions"), Event()

    def slowly(write: Callable[..., None]) -> Callable[..., None]:
        def wait_and_write(*given: Any) -> None:
            assert may_write.wait(60)
            write(*given)

        return wait_and_write

    monkeypatch.setattr(together, "save_drafter_state", slowly(save_drafter_state))
    monkeypatch.setattr(versions, "save", slowly(save_drafter_state))
    round_ = a.train(0, 1, tmp_path / "a")
    assert [next(round_) for _ in range(20)] == [None] * 20, "it only waits by now"
    round_.close()
    may_write.set()
    a._files.submit(lambda: None).result()
    assert not (tmp_path / "a" / DRAFTER_FILE).exists(), "it is forgotten"
    assert done(a.train(0, 1, tmp_path / "a"), most=10**6) == 1
    may_write.clear()
    lead = a.lead([Share(tmp_path / "a", 1)])
    assert [next(lead) for _ in range(20)] == [None] * 20 and versions.numbers(a.folder) == [0]
    lead.close()
    b = member("b", tmp_path / "versions", seed=1)
    given_up = b.lead([Share(tmp_path / "a", 1)])
    assert next(given_up) is None
    given_up.close()
    may_write.set()
    b.close()
    assert done(a.lead([Share(tmp_path / "a", 1)]), most=10**6) == (1, 1) and versions.numbers(a.folder) == [0, 1]
    a.close()
    assert {path.name for path in a.folder.iterdir()} == {"000000", "000001"}, "and nothing half done"


def test_faults_cost_a_share_and_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = member("a", tmp_path / "versions")
    done(a.train(0, 2, tmp_path / "a"))
    with pytest.warns(UserWarning, match="left out"):
        assert done(a.lead([Share(tmp_path / "a", 2), Share(tmp_path / "gone", 2)])) == (1, 2)
    with pytest.warns(UserWarning), pytest.raises(DrafterStateLost, match="no share"):
        done(a.lead([Share(tmp_path / "gone", 2)]))
    next(iter(a.trainer.model.parameters())).data.fill_(torch.nan)
    monkeypatch.setattr(together, "write_weights", lambda *_: None)
    with pytest.raises(RuntimeError, match="not numbers"):
        done(a.train(1, 1, tmp_path / "a"))
    done(a.train(1, 1, tmp_path / "a"))
    assert all(one.isfinite().all() for one in a.trainer.state_dict().values()), "from the leader's state"
    a.trainer.lessons.close()
    assert done(a.train(1, 2, tmp_path / "a")) == 0, "nothing to learn from"


@pytest.mark.parametrize(
    ("dtype", "off_by"), [(torch.float32, 1e-3), pytest.param(torch.bfloat16, 0.3, marks=pytest.mark.slow)]
)
def test_an_engines_policy_reads_what_was_sampled_and_a_drafter_learns_from_it(
    dtype: torch.dtype, off_by: float
) -> None:
    """A fused model, in the engine's number format, gives the hidden states that the trainer's would."""
    sampled, _ = generate(groups(1, 2))
    policy = target()
    cast_weights(policy, dtype)
    Engine(policy, max_sequences=4, max_length=96)  # which fuses it
    trainer = DrafterTrainer(policy, lr=3e-3, temperature=1.0, memory_bytes=10**9)
    reader = Reader(trainer, partial(document_hidden, policy))
    for rollout in sampled.values():
        reader.add(rollout)
    reader.new_policy()
    assert len(reader) == 2 and len(list(reader.read())) == 1 and len(reader) == 0
    texts = [(*one.request.prompt_ids, *one.token_ids)[:-1] for one in sampled.values()]
    for text, kept, wanted in zip(texts, trainer.lessons._new, windows_of(target(), texts, 4), strict=True):
        window = kept.window(0, kept.num_tokens)
        assert kept.num_prompt == 4 and window.ids_T.tolist() == list(text)
        assert (window.features_TF - wanted.features_TF).norm() < off_by * wanted.features_TF.norm()
    trainer.train(2)
    before = trainer.take_metrics()["drafter/loss"]
    trainer.train(4)
    assert trainer.take_metrics()["drafter/loss"] < before - 0.3
    reader.add(rollout)
    reader.new_policy()
    reader.new_policy()
    assert len(reader) == 0, "it is of a policy that is no more"
