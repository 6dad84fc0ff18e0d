from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import Reward, RewardFunction, TaskSet
from slipstream.tasks import grading
from slipstream.tasks.grading import Grader, TooManyFaults, check_faults
from slipstream.tasks.sources import load_problems
from slipstream.types import Problem, Request, Rollout, SamplingParams, Scored, Unscored

FUNCTIONS = Path(__file__).parent / "data" / "reward_functions.py"
Item = tuple[Problem, Rollout, str]
TIMEOUT_S = 2.0
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states in /proc")


def item(text: str, problem: Problem | None = None, **columns: Any) -> Item:
    problem = problem or Problem("train/0", 0, ({"role": "user", "content": "ask"},), columns)
    request = Request(f"0/0/{text}", "0/0", (1, 2), 3, SamplingParams())
    return problem, Rollout(request, tuple(range(len(text))), (0.0,) * len(text), "stop", 0, 0), text


def reward(*functions: str, **settings: Any) -> Reward:
    made = tuple(RewardFunction(function=f if f in ("task", "math_verify") else f"{FUNCTIONS}:{f}") for f in functions)
    return Reward(functions=made, **settings)


def grade(grader: Grader, *texts: str, **columns: Any) -> list[Scored | Unscored]:
    return drain(grader, [item(text, **columns) for text in texts])


def drain(grader: Grader, items: list[Item]) -> list[Scored | Unscored]:
    grader.submit("token", items)
    ((token, results),) = grader.poll(wait_s=40)
    assert token == "token" and grader.num_pending == 0
    assert [(result.rollout, result.text) for result in results] == [(rollout, text) for _, rollout, text in items]
    return results


def summary(results: list[Scored | Unscored]) -> list[float | str]:
    return [result.reward if isinstance(result, Scored) else result.kind for result in results]


@pytest.fixture(scope="module")
def by_text() -> Iterator[Grader]:
    with Grader(reward("by_text", timeout_s=TIMEOUT_S)) as grader:
        yield grader


@pytest.mark.parametrize(
    ("texts", "expected", "detail"),
    [
        (["a", "b"], [1.0, 1.0], ""),
        (["true"], [1.0], ""),
        (["a", "raise", "b"], [1.0, "raised", 1.0], "RuntimeError: planted error"),
        (["sys.exit", "a"], ["raised", 1.0], "SystemExit"),
        (["a", "nan", "inf", "text"], [1.0, *["not_a_number"] * 3], "returned nan"),
        (["none", "a"], ["no_score", 1.0], "no reward function applies"),
        (["a", "short"], ["raised", "raised"], "returned 1 values for 2 samples"),
        (["hang", "a"], ["timeout", "timeout"], "reward.timeout_s = 2 s"),
        (["exit", "a"], ["died", 1.0], "exit code 0"),
        (["kill"], ["died"], "exit code -9"),
        (["memory", "a"], ["raised", 1.0], "a call may take 4 GiB"),
        ([], [], ""),
    ],
)
def test_faults_have_their_kind_and_the_pool_goes_on(
    by_text: Grader, texts: list[str], expected: list[float | str], detail: str
) -> None:
    results = grade(by_text, *texts)
    assert summary(results) == expected
    faults = [result for result in results if isinstance(result, Unscored)]
    assert not faults or (detail in faults[0].detail and faults[0].detail.startswith("by_text"))
    assert summary(grade(by_text, "fine")) == [1.0]


def test_a_fault_takes_no_other_group(by_text: Grader) -> None:
    for token, texts in enumerate((["kill"], ["a", "b"], ["hang"], ["raise"], ["c"])):
        by_text.submit(token, [item(text) for text in texts])
    found: dict[Any, list[float | str]] = {}
    assert by_text.num_pending == 5
    while by_text.num_pending:
        found.update({token: summary(results) for token, results in by_text.poll(wait_s=20)})
    assert found == {0: ["died"], 1: [1.0, 1.0], 2: ["timeout"], 3: ["raised"], 4: [1.0]}


def test_a_worker_killed_while_idle_is_replaced(by_text: Grader) -> None:
    assert summary(grade(by_text, "a")) == [1.0]
    (worker,) = by_text.pids
    os.kill(worker, signal.SIGKILL)
    time.sleep(0.5)
    assert summary(grade(by_text, "a", "raise")) == [1.0, "raised"]


def test_poll_does_not_wait_unless_asked(by_text: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    by_text.submit(0, [item("hang")])
    with monkeypatch.context() as patch:
        patch.setattr(grading, "wait", lambda *_, **__: pytest.fail("it waits"))
        assert by_text.poll() == []
    assert by_text.poll(wait_s=20)[0][0] == 0


def test_closing_drops_what_is_pending_and_may_be_repeated() -> None:
    grader = Grader(reward("by_text"))
    grader.submit(0, [item("hang")])
    grader.close()
    grader.close()
    assert grader.num_pending == 0 and grader.poll(wait_s=1) == []


def test_what_a_reward_prints_does_not_reach_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with Grader(reward("by_text")) as grader:
        assert summary(grade(grader, "print")) == [1.0]
    out, err = capfd.readouterr()
    assert "printed by a reward" in err and out == ""


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(holds: Callable[[], bool], limit_s: float) -> bool:
    until_s = time.monotonic() + limit_s
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.05)
    return holds()


