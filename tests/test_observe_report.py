"""The report: what it shows, what it leaves out, and that a rollout cannot put markup into it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from slipstream.config import build_config, dump_config
from slipstream.observe import figures
from slipstream.observe.ledger import Entry
from slipstream.observe.metrics import evaluation_metrics, rollout_metrics
from slipstream.observe.report import pick_samples, some_rollouts, wall_time_s, write_report
from slipstream.observe.store import RunStore
from slipstream.types import Request, Rollout, SamplingParams, Scored, Unscored

EVIL = "<script>alert('x')</script> & <b>bold</b>"
PLOTLY = re.compile(r"<script>\s*/\*\*.*?</script>", re.DOTALL)


def scored(uid: str, reward: float, text: str = "ok", length: int = 5) -> Scored:
    request = Request(uid, uid.rpartition("/")[0], (1,), 7, SamplingParams())
    made = Rollout(request, (3,) * length, (-1.0,) * length, "stop", 1, 1)
    return Scored(made, text, reward, {"task": reward})


def make_run(folder: Path, steps: int = 6) -> Path:
    tree = {
        "model": "tiny",
        "run": {"dir": str(folder)},
        "tasks": {"train": [{"source": "collatz", "size": 50}], "eval": {"heldout": {"source": "gcd", "size": 9}}},
        "train": {"steps": steps},
        "warmup": {"steps": 17},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(build_config(tree)))
    with RunStore(folder) as store:
        store.add_metrics(0, evaluation_metrics("heldout", [scored("eval/heldout/0/0/0", 0.25)], [], 1))
        for step in range(1, steps + 1):
            group = f"{step}/0"
            good = [scored(f"{group}/{i}", i / 3, f"response {step}.{i}", 5 * step + i) for i in range(4)]
            lost = [Unscored(scored(f"{group}/4", 0, EVIL).rollout, EVIL, "raised", f"Traceback {EVIL}")]
            store.add_rollouts(step, "train", "train/0", {group: ("key", f"question {step} {EVIL}")}, good + lost)
            metrics = rollout_metrics(good, lost, 5)
            metrics |= {"timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "timing_s/step": 3.5, "perf/throughput": 900}
            metrics |= {"actor/entropy": 1.0 / step, "actor/grad_norm": math.nan if step == 2 else 0.5}
            store.add_metrics(step, metrics)
        store.add_metrics(steps, evaluation_metrics("heldout", [scored(f"eval/heldout/{steps}/0/0", 0.75)], [], 1))
    return folder


def test_the_page_shows_the_run(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "my-run"))
    assert path == tmp_path / "my-run" / "report.html"
    html = path.read_text()
    assert "Plotly.newPlot" in html and len(html) > 1_000_000, "plotly.js is inside"
    own = PLOTLY.sub("", html)
    assert len(own) < 200_000
    assert not re.search(r"""(src|href)\s*=\s*["']?http""", own), "nothing is fetched"
    for words in ("my-run", "tiny", "collatz", "heldout (gcd)", "6 of 6", "21s", "17 supervised steps"):
        assert words in own, words
    assert "16 prompts x 8 samples = 128" in own, "the arithmetic"
    assert "0.250 (step 0)" in own and "0.750 (step 6)" in own, "evaluation before and after"
    for step in (1, 4, 6):
        assert f"Step {step}<" in own and f"response {step}.3" in own and f"response {step}.0" in own
    assert "response 2." not in own
    assert "save_every: 10" in own, "the config"
    assert "rollout 57 %, training 29 %" in own
    assert own.count('class="plot"') == 10
    missing = re.search(r"Not measured in this run: (.*?)\.<", own)
    assert "samples whose advantage is not zero" in own
    assert missing and missing[1] == "actor/pg_loss, actor/clipfrac, mismatch_kl"


def test_text_from_a_run_is_escaped(tmp_path: Path) -> None:
    own = PLOTLY.sub("", write_report(make_run(tmp_path / "run")).read_text())
    assert "<script>alert" not in own and "<b>bold" not in own
    assert own.count("&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;") >= 9, "prompt, response and fault are there"


