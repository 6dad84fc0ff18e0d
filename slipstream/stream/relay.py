"""Editions through a broadcast tree of processes, over torch.distributed: gloo in a run; NCCL has the same calls.

The root is a `Channel` of the publisher. Every other member takes each bucket from its parent, answers whether it came
as it was sent (else it is sent again), puts it onto a shelf of its own, from which the engines of its machine take it,
and passes it on while the next one arrives. So an edition is complete on every shelf or not there. Two editions of a
version may come at once, bucket by bucket. The group must have every member alive: if one is lost the tree is broken,
which the root tells, and whoever was reached by it takes another way.

A message is a head of int64 numbers and, if it tells a size, so many bytes; the answer to one is a 0 or a 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.stream.coding import NAMES
from slipstream.stream.editions import Bucket, Edition, Refusal, RefusedWeights, Sending, checksum, edition_name
from slipstream.stream.fanout import Tree
from slipstream.stream.shelf import Shelf

BEGIN, BUCKET, END, GIVE_UP = range(4)
REPEATS = 3
COMING_S = 1800.0
"""How long members wait for the root, which loads a model before."""
ANSWER_S = 60.0
"""How long a member may take to take a message and to answer it."""
NEXT_VERSION = timedelta(days=365)
"""Until then a member waits for its parent."""
_HEAD_NUMBERS = 6
"""Kind, version, base or -1, bytes that follow, and their checksum in two halves."""


class Group(Protocol):
    """What is used of a process group (`torch.distributed.group.WORLD`, `new_group(...)`): peers by rank in it."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Any: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class TreePlan:
    """How members find each other, and who sends to whom."""

    address: str
    port: int
    """Where the root listens."""
    tree: Tree

    @property
    def ranks(self) -> dict[str, int]:
        return {name: rank for rank, name in enumerate([self.tree.root, *self.tree.parents])}

    def group(self, name: str, own_address: str) -> Group:
        """As this member, over gloo, reached at this address. Waits for all of them; RuntimeError if one does not
        come."""
        ranks = self.ranks
        is_root, num_members, patience = name == self.tree.root, len(ranks), timedelta(seconds=ANSWER_S)
        coming = timedelta(seconds=COMING_S)
        store = dist.TCPStore(self.address, self.port, num_members, is_root, coming, wait_for_workers=False)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        # By itself gloo takes what the machine's name leads to, which may be an address that only the machine knows.
        options._devices, options._timeout = [gloo.create_device(hostname=own_address)], patience
        return cast("Group", gloo(store, ranks[name], num_members, options))


class TreeChannel:
    """The root's end: sends to its children in the tree, who send on."""

    def __init__(self, group: Group, tree: Tree, ranks: Mapping[str, int], device: torch.device | str = "cpu") -> None:
        """`ranks`: of every member in the group. `device`: where messages lie; "cuda" for NCCL."""
        children = {name: ranks[name] for name in tree.children(tree.root)}
        self._branches = _Branches(group, children, torch.device(device))
        self.is_broken = False
        """Somebody is lost, and nothing more is sent."""

    def begin(self, number: int, base: int | None) -> Sending:
        self.send(BEGIN, number, base, b"")
        return _TreeSending(self, number, base)

    def send(self, kind: int, number: int, base: int | None, payload: bytes | memoryview) -> None:
        """What ends an edition is there when this returns."""
        if self.is_broken:
            return
        try:
            self._branches.start(kind, number, base, payload)
            if kind in (END, GIVE_UP):
                self._branches.finish()
        except RuntimeError as error:  # of the group; others do not concern it
            self.is_broken = True
            first_line = str(error).partition("\n")[0]
            warnings.warn(f"the tree that weights go through is broken ({first_line})", stacklevel=4)


class _TreeSending:
    def __init__(self, channel: TreeChannel, number: int, base: int | None) -> None:
        self._channel, self._number, self._base = channel, number, base
        self._ended = False

    def put(self, bucket: Bucket, payload: bytes | memoryview) -> None:
        self._channel.send(BUCKET, self._number, self._base, payload)

    def end(self, edition: Edition) -> None:
        self._channel.send(END, self._number, self._base, edition.to_json().encode())
        self._ended = True

    def give_up(self) -> None:
        if not self._ended:
            self._channel.send(GIVE_UP, self._number, self._base, b"")


