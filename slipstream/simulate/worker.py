"""A worker that decodes, without decoding: it jumps from one change of its batch to the next. Pure.

All sequences of a batch advance together, so one number tells how far they are: the tokens that a sequence would have
that had been there from the start. A sequence that joins at progress p with L tokens to go ends at p + L, whatever
happens to the speed meanwhile. An hour of decoding costs two operations on a heap for each rollout.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.schedule.dispatch import WorkerSpec

ROUNDING = 1e-6
"""Tokens by which progress may be off."""


@dataclass(slots=True)
class SimulatedWorker:
    spec: WorkerSpec
    now_s: float = 0.0
    busy_slot_s: float = 0.0
    """Sequences x seconds so far."""
    busy_s: float = 0.0
    """Seconds with a sequence at least."""
    _waiting: deque[tuple[str, float]] = field(default_factory=deque)
    _running: list[tuple[float, int, str]] = field(default_factory=list)
    """(progress at its end, order of admission, uid)."""
    _marks: list[tuple[float, str]] = field(default_factory=list)
    """(progress, uid): places that rollouts shall tell when they pass them; a heap."""
    _mark_of: dict[str, float] = field(default_factory=dict)
    """By rollout: its mark; others in the heap are of an earlier stay."""
    _passed: list[str] = field(default_factory=list)
    _last_mark: dict[str, float] = field(default_factory=dict)
    """By rollout that is here: the mark it passed last."""
    _progress: float = 0.0
    _num_admitted: int = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, uid: str, num_tokens: float, tell_at: float | None = None) -> None:
        """Waits for a free slot, first come first served; takes it at `now_s` if there is one.

        `tell_at`: tokens after which `take_passed` names it; only for one that need not wait.
        """
        assert num_tokens > 0, f"{uid}: a rollout has at least one token"
        if tell_at is not None:
            assert len(self._running) < self.spec.slots, f"{uid} would wait"
            self._mark_of[uid] = self._progress + tell_at
            heapq.heappush(self._marks, (self._mark_of[uid], uid))
        self._waiting.append((uid, num_tokens))
        self._admit()

    def watch(self, uid: str, more: float) -> None:
        """One that has passed its mark: `take_passed` names it again after so many tokens more."""
        self._mark_of[uid] = self._last_mark[uid] + more
        heapq.heappush(self._marks, (self._mark_of[uid], uid))

    def next_s(self) -> float | None:
        """When the next rollout ends or passes its mark if nothing is submitted before; None if there is none."""
        while self._marks and self._mark_of.get(self._marks[0][1]) != self._marks[0][0]:
            heapq.heappop(self._marks)
        if not self._marks or not self._running or self._running[0][0] <= self._marks[0][0]:
            return self.next_end_s()
        return self.now_s + (self._marks[0][0] - self._progress) * self.spec.curve.token_s(len(self._running))

    def take_passed(self) -> list[str]:
        """Rollouts that have passed their marks since this was last asked."""
        passed, self._passed = self._passed, []
        return passed

    def next_end_s(self) -> float | None:
        """When the next rollout ends if nothing is submitted before; None if there is none."""
        if not self._running:
            return None
        return self.now_s + (self._running[0][0] - self._progress) * self.spec.curve.token_s(len(self._running))

    def advance(self, now_s: float) -> list[tuple[float, str]]:
        """(when, uid) of the rollouts that end until then; free slots are taken by who waits at that very moment."""
        ended = []
        while (end_s := self.next_end_s()) is not None and end_s <= now_s:
            self.busy_slot_s += len(self._running) * (end_s - self.now_s)
            self.busy_s += end_s - self.now_s
            self._progress, _, uid = heapq.heappop(self._running)
            self.now_s = end_s
            ended.append((end_s, uid))
            self._mark_of.pop(uid, None)
            self._last_mark.pop(uid, None)
            self._admit()
        if self._running:
            self.busy_slot_s += len(self._running) * (now_s - self.now_s)
            self.busy_s += now_s - self.now_s
            self._progress += (now_s - self.now_s) / self.spec.curve.token_s(len(self._running))
        self.now_s = now_s
        while self._marks and self._marks[0][0] <= self._progress + ROUNDING:
            mark, uid = heapq.heappop(self._marks)
            if self._mark_of.get(uid) == mark:
                self._last_mark[uid] = self._mark_of.pop(uid)
                self._passed.append(uid)
        return ended

    def busy_until(self, now_s: float) -> float:
        """Seconds with a sequence at least, up to a time after its last change."""
        return self.busy_s + (now_s - self.now_s if self._running else 0.0)

    def tokens_to_go(self) -> dict[str, float]:
        """Of everything that is here."""
        return {uid: end - self._progress for end, _, uid in self._running} | dict(self._waiting)

    def withdraw(self, uid: str) -> float:
        """Take a rollout out, to go on elsewhere or later: the tokens it has to go; KeyError if it is not here."""
        for place, (end, _, running) in enumerate(self._running):
            if running == uid:
                del self._running[place]
                self._mark_of.pop(uid, None)
                heapq.heapify(self._running)
                self._admit()
                return end - self._progress
        for place, (waiting, num_tokens) in enumerate(self._waiting):
            if waiting == uid:
                del self._waiting[place]
                return num_tokens
        raise KeyError(uid)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.spec.slots:
            uid, num_tokens = self._waiting.popleft()
            self._num_admitted += 1
            heapq.heappush(self._running, (self._progress + num_tokens, self._num_admitted, uid))


def run_to_end(
    spec: WorkerSpec, uids: Sequence[str], lengths: Mapping[str, float], start_s: float = 0.0
) -> list[tuple[float, str]]:
    """(when, uid) of all that a worker is given at once, in the order they end."""
    worker = SimulatedWorker(spec, now_s=start_s)
    for uid in uids:
        worker.submit(uid, lengths[uid])
    ended: list[tuple[float, str]] = []
    while (next_s := worker.next_end_s()) is not None:
        ended += worker.advance(next_s)
    return ended


def makespan_s(plan: dict[str, list[str]], lengths: dict[str, float], specs: list[WorkerSpec]) -> dict[str, float]:
    """When each worker ends, if rollouts are as long as `lengths` says, whatever was forecast."""
    ends = {}
    for spec in specs:
        ended = run_to_end(spec, plan[spec.name], lengths)
        ends[spec.name] = ended[-1][0] if ended else 0.0
    return ends
