"""Where the processes of a run live: on this machine, or on a Ray cluster.

A runtime is opened before the run's folder changes, so that what it cannot do is said at once. It knows who gets which
device, and starts processes; what they do is in `coats.py`, what becomes of them is `pool.py`'s to see.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from slipstream.config import Config
from slipstream.runtime.placement import place, visible_gpu, worker_bytes
from slipstream.runtime.pool import WorkerLink
from slipstream.runtime.processes import Doorbell, Link, Work
from slipstream.stream.ways import Ways

Born = Callable[[str, int], None]
"""Is told the name and the process number of whoever has started, maybe in another thread."""


class Runtime(Protocol):
    def start(
        self, name: str, log_file: Path, num_threads: int, work: Work, *arguments: Any, bell: Doorbell, born: Born
    ) -> WorkerLink:
        """A process, or one that is gone at once and says why: who starts one more must not fail for it."""
        ...

    def worker_bytes(self, name: str, num_parameters: int) -> int | None:
        """What a rollout worker may take of its GPU; None: what is free there."""
        ...

    def rendezvous(self) -> str:
        """Where trainer ranks meet: another place each time."""
        ...

    def weight_ways(self) -> Ways:
        """From the trainer, which is started next, to workers: others each time."""
        ...


class LocalRuntime:
    """On this machine: a GPU each while there are enough, else shared."""

    def __init__(self, config: Config, folder: Path) -> None:
        """`folder`: for places to meet at. ValueError if ranks would share a GPU."""
        self._config, self._folder, self._num_met, self._num_lent = config, folder, 0, 0
        self._num_gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
        self._placed = place(self._num_gpus, config.train.ranks, most_workers(config))

    def start(
        self, name: str, log_file: Path, num_threads: int, work: Work, *arguments: Any, bell: Doorbell, born: Born
    ) -> Link:
        link = Link(name, log_file, num_threads, work, *arguments, bell=bell, gpu=self._gpu_of(name))
        born(name, link.pid)
        return link

    def worker_bytes(self, name: str, num_parameters: int) -> int | None:
        if not self._num_gpus:
            return None
        placed = self._placement_with(name)
        gpu_bytes = torch.cuda.get_device_properties(placed[name]).total_memory
        return worker_bytes(placed, name, gpu_bytes, num_parameters)

    def rendezvous(self) -> str:
        self._num_met += 1
        return f"file://{self._folder}/ranks-{self._num_met}"

    def weight_ways(self) -> Ways:
        if self._num_gpus > 1:
            return Ways()  # workers need not be on the trainer's
        self._num_lent += 1
        return Ways(lending_place=self._folder / f"weights-{self._num_lent}")

    def _gpu_of(self, name: str) -> str | None:
        if not self._num_gpus:
            return None
        return visible_gpu(self._placement_with(name)[name], os.environ.get("CUDA_VISIBLE_DEVICES"))

    def _placement_with(self, name: str) -> dict[str, int]:
        """Of as many workers as the recipe allows, or with as many as one that came later needs to be among them."""
        if name in self._placed:
            return self._placed
        return place(self._num_gpus, self._config.train.ranks, int(name.rpartition("-")[2]) + 1)


@contextmanager
def _on_this_machine(config: Config, trainer_threads: int, worker_threads: int) -> Iterator[Runtime]:
    with TemporaryDirectory() as folder:
        yield LocalRuntime(config, Path(folder))


def _on_ray(config: Config, trainer_threads: int, worker_threads: int) -> AbstractContextManager[Runtime]:
    try:
        from slipstream.runtime.ray_runtime import on_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ValueError(
            "runtime=ray needs Ray: pip install -c constraints.txt -e '.[ray]', or write runtime=local, for processes "
            "on this machine"
        ) from None
    return on_ray(config, trainer_threads, worker_threads)


RUNTIMES: dict[str, Callable[[Config, int, int], AbstractContextManager[Runtime]]] = {
    "local": _on_this_machine,
    "ray": _on_ray,
}
"""By the recipe's runtime."""


def open_runtime(config: Config) -> AbstractContextManager[Runtime]:
    """ValueError if it is not there, or has no room for the run."""
    return RUNTIMES[config.runtime](config, trainer_threads(config), worker_threads(config))


def trainer_threads(config: Config) -> int:
    """How many it has is part of what a sum on a CPU comes out as: as many as this process would train with."""
    return config.train.threads or max(1, torch.get_num_threads() // config.train.ranks)


def worker_threads(config: Config) -> int:
    return config.rollout.threads or max(1, len(os.sched_getaffinity(0)) // most_workers(config))


def most_workers(config: Config) -> int:
    """That the recipe allows: so many share the machine."""
    return config.rollout.workers if config.rollout.scale is None else config.rollout.scale.max