class Relay:
    """Any other member's end."""

    def __init__(
        self,
        group: Group,
        tree: Tree,
        ranks: Mapping[str, int],
        name: str,
        folder: Path,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name = name
        self.refusals: list[Refusal] = []
        self._group, self._device = group, torch.device(device)
        self._parent = ranks[tree.parents[name]]
        self._branches = _Branches(group, {child: ranks[child] for child in tree.children(name)}, self._device)
        self._shelf = Shelf(folder)
        self._open: dict[int | None, tuple[Sending, list[Bucket]]] = {}
        """Editions of one version that are under way, by their base; with their buckets."""

    def take_version(self) -> list[Edition]:
        """Wait for a version, pass its editions on and put them onto the shelf: those that came, not those that
        the sender or somebody on the way from there gave up. RefusedWeights if one could not be had, RuntimeError if
        the tree is broken."""
        kind = -1
        while kind != BEGIN:  # the rest of one that it could not take is nothing to it
            kind, number, base, payload = self._receive(0, NEXT_VERSION)
        with self._shelf.only_writer():
            return self._take(kind, number, base, payload)

    def _take(self, kind: int, number: int, base: int | None, payload: bytes) -> list[Edition]:
        done: list[Edition] = []
        try:
            while True:
                self._branches.start(kind, number, base, payload)
                if kind == BEGIN:
                    buckets: list[Bucket] = []
                    self._open[base] = self._shelf.begin(number, base), buckets
                elif kind == BUCKET:
                    sending, buckets = self._open[base]
                    buckets.append(Bucket(NAMES[payload[:1]], len(payload), checksum(payload)))
                    sending.put(buckets[-1], payload)
                else:
                    self._branches.finish()
                    sending, buckets = self._open.pop(base)
                    if kind == END:
                        edition = Edition.from_json(payload)
                        assert edition.buckets == tuple(buckets), "a manifest tells of other buckets than came"
                        sending.end(edition)
                        done.append(edition)
                    else:
                        sending.give_up()
                if not self._open:
                    self._shelf.forget_old()
                    return done
                kind, number, base, payload = self._receive(len(buckets), timedelta(seconds=ANSWER_S))
        except BaseException:
            given_up, self._open = self._open, {}
            for sending, _ in given_up.values():
                sending.give_up()
            with suppress(RuntimeError):  # the tree is broken
                for other in given_up:
                    self._branches.start(GIVE_UP, number, other, b"")
                self._branches.finish()
            raise

    def _receive(self, index: int, patience: timedelta) -> tuple[int, int, int | None, bytes]:
        refused: list[Refusal] = []
        for _ in range(REPEATS + 1):
            head = torch.empty(_HEAD_NUMBERS, dtype=torch.int64, device=self._device)
            self._group.recv([head], self._parent, 0).wait(patience)
            kind, number, base, num_bytes, high, low = head.tolist()
            payload = b""
            if num_bytes:
                data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                self._group.recv([data], self._parent, 0).wait()
                payload = data.cpu().numpy().tobytes()
            expected, found = _hex(high, low), checksum(payload)
            arrived = torch.tensor([found == expected], dtype=torch.int64, device=self._device)
            self._group.send([arrived], self._parent, 0).wait()
            based = None if base < 0 else base
            if found == expected:
                return kind, number, based, payload
            refused.append(Refusal(self.name, number, edition_name(number, based), index, expected, found))
            warnings.warn(str(refused[-1]), stacklevel=3)
            self.refusals.append(refused[-1])
        raise RefusedWeights(self.name, number, refused, torn=False)


class _Branches:
    """One message at a time on its way to all children; the next one waits for their answers. Who refuses one for the
    last time gets nothing more of this edition, and the others go on."""

    def __init__(self, group: Group, children: Mapping[str, int], device: torch.device) -> None:
        self._group, self._children, self._device = group, children, device
        self._under_way: tuple[Sequence[Any], Tensor, Tensor] | None = None
        self.out: set[str] = set()

    def start(self, kind: int, number: int, base: int | None, payload: bytes | memoryview) -> None:
        self.finish()
        if kind == BEGIN:
            self.out.clear()
        told = bytes.fromhex(checksum(payload))
        halves = (int.from_bytes(told[i : i + 8], "little", signed=True) for i in (0, 8))
        head = torch.tensor([kind, number, -1 if base is None else base, len(payload), *halves], device=self._device)
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if len(payload) else torch.empty(0)
        data = data.to(self._device)
        works = [work for name in self._reached() for work in self._send(self._children[name], head, data)]
        self._under_way = works, head, data

    def finish(self) -> None:
        """Until everybody has the last message, or refused it for the last time."""
        if self._under_way is None:
            return
        (works, head, data), self._under_way = self._under_way, None
        for work in works:
            work.wait()
        for name in self._reached():
            rank = self._children[name]
            for repeats_left in reversed(range(REPEATS + 1)):
                answer = torch.empty(1, dtype=torch.int64, device=self._device)
                self._group.recv([answer], rank, 0).wait()
                if int(answer):
                    break
                if repeats_left:
                    for work in self._send(rank, head, data):
                        work.wait()
            else:
                self.out.add(name)
                warnings.warn(f"{name} refused version {int(head[1])} {REPEATS + 1} times", stacklevel=4)

    def _reached(self) -> list[str]:
        return [name for name in self._children if name not in self.out]

    def _send(self, rank: int, head: Tensor, data: Tensor) -> list[Any]:
        works = [self._group.send([head], rank, 0)]
        return [*works, self._group.send([data], rank, 0)] if len(data) else works


def _hex(high: int, low: int) -> str:
    return b"".join(half.to_bytes(8, "little", signed=True) for half in (high, low)).hex()
