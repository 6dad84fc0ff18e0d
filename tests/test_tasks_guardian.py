"""Graders that start processes, print much or end at a bad moment: nothing of it outlives or holds up the run."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_tasks_grading import FUNCTIONS, drain, grade, item, needs_proc, summary, wait_until

from slipstream.config import Reward, RewardFunction
from slipstream.runtime.machine import check_machine
from slipstream.tasks import guardian
from slipstream.tasks.grading import Grader
from slipstream.types import Unscored

HOSTILE = Path(__file__).parent / "data" / "hostile_graders.py"


def hostile(name: str, **settings: Any) -> Reward:
    return Reward(functions=(RewardFunction(function=f"{HOSTILE}:{name}"),), **settings)


def running(word: str) -> list[int]:
    """Processes, but zombies, with the word in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if word.encode() in command:
                found.append(int(folder.name))
    return found


@pytest.fixture
def word(tmp_path: Path) -> Iterator[str]:
    """In the command lines of what a test's graders start, which it must not leave behind."""
    word = f"{tmp_path}/{uuid.uuid4().hex}"
    yield word
    for pid in running(word):
        os.kill(pid, signal.SIGKILL)


def has_begun(word: str) -> bool:
    return Path(f"{word}.begun").exists()


def is_clean(word: str) -> bool:
    return wait_until(lambda: not running(word), 20)


@needs_proc
@pytest.mark.parametrize("end", ["timeout", "death", "close"])
def test_what_a_grader_starts_ends_with_it(word: str, end: str) -> None:
    then = {"timeout": "hang", "death": "die", "close": "return"}[end]
    with Grader(hostile("starts_processes", timeout_s=3 if end == "timeout" else 60)) as grader:
        (result,) = summary(drain(grader, [item(f"{word} {then}")]))
        assert result == {"timeout": "timeout", "death": "died", "close": 1.0}[end]
        if end == "close":
            assert len(running(word)) >= 6, "while the grader lives they may"
            grader.close()
            assert not running(word)
        assert is_clean(word)


SCRIPT = """
import signal, sys, time
sys.path.append({tests!r})
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    from test_tasks_guardian import Grader, hostile, item
    with Grader(hostile("starts_processes", timeout_s=60)) as grader:
        grader.submit(0, [item({word!r} + " hang")])
        time.sleep(60)
"""


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_what_graders_start_ends_with_the_run(tmp_path: Path, word: str, number: signal.Signals) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), word=word))
    run = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: has_begun(word), 60)
        run.send_signal(number)
        run.wait(30)
    finally:
        run.kill()
        run.wait()
    assert is_clean(word)


@needs_proc
def test_what_a_grader_starts_ends_although_its_guardian_was_killed(word: str) -> None:
    with Grader(hostile("starts_processes", timeout_s=60)) as grader:
        grader.submit(0, [item(f"{word} hang")])
        assert wait_until(lambda: has_begun(word), 60)
        os.kill(int(Path(f"{word}.begun").read_text()), signal.SIGKILL)
        assert summary(grader.poll(wait_s=60)[0][1]) == ["died"]
        assert is_clean(word)
        assert summary(drain(grader, [item(f"{word} return")])) == [1.0]


