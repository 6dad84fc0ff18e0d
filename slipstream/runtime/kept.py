"""Rollouts that a run had when it was saved or cut off, for the one that goes on from there: what is known of them is
not sampled again, and what was graded is not graded again.

There are three sources. A checkpoint holds what was under way when it was saved, in a file of its own. The store holds
the groups of steps that were trained after it. And a run that has lost the process that trains knows what its workers
had sampled by then. Pure but for reading these. Invariants, asserted by `tests/test_runtime_kept.py`: nothing is taken
up that has a token of newer weights than the checkpoint's, for these are computed anew and may come out different; nor
what is staler than the mode allows, nor what was sampled for another prompt, with another seed or other settings than
it is asked for with.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config import Config, load_config
from slipstream.engine.sequences import PartialRollout
from slipstream.observe.store import RunStore, StoredRollout
from slipstream.schedule.rules import MODES
from slipstream.types import FinishReason, Request, Rollout, Scored

KEPT_FILE = "rollouts.npz"
"""In a checkpoint's folder."""
BUILT_IN = ("task", "math_verify")
"""Reward functions that are ours."""


@dataclass(frozen=True, slots=True)
class Grade:
    text: str
    reward: float
    parts: Mapping[str, float]
    logged: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)

    def as_list(self) -> list[Any]:
        return [self.text, self.reward, dict(self.parts), dict(self.logged), dict(self.extras)]


@dataclass(frozen=True, slots=True)
class KeptRollout:
    uid: str
    seed: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    first_version: int
    last_version: int
    """None of its tokens is of a newer one."""
    finish_reason: FinishReason | None = None
    """None: it was being sampled."""
    origins: tuple[int, ...] = ()
    log_kept: tuple[float, ...] = ()
    grade: Grade | None = None

    @property
    def step(self) -> int:
        """That it was asked for."""
        return int(self.uid.partition("/")[0])

    def as_partial(self, request: Request) -> PartialRollout:
        return PartialRollout(request, self.token_ids, self.logprobs, self.first_version, self.log_kept)

    def as_rollout(self, request: Request) -> Rollout:
        assert self.finish_reason is not None, f"{self.uid} has not ended"
        known = self.token_ids, self.logprobs, self.finish_reason, self.first_version, self.last_version
        return Rollout(request, *known, self.origins, self.log_kept)

    def as_scored(self, request: Request) -> Scored:
        assert self.grade is not None, f"{self.uid} was not graded"
        grade = self.grade
        return Scored(
            self.as_rollout(request), grade.text, grade.reward, grade.parts, logged=grade.logged, extras=grade.extras
        )


def keep_partial(partial: PartialRollout, newest_version: int) -> KeptRollout:
    """`newest_version`: that its worker may have had."""
    known = partial.token_ids, partial.logprobs, partial.first_version, newest_version
    return KeptRollout(partial.request.uid, partial.request.seed, *known, log_kept=partial.log_kept)


def keep_rollout(rollout: Rollout, grade: Grade | None = None) -> KeptRollout:
    known = rollout.token_ids, rollout.logprobs, rollout.first_version, rollout.last_version, rollout.finish_reason
    return KeptRollout(rollout.request.uid, rollout.request.seed, *known, rollout.origins, rollout.log_kept, grade)


def keep_scored(scored: Scored) -> KeptRollout:
    grade = Grade(scored.text, scored.reward, scored.parts, scored.logged, scored.extras)
    return keep_rollout(scored.rollout, grade)


class Kept:
    """By uid, until they are asked for."""

    def __init__(self, rollouts: Iterable[KeptRollout] = ()) -> None:
        self._rollouts = {one.uid: one for one in rollouts}

    def __len__(self) -> int:
        return len(self._rollouts)

    def left(self, after_step: int) -> list[KeptRollout]:
        """Not taken up yet, of later steps."""
        return [one for one in self._rollouts.values() if one.step > after_step]

    def take_up(self, requests: Sequence[Request], oldest: int) -> dict[str, KeptRollout]:
        """What is known of these, which must have been begun with this version or a newer one."""
        found = {request.uid: self._rollouts.pop(request.uid, None) for request in requests}
        seeds = {request.uid: request.seed for request in requests}
        return {
            uid: one
            for uid, one in found.items()
            if one is not None and one.seed == seeds[uid] and one.first_version >= oldest
        }


