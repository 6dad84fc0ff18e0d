"""Editions through a broadcast tree of processes, over torch.distributed: gloo or NCCL, by the same calls.

The root is a `Channel` of the publisher. Every other member takes each bucket from its parent, answers whether it came
as it was sent (else it is sent again), puts it onto a shelf of its own, from which the engines of its machine take it,
and passes it on while the next one arrives. So a version is complete on every shelf or not there. The group must have
every member alive; who was lost is left out of a new group and its new tree (`fanout.replan`), or reads a shelf.

A message is a head of int64 numbers and, if it tells a size, so many bytes; the answer to one is a 0 or a 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.stream.coding import NAMES
from slipstream.stream.editions import Bucket, Edition, Refusal, RefusedWeights, Sending, checksum, edition_name
from slipstream.stream.fanout import Tree
from slipstream.stream.shelf import Shelf

BEGIN, BUCKET, END, GIVE_UP = range(4)
REPEATS = 3
_HEAD_NUMBERS = 6
"""Kind, version, base or -1, bytes that follow, and their checksum in two halves."""


class Group(Protocol):
    """What is used of a process group (`torch.distributed.group.WORLD`, `new_group(...)`): peers by rank in it."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Any: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Any: ...


class TreeChannel:
    """The root's end: sends to its children in the tree, who send on."""

    def __init__(self, group: Group, tree: Tree, ranks: Mapping[str, int], device: torch.device | str = "cpu") -> None:
        """`ranks`: of every member in the group. `device`: where messages lie; "cuda" for NCCL."""
        children = {name: ranks[name] for name in tree.children(tree.root)}
        self._branches = _Branches(group, children, torch.device(device))

    @property
    def refused_by(self) -> list[str]:
        """Children that did not get the last edition, however often it was sent; they tell what they found."""
        return sorted(self._branches.out)

    def begin(self, number: int, base: int | None) -> Sending:
        return _TreeSending(self._branches, number, base)


class _TreeSending:
    def __init__(self, branches: _Branches, number: int, base: int | None) -> None:
        self._branches, self._number, self._base = branches, number, base
        self._ended = False
        branches.start(BEGIN, number, base, b"")

    def put(self, bucket: Bucket, payload: bytes | memoryview) -> None:
        self._branches.start(BUCKET, self._number, self._base, payload)

    def end(self, edition: Edition) -> None:
        self._branches.start(END, self._number, self._base, edition.to_json().encode())
        self._branches.finish()
        self._ended = True

    def give_up(self) -> None:
        if not self._ended:
            self._branches.start(GIVE_UP, self._number, self._base, b"")
            self._branches.finish()


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

    def take_one(self) -> Edition | None:
        """Wait for an edition, pass it on and put it onto the shelf; None if the sender gave it up, or somebody on the
        way from there. RefusedWeights if it could not be had."""
        sending: Sending | None = None
        buckets: list[Bucket] = []
        try:
            while True:
                kind, number, base, payload = self._receive(len(buckets))
                self._branches.start(kind, number, base, payload)
                if kind == BEGIN:
                    sending = self._shelf.begin(number, base)
                    continue
                assert sending is not None, "buckets come after a beginning"
                if kind == BUCKET:
                    buckets.append(Bucket(NAMES[payload[:1]], len(payload), checksum(payload)))
                    sending.put(buckets[-1], payload)
                    continue
                self._branches.finish()
                if kind == GIVE_UP:
                    sending.give_up()
                    return None
                edition = Edition.from_json(payload)
                assert edition.buckets == tuple(buckets), "a manifest tells of other buckets than came"
                sending.end(edition)
                return edition
        except BaseException:
            if sending is not None:
                sending.give_up()
                self._branches.start(GIVE_UP, number, base, b"")
                self._branches.finish()
            raise

    def _receive(self, index: int) -> tuple[int, int, int | None, bytes]:
        refused: list[Refusal] = []
        for _ in range(REPEATS + 1):
            head = torch.empty(_HEAD_NUMBERS, dtype=torch.int64, device=self._device)
            self._group.recv([head], self._parent, 0).wait()
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