@needs_proc
def test_a_process_that_never_stands_still_is_caught(tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    with Grader(hostile("never_stands_still")) as grader:
        assert summary(drain(grader, [item(str(steps))])) == [1.0]
        num_steps = steps.stat().st_size
        assert wait_until(lambda: steps.stat().st_size > num_steps, 10), "while the grader lives it may"
    num_steps = steps.stat().st_size
    assert not wait_until(lambda: steps.stat().st_size > num_steps, 0.5)


@needs_proc
@pytest.mark.parametrize("listing", ["proc", "ps"])
def test_without_a_subreaper_they_are_found_by_parent_group_and_environment(
    tmp_path: Path, word: str, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    elsewhere = tmp_path / "guardian.py"
    source = Path(guardian.__file__).read_text()
    numbers = "_PR_GET_CHILD_SUBREAPER = 1, 36, 37"
    assert numbers in source and "/proc/self/stat" in source
    source = source.replace(numbers, "_PR_GET_CHILD_SUBREAPER = 9901, 9902, 9903")
    elsewhere.write_text(source.replace("/proc/self/stat", "/nowhere") if listing == "ps" else source)
    monkeypatch.setattr(guardian, "__file__", str(elsewhere))
    with Grader(hostile("starts_processes", timeout_s=3)) as grader:
        assert summary(drain(grader, [item(f"{word} hang")])) == ["timeout"]
        assert is_clean(word)


def test_check_says_how_graders_processes_are_ended() -> None:
    assert check_machine().facts["graders"] == guardian.containment()
    if sys.platform == "linux":
        assert "subreaper" in guardian.containment() and "may be missed" not in guardian.containment()


def test_a_flood_of_output_is_cut_and_it_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    num_calls, err = 1, ""
    with Grader(hostile("prints")) as grader:
        assert summary(grade(grader, "50000000")) == [1.0]
        while "what it prints from here on is not shown" not in err and num_calls < 500:
            assert summary(grade(grader, "20000")) == [1.0]
            num_calls += 1
            err += capfd.readouterr().err
    out, rest = capfd.readouterr()
    err += rest
    assert out == "" and len(err) < 80_000 and "what it prints from here on is not shown" in err
    counted = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes that it printed are not", err)]
    shown = re.sub(r"\n\[grader 0: .*\]\n", "", err)
    printed = 50_000_001 + (num_calls - 1) * 20_001
    assert len(shown) + sum(counted) == printed and len(shown) == 65536


def test_a_grader_that_floods_again_and_again_has_one_allowance(capfd: pytest.CaptureFixture[str]) -> None:
    """A grader that is replaced does not begin anew."""
    with Grader(hostile("prints")) as grader:
        for _ in range(8):
            assert summary(grade(grader, *["9000"] * 2, "nothing")) == [1.0, 1.0, "raised"]
    assert len(capfd.readouterr().err) < 70_000


def test_a_long_exception_text_is_cut_and_it_is_said() -> None:
    with Grader(hostile("raises_much")) as grader:
        (result,) = grade(grader, "1000000")
    assert isinstance(result, Unscored) and len(result.detail) < 5000
    assert "it begins xxx" in result.detail and result.detail.endswith("and it ends\n")
    assert "characters are cut here" in result.detail and "1,000," in result.detail


@pytest.mark.parametrize("how", ["half", "nonsense", "closed", "fork"])
def test_a_grader_that_breaks_its_own_channel_holds_up_nobody(how: str) -> None:
    functions = (*hostile("breaks_its_channel").functions, RewardFunction(function=f"{FUNCTIONS}:always_half"))
    with Grader(Reward(functions=functions, timeout_s=30)) as grader:
        expected = {"fork": [1.5], "closed": ["died"], "half": ["died"], "nonsense": ["died"]}[how]
        assert summary(grade(grader, how)) == expected
        assert summary(grade(grader, "fine")) == [1.5]


def test_a_grader_killed_at_any_moment_of_its_answer_holds_up_nobody() -> None:
    draw = random.Random(7)
    with Grader(hostile("is_killed_after", timeout_s=600, workers=2)) as grader:
        for token in range(6):
            grader.submit(token, [item(str(draw.uniform(100, 400)))])
        while grader.num_pending:
            ended = grader.poll(wait_s=60)
            assert ended, "a killed grader holds up the others"
            assert all(summary(results) in (["died"], ["raised"]) for _, results in ended)
    with Grader(hostile("is_killed_soon", timeout_s=600, workers=2)) as grader:
        for token in range(12):
            grader.submit(token, [item(str(draw.uniform(0, 3)))])
            grader.submit(-1, [item("fine")])
        while grader.num_pending:
            ended = grader.poll(wait_s=60)
            assert ended, "a killed grader holds up the others"
            assert all(summary(results) in (["died"], [1.0]) for _, results in ended)


def test_a_grader_that_is_stopped_is_a_timeout() -> None:
    with Grader(hostile("is_killed_soon", timeout_s=2)) as grader:
        assert summary(grade(grader, "fine")) == [1.0]
        (pid,) = grader.pids
        os.kill(pid, signal.SIGSTOP)
        assert summary(grade(grader, "fine")) == ["timeout"]
        assert wait_until(lambda: grader.pids != [pid], 30)
        assert summary(grade(grader, "fine")) == [1.0]
