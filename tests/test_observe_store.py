"""The run store: round trip, no double uid, forgetting, kill -9, full disk, reading beside a writer."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slipstream.observe.store import RunStore, RunStoreError
from slipstream.types import Request, Rollout, SamplingParams, Scored, Unscored

PROMPTS = {"1/0": ("key0", "What is 2 + 2?")}


def scored(uid: str, reward: float, length: int = 3, seed: int = 7) -> Scored:
    request = Request(uid, uid.rpartition("/")[0], (1, 2), seed, SamplingParams())
    made = Rollout(request, tuple(range(length)), (-0.25,) * length, "stop", 3, 4)
    return Scored(made, "four", reward, {"task": reward})


def fill(store: RunStore, step: int, kind: str = "train", samples: int = 2) -> None:
    uids = [f"{'eval/' * (kind == 'eval')}{step}/0/{i}" for i in range(samples)]
    group = uids[0].rpartition("/")[0]
    store.add_rollouts(step, kind, "set", {group: ("key", "text")}, [scored(uid, 1.0) for uid in uids])  # type: ignore[arg-type]
    store.add_event(step, 1.5 * step, "step_done", {"step": step})
    store.add_metrics(step, {"reward/mean": 0.1 * step})


def test_a_rollout_comes_back_as_it_was(tmp_path: Path) -> None:
    seed = 2**64 - 1
    first = scored("1/0/0", 0.5, 5, seed)
    lost = Unscored(scored("1/0/1", 0.0).rollout, "fünf \x00", "timeout", "10 s")
    with RunStore(tmp_path) as store:
        store.add_rollouts(1, "train", "train/0", PROMPTS, [first, lost])
        good, bad = store.rollouts()
    assert (good.uid, good.step, good.kind, good.set_name) == ("1/0/0", 1, "train", "train/0")
    assert (good.prompt_key, good.prompt_text, good.group, good.sample) == ("key0", "What is 2 + 2?", "1/0", 0)
    assert (good.seed, good.token_ids, good.logprobs) == (seed, (0, 1, 2, 3, 4), (-0.25,) * 5)
    assert (good.text, good.reward, good.parts, good.fault) == ("four", 0.5, {"task": 0.5}, None)
    assert (good.finish_reason, good.length, good.first_version, good.last_version) == ("stop", 5, 3, 4)
    assert bad.reward is None and bad.fault == "timeout: 10 s" and bad.sample == 1 and bad.text == "fünf \x00"


def test_text_that_is_not_utf8_does_not_stop_a_run(tmp_path: Path) -> None:
    lost = Unscored(scored("1/0/0", 0.0).rollout, "a\ud800b", "raised", "no file \udcff")
    with RunStore(tmp_path) as store:
        store.add_rollouts(1, "train", "s", PROMPTS, [lost])
        (found,) = store.rollouts()
    assert (found.text, found.fault) == ("a\\ud800b", "raised: no file \\udcff")


def test_a_replay_never_doubles(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        store.add_rollouts(1, "train", "a", PROMPTS, [scored("1/0/0", 0.0)])
        store.add_rollouts(1, "train", "a", PROMPTS, [scored("1/0/0", 1.0), scored("1/0/1", 0.0)])
        assert [(item.uid, item.reward) for item in store.rollouts()] == [("1/0/0", 1.0), ("1/0/1", 0.0)]


def test_a_bad_row_leaves_none_of_its_transaction(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        with pytest.raises(KeyError):
            store.add_rollouts(1, "train", "a", PROMPTS, [scored("1/0/0", 1.0), scored("1/9/0", 1.0)])
        with pytest.raises(sqlite3.IntegrityError):
            store.add_rollouts(1, "other", "a", PROMPTS, [scored("1/0/0", 1.0)])  # type: ignore[arg-type]
        assert store.rollouts() == []


def test_forget_after(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        for step in range(1, 5):
            fill(store, step)
        for step in (2, 4):
            fill(store, step, "eval")
        store.forget_after(2, 2)
        assert sorted(store.lengths_by_step()) == [1, 2]
        assert sorted(store.lengths_by_step("eval")) == [2]
        assert {event.step for event in store.events()} == {1, 2}
        assert store.metrics_by_name() == {"reward/mean": {1: 0.1, 2: 0.2}}


def test_a_trained_step_that_was_not_recorded_keeps_its_training_rollouts(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        for step in (1, 2):
            fill(store, step)
            fill(store, step, "eval")
        store.forget_after(2, 1)
        assert sorted(store.lengths_by_step()) == [1, 2] and sorted(store.lengths_by_step("eval")) == [1]
        assert {event.step for event in store.events()} == {1, 2}
        assert store.metrics_by_name() == {"reward/mean": {1: 0.1}}


def test_reading(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        fill(store, 2)
        fill(store, 1)
        fill(store, 1, "eval", samples=3)
        assert len(store.rollouts(step=1)) == 5
        assert len(store.rollouts(step=1, kind="eval")) == 3
        assert [item.uid for item in store.rollouts(kind="train", limit=3)] == ["1/0/0", "1/0/1", "2/0/0"]
        assert store.lengths_by_step() == {1: [3, 3], 2: [3, 3]}
        event = store.events("step_done")[0]
        assert (event.at_s, event.payload) == (3.0, {"step": 2})
        assert store.events("other") == []


def test_metrics_replace_and_keep_nan(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        store.add_metrics(1, {"a": 1.0, "b": math.nan, "c": math.inf})
        store.add_metrics(1, {"a": 2.0})
        found = store.metrics_by_name()
    assert found["a"] == {1: 2.0} and math.isnan(found["b"][1]) and found["c"] == {1: math.inf}


def test_reader_beside_a_writer(tmp_path: Path) -> None:
    with RunStore(tmp_path) as writer:
        fill(writer, 1)
        with RunStore(tmp_path, read_only=True) as reader:
            assert len(reader.rollouts()) == 2
            fill(writer, 2)
            assert len(reader.rollouts()) == 4
            with pytest.raises(RunStoreError, match=r"run\.db.*cannot be written"):
                reader.add_metrics(1, {"a": 1.0})


def test_other_threads_may_write(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        threads = [threading.Thread(target=fill, args=(store, step)) for step in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.rollouts()) == 16 and len(store.events()) == 8


def test_kill_9_keeps_whole_transactions(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; import test_observe_store as t\n"
        "store = t.RunStore(Path(sys.argv[1]))\n"
        "for step in range(1, 10**6):\n"
        "    group = f'{step}/0'\n"
        "    rows = [t.scored(f'{group}/{i}', 1.0) for i in range(50)]\n"
        "    store.add_rollouts(step, 'train', 's', {group: ('k', 'p')}, rows)\n"
        "    print(step, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        seen = 0
        while seen < 20:
            seen = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        seen = max([seen, *map(int, child.stdout.read().split())])
    with RunStore(tmp_path) as store:
        lengths = store.lengths_by_step()
        assert set(range(1, seen + 1)) <= set(lengths), "what was reported as written is there"
        assert {len(rows) for rows in lengths.values()} == {50}, "all rows of a step or none"
        store.forget_after(10, 10)
        assert max(store.lengths_by_step()) == 10


def test_full_disk_is_named_and_survived(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        fill(store, 1)
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        big = [scored(f"1/0/{i}", 1.0, 5000) for i in range(20)]
        with pytest.raises(RunStoreError, match=r"run\.db.*disk is full.*free some space") as caught:
            store.add_rollouts(1, "train", "s", PROMPTS, big)
        assert isinstance(caught.value, OSError)
        assert len(store.rollouts()) == 2, "the failed transaction left nothing"
        store._connection.execute("PRAGMA max_page_count = 1000000")
        store.add_rollouts(1, "train", "s", PROMPTS, big)
        assert len(store.rollouts()) == 20


def test_really_full_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        with RunStore(tmp_path) as store:
            with pytest.raises(RunStoreError, match=r"run\.db"):
                for step in range(1, 1000):
                    store.add_rollouts(step, "train", "s", PROMPTS, [scored(f"1/0/{step}", 1.0, 2000)])
            assert 0 < len(store.rollouts()) < 1000
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_files_that_are_no_store(tmp_path: Path) -> None:
    with pytest.raises(RunStoreError, match="folder of a run"):
        RunStore(tmp_path / "nowhere", read_only=True)
    (tmp_path / "run.db").write_bytes(b"not a database, but long enough to be looked at" * 100)
    for read_only in (False, True):
        with pytest.raises(RunStoreError, match="not a Slipstream store"):
            RunStore(tmp_path, read_only=read_only)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStoreError, match=r"choose another run\.dir"):
        RunStore(tmp_path / "file" / "run")


def test_another_schema_is_refused(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store, store._connection as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    for read_only in (False, True):
        with pytest.raises(RunStoreError, match="schema 99"):
            RunStore(tmp_path, read_only=read_only)


def test_sync_empties_the_log(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        fill(store, 1)
        store.sync()
        copy = tmp_path / "copy"
        copy.mkdir()
        (copy / "run.db").write_bytes((tmp_path / "run.db").read_bytes())  # without its -wal
    with RunStore(copy, read_only=True) as store:
        assert len(store.rollouts()) == 2
