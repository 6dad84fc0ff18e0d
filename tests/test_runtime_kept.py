"""Rollouts that a run takes up from an earlier one. The words of the module's head: nothing is taken up that has a
token of newer weights than the checkpoint's, for these are computed anew and may come out different; nor what is staler
than the mode allows, nor what was sampled for another prompt, with another seed or other settings than it is asked for
with. And no token that is known is sampled again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_runtime_pool import GROUPS, Stage, content, undisturbed, version_of

from slipstream.config import Config, build_config
from slipstream.observe.store import RunStore
from slipstream.runtime.kept import (
    KEPT_FILE,
    Grade,
    Kept,
    KeptRollout,
    keep_partial,
    keep_rollout,
    pack,
    recall,
    settings_of,
    unpack,
)
from slipstream.types import Request, Rollout, SamplingParams, Scored

RECIPE: dict[str, Any] = {
    "model": "tiny",
    "mode": "async",
    "rollout": {"workers": 2},
    "tasks": {"train": [{"source": "sorting", "size": 40, "seed": 1}]},
    "run": {"dir": "unused"},
}


def recipe(**changes: Any) -> Config:
    return build_config(RECIPE | changes)


def rollout_of(uid: str, first_version: int, last_version: int, seed: int = 7) -> Rollout:
    request = Request(uid, uid.rpartition("/")[0], (1, 2), seed, SamplingParams())
    values = (5, 6, 3), (-0.5, -0.25, -1.0), "stop", first_version, last_version, (0, 2, 0), (-0.125, 0.0, -0.5)
    return Rollout(request, *values)  # type: ignore[arg-type]


def graded(uid: str, first_version: int, last_version: int) -> KeptRollout:
    return keep_rollout(rollout_of(uid, first_version, last_version), Grade("ab", 0.75, {"task": 0.75}))


def test_a_run_that_is_cut_off_goes_on_and_samples_no_token_twice() -> None:
    """Through the file of a checkpoint: rollouts that ended, that were being sampled, and that had not begun."""
    first = Stage("sync", 2)
    first.pool.give_weights(version_of(0))
    for number, requests in enumerate(GROUPS):
        first.pool.ask(1, f"prompt {number}", requests)
    ended = [rollout for _ in range(20) for rollout in first.advance()]
    partials, newest = first.pool.partials()
    assert len(ended) > 3 and len(partials) > 3 and len(ended) + len(partials) < sum(map(len, GROUPS)), "some of each"
    known = [keep_rollout(rollout) for rollout in ended] + [keep_partial(one, newest) for one in partials]
    settings, again = unpack(pack({"some": "settings"}, known))
    assert settings == {"some": "settings"} and again == known

    kept, second = Kept(again), Stage("sync", 2)
    second.pool.give_weights(version_of(0))
    done: dict[str, Rollout] = {}
    for number, requests in enumerate(GROUPS):
        taken = kept.take_up(requests, oldest=0)
        by_uid = {request.uid: request for request in requests}
        done |= {uid: one.as_rollout(by_uid[uid]) for uid, one in taken.items() if one.finish_reason}
        begun = {uid: one.as_partial(by_uid[uid]) for uid, one in taken.items() if not one.finish_reason}
        second.pool.ask(1, f"prompt {number}", [one for one in requests if one.uid not in done], (), begun)
    assert len(kept) == 0
    rest = second.until_done()
    assert not rest.keys() & done.keys()
    assert content(rest | done) == undisturbed(GROUPS)
    num_known = sum(len(one.token_ids) for one in known)
    num_sampled = sum(link.worker._engine.facts().decode_tokens for link in second.started)
    assert num_sampled == sum(len(one.token_ids) for one in (rest | done).values()) - num_known
    assert second.pool.take_sampled() <= num_sampled


def test_what_is_packed_comes_out_as_it_was() -> None:
    running = replace(graded("3/1/0", 2, 2), finish_reason=None, origins=(), log_kept=(), grade=None)
    rollouts = [graded("2/0/0", 1, 1), running, replace(graded("2/0/1", 0, 1), grade=None, seed=2**64 - 1)]
    grade = Grade("ab", 0.75, {"mine": 0.75}, logged={"mine/accuracy": 0.5}, extras={"extracted": "4"})
    rollouts.append(replace(graded("2/0/2", 1, 1), grade=grade))
    assert unpack(pack({}, rollouts)) == ({}, rollouts)
    assert [one.origins for one in unpack(pack({}, rollouts))[1]] == [(0, 2, 0), (), (0, 2, 0), (0, 2, 0)]
    assert [len(one.log_kept) for one in unpack(pack({}, rollouts))[1]] == [3, 0, 3, 3]


@pytest.mark.parametrize(
    ("changes", "oldest", "is_taken"),
    [({}, 1, True), ({"seed": 8}, 1, False), ({}, 2, False), ({"uid": "3/0/1"}, 1, False)],
)
def test_only_what_was_sampled_for_this_request_and_is_not_too_stale(
    changes: dict[str, Any], oldest: int, is_taken: bool
) -> None:
    request = replace(rollout_of("3/0/0", 1, 2).request, **changes)
    assert bool(Kept([graded("3/0/0", 1, 2)]).take_up([request], oldest)) == is_taken


def leave_behind(run_dir: Path, config: Config) -> Path:
    """A run that was cut off: the checkpoint of step 2, and what the store has of the steps 3 to 5."""
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with RunStore(run_dir) as store:
        for step, first_version, last_version in ((3, 1, 2), (4, 2, 3), (5, 3, 4)):
            rollout = rollout_of(f"{step}/{step}/0", first_version, last_version)
            asked = {rollout.request.group: ("key", "text")}
            store.add_rollouts(step, "train", "train", asked, [Scored(rollout, "ab", 0.75, {"task": 0.75})])
    checkpoint = run_dir / "checkpoints" / "step_2"
    checkpoint.mkdir(parents=True)
    (checkpoint / KEPT_FILE).write_bytes(pack(settings_of(config), [graded("3/8/0", 1, 2), graded("3/8/1", 1, 1)]))
    return checkpoint


def recalled(run_dir: Path, config: Config, known: Kept, is_latest: bool = True) -> dict[str, KeptRollout]:
    kept = recall(run_dir, run_dir / "checkpoints" / "step_2", 2, is_latest, config, known)
    return {one.uid: one for one in kept.left(0)}


def test_no_token_of_newer_weights_is_taken_up(tmp_path: Path) -> None:
    run_dir, config = tmp_path / "run", recipe()
    leave_behind(run_dir, config)
    known = Kept([graded("3/9/0", 2, 2), graded("4/9/0", 2, 3), graded("2/9/0", 1, 1)])
    found = recalled(run_dir, config, known)
    assert sorted(found) == ["3/3/0", "3/8/0", "3/8/1", "3/9/0"]
    assert found["3/3/0"] == graded("3/3/0", 1, 2) and found["3/3/0"].origins == (0, 2, 0)
    assert sorted(recalled(run_dir, config, known, is_latest=False)) == ["3/8/0", "3/8/1"], "the store is another's"


@pytest.mark.parametrize(
    ("changes", "num_found", "has_grades"),
    [
        ({"sampling": {"temperature": 0.5}}, 0, False),
        ({"reward": {"functions": [{"function": "task", "weight": 2.0}]}}, 3, False),
        ({"reward": {"functions": [{"function": "task"}], "workers": 2}}, 3, True),
        ({"reward": {"functions": [{"function": "my.package.grade"}]}}, 3, False),
    ],
)
def test_with_other_settings_it_is_sampled_or_graded_again(
    tmp_path: Path, changes: dict[str, Any], num_found: int, has_grades: bool
) -> None:
    run_dir = tmp_path / "run"
    leave_behind(run_dir, recipe())
    found = recalled(run_dir, recipe(**changes), Kept())
    assert len(found) == num_found and all((one.grade is not None) == has_grades for one in found.values())


def test_what_somebodys_own_code_graded_is_graded_again(tmp_path: Path) -> None:
    """It may have been mended since."""
    config = recipe(reward={"functions": [{"function": "my.package.grade"}]})
    leave_behind(tmp_path / "run", config)
    found = recalled(tmp_path / "run", config, Kept())
    assert len(found) == 3 and not any(one.grade for one in found.values())
