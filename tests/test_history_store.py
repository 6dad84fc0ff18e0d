"""The history store: a model in plain Python, whole adds beside a reader, kill -9, eviction, the cache, taking over."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.history.cache import ByteBoundedCache
from slipstream.history.eviction import Candidate, choose_evictions
from slipstream.history.format import HistoryStoreError, narrow, pack, unpack
from slipstream.history.store import HistoryStore, PastRollout
from slipstream.observe.store import RunStore
from slipstream.types import Request, Rollout, SamplingParams, Scored, Unscored

FILE = "history.db"


def past(key: str, step: int = 1, reward: float | None = 1.0, length: int = 3) -> PastRollout:
    return PastRollout(key, tuple(range(abs(step), abs(step) + length)), reward, step, abs(step), abs(step) + 1)


def steps(store: HistoryStore, key: str) -> list[int]:
    return [rollout.step for rollout in store.of_prompt(key)]


def test_a_rollout_comes_back_as_it_was(tmp_path: Path) -> None:
    given_ = [
        PastRollout("a", (0, 255, 256, 65535, 65536, 2**31 - 1), 0.25, 7, 5, 6),
        PastRollout("a", (), None, 8, 6, 6),
        PastRollout("b", (0, 0, 0), -1.0, 9, 7, 7),
    ]
    with HistoryStore(tmp_path / "run" / FILE) as store:
        store.add(given_)
    with HistoryStore(tmp_path / "run" / FILE) as store:
        assert store.of_prompt("a") == (given_[1], given_[0]) and store.of_prompt("b") == (given_[2],)
        assert store.of_prompt("a", limit=1) == (given_[1],) and store.of_prompt("c") == ()
        assert store.lengths("a") == (0, 6) and store.lengths("c") == ()
        assert (store.num_rollouts, store.num_prompts) == (3, 2)


@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 300), max_size=40))
def test_packing(token_ids: list[int]) -> None:
    assert list(unpack(pack(token_ids), len(token_ids))) == token_ids


def test_packed_tokens_are_as_wide_as_the_largest() -> None:
    assert [len(pack((0, largest))) for largest in (0, 255, 256, 65535, 65536, 2**24)] == [0, 2, 4, 4, 6, 8]
    assert narrow(b"\x01\x02\x00\x00\x03\x00\x00\x00") == b"\x01\x03\x02\x00"


BATCHES = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([None, 0.0, 1.0]), st.integers(0, 5)), max_size=8)
WRITES = st.tuples(st.just("add"), st.sampled_from([0, 1]), BATCHES)
FORGETS = st.tuples(st.just("forget"), st.sampled_from([0, 1]), st.integers(0, 3))


@settings(max_examples=60)
@given(st.integers(1, 5), st.lists(WRITES | WRITES | WRITES | FORGETS, max_size=8))
def test_two_connections_agree_with_a_dict(keep: int, actions: list[tuple[str, int, object]]) -> None:
    model: dict[str, list[PastRollout]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, FILE)
        with HistoryStore(path, keep_per_prompt=keep) as first, HistoryStore(path, keep_per_prompt=keep) as second:
            step = 0
            for action, who, what in actions:
                writer = (first, second)[who]
                if action == "forget":
                    assert isinstance(what, int)
                    step = max(0, step - what)
                    writer.forget_after(step)
                    model = {key: [one for one in kept if one.step <= step] for key, kept in model.items()}
                else:
                    assert isinstance(what, list)
                    step += 1
                    batch = [past(key, step, reward, length) for key, reward, length in what]
                    writer.add(batch)
                    for one in batch:
                        model[one.prompt_key] = [one, *model.get(one.prompt_key, [])][:keep]
                model = {key: kept for key, kept in model.items() if kept}
                for store in (first, second):
                    for key in "abcd":
                        expected = tuple(model.get(key, ()))
                        assert store.lengths(key) == tuple(len(one.token_ids) for one in expected)
                        assert store.of_prompt(key) == expected and store.of_prompt(key, 2) == expected[:2]
                        assert store.lengths(key) == tuple(len(one.token_ids) for one in expected), "from the cache too"
                    assert store.num_rollouts == sum(map(len, model.values())) and store.num_prompts == len(model)


def test_a_smaller_keep_is_followed_at_the_next_add(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / FILE) as store:
        store.add([past("a", step) for step in range(1, 9)] + [past("b")])
    with HistoryStore(tmp_path / FILE, keep_per_prompt=3) as store:
        store.add([past("a", 9)])
        assert steps(store, "a") == [9, 8, 7] and store.num_rollouts == 4


# ---- the rule of eviction, by hand: (id, age, bytes, has_spread)


@pytest.mark.parametrize(
    ("candidates", "bytes_to_free", "evicted"),
    [
        pytest.param([(1, 5, 10, True), (2, 9, 10, True), (3, 7, 10, True)], 20, [2, 3], id="oldest first"),
        pytest.param([(1, 5, 10, True), (2, 9, 10, True)], 11, [2, 1], id="until enough is free"),
        pytest.param([(1, 5, 10, True), (2, 9, 10, True)], 0, [], id="no more than needed"),
        pytest.param([(1, 5, 10, True)], 99, [1], id="all, if all is too little"),
        pytest.param([], 5, [], id="nothing to give"),
        pytest.param([(1, 100, 10, True), (2, 90, 10, False)], 1, [2], id="of similar age, no spread first"),
        pytest.param([(1, 100, 10, True), (2, 51, 10, False)], 1, [2], id="younger by less than half"),
        pytest.param([(1, 100, 10, True), (2, 49, 10, False)], 1, [1], id="less than half as old is safe"),
        pytest.param([(1, 30, 10, False), (2, 40, 10, False)], 1, [2], id="without spread, oldest first"),
    ],
)
def test_the_rule_of_eviction(
    candidates: list[tuple[int, int, int, bool]], bytes_to_free: int, evicted: list[int]
) -> None:
    assert choose_evictions([Candidate(*one) for one in candidates], bytes_to_free) == evicted


def test_the_disk_is_bounded_and_what_is_left_is_whole(tmp_path: Path) -> None:
    limit, largest = 400_000, 0
    with HistoryStore(tmp_path / FILE, keep_per_prompt=4, disk_bytes=limit) as store:
        for step in range(1, 41):
            store.add([past(f"{step}-{prompt}", step, float(n), 900) for prompt in range(8) for n in range(4)])
            assert store.num_bytes <= limit and len(store.of_prompt(f"{step}-0")) == 4
            largest = max(largest, store.num_bytes)
        keys = [f"{step}-{n}" for step in range(1, 41) for n in range(8)]
        kept = [key for key in keys if len(store.of_prompt(key)) == 4]
        assert kept == [key for key in keys if store.of_prompt(key)] == keys[-len(kept) :], "whole prompts, the newest"
        assert store.num_prompts == len(kept) and store.num_rollouts == 4 * len(kept)
        assert largest > 0.9 * limit and len(kept) * 4 * 1800 > 0.6 * limit, "room is used"
    assert (tmp_path / FILE).stat().st_size < 1.2 * limit, "freed pages are used again"


def test_prompts_without_spread_are_evicted_first(tmp_path: Path) -> None:
    rewards: dict[str, Sequence[float | None]] = {"mixed": (0.0, 1.0), "right": (1.0, 1.0), "unscored": (None, None)}
    with HistoryStore(tmp_path / FILE) as store:
        for n in range(40):
            store.add([past(f"{kind}{n}", 1, reward, 900) for kind in rewards for reward in rewards[kind]])
        half = store.num_bytes // 2
    with HistoryStore(tmp_path / FILE, disk_bytes=half) as store:
        store.add([past("new")])
        left = {kind: sum(bool(store.of_prompt(f"{kind}{n}")) for n in range(40)) for kind in rewards}
        assert left["mixed"] > 1.5 * left["right"] > 0 and abs(left["right"] - left["unscored"]) <= 1
        assert all(store.of_prompt(f"{kind}39") for kind in rewards)


def test_a_limit_below_an_empty_file_keeps_nothing_and_ends(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / FILE, disk_bytes=1) as store:
        store.add([past("a")])
        assert (store.num_rollouts, store.num_prompts, store.of_prompt("a")) == (0, 0, ())


# ---- readers, writers, kills


def test_a_reader_sees_whole_adds_only(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / FILE) as writer, HistoryStore(tmp_path / FILE) as reader:
        writer.add([past("a")])
        with writer._transaction():
            writer._insert([("a", 2, 1, None, 2, 2, b"\x01"), ("b", 2, 1, None, 2, 2, b"\x01")])
            assert steps(reader, "a") == [1] and reader.of_prompt("b") == (), "and does not wait"
        assert steps(reader, "a") == [2, 1] and steps(reader, "b") == [2]


def test_a_read_that_has_begun_keeps_its_view(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / FILE, keep_per_prompt=50) as writer:
        writer.add([past("a", 1, length=900) for _ in range(50)])
        with sqlite3.connect(tmp_path / FILE) as reader:
            rows = reader.execute("SELECT step FROM readable")
            seen = [rows.fetchone()]
            writer.add([past("a", 2, length=900) for _ in range(50)])
            assert {step for (step,) in [*seen, *rows]} == {1}
            assert set(reader.execute("SELECT step FROM readable")) == {(2,)}
        reader.close()


def test_readers_beside_a_busy_writer(tmp_path: Path) -> None:
    num_adds = 200
    with HistoryStore(tmp_path / FILE) as writer, HistoryStore(tmp_path / FILE) as reader:
        work = [[past("a", step) for _ in range(16)] for step in range(1, num_adds + 1)]
        thread = threading.Thread(target=lambda: [writer.add(batch) for batch in work])
        thread.start()
        seen = [steps(reader, "a")]
        while seen[-1] != [num_adds] * 16 and thread.is_alive():
            seen.append(steps(reader, "a"))
        thread.join()
        assert all(len(set(one)) <= 1 and len(one) in (0, 16) for one in seen), "one add, and all of it"
        assert [one[0] for one in seen if one] == sorted(one[0] for one in seen if one)
        assert steps(reader, "a") == [num_adds] * 16


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    def write(name: str) -> None:
        with HistoryStore(tmp_path / FILE, keep_per_prompt=100) as store:
            for step in range(1, 51):
                store.add([past(f"{name}{step}", step), past("both", step)])

    HistoryStore(tmp_path / FILE).close()
    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with HistoryStore(tmp_path / FILE) as store:
        assert store.num_prompts == 101 and store.num_rollouts == 200
        assert sorted(steps(store, "both")) == [step for step in range(1, 51) for _ in range(2)]


KILLED = """
import sys; sys.path.insert(0, sys.argv[2])
from pathlib import Path
import test_history_store as t
store = t.HistoryStore(Path(sys.argv[1]))
for step in range(1, 10**6):
    store.add([t.past(f"{step}-{prompt}", step, float(n % 2), 200) for prompt in range(8) for n in range(4)])
    print(step, flush=True)
