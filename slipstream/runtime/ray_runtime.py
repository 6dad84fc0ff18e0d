"""A run on a Ray cluster: the one that RAY_ADDRESS names, one that was started on this machine, or its own.

Room for all processes is asked for at once, in one placement group: trainer ranks first, close together. Workers that
come later ask for room of their own. On a cluster that others share a process counts as a GPU if there are any, else as
as many CPUs as it has threads; the run's own cluster is this machine, whose cores its processes share.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# On the run's own cluster actors are no less urgent than processes of runtime=local.
os.environ.setdefault("RAY_worker_niceness", "0")
# The pool says it in its own words. Read when ray is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slipstream.config import Config
from slipstream.runtime.folder import MARKER_FILE, WEIGHTS_FOLDER
from slipstream.runtime.placement import Need, seat, too_small, trainer_name, worker_name
from slipstream.runtime.pool import WorkerLink
from slipstream.runtime.processes import Doorbell, Work
from slipstream.runtime.ray_actor import SharedFolder
from slipstream.runtime.ray_link import RayLink, RefusedLink
from slipstream.runtime.ray_tree import Grove
from slipstream.runtime.ray_weights import ParcelPost
from slipstream.runtime.runtimes import Born, Runtime
from slipstream.stream.ways import Ways

REGION_LABEL = "ray.io/availability-region"
OWN_ROOM = "slipstream"
"""What processes count as on the run's own cluster."""
ROOM = 10_000.0
LEAVING_S = 10.0
"""Until what a process had that is gone counts as free."""
PLACING_S = 60.0
"""For a placement group that there was room for a moment ago, and for a node to answer."""


class RayRuntime:
    def __init__(self, config: Config, needs: list[Need], group: PlacementGroup, folder: SharedFolder) -> None:
        self._config, self._group, self._folder = config, group, folder
        self._bundles = {need.name: (number, need) for number, need in enumerate(needs)}
        self._post = ParcelPost(folder.weights)
        self._links: list[RayLink] = []
        self._grove: Grove | None = None
        self._late: set[str] = set()
        """Workers that came later, and found room."""

    def start(
        self, name: str, log_file: Path, num_threads: int, work: Work, *arguments: Any, bell: Doorbell, born: Born
    ) -> WorkerLink:
        number, need = self._bundles.get(name, (None, None))
        if number is None or need is None:
            need = Need(name, self._bundles[worker_name(0)][1].resources)
            free = room("free")
            if name not in self._late and seat([need], free) is None:
                return RefusedLink(name, too_small([need], free, ray.cluster_resources()), bell)
            self._late.add(name)  # if it is lost, one in its place waits for what it leaves
            options = _options(need)
        else:
            options = _options(need) | {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, number)}
        link = RayLink(
            name,
            log_file.absolute(),
            num_threads,
            work,
            *(self._absolute(one) for one in arguments),
            bell=bell,
            born=born,
            folder=self._folder_for(name),
            post=self._post,
            options=options,
            grove=self._grove,
        )
        self._links.append(link)
        return link

    def worker_bytes(self, name: str, num_parameters: int) -> int | None:
        return None  # its GPU is its own

    def rendezvous(self) -> str:
        """At the first rank's node, which the others may have to reach over the network."""
        if self._config.train.ranks == 1:
            return ""
        address, port = _call_on(self._nodes()[0], _free_port)
        return f"tcp://{address}:{port}"

    def weight_ways(self) -> Ways:
        """Through a tree to nodes that do not see the run's folder, if there are any."""
        blind = set()
        for name, node in zip(self._bundles, self._nodes(), strict=True):
            with suppress(RayError):  # one that does not answer has other troubles
                if not _call_on(node, _sees, self._folder_for(name)):
                    blind.add(node)
        if not blind:
            return Ways()
        root, sites = self._nodes()[0], _sites()
        address, port = _call_on(root, _free_port)
        others = {node: sites[node] for node in blind}
        self._grove = Grove(address, port, sites[root], others, self._folder.weights_elsewhere)
        return Ways(tree=self._grove.plan)

    def check_trainers_see_folder(self) -> None:
        for node in sorted(set(self._nodes()[: self._config.train.ranks])):
            if not _call_on(node, _sees, self._folder):
                raise ValueError(
                    f"the trainer's place is on node {_address_of(node)}, which does not see {self._folder.path}: "
                    "write a run.dir on a file system that all machines share, or start the run on a machine with room "
                    "for the trainer"
                )

    def close(self) -> None:
        """Take back what was left on nodes that do not see the run's folder; logs stay."""
        blind = set() if self._grove is None else set(self._grove.nodes)
        if self._grove is not None:
            self._grove.close()
        blind |= {link.where.node_id for link in self._links if link.where is not None and not link.where.sees_folder}
        for node in blind:
            with suppress(RayError):
                _call_on(node, shutil.rmtree, self._folder.weights_elsewhere, True)

    def _folder_for(self, name: str) -> SharedFolder:
        return self._folder

    def _nodes(self) -> list[str]:
        """By bundle."""
        by_bundle = placement_group_table(self._group)["bundles_to_node_id"]
        return [by_bundle[number] for number in range(len(self._bundles))]

    def _absolute(self, argument: Any) -> Any:
        """A process there need not work in the same folder."""
        if isinstance(argument, Config):
            return argument.model_copy(
                update={"run": argument.run.model_copy(update={"dir": argument.run.dir.absolute()})}
            )
        return argument.absolute() if isinstance(argument, Path) else argument


