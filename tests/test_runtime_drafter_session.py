"""What becomes of a round when processes die, hang, fail or are called away: the others' goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from drafter_fakes import fake_worker

from slipstream.runtime.drafter_session import SHARES_FOLDER, DrafterSession
from slipstream.schedule.coordinator import Coordinator
from slipstream.schedule.events import (
    EndSession,
    Item,
    Lend,
    LessonsAdded,
    Publish,
    Recall,
    RoundDone,
    StopTraining,
    TrainRound,
    WorkerLeft,
)

SOON_S = 60.0


class Told(DrafterSession):
    """Of fake workers, with all that was said."""

    def __init__(self, folder: Path, habits: dict[str, dict[str, str]], **settings: Any) -> None:
        self.said = list[Item]()
        self.pids = dict[str, int]()
        coordinator = Coordinator(least_lessons=10)
        super().__init__(folder, updates=4, record=self.said.append, coordinator=coordinator, **settings)
        for name, habit in habits.items():
            self.pids[name] = self.start(name, fake_worker, habit)
        self.wait_until(lambda: len(self.here) == len(habits), SOON_S, "all have started")
        del self.said[:]

    def lend(self, *names: str) -> None:
        for name in names:
            self.tell(Lend(name))
        self.tell(LessonsAdded(10))

    def until(self, item: Item) -> None:
        self.wait_until(lambda: item in self.said, SOON_S, f"{item}")

    def about(self, version: int) -> str:
        return (self.folder / f"{version:06d}" / "about").read_text()


def test_a_session_from_beginning_to_end(tmp_path: Path) -> None:
    with Told(tmp_path, {"a": {}, "b": {"train": "idle"}, "c": {}}) as session:
        session.lend("b", "a")
        session.until(EndSession(1))
        assert session.said == [
            *(Lend("b"), Lend("a"), LessonsAdded(10), TrainRound(1, "b", ("b", "a"))),
            *(RoundDone(1), Publish(1, "b"), EndSession(1)),
        ]
        assert session.version == 1 and session.about(1) == "b averaged a:4", "b had nothing to learn from"
        session.wait_until(lambda: set(session.here.values()) == {1}, SOON_S, "all draft with it")
        session.give("c", "work")
        session.wait_until(lambda: session.take_results() == [("c", ("c", "work"))], SOON_S, "it samples")
        with pytest.raises(AssertionError, match="recall it first"):
            session.give("a", "work")
        with pytest.raises(TimeoutError, match=r"a miracle: not within 0 s; version 1, awaited of nobody"):
            session.wait_until(lambda: False, 0.0, "a miracle")
        processes = [worker.process for worker in session._workers.values()]
    assert len(processes) == 3 and all(process.exitcode == 0 for process in processes), "they end by themselves"
    assert not (tmp_path / SHARES_FOLDER).exists()


@pytest.mark.parametrize("who", ["a", "b"])
@pytest.mark.parametrize(("habit", "counts"), [("die", False), ("die after", True), ("fail", False)])
def test_who_dies_or_fails_in_a_round_costs_no_more_than_its_own_updates(
    tmp_path: Path, who: str, habit: str, counts: bool
) -> None:
    """Of a and b the one does, the other is called away, and c is left; a leads as long as it is there."""
    other = "b" if who == "a" else "a"
    with Told(tmp_path, {who: {"train": habit}, other: {"train": "linger"}, "c": {}}) as session:
        session.lend("a", "b", "c")
        if habit == "fail":
            with pytest.warns(UserWarning, match=f"{who} goes on without.*out of memory"):
                session.wait_until(lambda: bool(session._round and session._round.failed), SOON_S, "it has failed")
        else:
            session.until(WorkerLeft(who))
            assert who not in session.here
        session.tell(Recall(other))
        session.until(EndSession(1))
        shares = " ".join([f"{who}:4"] * counts + ["c:4"])
        assert session.version == 1 and session.about(1) == f"c averaged {shares}"
        session.wait_until(lambda: not session._workers[other].awaited, SOON_S, "it has stopped")
        assert session._workers[other].num_given_up == 3


def test_the_next_averages_if_the_leader_dies_or_fails_at_it(tmp_path: Path) -> None:
    dies, fails = {"average": "die"}, {"average": "fail"}
    with Told(tmp_path, {"a": dies, "b": fails, "c": {"average": "die after"}, "d": {}}) as session:
        with pytest.warns(UserWarning, match="b goes on without"):
            session.lend("a", "b", "c", "d")
            session.until(EndSession(1))
        assert session.said[4:10] == [
            *(LessonsAdded(10), TrainRound(1, "a", ("a", "b", "c", "d"))),
            *(WorkerLeft("a"), RoundDone(1), Publish(1, "b"), EndSession(1)),
        ]
        assert session.about(session.version) == "c averaged a:4 b:4 c:4 d:4", "also what is the dead one's"
        session.until(WorkerLeft("c"))
        session.tell(LessonsAdded(10))
        with pytest.warns(UserWarning, match="b goes on without"):
            session.until(EndSession(2))
        assert session.about(session.version) == "d averaged b:4 d:4"


def test_if_nobody_can_nothing_is_published_and_nothing_hangs(tmp_path: Path) -> None:
    fails = {"train": "fail"}
    with Told(tmp_path, {"a": fails, "b": fails}) as session, pytest.warns(UserWarning):
        session.lend("a", "b")
        session.until(EndSession(1))
        assert session.version == 0 and session.coordinator.idle == ("a", "b")
        os.kill(session.pids["a"], signal.SIGKILL)
        os.kill(session.pids["b"], signal.SIGKILL)
        session.until(WorkerLeft("a"))
        session.until(WorkerLeft("b"))
        assert session.coordinator.idle == () == tuple(session.here)


def test_all_are_called_away(tmp_path: Path) -> None:
    lingers = {"train": "linger"}
    with Told(tmp_path, {"a": lingers, "b": lingers}) as session:
        session.lend("a", "b")
        session.tell(Recall("a"))
        session.tell(Recall("b"))
        session.give("a", "work")
        assert session.said[-5:] == [Recall("a"), StopTraining("a"), Recall("b"), StopTraining("b"), EndSession(1)]
        session.wait_until(lambda: session.take_results() == [("a", ("a", "work"))], SOON_S, "a samples")
        session.wait_until(lambda: not session._workers["b"].awaited, SOON_S, "b has stopped")
        assert [worker.num_given_up for worker in session._workers.values()] == [3, 3] and session.version == 0
        session.tell(Lend("b"))
        session.until(TrainRound(2, "b", ("b",)))


@pytest.mark.parametrize(
    ("what", "habit"),
    [("start", {}), ("round", {"train": "sleep"}), ("average", {"average": "sleep"}), ("stop", {"train": "sleep"})],
)
def test_who_does_not_answer_is_ended_and_the_others_go_on(tmp_path: Path, what: str, habit: dict[str, str]) -> None:
    with Told(tmp_path, {"a": habit, "b": {}}) as session:
        if what == "start":
            session.start("z", fake_worker, {"start": "sleep"})
        else:
            session.lend("a", "b")
        if what == "stop":
            session.tell(Recall("a"))
        late = session._workers["z" if what == "start" else "a"]
        session.wait_until(lambda: what in late.awaited and not session._workers["b"].awaited, SOON_S, "only a is late")
        session._limits_s[what] = 7.0
        late.awaited[what] = time.monotonic()
        with pytest.warns(UserWarning, match=rf"is ended: no answer about {what} within 7 s; version ., awaited of ."):
            session.until(WorkerLeft(late.process.name))
        assert not late.process.is_alive()
        if what != "start":
            session.until(EndSession(1))
            assert session.about(session.version) == f"b averaged {'a:4 ' if what == 'average' else ''}b:4"


DRIVER = """
import sys, time
from pathlib import Path
from drafter_fakes import fake_worker
from slipstream.runtime.drafter_session import DrafterSession
from slipstream.schedule.events import Lend
if __name__ == "__main__":
    session = DrafterSession(Path(sys.argv[1]))
    pids = [session.start(name, fake_worker) for name in "ab"]
    session.wait_until(lambda: len(session.here) == 2, 60.0, "start")
    print(*pids, flush=True)
    time.sleep(1000)
"""


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_no_process_outlives_the_driver(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    environment = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, env=environment
    ) as driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_there, pids))
        driver.kill()
    end_s = time.monotonic() + SOON_S
    while any(map(is_there, pids)) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not any(map(is_there, pids))