"""


def write_until_killed(path: Path, num_adds: int) -> int:
    """The last step that a process reported as added before a kill -9."""
    command = [sys.executable, "-c", KILLED, str(path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        seen = 0
        while seen < num_adds:
            seen = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        return max([seen, *map(int, child.stdout.read().split())])


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    last = write_until_killed(tmp_path / FILE, 60)
    with HistoryStore(tmp_path / FILE) as store:
        for step in range(1, last + 1):
            assert all(steps(store, f"{step}-{prompt}") == [step] * 4 for prompt in range(8))
        assert store.num_prompts % 8 == 0 and store.num_rollouts == 4 * store.num_prompts, "all of an add or nothing"
        assert store._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_failed_add_leaves_nothing(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / FILE) as store:
        store.add([past("a")])
        before = store.of_prompt("a")
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(HistoryStoreError, match=r"history\.db: database or disk is full; check.*space"):
            store.add([past(key, 2, length=5000) for key in "abcdefgh"])
        assert (store.of_prompt("a"), store.num_rollouts) == (before, 1)
        with pytest.raises(AssertionError, match="nan"):
            store.add([past("a", 2), past("a", 2, float("nan"))])
        assert store.num_rollouts == 1


def test_forgetting_for_a_resume(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / FILE) as store:
        store.add([past("a", -3), past("a", 1), past("b", 1, 0.0), past("b", 2, 1.0), past("c", 2)])
        assert steps(store, "b") == [2, 1]
        store.forget_after(1)
        assert (steps(store, "a"), steps(store, "b"), steps(store, "c")) == ([1, -3], [1], [])
        assert (store.num_rollouts, store.num_prompts) == (3, 2)
        assert store._connection.execute("SELECT has_spread FROM prompts WHERE key = 'b'").fetchone() == (0,)


# ---- the cache


def reads_of(store: HistoryStore) -> list[str]:
    """Queries of rollouts that `store` sends from now on."""
    seen: list[str] = []
    store._connection.set_trace_callback(lambda query: seen.append(query) if "rollouts" in query else None)
    return seen


def test_the_cache_spares_reads_until_somebody_writes(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / FILE) as store, HistoryStore(tmp_path / FILE) as other:
        other.add([past("a"), past("b")])
        seen = reads_of(store)
        for _ in range(3):
            assert steps(store, "a") == [1] and store.lengths("a") == (3,) and steps(store, "never") == []
        assert len(seen) == 2
        other.add([past("a", 2)])
        assert steps(store, "a") == [2, 1] and len(seen) == 3, "another connection"
        assert steps(store, "b") == [1] and len(seen) == 4
        store.add([past("a", 3)])
        seen.clear()
        assert steps(store, "a") == [3, 2, 1] and steps(store, "b") == [1] and len(seen) == 1, (
            "itself, and only what changed"
        )


def test_the_memory_is_bounded(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / FILE, memory_bytes=20_000) as store:
        store.add([past(f"{n}", length=100) for n in range(20)] + [past("long", length=6000)])
        for n in range(20):
            assert store.of_prompt(f"{n}") and 0 < store._cache.num_bytes <= 20_000
        seen = reads_of(store)
        assert store.of_prompt("19") and not seen and store.of_prompt("0") and len(seen) == 1
        assert store.of_prompt("long") and store._cache.num_bytes == 0, "larger than all of it"


def test_the_least_recently_used_goes_first() -> None:
    cache: ByteBoundedCache[int] = ByteBoundedCache(30)
    for key, value in (("a", 1), ("b", 2), ("c", 3)):
        cache.put(key, value, 10)
    assert cache.get("a") == 1
    cache.put("d", 4, 10)
    assert [cache.get(key) for key in "abcd"] == [1, None, 3, 4] and cache.num_bytes == 30
    cache.put("a", 5, 1)
    cache.drop("c")
    assert (cache.get("a"), cache.num_bytes) == (5, 11)


# ---- taking over from another run


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if not file.name.endswith("-shm")}


def test_warm_from_a_history(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / "old" / FILE) as old:
        old.add([past("a", step) for step in range(1, 7)])
        old.add([past("b", 7, None, 300), past("c", 8, length=0)])
    before = contents(tmp_path / "old")
    with HistoryStore(tmp_path / "new" / FILE, keep_per_prompt=4) as store:
        for _ in range(2):  # a second time changes nothing
            store.warm_from(tmp_path / "old")
            assert [(one.step, tuple(one.token_ids)) for one in store.of_prompt("a")] == [
                (step - 8, tuple(range(step, step + 3))) for step in (6, 5, 4, 3)
            ]
            assert store.of_prompt("b") == (PastRollout("b", tuple(range(7, 307)), None, -1, 7, 8),)
            assert (steps(store, "c"), store.num_rollouts) == ([0], 6)
        store.add([past("a", 1)])
        store.forget_after(1)
        assert steps(store, "a") == [1, -2, -3, -4], "its own come after what was taken over"
        store.forget_after(0)
        assert steps(store, "a") == [-2, -3, -4]
    assert contents(tmp_path / "old") == before and list(before) == [FILE]


def test_warm_from_a_killed_run(tmp_path: Path) -> None:
    last = write_until_killed(tmp_path / "old" / FILE, 5)
    before = contents(tmp_path / "old")
    assert f"{FILE}-wal" in before
    with HistoryStore(tmp_path / FILE) as store:
        store.warm_from(str(tmp_path / "old"))
        assert all(len(store.of_prompt(f"{step}-7")) == 4 for step in range(1, last + 1))
    assert contents(tmp_path / "old") == before


def test_warm_from_a_run_store(tmp_path: Path) -> None:
    def made(uid: str, tokens: tuple[int, ...], version: int) -> Rollout:
        request = Request(uid, uid.rpartition("/")[0], (1, 2), 7, SamplingParams())
        return Rollout(request, tokens, (-0.5,) * len(tokens), "stop", version, version + 1)

    with RunStore(tmp_path / "old") as old:
        for step in range(1, 12):
            group = f"{step}/0"
            right = Scored(made(f"{group}/0", (step, 70_000), step), "text", 0.5, {"task": 0.5})
            lost = Unscored(made(f"{group}/1", (step,), step), "text", "timeout", "10 s")
            old.add_rollouts(step, "train", "train", {group: ("key", "text")}, [right, lost])
            held_out = Scored(made(f"eval/{group}/0", (9,), step), "text", 1.0, {})
            old.add_rollouts(step, "eval", "eval", {f"eval/{group}": ("held out", "text")}, [held_out])
    before = contents(tmp_path / "old")
    with HistoryStore(tmp_path / "new" / FILE, keep_per_prompt=3) as store:
        store.warm_from(tmp_path / "old")
        assert store.of_prompt("key") == (
            PastRollout("key", (11,), None, 0, 11, 12),
            PastRollout("key", (11, 70_000), 0.5, 0, 11, 12),
            PastRollout("key", (10,), None, -1, 10, 11),
        )
        assert (store.num_rollouts, store.num_prompts) == (3, 1)
    assert contents(tmp_path / "old") == before


def test_warm_from_a_live_run_keeps_the_disk_bounded(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / "old" / FILE) as old, HistoryStore(tmp_path / FILE, disk_bytes=200_000) as store:
        keys = [f"{n:03}" for n in reversed(range(400))]
        old.add([past(key, 5, length=900) for key in keys])
        store.warm_from(tmp_path / "old")
        assert 100_000 < store.num_bytes <= 200_000
        assert [key for key in keys if store.of_prompt(key)] == keys[-store.num_prompts :], "the old go first here too"


def test_warm_from_a_folder_that_is_no_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    with HistoryStore(run / FILE) as own:
        own.add([past("a")])
        for wrong in (tmp_path / "runs", run / FILE, run / "checkpoints"):
            with pytest.raises(ValueError, match=rf"neither history\.db nor run\.db; write {run}$"):
                own.warm_from(wrong)
        with pytest.raises(ValueError, match="write the folder of a run"):
            own.warm_from(tmp_path / "nowhere" / "at all")
        with pytest.raises(ValueError, match="own history; write the folder of another"):
            own.warm_from(run)
        assert own.num_rollouts == 1


# ---- the file


def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / "old" / FILE) as store:
        store._connection.execute("PRAGMA user_version = 99")
    with pytest.raises(HistoryStoreError, match=r"old/history\.db: .*schema 99, .* reads 1; use the version"):
        HistoryStore(tmp_path / "old" / FILE)
    with HistoryStore(tmp_path / FILE) as store:
        store.add([past("a", -1)])
        with pytest.raises(HistoryStoreError, match=r"old/history\.db: .*schema 99"):
            store.warm_from(tmp_path / "old")
        assert steps(store, "a") == [-1]


def test_files_that_are_no_history(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / FILE).write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(HistoryStoreError, match=r"old/history\.db: file is not a database; check"):
        HistoryStore(tmp_path / "old" / FILE)
    with HistoryStore(tmp_path / FILE) as store:
        with pytest.raises(HistoryStoreError, match=r"old/history\.db: file is not a database"):
            store.warm_from(tmp_path / "old")
        store.add([past("a")])
        assert store.num_rollouts == 1


def test_a_person_can_read_it(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / FILE) as store:
        store.add([past("a", 1, 0.0), past("b", 1, None, 5), past("a", 2, 1.0, 4)])
        with sqlite3.connect(tmp_path / FILE) as shell:
            rows = shell.execute("SELECT * FROM readable ORDER BY key, age_rank")
            assert [column[0] for column in rows.description] == [
                *("key", "step", "length", "reward", "first_version", "last_version", "age_rank")
            ]
            assert rows.fetchall() == [("a", 2, 4, 1.0, 2, 3, 1), ("a", 1, 3, 0.0, 1, 2, 2), ("b", 1, 5, None, 1, 2, 1)]
        shell.close()
