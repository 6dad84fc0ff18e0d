"""Weights that arrive damaged, torn or not at all: refused, told of, and another way taken."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import small_llama
from torch import Tensor
from weight_versions import SMALL, bits, damage, publish_steps, step

from slipstream.models.weights import fingerprint, named_weights
from slipstream.stream import publisher as publishing
from slipstream.stream.editions import Edition, RefusedWeights, VersionMissing, edition_name
from slipstream.stream.publisher import Publisher
from slipstream.stream.receiver import Receiver
from slipstream.stream.shelf import MANIFEST, Shelf
from slipstream.types import WeightVersion

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("at", [-1, 60, 2, 10, 20], ids=["last", "inside", "magic", "number", "checksum"])
def test_a_damaged_bucket_is_refused_before_anything_is_written(tmp_path: Path, at: int) -> None:
    trained, model = small_llama(0, dtype=torch.bfloat16), small_llama(0, dtype=torch.bfloat16)
    publisher = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL, full_every=100)
    receiver = Receiver(tmp_path, "w3", repeats=2)
    held, _ = publish_steps(publisher, trained, range(2))
    receiver.catch_up(model, 0)
    before = bits(model)
    name = edition_name(1, 0)
    damage(tmp_path, name, 5, at=at)
    with pytest.warns(UserWarning, match="w3 refused version 1"), pytest.raises(RefusedWeights) as raised:
        receiver.catch_up(model, 1)
    error = raised.value
    assert not error.torn and receiver.version == held and not receiver.torn
    assert all(torch.equal(a, b) for a, b in zip(bits(model), before, strict=True)), "as it was"
    first = error.refusals[0]
    assert (first.worker, first.version, first.edition, first.bucket) == ("w3", 1, name, 5)
    edition = Shelf(tmp_path).edition(name)
    assert edition is not None and first.expected == edition.buckets[5].checksum != first.found
    assert first.expected in str(error) and "bucket 5" in str(error) and "keeps the weights" in str(error)
    assert len(error.refusals) == 2, "tried twice; there was no other way"
    publisher.repeat()
    assert receiver.catch_up(model, 1).digest == fingerprint(model) == publisher.last.version.digest  # type: ignore[union-attr]
    assert len(receiver.refusals) == 2, "what was damaged is gone"


def test_a_fault_of_the_reading_is_over_with_the_next_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, model = small_llama(0, dtype=torch.bfloat16), small_llama(1, dtype=torch.bfloat16)
    version = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL).publish(named_weights(trained), 0)
    receiver = Receiver(tmp_path, "w")
    good = damage(tmp_path, "000000.full", 2)
    plain = Receiver._stage

    def mended_meanwhile(self: Receiver, chain: list[Edition]) -> object:
        refusal = plain(self, chain)
        (tmp_path / "000000.full" / "00002.bucket").write_bytes(good)
        return refusal

    monkeypatch.setattr(Receiver, "_stage", mended_meanwhile)
    with pytest.warns(UserWarning, match="bucket 2"):
        assert receiver.catch_up(model, 0) == version
    assert [refusal.bucket for refusal in receiver.refusals] == [2] and fingerprint(model) == version.digest


def test_around_a_damaged_edition_another_way_is_taken(tmp_path: Path) -> None:
    trained, model = small_llama(0, dtype=torch.bfloat16), small_llama(1, dtype=torch.bfloat16)
    publisher = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL, full_every=2)
    receiver = Receiver(tmp_path, "w")
    publish_steps(publisher, trained, range(2))
    receiver.catch_up(model, 1)
    (version,) = publish_steps(publisher, trained, range(2, 3))
    assert {"000002.full", "000002.on.000001"} <= set(Shelf(tmp_path).names())
    damage(tmp_path, "000002.on.000001", 0)
    with pytest.warns(UserWarning, match=r"000002.on.000001"):
        assert receiver.catch_up(model, 2) == version
    assert fingerprint(model) == version.digest and len(receiver.refusals) == 2


def test_a_bucket_of_another_version_run_or_place_is_refused(tmp_path: Path) -> None:
    trained, model = small_llama(0, dtype=torch.bfloat16), small_llama(1, dtype=torch.bfloat16)
    publisher = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL, full_every=1)
    publish_steps(publisher, trained, range(2))
    one = tmp_path / "000001.full"
    kept = {index: (one / f"{index:05d}.bucket").read_bytes() for index in (3, 4)}
    step(trained, 0.5, 77)
    other = Publisher(tmp_path / "other", dtype=torch.bfloat16, bucket_bytes=SMALL)
    other.publish(named_weights(trained), 1)
    of_another_run = (tmp_path / "other" / "000001.full" / "00003.bucket").read_bytes()
    of_another_version = (tmp_path / "000000.full" / "00003.bucket").read_bytes()
    for foreign in (kept[4], of_another_version, of_another_run, b"", kept[3][:30]):
        (one / "00003.bucket").write_bytes(foreign)
        with pytest.warns(UserWarning), pytest.raises(RefusedWeights) as raised:
            Receiver(tmp_path, "w", repeats=1).catch_up(model, 1)
        assert raised.value.refusals[0].bucket == 3
    (one / "00003.bucket").unlink()
    with pytest.warns(UserWarning), pytest.raises(RefusedWeights, match="nothing"):
        Receiver(tmp_path, "w", repeats=1).catch_up(model, 1)


def test_a_base_that_is_not_what_it_seemed_is_noticed_and_the_full_version_taken(tmp_path: Path) -> None:
    trained, model = small_llama(0, dtype=torch.bfloat16), small_llama(1, dtype=torch.bfloat16)
    publisher = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL, full_every=3)
    receiver = Receiver(tmp_path, "w")
    publish_steps(publisher, trained, range(2))
    receiver.catch_up(model, 1)
    versions = publish_steps(publisher, trained, range(2, 4))
    with torch.no_grad():
        weight = model.model.layers[0].mlp.up_proj.weight
        weight[[0, 1]] = weight[[1, 0]]  # a sum of bits would not see it
    with pytest.warns(UserWarning, match="the weights should have hash"):
        assert receiver.catch_up(model, 2) == versions[0]
    assert fingerprint(model) == versions[0].digest and receiver.refusals[0].bucket is None


def test_torn_weights_are_no_version(tmp_path: Path) -> None:
    trained, model = small_llama(0, dtype=torch.bfloat16), small_llama(1, dtype=torch.bfloat16)
    publisher = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL, full_every=100)
    receiver = Receiver(tmp_path, "w")
    publish_steps(publisher, trained, range(2))
    receiver.catch_up(model, 1)
    Shelf(tmp_path).remove("000000.full")
    publish_steps(publisher, trained, range(2, 3))
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    with pytest.warns(UserWarning), pytest.raises(RefusedWeights, match="torn") as raised:
        receiver.catch_up(model, 2)
    assert raised.value.torn and receiver.torn and receiver.version is None
    publisher.repeat()
    assert receiver.catch_up(model, 2).digest == fingerprint(model) and not receiver.torn


def test_a_damaged_manifest_is_no_version(tmp_path: Path) -> None:
    trained, model = small_llama(0, dtype=torch.bfloat16), small_llama(1, dtype=torch.bfloat16)
    publisher = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL)
    publisher.publish(named_weights(trained), 0)
    path = tmp_path / "000000.full" / MANIFEST
    good = path.read_text()
    digest = publisher.last.version.digest  # type: ignore[union-attr]
    for broken in (
        good.replace(digest, "0" * 32),
        good[:-5],
        "",
        "[]",
        good.replace('"checksum": "', '"checksum": "0'),
    ):
        path.write_text(broken)
        with pytest.warns(UserWarning, match="manifest"), pytest.raises(RefusedWeights):
            Receiver(tmp_path, "w", repeats=1).catch_up(model, 0)
    path.write_text(good)
    assert Receiver(tmp_path, "w").catch_up(model, 0).digest == digest


def test_a_disk_that_is_full_is_told_of_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    """A limit on the size of files: the system refuses what is beyond, as it does on a full disk."""
    publisher = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL // 2, before[1]))
    try:
        with pytest.raises(OSError, match=r"could not be written \(File too large; .* MB are free\).*\.bucket"):
            publish_steps(publisher, small_llama(0, dtype=torch.bfloat16), range(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert Shelf(tmp_path).names() == []


def test_a_publisher_that_died_or_failed_leaves_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, model = small_llama(0, dtype=torch.bfloat16), small_llama(1, dtype=torch.bfloat16)
    publisher = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL)
    receiver = Receiver(tmp_path, "w")
    held, _ = publish_steps(publisher, trained, range(2))
    receiver.catch_up(model, 0)

    def dying() -> Iterator[tuple[str, Tensor]]:
        yield from list(named_weights(trained))[:4]
        raise OSError("the trainer is gone")

    with pytest.raises(OSError, match="gone"):
        publisher.publish(dying(), 2)
    assert "000002.on.000001" not in Shelf(tmp_path).names()
    # Killed in the middle: nothing is tidied up.
    monkeypatch.setattr(publishing._Line, "give_up", lambda self: None)
    with pytest.raises(OSError, match="gone"):
        publisher.publish(dying(), 2)
    assert "000002.full" in Shelf(tmp_path).names(), "what was sent in part is no base"
    with pytest.raises(VersionMissing):
        receiver.catch_up(model, 2)
    assert receiver.version == held == WeightVersion(0, fingerprint(model))
    (version,) = publish_steps(Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL), trained, range(2, 3))
    assert receiver.catch_up(model, 2) == version and fingerprint(model) == version.digest
