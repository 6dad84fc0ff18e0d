"""Weights through a tree of processes and through memory that two processes share."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stream_workers import borrow
from tiny_models import small_llama
from weight_versions import step

from slipstream.models.weights import fingerprint, named_weights
from slipstream.stream import neighbours
from slipstream.stream import relay as relay_module
from slipstream.stream.editions import RefusedWeights
from slipstream.stream.fanout import Node, Tree, plan_tree
from slipstream.stream.neighbours import Borrower, Lender
from slipstream.stream.publisher import Publisher
from slipstream.stream.receiver import Receiver
from slipstream.stream.relay import REPEATS, Relay, TreeChannel, TreePlan
from slipstream.stream.shelf import Shelf
from slipstream.stream.ways import Ways

SMALL = 4096
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WORKERS = [Node("a", 2e9), Node("b", 1e9), Node("c", 1e9)]
TREE = plan_tree(Node("root", 2e9), WORKERS, 1)
RANKS = {"root": 0, "a": 1, "b": 2, "c": 3}


class Faulty:
    """A group that flips a bit in what these receive, as often as told."""

    def __init__(self, group: Any, num_faults: int) -> None:
        self.group, self.num_faults = group, num_faults
        self.send = group.send

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        group = self

        class Work:
            def __init__(self) -> None:
                self.work = group.group.recv(tensors, src, tag)

            def wait(self, *patience: Any) -> None:
                self.work.wait(*patience)
                if tensors[0].dtype == torch.uint8 and group.num_faults:
                    group.num_faults -= 1
                    tensors[0][len(tensors[0]) // 2] ^= 4

        return Work()


def groups(folder: Path) -> list[Any]:
    """A gloo group of four whose members are threads: the same sockets as between processes."""
    store = dist.FileStore(str(folder / "store"), len(RANKS))
    with ThreadPoolExecutor(len(RANKS)) as pool:
        made = [pool.submit(dist.ProcessGroupGloo, store, rank, len(RANKS)) for rank in range(len(RANKS))]
        return [one.result(60) for one in made]


def in_threads(calls: dict[str, Callable[[], Any]]) -> dict[str, Future[Any]]:
    pool = ThreadPoolExecutor(len(calls))
    return {name: pool.submit(call) for name, call in calls.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tree_brings_every_version_to_every_shelf_and_repeats_what_was_damaged(tmp_path: Path) -> None:
    members = groups(tmp_path)
    members[RANKS["b"]] = Faulty(members[RANKS["b"]], num_faults=2)
    trained = small_llama(0, dtype=torch.bfloat16)
    channel = TreeChannel(members[0], TREE, RANKS)
    publisher = Publisher(tmp_path / "root", dtype=torch.bfloat16, bucket_bytes=SMALL, channels=[channel], full_every=2)
    relays = {name: Relay(members[RANKS[name]], TREE, RANKS, name, tmp_path / name) for name in "abc"}
    assert [TREE.parents[name] for name in "abc"] == ["root", "a", "b"], "a chain: everybody but c passes on"
    models = {name: small_llama(5, dtype=torch.bfloat16) for name in "abc"}
    receivers = {name: Receiver(tmp_path / name, name) for name in "abc"}
    for number in range(5):
        step(trained, 0.05, number)
        under_way = in_threads({name: relay.take_version for name, relay in relays.items()})
        version = publisher.publish(named_weights(trained), number)
        for name in "abc":
            editions = under_way[name].result(60)
            assert {edition.version for edition in editions} == {version}
            assert [edition.base is None for edition in editions] == ([number == 0] if number in (0, 1, 3) else [0, 1])
            assert receivers[name].catch_up(models[name], number) == version
            assert fingerprint(models[name]) == version.digest
    assert [refusal.bucket for refusal in relays["b"].refusals] == [0, 0] and not relays["c"].refusals
    assert Shelf(tmp_path / "c").names() == Shelf(tmp_path / "root").names()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_who_never_gets_it_right_is_named_and_the_others_get_it(tmp_path: Path) -> None:
    members = groups(tmp_path)
    members[RANKS["b"]] = Faulty(members[RANKS["b"]], num_faults=1000)
    # root -> a, root -> b -> c: b refuses, c cannot have it, a and the root's own shelf do.
    tree = Tree("root", {"a": "root", "b": "root", "c": "b"})
    channel = TreeChannel(members[0], tree, RANKS)
    publisher = Publisher(tmp_path / "root", dtype=torch.bfloat16, bucket_bytes=SMALL, channels=[channel])
    relays = {name: Relay(members[RANKS[name]], tree, RANKS, name, tmp_path / name) for name in "abc"}
    trained = small_llama(0, dtype=torch.bfloat16)
    under_way = in_threads({name: relay.take_version for name, relay in relays.items()})
    version = publisher.publish(named_weights(trained), 0)
    assert channel._branches.out == {"b"} and under_way["a"].result(60)[0].version == version
    with pytest.raises(RefusedWeights, match="b could not take version 0, it keeps the weights") as raised:
        under_way["b"].result(60)
    assert len(raised.value.refusals) == REPEATS + 1 and raised.value.refusals[0].worker == "b"
    assert under_way["c"].result(60) == []
    assert Shelf(tmp_path / "b").names() == Shelf(tmp_path / "c").names() == [], "no half of it is left"
    members[RANKS["b"]].num_faults = 0
    under_way = in_threads({name: relay.take_version for name, relay in relays.items()})
    assert publisher.repeat() == version and not channel._branches.out
    assert all(under_way[name].result(60)[0].version == version for name in "abc")
    assert Receiver(tmp_path / "c", "c").catch_up(trained, 0) == version


class OneAtATime:
    """A channel that takes its time, and in which nothing may overlap."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def begin(self, *_: Any) -> Any:
        assert self.lock.acquire(blocking=False), "two things at once"
        time.sleep(0.002)
        self.lock.release()
        return self

    def put(self, *_: Any) -> None:
        self.begin()

    end = give_up = put


