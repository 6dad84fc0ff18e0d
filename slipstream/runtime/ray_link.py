"""The end of a process on a Ray cluster that is here: as `processes.Link`, with an actor in place of the pipe.

One thread tells the actor what is sent, another waits for what it says and sees at once when it is lost. Ray never
starts an actor again: the pool does.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slipstream.runtime.processes import GRACE_S, JOIN_S, Doorbell, Work, log_in_words
from slipstream.runtime.ray_actor import GROUPS, Closed, Coat, SharedFolder, Whereabouts
from slipstream.runtime.ray_tree import Grove
from slipstream.runtime.ray_weights import ParcelPost
from slipstream.runtime.rollout_messages import Broke, TakeWeights

TREE_S = 10.0
"""Until what the trainer has sent through a tree is at all nodes: those next to it have it by now."""
_THREADS: dict[str, Any] = {"concurrency_groups": GROUPS}  # which Ray's type hints do not know
_ACTOR: Any = ray.remote(**_THREADS)(Coat)


class RayLink:
    def __init__(
        self,
        name: str,
        log_file: Path,
        num_threads: int,
        work: Work,
        *arguments: Any,
        bell: Doorbell,
        born: Callable[[str, int], None],
        folder: SharedFolder,
        post: ParcelPost,
        options: dict[str, Any],
        grove: Grove | None = None,
    ) -> None:
        """`options`: of the actor, what it needs and where it goes. `grove`: through which weights come to nodes that
        do not see them, if there is one."""
        self.name, self.log_file, self._bell, self._born, self._post = name, log_file, bell, born, post
        self.where: Whereabouts | None = None
        """None until it has started."""
        self._work = num_threads, pickle.dumps((work, arguments))
        self._grove = grove
        self._held: int | None = None
        """The version of the weights that were last sent to a node that does not see them."""
        self._ended = ""
        self._gone = threading.Event()
        self._started = threading.Event()
        self._fault: Exception | None = None
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._actor = _ACTOR.options(max_restarts=0, max_task_retries=0, **options).remote(
            name, log_file, folder, Path.cwd()
        )
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, daemon=True)
        self._sender.start()
        self._receiver.start()

    @property
    def pid(self) -> int:
        """0 until it has started."""
        return self.where.pid if self.where is not None else 0

    def send(self, message: object) -> None:
        """Sooner or later, in order; to nobody if the process is gone, which `is_gone` tells."""
        self._outbox.put(message)

    def receive(self) -> list[Any]:
        """All that it has said, also before it ended."""
        if self._fault is not None:
            raise self._fault
        received: list[Any] = []
        with suppress(queue.Empty):
            while True:
                received.append(self._inbox.get_nowait())
        return received

    @property
    def is_gone(self) -> bool:
        """Then all that it ever said is there."""
        return self._gone.is_set()

    def how_it_ended(self) -> str:
        """For an error: what became of it, its log file, and the end of that if it can be read from here."""
        if self.where is None:
            return f"{self.name} {self._ended or 'has not started'}. Its log, if it came to that: {self.log_file}"
        log = log_in_words(self.log_file)
        if not self.where.sees_folder:
            log = f"Its log: {self.where.log_file} on {self.where.address}, which does not see the run's folder"
        return f"{self.name} (process {self.pid} on {self.where.address}) {self._ended or 'has not ended'}. {log}"

    def kill(self) -> None:
        """At once, whatever it does; it is gone when this returns."""
        if not self.is_gone:
            self._ended = self._ended or "was killed"
            with suppress(RayError, OSError):
                self._end_process()
        ray.kill(self._actor)
        self._receiver.join(JOIN_S)
        self._end()  # a node that does not answer is as good as gone

    def close(self) -> None:
        """The process ends when it hears that there is nothing more; if it does not listen, it is killed."""
        self._outbox.put(None)
        if self._started.is_set():
            self._sender.join(GRACE_S)
            self._receiver.join(GRACE_S)
        if not self.is_gone:
            self.kill()

    def _end_process(self) -> None:
        """By its number, on its node: Ray asks an actor to end itself, which one that hangs does not hear."""
        if self.where is None:
            return
        if self.where.node_id == ray.get_runtime_context().get_node_id():
            os.kill(self.where.pid, signal.SIGKILL)
        else:
            there = NodeAffinitySchedulingStrategy(self.where.node_id, soft=False)
            kill = ray.remote(num_cpus=0, max_retries=0)(os.kill)
            ray.get(kill.options(scheduling_strategy=there).remote(self.where.pid, signal.SIGKILL), timeout=JOIN_S)

    def _end(self) -> None:
        self._gone.set()
        self._started.set()
        self._outbox.put(None)  # nothing is to wait for
        self._bell.ring()

    def _send_all(self) -> None:
        self._started.wait()
        try:
            while not self.is_gone and self.where is not None:
                batch = [self._outbox.get()]
                with suppress(queue.Empty):
                    while True:
                        batch.append(self._outbox.get_nowait())
                is_last = None in batch
                messages = [*batch[: batch.index(None)], Closed()] if is_last else batch
                self._send_weights(messages)
                ray.get(self._actor.tell.remote(messages))
                if is_last:
                    return
        except RayTaskError as error:  # of our own making
            self._fault = error
            self._bell.ring()
        except RayError:
            return  # it is gone, which the other thread sees
        except Exception as error:  # a message that cannot travel: whoever looks next is told
            self._fault = error
            self._bell.ring()

    def _send_weights(self, messages: list[Any]) -> None:
        """To a node that does not see the publisher's shelf, before it is told to take them."""
        assert self.where is not None
        wanted = [message.number for message in messages if isinstance(message, TakeWeights)]
        if self.where.sees_folder or not wanted:
            return
        for number in wanted:
            if self._grove is not None and self._grove.reaches(self.where.node_id):
                if ray.get(self._actor.finds_weights.remote(number, self._held, TREE_S)):
                    self._held = number
                    continue
                self._grove.look()
            try:
                parcel = self._post.parcel(number, self._held)
            except (LookupError, ValueError):
                continue  # it will miss them, and say so: one in its place gets all that it needs
            ray.get(self._actor.take_parcel.remote(parcel))
            self._held = number

    def _receive_all(self) -> None:
        try:
            self.where = ray.get(self._actor.whereabouts.remote())
            self._born(self.name, self.where.pid)
            living = self._actor.live.remote(*self._work)
            self._started.set()
            while True:
                said, ended = ray.get(self._actor.said.remote())
                for message in said:
                    self._inbox.put(message)
                if said:
                    self._bell.ring()
                if ended is not None:
                    self._ended = ended
                    with suppress(RayError):
                        ray.get(living, timeout=GRACE_S)
                    break
        except RayTaskError as error:  # of our own making
            self._fault = error
        except RayError as error:
            self._ended = self._ended or what_became(str(error))
        except Exception as error:
            self._fault = error
        with suppress(Exception):
            ray.kill(self._actor)  # gives its place back
        self._end()


class RefusedLink:
    """Of a process that was not started, since there is no room for it."""

    def __init__(self, name: str, reason: str, bell: Doorbell) -> None:
        self.name, self.pid, self.is_gone = name, 0, True
        self._reason, self._said = reason, [Broke(reason)]
        bell.ring()

    def send(self, message: object) -> None:
        return  # to nobody

    def receive(self) -> list[Any]:
        said, self._said = self._said, []
        return said

    def how_it_ended(self) -> str:
        return f"{self.name} was not started"

    def kill(self) -> None:
        return  # it never was

    def close(self) -> None:
        return


def what_became(error: str) -> str:
    """Of an actor, by Ray's error, in words that say what to look for."""
    if "unexpectedly exits" in error:
        return "was lost: its process ended without a word (killed, out of memory, or crashed)"
    if "node has died" in error or "node was terminated" in error:
        return "was lost with its node"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    began = "could not start" if "creation task" in error else "was lost"
    return f"{began}: {lines[-1] if lines else 'Ray does not say why'}"
