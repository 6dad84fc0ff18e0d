"""Weights from a publisher to receivers through a shelf: complete or not there, and to the bit."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import small_llama
from torch import Tensor
from weight_versions import SMALL, Tied, publish_steps, step

from slipstream.engine.engine import Engine
from slipstream.models.weights import after_writing, fingerprint, named_weights
from slipstream.stream import publisher as publishing
from slipstream.stream.editions import Bucket, Edition, VersionMissing, edition_name, shortest_chain
from slipstream.stream.publisher import Publisher
from slipstream.stream.receiver import Receiver
from slipstream.stream.shelf import Shelf
from slipstream.types import WeightVersion

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_engine_s_model_gets_the_trainer_s_weights_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    trained = small_llama(0)
    engine = Engine(small_llama(1, dtype=dtype), max_sequences=2, max_length=64)
    publisher, receiver = Publisher(tmp_path, dtype=dtype, bucket_bytes=SMALL), Receiver(tmp_path, "w0")
    for number in range(4):
        (version,) = publish_steps(publisher, trained, range(number, number + 1))
        assert receiver.catch_up(engine.model, number) == version == receiver.version
        assert fingerprint(engine.model) == version.digest, "computed on both sides"
        for (name, own), (_, sent) in zip(named_weights(engine.model), named_weights(trained), strict=True):
            assert torch.equal(own, sent.to(dtype)), name
    assert publisher.last is not None and publisher.last.delta_bytes is not None
    whole = sum(weight.numel() * dtype.itemsize for _, weight in named_weights(trained))
    assert publisher.last.delta_bytes < 0.5 * whole and publisher.last.num_values * dtype.itemsize == whole
    assert not receiver.refusals and not receiver.torn


def test_tied_empty_single_and_strided_weights(tmp_path: Path) -> None:
    trained, model = Tied(), Tied()
    publisher, receiver = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=100), Receiver(tmp_path, "w0")
    told: list[str] = []
    after_writing(model, lambda: told.append(fingerprint(model)))
    for number in range(3):
        step(trained, 0.3, number)
        with torch.no_grad():
            trained.embed[number] = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), 1e-40, -1.0, 2.0, 3.0])
        everything = [*trained.state_dict().items()]
        assert {"embed", "head"} <= dict(everything).keys(), "a tied weight comes under two names"
        version = publisher.publish(everything, number)
        assert receiver.catch_up(model, number) == version
        assert model.head is model.embed and told[-1] == version.digest, "derived things are made anew, after writing"
        for (name, own), (_, sent) in zip(named_weights(model), named_weights(trained), strict=True):
            assert own.shape == sent.shape and own.stride() == sent.stride()
            assert torch.equal(own.contiguous().view(torch.int16), sent.contiguous().view(torch.int16)), name


def test_who_missed_versions_catches_up_on_the_shortest_way(tmp_path: Path) -> None:
    trained = small_llama(0, dtype=torch.bfloat16)
    publisher = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL, full_every=4)
    early, late, newcomer = (Receiver(tmp_path, name) for name in ("early", "late", "newcomer"))
    models = {name: small_llama(7, dtype=torch.bfloat16) for name in ("early", "late", "newcomer")}
    publish_steps(publisher, trained, range(2))
    early.catch_up(models["early"], 1)
    late.catch_up(models["late"], 0)
    versions = publish_steps(publisher, trained, range(2, 7))
    shelf = Shelf(tmp_path)
    assert [name for name in shelf.names() if name.endswith("full")] == ["000000.full", "000004.full"]
    opened: list[str] = []
    plain = Shelf.bucket

    def noting(self: Shelf, name: str, number: int, index: int) -> tuple[str, memoryview] | None:
        opened.append(name)
        return plain(self, name, number, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shelf, "bucket", noting)
        early.catch_up(models["early"], 6)
        assert sorted(set(opened)) == [edition_name(n, n - 1) for n in range(2, 7)], "five deltas are less than a full"
        opened.clear()
        newcomer.catch_up(models["newcomer"], 6)
        assert sorted(set(opened)) == ["000004.full", "000005.on.000004", "000006.on.000005"]
        opened.clear()
        late.catch_up(models["late"], 3)
        late.catch_up(models["late"], 3)
        assert sorted(set(opened)) == [edition_name(n, n - 1) for n in range(1, 4)]
    assert {fingerprint(models[name]) for name in ("early", "newcomer")} == {versions[-1].digest}
    assert late.catch_up(models["late"], 5).digest == fingerprint(models["late"]) == versions[3].digest
    assert early.catch_up(models["early"], 4).digest == fingerprint(models["early"]), "and back, for an evaluation"


def test_old_versions_are_forgotten_and_a_way_stays(tmp_path: Path) -> None:
    trained = small_llama(0, dtype=torch.bfloat16)
    publisher = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL, full_every=3)
    publish_steps(publisher, trained, range(20))
    names = Shelf(tmp_path).names()
    assert [name for name in names if name.endswith("full")] == ["000015.full", "000018.full"]
    assert min(names) == "000013.on.000012" and len(names) == 9
    for number in range(15, 20):
        Receiver(tmp_path, "w").catch_up(small_llama(3, dtype=torch.bfloat16), number)
    with pytest.raises(VersionMissing, match=r"w holds nothing known, and nothing in .* leads to 14"):
        Receiver(tmp_path, "w").catch_up(small_llama(3, dtype=torch.bfloat16), 14)


def test_always_in_full(tmp_path: Path) -> None:
    trained, model = small_llama(0), small_llama(1)
    publisher, receiver = Publisher(tmp_path, dtype=torch.float32, full_every=1), Receiver(tmp_path, "w")
    for version in publish_steps(publisher, trained, range(4))[2:]:
        assert receiver.catch_up(model, version.number) == version
    assert Shelf(tmp_path).names() == ["000002.full", "000003.full"] and not publisher._kept


def test_a_run_that_went_back_is_followed(tmp_path: Path) -> None:
    trained, model = small_llama(0, dtype=torch.bfloat16), small_llama(1, dtype=torch.bfloat16)
    receiver = Receiver(tmp_path, "w")
    abandoned = publish_steps(Publisher(tmp_path, dtype=torch.bfloat16), trained, range(5))
    receiver.catch_up(model, 4)
    resumed = Publisher(tmp_path, dtype=torch.bfloat16)
    step(trained, 0.5, 99)
    version = resumed.publish(named_weights(trained), 3)
    assert version.digest != abandoned[3].digest and Shelf(tmp_path).names()[-1] == "000003.full"
    assert receiver.catch_up(model, 3) == version
    fourth = publish_steps(resumed, trained, range(4, 5))[0]
    assert receiver.catch_up(model, 4) == fourth and fingerprint(model) == fourth.digest != abandoned[4].digest
    late = Receiver(tmp_path, "late")
    late.version = abandoned[4]
    assert late.catch_up(small_llama(2, dtype=torch.bfloat16), 4) == fourth, "the same number is not the same version"


def test_weights_of_another_model_are_refused_as_a_mistake(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, dtype=torch.bfloat16)
    trained = small_llama(0, dtype=torch.bfloat16)
    publisher.publish(named_weights(trained), 0)
    with pytest.raises(ValueError, match=r"is torch.float32 here and travels as bfloat16"):
        Receiver(tmp_path, "w").catch_up(small_llama(0), 0)
    with pytest.raises(ValueError, match="does not fit"):
        Receiver(tmp_path, "w").catch_up(Tied(), 0)
    weights = dict(named_weights(trained))
    name = next(iter(weights))
    with pytest.raises(ValueError, match="not the weights of the version before"):
        publisher.publish((weights | {name: weights[name][:-1]}).items(), 1)
    publisher.publish(weights.items(), 1)
    with pytest.raises(ValueError, match="fewer weights"):
        publisher.publish(list(weights.items())[:-1], 2)
    publisher.publish(weights.items(), 2)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match="not the weights of the version before"):
        publisher.publish(weights.items(), 3)
    Publisher(tmp_path, dtype=torch.bfloat16).publish(weights.items(), 3)
    with pytest.raises(ValueError, match=r"missing: model.norm.weight"):
        Receiver(tmp_path, "w").catch_up(trained, 3)
    with pytest.raises(ValueError, match="not int64"):
        Publisher(tmp_path, dtype=torch.int64)


def test_buckets_are_looked_at_while_others_are_still_encoded(tmp_path: Path) -> None:
    """The sender waits, in the middle of its weights, until the receiver has begun."""
    trained, model = small_llama(0, dtype=torch.bfloat16), small_llama(1, dtype=torch.bfloat16)
    publisher, receiver = Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL), Receiver(tmp_path, "w")
    begun = threading.Event()
    plain = Receiver._look_ahead

    def noting(self: Receiver, number: int) -> bool:
        found = plain(self, number)
        if len(self._staged) >= 2:
            begun.set()
        return found

    def slow() -> Iterator[tuple[str, Tensor]]:
        weights = list(named_weights(trained))
        yield from weights[:6]
        assert begun.wait(30), "nobody looked at the first buckets"
        yield from weights[6:]

    sender = threading.Thread(target=lambda: publisher.publish(slow(), 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receiver, "_look_ahead", noting)
        sender.start()
        version = receiver.catch_up(model, 0, wait_s=30)
        sender.join()
    assert begun.is_set() and fingerprint(model) == version.digest == fingerprint(trained)
    assert not receiver._staged, "given back"


def test_memory_is_bounded_by_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding does not run ahead of a slow shelf by more than WAITING buckets and the one in the writer's hand."""
    trained = small_llama(0, dtype=torch.bfloat16)
    ahead: list[int] = []
    encoded = written = 0
    plain_encode, plain_put = publishing.encode, publishing._Line._put

    def encode(new: Tensor, base: Tensor | None) -> object:
        nonlocal encoded
        encoded += 1
        ahead.append(encoded - written)
        return plain_encode(new, base)

    def put(self: publishing._Line, bucket: Bucket, payload: bytes) -> None:
        nonlocal written
        threading.Event().wait(0.01)
        plain_put(self, bucket, payload)
        written += 1

    monkeypatch.setattr(publishing, "encode", encode)
    monkeypatch.setattr(publishing._Line, "_put", put)
    Publisher(tmp_path, dtype=torch.bfloat16, bucket_bytes=SMALL).publish(named_weights(trained), 0)
    assert encoded == written > 10 and max(ahead) <= publishing.WAITING + 1 and max(ahead) > 1


