"""Which process of a run gets which device: GPUs of one machine, or room on the nodes of a cluster. Pure.

On one machine trainer ranks come first, a GPU each; rollout workers take the others in turn, or share the trainers' if
there are no others. Who shares a GPU gets a part of its memory, never all of it. On a cluster every process asks for
room of its own; whether there is enough is found out before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

USABLE = 0.9
"""Of a GPU's memory: the rest is for CUDA itself and for what does not lie well."""
ACTIVATIONS = 0.25
"""Of a GPU's memory, for what a trainer computes between forward and backward."""
TRAINER_BYTES = 16
"""Of each parameter: weight, gradient and two moments, in float32."""


def trainer_name(rank: int, num_ranks: int) -> str:
    return "trainer" if num_ranks == 1 else f"trainer-{rank}"


def worker_name(number: int) -> str:
    return f"rollout-{number}"


def place(num_gpus: int, num_ranks: int, num_workers: int) -> dict[str, int]:
    """By the name of a process, its GPU; empty if there are none. ValueError for ranks that would share one."""
    if num_gpus == 0:
        return {}
    if num_ranks > num_gpus:
        raise ValueError(
            f"train.ranks={num_ranks}, but there are {num_gpus} GPU(s) here, and ranks that share one cannot talk to "
            f"each other (NCCL): write train.ranks={num_gpus}, or device=cpu"
        )
    trainers = {trainer_name(rank, num_ranks): rank for rank in range(num_ranks)}
    others = range(num_ranks, num_gpus) if num_gpus > num_ranks else range(num_gpus)
    return trainers | {worker_name(number): others[number % len(others)] for number in range(num_workers)}


def worker_bytes(placed: Mapping[str, int], name: str, gpu_bytes: int, num_parameters: int) -> int:
    """What a rollout worker may take of its GPU, which has so much: its part of what trainers there leave."""
    there = [other for other, gpu in placed.items() if gpu == placed[name]]
    num_ranks = sum(other.startswith("trainer") for other in placed)
    left = USABLE * gpu_bytes
    if any(other.startswith("trainer") for other in there):
        left -= ACTIVATIONS * gpu_bytes + TRAINER_BYTES * num_parameters / num_ranks
    return max(0, int(left / sum(other.startswith("rollout") for other in there)))


def kv_tokens_in(room_bytes: float, token_bytes: int, wanted: int, max_length: int) -> int:
    """Tokens whose keys and values a worker keeps: as many as it wants if they fit, else as many as do. ValueError if
    that is not one sequence."""
    fitting = int(max(0.0, room_bytes) // token_bytes)
    if fitting < max_length:
        raise ValueError(
            f"this worker's part of its GPU leaves {max(0.0, room_bytes) / 2**30:.1f} GiB for keys and values, and one "
            f"sequence of {max_length} tokens takes {max_length * token_bytes / 2**30:.1f}: write a smaller "
            "rollout.workers or sampling.max_new_tokens, use more GPUs, or set engine.kv_tokens to take them anyway"
        )
    return min(wanted, fitting)


def visible_gpu(gpu: int, visible: str | None) -> str:
    """Its name for CUDA_VISIBLE_DEVICES, which may say already which GPUs this process counts."""
    return visible.split(",")[gpu].strip() if visible else str(gpu)


@dataclass(frozen=True, slots=True)
class Need:
    """What a process asks a cluster for."""

    name: str
    resources: tuple[tuple[str, float], ...]


def seat(needs: Sequence[Need], free: Mapping[str, Mapping[str, float]]) -> dict[str, str] | None:
    """By the name of a process, a node with room for it; None if they do not fit. `free`: by node, in the order in
    which they are filled."""
    left = {node: dict(resources) for node, resources in free.items()}
    seats = {}
    for need in needs:
        for node, resources in left.items():
            if all(resources.get(kind, 0.0) >= amount for kind, amount in need.resources):
                seats[need.name] = node
                for kind, amount in need.resources:
                    resources[kind] -= amount
                break
        else:
            return None
    return seats


def too_small(needs: Sequence[Need], free: Mapping[str, Mapping[str, float]], total: Mapping[str, float]) -> str:
    """What to say if they do not fit: what is asked for, what is there, what to write instead."""
    asked: dict[str, float] = {}
    for need in needs:
        for kind, amount in need.resources:
            asked[kind] = asked.get(kind, 0.0) + amount
    each = "; ".join(f"{need.name}: {_in_words(dict(need.resources), asked)}" for need in needs)
    there = "; ".join(f"{node} has {_in_words(resources, asked)}" for node, resources in free.items()) or "no node"
    if "GPU" in asked:
        instead = "a smaller rollout.workers or train.ranks, or runtime=local, where processes share a machine's GPUs"
    else:
        instead = (
            "a smaller rollout.workers or rollout.threads (and OMP_NUM_THREADS=1 before the command, for trainers), "
            "or runtime=local, where processes share the cores"
        )
    return (
        f"the Ray cluster is too small: this run asks for {_in_words(asked, asked)} ({each}); free now: {there} "
        f"(of {_in_words(total, asked)} in all); write {instead}"
    )


def _in_words(resources: Mapping[str, float], kinds: Iterable[str]) -> str:
    return ", ".join(f"{resources.get(kind, 0.0):g} {kind}" for kind in kinds)
