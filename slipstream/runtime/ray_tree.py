"""Weights to nodes of a Ray cluster that do not see the run's folder, through a tree of these nodes: a process on each
takes what the trainer sends, puts it onto the node's shelf and passes it on (`stream/relay.py`).

The tree lives as long as all of its processes do. Once it is broken weights come by Ray's object store
(`ray_weights.py`), as they do to nodes that joined later.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slipstream.stream.editions import RefusedWeights
from slipstream.stream.fanout import Node, plan_tree
from slipstream.stream.relay import Relay, TreePlan

ROOT = "trainer"
DEGREE = 2
"""Nodes that one sends to: more share its link, fewer make a longer way."""


class RelayCoat:
    """On a node: a relay for as long as its tree lives."""

    def live(self, plan: TreePlan, name: str, folder: Path) -> str:
        """Why it ended."""
        try:
            group = plan.group(name, ray.util.get_node_ip_address())
            relay = Relay(group, plan.tree, plan.ranks, name, folder)
            while True:
                with suppress(RefusedWeights):  # the next one may come as it was sent
                    relay.take_version()
        except Exception as error:
            return f"{type(error).__name__}: {error}"


_ACTOR: Any = ray.remote(RelayCoat)


class Grove:
    """The tree of a run, and its processes."""

    def __init__(self, address: str, port: int, site: str, nodes: Mapping[str, str], folder: Path) -> None:
        """`address`, `port`, `site`: of the trainer, which is the root. `nodes`: all others, with their sites.
        `folder`: of the shelf, on each of them."""
        # How fast their links are nobody knows: all the same.
        members = [Node(node, 1.0, site) for node, site in sorted(nodes.items())]
        tree = plan_tree(Node(ROOT, 1.0, site), members, DEGREE)
        self.plan, self.nodes = TreePlan(address, port, tree), frozenset(nodes)
        self.relays: dict[str, Any] = {}
        self._lives: dict[Any, str] = {}
        """What each of them does until it ends, and its node."""
        self._broken = threading.Event()
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self.relays[node] = _ACTOR.options(num_cpus=0, scheduling_strategy=there).remote()
            self._lives[self.relays[node].live.remote(self.plan, node, folder)] = node

    def reaches(self, node: str) -> bool:
        """As far as is known."""
        return node in self.nodes and not self._broken.is_set()

    def look(self) -> None:
        """Because somebody did not get what was sent: if a process is gone the tree is broken, and a warning says so.
        Once."""
        ended, _ = ray.wait(list(self._lives), num_returns=len(self._lives), timeout=0)
        if not ended or self._broken.is_set():
            return
        self._broken.set()
        try:
            reason = str(ray.get(ended[0]))
        except RayError as error:
            reason = str(error)
        first_line = reason.strip().partition("\n")[0]
        warnings.warn(
            f"weights reach other nodes by Ray's object store from now on: the tree is broken at node "
            f"{self._lives[ended[0]]} ({first_line})",
            stacklevel=2,
        )

    def close(self) -> None:
        for relay in self.relays.values():
            with suppress(RayError):
                ray.kill(relay)