@contextmanager
def on_ray(config: Config, trainer_threads: int, worker_threads: int) -> Iterator[Runtime]:
    """ValueError if the cluster cannot be reached or has no room."""
    with ExitStack() as stack:
        is_own = stack.enter_context(_connected())
        num_ranks, num_workers = config.train.ranks, config.rollout.workers
        threads = {trainer_name(rank, num_ranks): trainer_threads for rank in range(num_ranks)}
        threads |= {worker_name(number): worker_threads for number in range(num_workers)}
        has_gpus = config.device != "cpu" and ray.cluster_resources().get("GPU", 0.0) > 0
        needs = [Need(name, resources_of(num, has_gpus=has_gpus, is_own=is_own)) for name, num in threads.items()]
        free = _room_for(needs)
        group = placement_group(_bundles(needs, num_ranks, free), strategy="PACK")
        stack.callback(remove_placement_group, group)
        if not group.wait(PLACING_S):
            raise ValueError(f"{too_small(needs, room('free'), ray.cluster_resources())} (others took it meanwhile)")
        runtime = RayRuntime(config, needs, group, stack.enter_context(_marked(config.run.dir.absolute())))
        stack.callback(runtime.close)
        runtime.check_trainers_see_folder()
        yield runtime


def resources_of(num_threads: int, *, has_gpus: bool, is_own: bool) -> tuple[tuple[str, float], ...]:
    if has_gpus:
        return (("GPU", 1.0),) if is_own else (("GPU", 1.0), ("CPU", 1.0))
    return ((OWN_ROOM, 1.0),) if is_own else (("CPU", float(num_threads)),)


def room(which: Literal["free", "all"]) -> dict[str, dict[str, float]]:
    """By the address of a node, this one first."""
    mine = ray.get_runtime_context().get_node_id()
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != mine)
    found = {node["NodeID"]: node["Resources"] for node in nodes}
    if which == "free":  # which Ray tells by node only here
        found = ray._private.state.available_resources_per_node()
    return {f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}": found.get(node["NodeID"], {}) for node in nodes}


