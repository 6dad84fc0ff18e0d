"""Who samples what: rollouts of forecast lengths onto workers that slow down as they take more. Pure.

A worker advances all its sequences together, one token in `token_s(batch)` seconds, so another sequence of L tokens
that joins n longer ones makes it end L * (token_s(n + 1) - token_s(n)) later: much if it is the first, little if the
weights are read for others anyway. Taken from the longest on, this is exact until the slots are full. Hence long ones
belong together, on workers that do little else: `by_deadline` looks for the earliest time by which all can end, and for
each time it tries, gives every rollout, longest first, to the first worker that would still end by then. What is long,
and how many workers long ones get, comes out of it. Beside it, to be compared: `skewness_split` (StreamRL's: the
longest fifth to workers of their own) and `round_robin`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.schedule.speeds import SpeedCurve

TAIL_SHARE = 0.2
"""Of the rollouts, the longest: those that `skewness_split` sets apart."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    name: str
    curve: SpeedCurve
    slots: int
    """Sequences at once."""


Plan = dict[str, list[str]]
"""By worker: its rollouts, longest first."""
Dispatch = Callable[[Mapping[str, float], Sequence[WorkerSpec]], Plan]


def by_deadline(lengths: Mapping[str, float], workers: Sequence[WorkerSpec]) -> Plan:
    return earliest(lengths, workers)[0]


def earliest(lengths: Mapping[str, float], workers: Sequence[WorkerSpec]) -> tuple[Plan, float]:
    """The earliest deadline, to a thousandth, that first-fit from the longest on can keep, and how. If lengths are as
    forecast nobody ends after it."""
    order = longest_first(lengths)
    crew = sorted(workers, key=lambda worker: worker.curve.token_s(1))
    low = high = lengths[order[0]] * crew[0].curve.token_s(1) if order else 0.0
    while (plan := _first_fit(order, lengths, crew, high)) is None:
        low, high = high, 2 * high
    best = plan
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        plan = _first_fit(order, lengths, crew, middle)
        if plan is None:
            low = middle
        else:
            best, high = plan, middle
    return best, high


def _first_fit(
    order: Sequence[str], lengths: Mapping[str, float], workers: Sequence[WorkerSpec], deadline_s: float
) -> Plan | None:
    """None if somebody would end too late."""
    loads = [_Load(worker, deadline_s) for worker in workers]
    fitting = _FirstAtLeast([load.longest_that_fits() for load in loads])
    for uid in order:
        place = fitting.find(lengths[uid])
        if place is None:
            return None
        loads[place].add(uid, lengths[uid])
        fitting.set(place, loads[place].longest_that_fits())
    return {load.worker.name: load.uids for load in loads}


class _Load:
    """What a worker has been given, longest first, and what it can still take."""

    def __init__(self, worker: WorkerSpec, deadline_s: float) -> None:
        self.worker = worker
        self.uids: list[str] = []
        self._deadline_s = deadline_s
        self._end_s = 0.0
        self._slot_ends: list[float] = []
        """Of each slot, the progress at which it is free again; a heap."""
        self._last_end = 0.0

    def add(self, uid: str, length: float) -> None:
        if len(self.uids) < self.worker.slots:
            self._end_s += length * self.worker.curve.extra_s(len(self.uids))
            end = length
        else:
            end = heapq.heappop(self._slot_ends) + length
        heapq.heappush(self._slot_ends, end)
        self._last_end = max(self._last_end, end)
        self.uids.append(uid)

    def longest_that_fits(self) -> float:
        load, curve = len(self.uids), self.worker.curve
        if load < self.worker.slots:
            extra_s = curve.extra_s(load)
            return (self._deadline_s - self._end_s) / extra_s if extra_s else math.inf
        # All slots are taken: it waits for the first that is free, and nobody is reckoned to get faster meanwhile.
        token_s = curve.token_s(self.worker.slots)
        if self._last_end * token_s > self._deadline_s:
            return -math.inf
        return self._deadline_s / token_s - self._slot_ends[0]


class _FirstAtLeast:
    """Numbers in a row, of which the first that is at least some other is found in a logarithm of their count."""

    def __init__(self, values: Sequence[float]) -> None:
        self._size = 1 << (len(values) - 1).bit_length()
        self._tree = [-math.inf] * self._size + list(values) + [-math.inf] * (self._size - len(values))
        for node in range(self._size - 1, 0, -1):
            self._tree[node] = max(self._tree[2 * node], self._tree[2 * node + 1])

    def find(self, least: float) -> int | None:
        if self._tree[1] < least:
            return None
        node = 1
        while node < self._size:
            node = 2 * node if self._tree[2 * node] >= least else 2 * node + 1
        return node - self._size

    def set(self, place: int, value: float) -> None:
        node = self._size + place
        self._tree[node] = value
        while node > 1:
            node //= 2
            self._tree[node] = max(self._tree[2 * node], self._tree[2 * node + 1])


def skewness_split(lengths: Mapping[str, float], workers: Sequence[WorkerSpec], *, worst_of_both: bool = True) -> Plan:
    """The longest TAIL_SHARE to as many workers as makes both parts end soonest, by StreamRL's estimate
    token_s(batch) x typical length x waves; `worst_of_both`: the later end, else the sum of both, as it was printed.

    Workers that are fastest alone take the tail; within a part, rollouts go round.
    """
    order = longest_first(lengths)
    by_speed = sorted(workers, key=lambda worker: worker.curve.token_s(1))
    num_long = math.ceil(TAIL_SHARE * len(order))
    parts = order[:num_long], order[num_long:]
    if len(workers) == 1 or not parts[1]:
        return round_robin(lengths, workers)

    def cost(num_tail_workers: int) -> float:
        staff = by_speed[:num_tail_workers], by_speed[num_tail_workers:]
        ends = [_estimate_s([lengths[uid] for uid in part], crew) for part, crew in zip(parts, staff, strict=True)]
        return max(ends) if worst_of_both else sum(ends)

    num_tail_workers = min(range(1, len(workers)), key=cost)
    return _deal(parts[0], by_speed[:num_tail_workers]) | _deal(parts[1], by_speed[num_tail_workers:])


def _estimate_s(lengths: Sequence[float], workers: Sequence[WorkerSpec]) -> float:
    """Of a part whose rollouts are all like its median."""
    each = math.ceil(len(lengths) / len(workers))
    typical = sorted(lengths)[len(lengths) // 2]
    return max(
        worker.curve.token_s(min(each, worker.slots)) * typical * math.ceil(each / worker.slots) for worker in workers
    )


def round_robin(lengths: Mapping[str, float], workers: Sequence[WorkerSpec]) -> Plan:
    """In the order given, to one after another: what is done where lengths are not known."""
    return _deal(list(lengths), workers)


def _deal(uids: Sequence[str], workers: Sequence[WorkerSpec]) -> Plan:
    return {worker.name: list(uids[place :: len(workers)]) for place, worker in enumerate(workers)}


DISPATCHES: dict[str, Dispatch] = {
    "deadline": by_deadline,
    "skewness split": skewness_split,
    "round robin": round_robin,
}


def longest_first(lengths: Mapping[str, float]) -> list[str]:
    return sorted(lengths, key=lambda uid: (-lengths[uid], uid))