def test_the_shortest_chain_by_hand() -> None:
    def edition(number: int, base: int | None, num_bytes: int) -> Edition:
        based = None if base is None else WeightVersion(base, f"d{base}")
        bucket = (Bucket("full", num_bytes, ""),)
        return Edition(WeightVersion(number, f"d{number}"), based, "bfloat16", 10, (), bucket)

    editions = [edition(0, None, 100), edition(4, None, 100), *(edition(n, n - 1, 30) for n in range(1, 7))]

    def way(held: int | None, number: int) -> list[str] | None:
        version = None if held is None else WeightVersion(held, f"d{held}")
        chain = shortest_chain(editions, version, number)
        return None if chain is None else [one.name for one in chain]

    assert way(None, 6) == ["000004.full", "000005.on.000004", "000006.on.000005"]
    assert way(3, 6) == ["000004.on.000003", "000005.on.000004", "000006.on.000005"]
    assert way(0, 4) == ["000004.full"], "100 bytes are less than four times 30"
    assert way(1, 4) == [f"00000{n}.on.00000{n - 1}" for n in (2, 3, 4)] and way(2, 2) == [] and way(2, 9) is None
    assert shortest_chain(editions, WeightVersion(5, "another"), 6) is not None
    assert shortest_chain(editions[2:], WeightVersion(5, "another"), 6) is None


def test_a_manifest_comes_back_as_it_went() -> None:
    edition = Edition(
        WeightVersion(3, "x"),
        WeightVersion(2, "y"),
        "float32",
        7,
        (("a", (2, 3)), ("b", ())),
        (Bucket("full", 9, "z"),),
    )
    assert Edition.from_json(edition.to_json()) == edition and edition.num_values == 7 and edition.span(0) == (0, 7)
    full = replace(edition, base=None)
    assert Edition.from_json(full.to_json()) == full and full.name == "000003.full"


def test_no_warning_without_a_fault(tmp_path: Path) -> None:
    trained, model = small_llama(0, dtype=torch.bfloat16), small_llama(1, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        publish_steps(Publisher(tmp_path, dtype=torch.bfloat16), trained, range(3))
        Receiver(tmp_path, "w").catch_up(model, 2)