def _room_for(needs: list[Need]) -> dict[str, dict[str, float]]:
    """What is free, once they fit into it. Not at once if somebody has just left: what they had is free a little later.
    ValueError if they do not fit."""
    until_s = time.monotonic() + LEAVING_S
    while seat(needs, free := room("free")) is None:
        if seat(needs, room("all")) is None or time.monotonic() > until_s:
            raise ValueError(too_small(needs, free, ray.cluster_resources()))
        time.sleep(0.5)
    return free


def _bundles(needs: list[Need], num_ranks: int, free: dict[str, dict[str, float]]) -> list[dict[str, float]]:
    """Trainers on this node if it has room for all of them: it certainly sees the run's folder."""
    bundles = [dict(need.resources) for need in needs]
    here = next(iter(free))
    if seat(needs[:num_ranks], {here: free[here]}) is not None:
        for bundle in bundles[:num_ranks]:
            bundle[f"node:{ray.util.get_node_ip_address()}"] = 0.001
    return bundles


def _options(need: Need) -> dict[str, Any]:
    resources = dict(need.resources)
    return {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}


@contextmanager
def _connected() -> Iterator[bool]:
    """Whether the cluster is the run's own, which ends with it."""
    if ray.is_initialized():  # by whoever called
        yield False
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ValueError(
            f"RAY_ADDRESS={address} is Ray Client's, which cannot look after processes: start the run on a "
            "node of the cluster (ssh, or ray job submit), with RAY_ADDRESS=auto"
        )
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    try:
        with _deaf_children():
            ray.init(num_cpus=0, resources={OWN_ROOM: ROOM}, **quiet)
        is_own = True
    except ValueError as error:
        if "existing cluster" not in str(error):
            raise
        is_own = False
        quiet.pop("include_dashboard")
        try:
            ray.init(**quiet)
        except ConnectionError as failure:
            raise _unreachable(address, failure) from None
    except ConnectionError as failure:
        raise _unreachable(address, failure) from None
    try:
        with suppress(ValueError):  # not in the main thread: signals are the host program's
            for number, handler in before.items():
                signal.signal(number, handler)  # Ray has one of its own, which ends the process
        yield is_own
    finally:
        ray.shutdown()


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Batch systems send SIGTERM to every process or to the whole group, which is the run's to hear: its cluster must
    be there until it has saved. Ray does the same with Ctrl-C."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _unreachable(address: str, failure: Exception) -> ValueError:
    named = f"RAY_ADDRESS={address}" if address else "the cluster that was last started on this machine"
    return ValueError(
        f"cannot reach {named} ({str(failure).splitlines()[0]}): start it with `ray start --head`, correct it, "
        "or set RAY_ADDRESS=local for a cluster of the run's own"
    )


@contextmanager
def _marked(run_dir: Path) -> Iterator[SharedFolder]:
    """With a file by which other nodes know the folder."""
    token, marker = uuid.uuid4().hex, run_dir / MARKER_FILE
    marker.write_text(token)
    try:
        yield SharedFolder(run_dir, marker, token, run_dir / WEIGHTS_FOLDER)
    finally:
        marker.unlink(missing_ok=True)


def _call_on(node_id: str, function: Callable[..., Any], *arguments: Any) -> Any:
    if node_id == ray.get_runtime_context().get_node_id():
        return function(*arguments)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    call = ray.remote(num_cpus=0)(function).options(scheduling_strategy=there)
    return ray.get(call.remote(*arguments), timeout=PLACING_S)


def _sees(folder: SharedFolder) -> bool:
    return folder.is_here


def _free_port() -> tuple[str, int]:
    with socket.socket() as free:
        free.bind(("", 0))
        return ray.util.get_node_ip_address(), free.getsockname()[1]


def _sites() -> dict[str, str]:
    """By node: its region, where clouds or `ray start --labels` tell one. Weights enter each but once."""
    return {node["NodeID"]: (node.get("Labels") or {}).get(REGION_LABEL, "") for node in ray.nodes()}


def _address_of(node_id: str) -> str:
    return next((node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id), node_id)