def recall(run_dir: Path, checkpoint: Path, step: int, is_latest: bool, config: Config, known: Kept) -> Kept:
    """All that may be taken up by a run that goes on from the checkpoint of this step. `known`: by the run that was cut
    off. Reads the store as that left it. `is_latest`: what the store has of later steps was sampled from the weights
    of this checkpoint, and not from those of another one with the same number."""
    now = settings_of(config)
    found: list[KeptRollout] = []
    if (checkpoint / KEPT_FILE).is_file():
        before, rollouts = unpack((checkpoint / KEPT_FILE).read_bytes())
        found += _as_of(now, before, rollouts)
    if is_latest and (run_dir / "run.db").is_file():
        found += known.left(step)
        with RunStore(run_dir, read_only=True) as store:
            stored = [
                _from_store(one, store.origins_of(one.uid), store.log_kept_of(one.uid))
                for later in range(step + 1, step + 2 + MODES[config.mode].staleness)
                for one in store.rollouts(step=later, kind="train")
            ]
        found += _as_of(now, settings_of(load_config(run_dir / "config.yaml")), stored)
    return Kept(one for one in found if one.last_version <= step)


def settings_of(config: Config) -> dict[str, Any]:
    """With others, a rollout or its grade would be another. `grading` is None where it is by somebody's own code, which
    may have been mended since."""
    functions = config.reward.functions
    is_ours = all(one.function in BUILT_IN for one in functions)
    return {
        "sampling": config.sampling.model_dump(mode="json"),
        "grading": [one.model_dump(mode="json") for one in functions] if is_ours else None,
    }


def _as_of(now: dict[str, Any], before: dict[str, Any], rollouts: Sequence[KeptRollout]) -> list[KeptRollout]:
    if before["sampling"] != now["sampling"]:
        return []
    if now["grading"] is None or before["grading"] != now["grading"]:
        return [replace(one, grade=None) for one in rollouts]
    return list(rollouts)


def _from_store(stored: StoredRollout, origins: tuple[int, ...], log_kept: tuple[float, ...]) -> KeptRollout:
    """One that could not be graded may be now."""
    grade = None if stored.reward is None else Grade(stored.text, stored.reward, stored.parts)
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
    return KeptRollout(
        stored.uid,
        stored.seed,
        stored.token_ids,
        stored.logprobs,
        stored.first_version,
        stored.last_version,
        reasons[stored.finish_reason],
        origins,
        log_kept,
        grade,
    )


def pack(settings: dict[str, Any], rollouts: Sequence[KeptRollout]) -> bytes:
    """As the content of a file: numbers as arrays, one after the other, and a description of whose they are."""
    about = [
        {
            "uid": one.uid,
            "seed": one.seed,
            "versions": [one.first_version, one.last_version],
            "finish_reason": one.finish_reason,
            "num_tokens": len(one.token_ids),
            "has_origins": bool(one.origins),
            "has_log_kept": bool(one.log_kept),
            "grade": None if one.grade is None else one.grade.as_list(),
        }
        for one in rollouts
    ]
    text = json.dumps({"settings": settings, "rollouts": about})
    file = io.BytesIO()
    np.savez(
        file,
        about=np.frombuffer(text.encode(), dtype=np.uint8),
        token_ids=np.fromiter((token for one in rollouts for token in one.token_ids), dtype="<i4"),
        logprobs=np.fromiter((value for one in rollouts for value in one.logprobs), dtype="<f4"),
        origins=np.fromiter((origin for one in rollouts for origin in one.origins), dtype=np.uint8),
        log_kept=np.fromiter((value for one in rollouts for value in one.log_kept), dtype="<f4"),
    )
    return file.getvalue()


def unpack(content: bytes) -> tuple[dict[str, Any], list[KeptRollout]]:
    """The settings it was packed with, and the rollouts."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        described = json.loads(file["about"].tobytes())
        token_ids, logprobs, origins = (file[name].tolist() for name in ("token_ids", "logprobs", "origins"))
        log_kept = file["log_kept"].tolist() if "log_kept" in file else []  # files of older versions have none
    rollouts: list[KeptRollout] = []
    start = origin_start = kept_start = 0
    for about in described["rollouts"]:
        end = start + about["num_tokens"]
        first_version, last_version = about["versions"]
        origin_end = origin_start + (about["num_tokens"] if about["has_origins"] else 0)
        kept_end = kept_start + (about["num_tokens"] if about.get("has_log_kept") else 0)
        rollouts.append(
            KeptRollout(
                about["uid"],
                about["seed"],
                tuple(token_ids[start:end]),
                tuple(logprobs[start:end]),
                first_version,
                last_version,
                about["finish_reason"],
                tuple(origins[origin_start:origin_end]),
                tuple(log_kept[kept_start:kept_end]),
                None if about["grade"] is None else Grade(*about["grade"]),
            )
        )
        start, origin_start, kept_start = end, origin_end, kept_end
    return described["settings"], rollouts