def test_a_metric_name_cannot_end_the_script(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with RunStore(run) as store:
        store.add_metrics(1, {"reward/</script><b>/mean": 1.0, "reward/b/mean": 1.0})
    own = PLOTLY.sub("", write_report(run).read_text())
    data = re.findall(r'<script type="application/json">(.*?)</script>', own, re.DOTALL)
    assert len(data) == 10 and "</script><b>" in {line["name"] for line in json.loads(data[0])["data"]}


def test_long_text_is_folded(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        store.add_rollouts(1, "train", "s", {"1/0": ("k", "q")}, [scored("1/0/0", 1.0, "word " * 500)])
    html = write_report(tmp_path).read_text()
    assert "show all 2,500 characters" in html and "word " * 500 in html


def test_of_a_very_long_text_the_beginning_is_in_the_page(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        store.add_rollouts(1, "train", "s", {"1/0": ("k", "q")}, [scored("1/0/0", 1.0, "word " * 50_000)])
    html = PLOTLY.sub("", write_report(tmp_path).read_text())
    assert "show 100,000 of 250,000 characters; the others are in run.db only" in html and len(html) < 150_000


def test_zero_steps_still_gives_a_page(tmp_path: Path) -> None:
    RunStore(tmp_path).close()
    html = PLOTLY.sub("", write_report(tmp_path).read_text())
    for words in ("No readable config.yaml", "No reward/mean yet", "no evaluation", "No training rollouts", "none yet"):
        assert words in html, words
    assert 'class="plot"' not in html


def test_report_while_the_run_is_writing(tmp_path: Path) -> None:
    make_run(tmp_path)
    with RunStore(tmp_path) as writer:
        writer.add_metrics(7, {"reward/mean": 0.5})
        assert "7 of 6" in write_report(tmp_path).read_text()


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a run folder.*run\.db"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def seconds_of(folder: Path, metrics: dict[str, dict[int, float]]) -> float:
    with RunStore(folder) as store:
        for name, series in metrics.items():
            for step, value in series.items():
                store.add_metrics(step, {name: value})
        return wall_time_s(store)


def test_wall_time_counts_each_second_once(tmp_path: Path) -> None:
    metrics = {"timing_s/step": {1: 5.0, 2: 6.0}, "timing_s/gen": {1: 4.0, 2: 4.0}, "timing_s/eval": {0: 3.0, 2: 1.0}}
    assert seconds_of(tmp_path, metrics) == 14.0


def test_wall_time_counts_the_warm_start_and_checkpoints(tmp_path: Path) -> None:
    metrics = {"timing_s/step": {1: 5.0, 2: 6.0}, "timing_s/warmup": {0: 7.0}, "timing_s/save": {2: 2.0}}
    assert seconds_of(tmp_path, metrics) == 20.0
    figure = figures.time_stack(metrics | {"timing_s/gen": {1: 5.0, 2: 6.0}})
    assert figure is not None
    assert [(trace["name"], trace["x"]) for trace in figure["data"]] == [
        ("warm start", [0]),
        ("rollout", [1, 2]),
        ("checkpoint", [2]),
    ]


def test_shares_count_the_warm_start_and_checkpoints(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with RunStore(run) as store:
        store.add_metrics(0, {"timing_s/warmup": 6.0})
        store.add_metrics(4, {"timing_s/save": 3.0})
    own = PLOTLY.sub("", write_report(run).read_text())
    assert "warm start 20 %, rollout 40 %, training 20 %, checkpoint 10 %" in own and ">30s<" in own


def test_picks_are_distinct(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        for count in (0, 1, 2, 3, 9):
            items = [scored(f"{count}/0/{i}", i % 5) for i in range(count)]
            store.add_rollouts(count, "train", "s", {f"{count}/0": ("k", "q")}, items)
            picks = pick_samples(store, some_rollouts(store, count))
            assert len({item.uid for _, item in picks}) == len(picks) == min(count, 3)
        assert [(why, item.reward) for why, item in picks] == [("best", 4), ("median", 2), ("worst", 0)]


def test_length_bands_by_hand() -> None:
    figure = figures.length_bands({1: list(range(1, 102))})
    assert figure is not None
    assert [(trace["name"], trace["y"]) for trace in figure["data"]] == [
        ("median", [51.0]),
        ("p90", [91.0]),
        ("p99", [100.0]),
        ("longest", [101.0]),
    ]


def test_time_beyond_the_phases_is_other() -> None:
    figure = figures.time_stack({"timing_s/gen": {1: 2.0}, "timing_s/step": {1: 5.0}})
    assert figure is not None
    assert [(trace["name"], trace["y"]) for trace in figure["data"]] == [("rollout", [2.0]), ("other", [3.0])]


def test_choices_of_drafts_are_told_by_the_sizes_that_are_judged_together(tmp_path: Path) -> None:
    make_run(tmp_path)
    with RunStore(tmp_path) as store:
        for step in range(1, 7):
            store.add_metrics(step, {"rollout/spec_accept_length": 1.5, "rollout/spec_share_history": 0.2})
        chosen = [
            (7, "2 drafts", "2 drafts gives 1.20 times the tokens of off"),
            (5, "2 drafts", "16 drafts is not tried: 0.50 times the tokens of this at best"),
            (1, "off", "4 drafts is not tried: 0.90 times the tokens of this at best"),
        ]
        for batch, strategy, reason in chosen:
            payload = {"batch": batch, "strategy": strategy, "reason": reason}
            store.add_event(1, 0.0, "DraftChosen", payload)
    write_report(tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert "5-8" in html and "2 drafts gives 1.20" in html and "16 drafts is not tried" not in html
    assert "nothing that was tried gives more" in html and "4 drafts is not tried" not in html


def test_the_ledger_is_shown_by_step_and_by_device(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_report(tmp_path)
    assert "Where every device-second went" not in (tmp_path / "report.html").read_text()
    with RunStore(tmp_path) as store:
        for step in (1, 2):
            store.add_ledger(
                [
                    Entry(step, "rollout-0", "decode", 3.0),
                    Entry(step, "rollout-0", "tail wait", 1.0),
                    Entry(step, "trainer", "training", 1.0),
                    Entry(step, "trainer", "idle", 3.0),
                ]
            )
    write_report(tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert "Where every device-second went" in html and "all devices" in html
    for share in ("75.0%", "25.0%", "37.5%", "12.5%"):  # of rollout-0, of trainer, of both
        assert share in html
    assert "while others finish the step" in html and "held-out prompts" not in html
