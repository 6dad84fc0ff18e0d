"""What runs in a grading process: one call after the other, each answered in JSON.

Owns the translation of what a reward function does into outcomes and the bounds on what an answer carries. Invariants:
- whatever a function raises or returns becomes an outcome; nothing of it but numbers and short texts is sent;
- the reward's imports and the verifiers' preparations are done before the first call is taken;
- only the process that was started answers: a fork of it that a reward function made and let return ends instead.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import pickle
import re
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from slipstream.tasks import verifiers
from slipstream.tasks.guardian import receive_frame, send_frame
from slipstream.tasks.rewards import CallLog, RewardCall, Sample, TrainerState, resolve_reward, shortened

Kind = Literal["raised", "timeout", "not_a_number", "died", "no_score"]
MEMORY_BYTES = 4 * 2**30
"""What a worker may take on top of its imports. Model output reaches sympy, where a few characters (9^9^9^9) ask for
any amount; without a limit the machine's OOM killer might choose the trainer."""
MAX_DETAIL = 4000
"""Longest text of a fault, in characters: its beginning and its end are kept."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    detail: str


Outcome = float | None | Fault


@dataclass(frozen=True, slots=True)
class Answer:
    """One call's."""

    outcomes: list[Outcome]
    """By sample."""
    metrics: dict[str, float] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """By column, then by sample."""


def serve(channel: socket.socket, functions: Sequence[str], warm: Sequence[tuple[str, str]]) -> None:
    """Import all that the reward needs, then answer calls until the run closes the channel."""
    own_pid = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIO) or hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    calls = [_load(function, warm) for function in functions]
    _limit_memory()
    _say(channel, {"ready": own_pid})
    while True:
        try:
            frame = receive_frame(channel)
        except (EOFError, ConnectionError):
            return
        _say(channel, {"began": True})
        answer = _answer(calls, frame)
        if os.getpid() != own_pid:
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the reward's code may have closed or replaced it
                stream.flush()
        _say(channel, answer)


def _say(channel: socket.socket, message: dict[str, Any]) -> None:
    send_frame(channel, json.dumps(message).encode())


def _load(function: str, warm: Sequence[tuple[str, str]]) -> RewardCall | Fault:
    try:
        call = resolve_reward(function)
        if function == "math_verify":
            verifiers.warm_math()
        if function == "task":
            verifiers.warm_tasks(warm)
        return call
    except Exception:
        return _raised()


def _limit_memory() -> None:
    # Not RLIMIT_AS: it counts address space that is only reserved, of which CUDA and threads take a lot.
    if sys.platform == "linux":
        used = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if used:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (int(used[1]) * 1024 + MEMORY_BYTES, hard))


def _answer(calls: Sequence[RewardCall | Fault], frame: bytes) -> dict[str, Any]:
    """One call: an outcome for each sample, or one fault for all."""
    try:
        number, samples, state = pickle.loads(frame)
        log = CallLog(len(samples))
        answer = _grade(calls[number], samples, state, log)
    except BaseException:
        answer = _raised()
    if isinstance(answer, Fault):
        return {"fault": [answer.kind, answer.detail]}
    outcomes = [[one.kind, one.detail] if isinstance(one, Fault) else one for one in answer]
    return {"outcomes": outcomes, "metrics": log.metrics, "extras": log.extras}


def as_answer(message: dict[str, Any]) -> Answer | Fault:
    """What `_answer` made, on the other side."""
    if "fault" in message:
        return Fault(*message["fault"])
    outcomes = [Fault(*one) if isinstance(one, list) else one for one in message["outcomes"]]
    return Answer(outcomes, message["metrics"], message["extras"])


def _grade(
    call: RewardCall | Fault, samples: Sequence[Sample], state: TrainerState, log: CallLog
) -> list[Outcome] | Fault:
    if isinstance(call, Fault):
        return [call] * len(samples)
    if call.score_one is not None:
        return [_outcome(_guarded(call.score_one, sample)) for sample in samples]
    assert call.score_group is not None
    values = _guarded(call.score_group, samples, state, log)
    if isinstance(values, Fault):
        return values
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or tensor
    if not isinstance(values, list | tuple) or len(values) != len(samples):
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        detail = f"returned {got} for {len(samples)} samples; a reward function returns a list, one value per sample"
        return [Fault("raised", detail)] * len(samples)
    return [_outcome(value) for value in values]


def _guarded(score: Callable[..., Any], *given: Any) -> Any:
    try:
        return score(*given)
    except MemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold what filled the memory
        gc.collect()
        advice = f"a call may take {MEMORY_BYTES / 2**30:g} GiB; load what is large when the reward is imported"
        return Fault("raised", f"{shortened(traceback.format_exc(), MAX_DETAIL)}{advice}")
    except BaseException:  # also SystemExit of a reward that calls sys.exit
        return _raised()


def _raised() -> Fault:
    return Fault("raised", shortened(traceback.format_exc(), MAX_DETAIL))


def _outcome(value: Any) -> Outcome:
    if value is None or isinstance(value, Fault):
        return value
    if not isinstance(value, str | bytes):
        with contextlib.suppress(Exception):  # whatever cannot be made a float is not a number, said below
            number = float(value)
            if math.isfinite(number):
                return number
    return Fault("not_a_number", f"returned {value!r:.200}; write a finite number, or None where it does not apply")
