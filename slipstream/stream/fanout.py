"""Who passes weights on to whom: a broadcast tree that keeps every link equally busy. Pure.

Buckets follow each other through the tree, so what counts is the slowest link of all, reckoned with how many children
share their parent's way out, and then how deep the tree is. Fast workers stand near the root and serve most. A site of
its own (a datacenter behind a slow link) is reached once: the fastest of its workers receives from the root's site and
passes on to the others.

Invariants: everybody exactly once, nobody serves more than `degree`, the depth within a site is logarithmic in its
workers, and nothing crosses into a site but what its first worker receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Node:
    """A worker that wants weights, or the sender."""

    name: str
    bytes_per_s: float
    """Of its link, in and out."""
    site: str = ""


@dataclass(frozen=True, slots=True)
class Tree:
    root: str
    parents: Mapping[str, str] = field(default_factory=dict)
    """Everybody but the root -> who sends to it. Parents come before their children."""

    def children(self, name: str) -> list[str]:
        return [child for child, parent in self.parents.items() if parent == name]

    def depth(self, name: str) -> int:
        """Of the root 0."""
        depth = 0
        while name != self.root:
            name, depth = self.parents[name], depth + 1
        return depth


def plan_tree(root: Node, workers: Sequence[Node], degree: int) -> Tree:
    """ValueError for a degree below 1 or two of the same name."""
    check_names([root, *workers])
    if degree < 1:
        raise ValueError("somebody must be served: degree is at least 1")
    by_site: dict[str, list[Node]] = {}
    for worker in sorted(workers, key=lambda node: (-node.bytes_per_s, node.name)):
        by_site.setdefault(worker.site, []).append(worker)
    at_home = by_site.pop(root.site, [])
    planting = _Planting(root, degree)
    # Far sites begin first, theirs is the long way; but one of the root's places is for its own site, if that has any.
    far = list(by_site.values())
    num_early = degree - bool(at_home)
    for first, *_ in far[:num_early]:
        planting.hang(first, root.name)
    planting.plant(at_home, [root.name])
    for first, *others in far[:num_early]:
        planting.plant(others, [first.name])
    home = [root.name, *(node.name for node in at_home)]
    for first, *others in far[num_early:]:
        planting.plant([first], planting.free(home) or planting.names)
        planting.plant(others, [first.name])
    return planting.tree


def check_names(nodes: Iterable[Node]) -> None:
    names = [node.name for node in nodes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"workers must have different names; twice: {', '.join(twice)}")


class _Planting:
    """A tree that grows: the next one hangs where the way from the root is shortest, then where most speed is left."""

    def __init__(self, root: Node, degree: int) -> None:
        self._degree, self._root = degree, root.name
        self._parents: dict[str, str] = {}
        self._depth = {root.name: 0}
        self._speed = {root.name: root.bytes_per_s}
        self._served = {root.name: 0}

    @property
    def tree(self) -> Tree:
        return Tree(self._root, dict(self._parents))

    @property
    def names(self) -> list[str]:
        return list(self._depth)

    def hang(self, node: Node, parent: str) -> None:
        self._parents[node.name] = parent
        self._depth[node.name] = self._depth[parent] + 1
        self._speed[node.name], self._served[node.name] = node.bytes_per_s, 0
        self._served[parent] += 1

    def free(self, names: Iterable[str]) -> list[str]:
        """Those who can serve one more."""
        return [name for name in names if self._served[name] < self._degree]

    def plant(self, nodes: Sequence[Node], among: Sequence[str]) -> None:
        """Fastest first; each below one of `among` or below one that was planted here."""
        places = list(among)
        for node in nodes:
            parent = min(self.free(places), key=lambda name: (self._depth[name], -self._left(name), name))
            self.hang(node, parent)
            places.append(node.name)

    def _left(self, name: str) -> float:
        """What a further child would get."""
        return self._speed[name] / (self._served[name] + 1)