@needs_proc
@pytest.mark.parametrize("end", ["timeout", "close"])
def test_a_worker_takes_its_subprocesses_with_it(tmp_path: Path, end: str) -> None:
    pids = tmp_path / "pids"
    with Grader(reward("hangs_with_a_child", timeout_s=1 if end == "timeout" else 60)) as grader:
        grader.submit(0, [item(f"python {pids}")])
        assert wait_until(pids.exists, 40)
        if end == "timeout":
            assert summary(grader.poll(wait_s=40)[0][1]) == ["timeout"]
        else:
            grader.close()
        worker, child = map(int, pids.read_text().split())
        assert wait_until(lambda: not is_running(worker) and not is_running(child), 5)


@needs_proc
@pytest.mark.parametrize("where", ["python", "c"])
def test_a_hung_worker_does_not_outlive_a_killed_parent(tmp_path: Path, where: str) -> None:
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(
        "import sys, time\n"
        f"sys.path.append({str(Path(__file__).parent)!r})\n"
        'if __name__ == "__main__":\n'
        "    from slipstream.tasks import grading\n"
        "    from test_tasks_grading import item, reward\n"
        "    grader = grading.Grader(reward('hangs_with_a_child', timeout_s=60))\n"
        f"    grader.submit(0, [item('{where} {pids}')])\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)])
    try:
        assert wait_until(pids.exists, 50)
    finally:
        parent.kill()
        parent.wait()
    worker, child = map(int, pids.read_text().split())
    try:
        assert wait_until(lambda: not is_running(worker), 10)
        assert wait_until(lambda: not is_running(child), 10)
    finally:
        for pid in filter(is_running, (worker, child)):
            os.kill(pid, signal.SIGKILL)


def run_script(*command: str, **settings: Any) -> str:
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=90, **settings)
    return ended.stdout + ended.stderr


def test_a_script_without_a_guard_is_told_to_write_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
        "from test_tasks_grading import Grader, item, reward\n"
        "with Grader(reward('length')) as grader:\n"
        "    grader.submit(0, [item('a')])\n"
        "    print('parent:', grader.poll(wait_s=80)[0][1][0].kind)\n"
    )
    said = run_script(str(script))
    assert "parent: died" in said and "ValueError: this script" in said and 'if __name__ == "__main__":\n' in said


def test_a_script_from_stdin_is_refused() -> None:
    script = (
        "from slipstream.config import Reward\nfrom slipstream.tasks.grading import Grader\n"
        'if __name__ == "__main__":\n    Grader(Reward()).close()\n'
    )
    said = run_script("-", input=script)
    assert "ValueError" in said and "Save the script to a file" in said


def test_several_functions_make_one_weighted_sum() -> None:
    half = tuple(function.model_copy(update={"weight": 0.5}) for function in reward("length").functions)
    functions = (*half, *reward("only_b", "compute_score", "num_torch_modules", "slow_is_fine").functions)
    with Grader(Reward(functions=functions)) as grader:
        good, other, bad = grade(grader, "b", "ccc", "bad", data_source="mine", answer="b")
    assert isinstance(good, Scored) and good.reward == 0.5 + 1 + 1 + 0 + 1
    parts = {"length": 1.0, "only_b": 1.0, "compute_score": 1.0, "num_torch_modules": 0.0, "slow_is_fine": 1.0}
    assert good.parts == parts, "num_torch_modules counts what a worker should never import"
    assert isinstance(other, Scored) and other.reward == 1.5 and "only_b" not in other.parts
    assert isinstance(bad, Unscored) and bad.kind == "raised" and "cannot judge bad" in bad.detail


def test_built_in_verifiers_are_imported_before_the_clock_runs() -> None:
    problems = load_problems(TaskSet(source="reasoning_gym/chain_sum", size=1), "train/0")
    problems += load_problems(TaskSet(source="gcd", size=1), "train/1")
    with Grader(reward("verifiers_imported", "task", "math_verify"), problems) as grader:
        right = [item(f"#### {problem.columns['answer']}", problem) for problem in problems]
        wrong = [item("#### 123456789", problem) for problem in problems]
        assert summary(drain(grader, right)) == [3.0, 3.0]
        assert all(isinstance(value, float) and value < 1.1 for value in summary(drain(grader, wrong)))


def test_a_reward_that_does_not_fit_is_refused_before_a_process_starts() -> None:
    with pytest.raises(ValueError, match="cannot judge problem 0 of train/0"):
        Grader(reward("task"), [item("a")[0]])


def test_too_many_faults() -> None:
    rollout = item("a")[1]
    good = [Scored(rollout, "a", 1.0, {})] * 8
    bad = [Unscored(rollout, "a", "raised", "Traceback: one"), Unscored(rollout, "a", "timeout", "two")]
    check_faults([*good, *bad], 0.2)
    check_faults([], 0.0)
    check_faults(good, 0.0)
    with pytest.raises(TooManyFaults, match=r"2 of 10 samples \(20%\).*allows 10%.*1 raised, 1 timeout.*one") as caught:
        check_faults([*good, *bad], 0.1)
    assert "two" not in str(caught.value)
