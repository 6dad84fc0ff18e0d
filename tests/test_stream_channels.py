"""Weights through a tree of processes and through memory that two processes share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stream_workers import borrow
from tiny_models import small_llama
from weight_versions import step

from slipstream.models.weights import fingerprint, named_weights
from slipstream.stream.editions import RefusedWeights
from slipstream.stream.fanout import Node, Tree, plan_tree
from slipstream.stream.neighbours import REPEATS, Lender
from slipstream.stream.publisher import Publisher
from slipstream.stream.receiver import Receiver
from slipstream.stream.relay import Relay, TreeChannel
from slipstream.stream.shelf import Shelf

SMALL = 4096
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

            def wait(self) -> None:
                self.work.wait()
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
    publisher = Publisher(tmp_path / "root", dtype=torch.bfloat16, bucket_bytes=SMALL, channels=[channel])
    relays = {name: Relay(members[RANKS[name]], TREE, RANKS, name, tmp_path / name) for name in "abc"}
    assert [TREE.parents[name] for name in "abc"] == ["root", "a", "b"], "a chain: everybody but c passes on"
    models = {name: small_llama(5, dtype=torch.bfloat16) for name in "abc"}
    receivers = {name: Receiver(tmp_path / name, name) for name in "abc"}
    for number in range(3):
        step(trained, 0.05, number)
        under_way = in_threads({name: relay.take_one for name, relay in relays.items()})
        version = publisher.publish(named_weights(trained), number)
        for name in "abc":
            edition = under_way[name].result(60)
            assert edition.version == version and (edition.base is None) == (number == 0)
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
    under_way = in_threads({name: relay.take_one for name, relay in relays.items()})
    version = publisher.publish(named_weights(trained), 0)
    assert channel.refused_by == ["b"] and under_way["a"].result(60).version == version
    with pytest.raises(RefusedWeights, match="b could not take version 0, it keeps the weights") as raised:
        under_way["b"].result(60)
    assert len(raised.value.refusals) == REPEATS + 1 and raised.value.refusals[0].worker == "b"
    assert under_way["c"].result(60) is None
    assert Shelf(tmp_path / "b").names() == Shelf(tmp_path / "c").names() == [], "no half of it is left"
    members[RANKS["b"]].num_faults = 0
    under_way = in_threads({name: relay.take_one for name, relay in relays.items()})
    assert publisher.repeat() == version and channel.refused_by == []
    assert all(under_way[name].result(60).version == version for name in "abc")
    assert Receiver(tmp_path / "c", "c").catch_up(trained, 0) == version


def lend(
    model: torch.nn.Module, *, dtype: torch.dtype, device: str, numbers: list[int], bad: list[int], bucket_bytes: int
) -> tuple[list[Any], list[Any]]:
    """Versions that a process beside this one borrows: what we published, what it tells."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    (mine, theirs), (results, results_theirs) = pipes
    arguments = (theirs, results_theirs, numbers, dtype, device, bad)
    process = context.Process(target=borrow, args=arguments)
    process.start()
    theirs.close()
    results_theirs.close()
    lender = Lender({"neighbour": mine}, dtype=dtype, bucket_bytes=bucket_bytes)
    published, told = [], []
    try:
        for number in numbers:
            step(model, 0.1, number)
            try:
                published.append(lender.publish(named_weights(model), number))
            except RefusedWeights as error:
                published.append(error)
            assert results.poll(120)
            told.append(results.recv())
            if isinstance(published[-1], RefusedWeights):
                break
    finally:
        process.join(30)
        process.kill()
    return published, told


@pytest.mark.slow
def test_a_process_beside_borrows_versions_and_is_shown_again_what_it_saw_damaged() -> None:
    model = small_llama(0)
    published, told = lend(model, dtype=torch.bfloat16, device="cpu", numbers=[0, 1], bad=[1, 4], bucket_bytes=SMALL)
    for version, (got, digest, _) in zip(published, told, strict=True):
        assert got == version and digest == version.digest
    assert told[1][2] == told[0][2] == [1, 3], "buckets 0, 1, 2, 1 again, and 3 were looked at"


@pytest.mark.slow
def test_a_borrower_that_never_sees_it_right_is_named() -> None:
    published, told = lend(
        small_llama(0), dtype=torch.float32, device="cpu", numbers=[0], bad=list(range(1, 99)), bucket_bytes=SMALL * 4
    )
    assert isinstance(published[0], RefusedWeights) and published[0].worker == "neighbour"
    assert len(published[0].refusals) == REPEATS + 1 and told == [("neighbour", True, None)], "bucket 0 was written"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cuda_memory_is_borrowed_by_another_process(dtype: torch.dtype) -> None:
    model = small_llama(0).to("cuda")
    published, told = lend(model, dtype=dtype, device="cuda", numbers=[0, 1, 2], bad=[2], bucket_bytes=SMALL * 4)
    for version, (got, digest, _) in zip(published, told, strict=True):
        assert got == version and digest == version.digest


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