def test_a_channel_does_one_thing_at_a_time(tmp_path: Path) -> None:
    trained, channel = small_llama(0, dtype=torch.bfloat16), OneAtATime()
    publisher = Publisher(tmp_path / "root", dtype=torch.bfloat16, bucket_bytes=SMALL, channels=[channel], full_every=2)
    for number in range(7):
        step(trained, 0.05, number)
        publisher.publish(named_weights(trained), number)


class Lost:
    """A group one of whose members is gone."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        raise RuntimeError("Connection closed by peer\nat some place")

    recv = send


def test_a_tree_that_breaks_is_told_and_everything_else_goes_on(tmp_path: Path) -> None:
    channel = TreeChannel(Lost(), TREE, RANKS)
    publisher = Publisher(tmp_path / "root", dtype=torch.bfloat16, bucket_bytes=SMALL, channels=[channel])
    trained = small_llama(0, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"weights go through is broken \(Connection closed by peer\)$") as told:
        versions = [publisher.publish(named_weights(trained), number) for number in range(2)]
    assert channel.is_broken and len(told) == 1
    assert Receiver(tmp_path / "root", "w").catch_up(trained, 1) == versions[1]


def test_members_meet_by_a_plan_and_wait_for_versions_longer_than_for_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "ANSWER_S", 2.0)
    with socket.socket() as free:
        free.bind(("", 0))
        plan = TreePlan("127.0.0.1", free.getsockname()[1], plan_tree(Node("root", 1.0), [Node("a", 1.0)], 2))
    groups = {
        name: one.result(60)
        for name, one in in_threads({n: partial(plan.group, n, plan.address) for n in plan.ranks}).items()
    }
    relay = Relay(groups["a"], plan.tree, plan.ranks, "a", tmp_path / "a")
    channel = TreeChannel(groups["root"], plan.tree, plan.ranks)
    publisher = Publisher(tmp_path / "root", dtype=torch.bfloat16, bucket_bytes=SMALL, channels=[channel])
    under_way = in_threads({"a": relay.take_version})["a"]
    time.sleep(3.0)
    version = publisher.publish(named_weights(small_llama(0)), 0)
    assert [edition.version for edition in under_way.result(60)] == [version]


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[Lender]:
    lender = Lender(tmp_path / "socket")
    yield lender
    lender.close()


def publisher_of(folder: Path, lender: Lender, dtype: torch.dtype = torch.bfloat16) -> Publisher:
    return Publisher(folder / "shelf", dtype=dtype, bucket_bytes=SMALL, lender=lender)


def receiver_in(folder: Path, shelf: str = "shelf") -> Receiver:
    return Receiver(folder / shelf, "w", borrower=Borrower(folder / "socket"))


def test_the_last_version_is_borrowed_and_others_come_from_the_shelf(tmp_path: Path, lender: Lender) -> None:
    trained, model = small_llama(0), small_llama(1, dtype=torch.bfloat16)
    publisher, borrowing, reading = publisher_of(tmp_path, lender), receiver_in(tmp_path, "none"), receiver_in(tmp_path)
    published = []
    for number in range(3):
        step(trained, 0.05, number)
        published.append(publisher.publish(named_weights(trained), number))
        assert borrowing.catch_up(model, number) == published[-1] == borrowing.version, "there is no such shelf"
        assert fingerprint(model) == published[-1].digest
    assert reading.catch_up(model, 1) == published[1] and fingerprint(model) == published[1].digest
    assert not borrowing.refusals and not reading.refusals
    publisher.look(wait=True)
    assert Shelf(tmp_path / "shelf").names() == ["000000.full", "000001.on.000000", "000002.on.000001"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_was_lent_with_another_hash_is_refused_and_taken_from_the_shelf(tmp_path: Path, lender: Lender) -> None:
    publisher, receiver = publisher_of(tmp_path, lender), receiver_in(tmp_path)
    model = small_llama(1, dtype=torch.bfloat16)
    version = publisher.publish(named_weights(small_llama(0)), 0)
    publisher.look(wait=True)
    assert lender._shown is not None
    lender._shown.loan.buckets[1][5] ^= 1
    assert receiver.catch_up(model, 0) == version and fingerprint(model) == version.digest
    assert [(refusal.edition, refusal.expected) for refusal in receiver.refusals] == [("lent", version.digest)]
    next((tmp_path / "shelf" / "000000.full").glob("*.bucket")).write_bytes(b"")
    with pytest.raises(RefusedWeights, match="its weights are torn"):
        receiver_in(tmp_path).catch_up(model, 0)


def test_a_lender_that_is_gone_or_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "ANSWER_S", 0.2)
    model = small_llama(1, dtype=torch.bfloat16)
    version = Publisher(tmp_path / "shelf", dtype=torch.bfloat16).publish(named_weights(small_llama(0)), 0)
    assert receiver_in(tmp_path).catch_up(model, 0) == version, "nobody is there"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "socket"))
        silent.listen(1)
        assert receiver_in(tmp_path).catch_up(model, 0) == version, "it does not answer"
        assert receiver_in(tmp_path).catch_up(model, 0) == version


def test_who_goes_away_or_stops_in_the_middle_costs_nobody_anything(tmp_path: Path, lender: Lender) -> None:
    publisher, model = publisher_of(tmp_path, lender), small_llama(1, dtype=torch.bfloat16)
    version = publisher.publish(named_weights(small_llama(0)), 0)
    borrower, files = Borrower(tmp_path / "socket"), Path("/proc/self/fd")

    def ask_and_stop(question: bytes) -> socket.socket:
        asker = socket.socket(socket.AF_UNIX)
        asker.connect(str(tmp_path / "socket"))
        asker.sendall(question)
        return asker

    whole = pickle.dumps((0, "cpu"))
    whole = struct.pack("<Q", len(whole)) + whole
    assert borrower.ask(0, torch.device("cpu")) is not None
    num_files = len(list(files.iterdir()))
    stopped = [ask_and_stop(question) for question in (b"", whole[:5], whole[:12], whole) for _ in range(5)]
    loan = borrower.ask(0, torch.device("cpu"))
    assert loan is not None and loan.version == version
    del loan
    for asker in stopped:
        asker.close()
    until_s = time.monotonic() + 30
    while len(list(files.iterdir())) > num_files:
        assert time.monotonic() < until_s, "what they were shown is kept"
        time.sleep(0.05)
    assert receiver_in(tmp_path, "none").catch_up(model, 0) == version


def test_without_memory_to_lend_from_a_version_is_there_once_it_is_on_the_shelf(
    tmp_path: Path, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*arguments: int) -> None:
        raise OSError("no room")

    monkeypatch.setattr(neighbours.os, "posix_fallocate", no_room)
    publisher, model = publisher_of(tmp_path, lender), small_llama(1, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"no memory to lend .* workers read files$") as told:
        version = publisher.publish(named_weights(small_llama(0)), 0)
        assert Shelf(tmp_path / "shelf").has(0)
        publisher.publish(named_weights(small_llama(0)), 1)
    assert len(told) == 1 and receiver_in(tmp_path).catch_up(model, 0) == version


def test_a_place_that_cannot_be_is_told_and_done_without(tmp_path: Path) -> None:
    ways = Ways(lending_place=tmp_path / ("long" * 40))
    with pytest.warns(UserWarning, match="none are lent .*too long"):
        publisher = ways.publisher(tmp_path / "shelf", torch.bfloat16)
    version = publisher.publish(named_weights(small_llama(0)), 0)
    assert ways.receiver(tmp_path / "shelf", "w").catch_up(small_llama(1, dtype=torch.bfloat16), 0) == version


def test_a_fault_in_the_background_is_told(tmp_path: Path, lender: Lender) -> None:
    publisher = publisher_of(tmp_path, lender)
    (tmp_path / "shelf").write_text("not a folder")
    publisher.publish(named_weights(small_llama(0)), 0)
    with pytest.raises(OSError, match="shelf"):
        publisher.look(wait=True)
    publisher.look()
    (tmp_path / "shelf").unlink()
    publisher.publish(named_weights(small_llama(0)), 1)
    publisher.look(wait=True)
    assert Shelf(tmp_path / "shelf").names() == ["000001.full"], "without what never was, it is no base"


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("cuda", torch.bfloat16, marks=[pytest.mark.gpu, NEEDS_GPU]),
        pytest.param("cuda", torch.float32, marks=[pytest.mark.gpu, NEEDS_GPU]),
    ],
)
def test_another_process_borrows_what_lies_in_memory(tmp_path: Path, lender: Lender, device: str, dtype: Any) -> None:
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    arguments = (theirs, tmp_path / "socket", tmp_path / "no shelf", dtype, device)
    process = context.Process(target=borrow, args=arguments, daemon=True)
    process.start()
    trained, publisher = small_llama(0).to(device), publisher_of(tmp_path, lender, dtype)
    for number in range(3):
        step(trained, 0.05, number)
        version = publisher.publish(named_weights(trained), number)
        orders.send(number)
        assert orders.poll(120) and orders.recv() == (version, version.digest)
    orders.send(None)
    process.join(60)
    assert process.exitcode == 0


@NEEDS_GPU
@pytest.mark.gpu
def test_another_device_is_lent_nothing(tmp_path: Path, lender: Lender) -> None:
    publisher_of(tmp_path, lender).publish(named_weights(small_llama(0).to("cuda")), 0)
    assert Borrower(tmp_path / "socket").ask(0, torch.device("cpu")) is None


@NEEDS_GPU
@pytest.mark.gpu
def test_weights_on_a_gpu_have_the_hash_and_the_bytes_that_they_have_on_the_host(tmp_path: Path) -> None:
    trained, model = small_llama(0).to("cuda"), small_llama(1, dtype=torch.bfloat16).to("cuda")
    on_gpu, on_host = (Publisher(tmp_path / name, dtype=torch.bfloat16, bucket_bytes=SMALL) for name in ("gpu", "host"))
    receiver = Receiver(tmp_path / "host", "w")
    for number in range(3):
        step(trained.cpu(), 0.05, number)
        host = [(name, weight.clone()) for name, weight in named_weights(trained)]
        trained.to("cuda")
        version = on_gpu.publish(named_weights(trained), number)
        assert version == on_host.publish(host, number)
        assert receiver.catch_up(model, number) == version == receiver.version and fingerprint(model) == version.digest
    for path in (tmp_path / "gpu").rglob("*.bucket"):
        assert path.read_bytes() == (tmp_path / "host" / path.relative_to(tmp_path / "gpu")).read_bytes()
