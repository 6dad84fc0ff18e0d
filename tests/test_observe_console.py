"""Progress on a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest

from slipstream.observe.console import (
    PIPE_COLUMNS,
    Console,
    format_duration,
    format_evaluation,
    format_overall,
    format_step,
)

STEP = {
    "reward/mean": 0.534,
    "reward/unscored": 0.0,
    "response_length/mean": 87.2,
    "response_length/p99": 210.4,
    "perf/throughput": 1234.4,
    "timing_s/gen": 3.14,
    "timing_s/update_actor": 2.0,
    "timing_s/step": 2.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_through(file: io.StringIO, quiet: bool = False) -> str:
    with Console(80, quiet=quiet, file=file) as console:
        console.start_run(["model tiny [not markup]", "a line of more than eighty characters " * 4])
        with console.phase("rollout", 4) as advance:
            for _ in range(4):
                advance(1, tokens=100, running=3)
        with console.phase("warm start", None) as advance:
            advance()
        console.step_line(12, STEP)
        console.eval_line(12, {"eval/heldout/avg@4": 0.5, "eval/heldout/pass@4": 0.75, "reward/mean": 1.0})
        console.note("checkpoint step_12 saved")
    return file.getvalue()


def test_a_pipe_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = run_through(io.StringIO())
    assert text.splitlines() == [
        "model tiny [not markup]",
        "a line of more than eighty characters " * 4,
        "step 12/80  reward 0.534  len 87 (p99 210)  1,234 tok/s  gen 3.1s  train 2.0s  left 2m16s",
        "eval at step 12  heldout: avg@4 0.500  pass@4 0.750",
        "checkpoint step_12 saved",
    ]
    assert "\x1b" not in text and "\r" not in text


def test_a_terminal_gets_bars_and_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    text = run_through(Terminal())
    assert "\x1b[" in text and "step 12/80  reward 0.534" in text and "[not markup]" in text


def test_a_phase_before_the_run_begins_has_its_bar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    file = Terminal()
    with Console(80, file=file) as console:
        with console.phase("checking rows", 40):
            pass
        before = file.getvalue()
        console.start_run(["head"])
        with console.phase("rollout", 4):
            pass
    assert "checking rows" in before and "0/40" in before
    assert "head" in file.getvalue() and "steps" in file.getvalue().removeprefix(before)


def test_a_dumb_terminal_gets_no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in run_through(Terminal())


def test_quiet_is_silent() -> None:
    assert run_through(io.StringIO(), quiet=True) == ""


def test_a_phase_that_fails_gives_its_bar_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    with Console(2, file=Terminal()) as console:
        console.start_run([])
        with pytest.raises(RuntimeError), console.phase("rollout", 3):
            raise RuntimeError
        assert console._bars is not None and [task.description for task in console._bars.tasks] == ["steps"]


def test_missing_metrics_leave_their_words_out() -> None:
    assert format_step(1, 100, {}, None) == "step   1/100"
    assert format_step(3, 3, {"reward/mean": 1.0, "reward/unscored": 2.0}, 9.0) == "step 3/3  reward 1.000  unscored 2"
    assert format_evaluation(0, {"eval/a/b/avg@1": 1.0, "eval/a/b/unscored": 3.0, "eval/c/response_length": 8.5}) == (
        "eval at step 0  a/b: avg@1 1.000  unscored 3 | c: len 8"
    )


def test_step_lines_tell_the_speed_of_generation() -> None:
    both = {"rollout/tokens_per_s": 2000.0, "perf/throughput": 900.0}
    assert format_step(1, 9, both, None) == "step 1/9  2,000 tok/s"
    assert format_step(1, 9, {"perf/throughput": 900.0}, None) == "step 1/9  900 tok/s"


def test_the_overall_bar_tells_reward_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    with Console(80, file=Terminal()) as console:
        console.start_run([])
        console.step_line(12, STEP | {"rollout/tokens_per_s": 5000.0})
        assert console._bars is not None and console._bars.tasks[0].completed == 12
        assert console._bars.tasks[0].fields["facts"] == "reward 0.534  1,234 tok/s  left 2m16s"
    assert format_overall({}, None) == ""


def test_the_total_of_a_phase_may_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    with Console(2, file=Terminal()) as console:
        console.start_run([])
        for total, grown in ((4, 12), (None, None)):
            with console.phase("rollout", total) as advance:
                advance(4, tokens=10)
                advance(0, more_total=8)
                assert console._bars is not None
                task = console._bars.tasks[-1]
                assert (task.completed, task.total) == (4, grown) and "more_total" not in task.fields["facts"]
    with Console(2, file=io.StringIO()) as console, console.phase("rollout", 4) as advance:
        advance(0, more_total=8)


def test_time_left_is_a_median() -> None:
    console = Console(10, file=io.StringIO())
    assert console.time_left_s(0) is None
    for step, seconds in enumerate((2.0, 2.0, 500.0), start=1):
        console.step_line(step, {"timing_s/step": seconds})
    assert console.time_left_s(3) == 14.0
    for step in range(4, 30):
        console.step_line(step, {"timing_s/step": 1.0})
    assert console.time_left_s(9) == 1.0 and console.time_left_s(40) == 0.0


def test_time_left_by_the_clock() -> None:
    now = iter([0.0, 4.0, 8.0])
    console = Console(5, file=io.StringIO(), clock=lambda: next(now))
    console.start_run([])
    console.step_line(1, {})
    console.step_line(2, {})
    assert console.time_left_s(2) == 12.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (130, "2m10s"), (11100, "3h05m"), (187300, "2d04h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def drawn_on(file: io.TextIOBase, quiet: bool = False) -> list[tuple[int, bool]]:
    asked: list[tuple[int, bool]] = []

    def draw(width: int, *, ascii_only: bool) -> list[str]:
        asked.append((width, ascii_only))
        return ["*" if ascii_only else "⠿"]

    with Console(3, quiet=quiet, file=file) as console:  # type: ignore[arg-type]
        console.start_run([])
        console.picture(draw)
    return asked


def test_a_picture_is_drawn_with_what_the_terminal_or_the_pipe_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "57")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert drawn_on(Terminal()) == [(57, False)]
    assert drawn_on(io.StringIO()) == [(PIPE_COLUMNS, False)]
    monkeypatch.setenv("TERM", "linux")
    assert drawn_on(Terminal()) == [(57, True)]
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert drawn_on(narrow) == [(PIPE_COLUMNS, True)]
    narrow.flush()
    assert narrow.buffer.getvalue() == b"*\n"  # type: ignore[attr-defined]
    assert drawn_on(io.StringIO(), quiet=True) == []
