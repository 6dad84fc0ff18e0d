"""`report.html` of a run folder: one self-contained page that opens without a network.

Owns what is shown and in which order, and which rollouts are shown as samples. Reads `run.db` read-only (a run may
still be writing) and `config.yaml`; writes the page atomically. What a run has not measured is left out with a
sentence; a run with no step yet still gives a page. What is read one by one, and the page, stop growing with the run:
the number of points of a curve and of rollouts that samples come from is bounded; SQLite sums over all steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slipstream.config import Config, build_config
from slipstream.files import check_output_folder, parse_yaml, replacing
from slipstream.observe import figures, page
from slipstream.observe.advice import Advice
from slipstream.observe.buckets import MOST_POINTS, Series, bad_steps, count, last, total, width_of
from slipstream.observe.console import format_duration
from slipstream.observe.figures import Metrics
from slipstream.observe.ledger import ACCOUNTS, Entry, shares
from slipstream.observe.metrics import draft_share_name
from slipstream.observe.spans import find_decoder, spans
from slipstream.observe.store import RunStore, StoredRollout
from slipstream.observe.timeline import HAPPENINGS, happenings
from slipstream.types import MODEL_ORIGIN, ORIGIN_NAMES

WhatIf = tuple[str, Sequence[Sequence[str]]]
"""(Of which steps, [(setting, seconds of a step, times as fast, share idle)])."""
MOST_HAPPENINGS = 100
READ_HAPPENINGS = 1000
"""Events of a kind that are read for them: several may be told as one."""
READ_CHOICES = 2000
"""The newest choices of drafts: of the sizes that still come up."""
MOST_DEVICES = 40
HINT_STEPS = 4000
"""The newest, whose metrics are gone through for hints."""
LOOKED_AT, LEAST_LOOKED_AT, LOOKED_AT_TOKENS = 256, 16, 1_000_000
"""Rollouts of a step of which samples are picked: at most, at least, and how many tokens together."""
MOST_LENGTHS, LEAST_LENGTH_STEPS = 120_000, 20
"""Rollouts whose lengths are read in all, and steps of them at least."""
_TAUGHT_ONLY = (
    "actor/entropy, actor/clipfrac and mismatch_kl are means over the tokens of the samples whose advantage is not "
    "zero: samples that teach nothing are not computed (all are, if algorithm.kl_coef is above 0)."
)


def write_report(run_dir: Path, what_if: WhatIf | str | None = None) -> Path:
    """Write `<run_dir>/report.html` and return its path; ValueError when the folder is not a run's.

    `what_if`: simulated; or a sentence that says why not."""
    run_dir = Path(run_dir)
    if not (run_dir / "run.db").is_file():
        raise ValueError(
            f"{run_dir} is not a run folder: it has no run.db. A run folder is what `slipstream train` writes to "
            "run.dir: config.yaml, run.db, metrics.jsonl, checkpoints/"
        )
    check_output_folder(run_dir, "the run folder")
    config_file = run_dir / "config.yaml"
    config_text = config_file.read_text("utf-8", "replace") if config_file.is_file() else ""
    config = _read_config(config_text)
    with RunStore(run_dir, read_only=True) as store:
        buckets = store.buckets()
        metrics = store.curves(buckets)
        wall_s = wall_time_s(store)
        sections = [
            _header(run_dir.resolve().name, config, metrics, wall_s, buckets.width),
            _not_exact(store),
            _hints(store, config),
            _learning(metrics),
            _lengths_and_time(metrics, _some_lengths(store), wall_s),
            _ledger(store.ledger_by_step(buckets), store.ledger_by_device()),
            _workers(store),
            _what_if(what_if),
            _drafts(run_dir, store, metrics),
            _health(metrics),
            _logged(metrics),
            _samples(store),
        ]
    if config_text:
        sections.append("<h2>Config</h2>" + page.config_section(config_text))
    text = page.page(f"{run_dir.resolve().name} - Slipstream", "".join(sections), figures.drawing_script())
    report = run_dir / "report.html"
    with replacing(report) as partial:
        partial.write_text(text, encoding="utf-8")
    return report


def wall_time_s(store: RunStore) -> float:
    """Seconds of the run: timing_s/step where a step has it, else the phases it has; and what is between steps."""
    covered = [name for name in figures.PHASES if name not in figures.BETWEEN_STEPS]
    return store.seconds("timing_s/step", covered, figures.BETWEEN_STEPS)


def some_rollouts(store: RunStore, step: int) -> list[int]:
    """The rows of at most LOOKED_AT of a step's training rollouts, evenly spread over their lengths, and fewer where
    they are long."""
    rows = store.rows_of_step(step)
    mean_tokens = sum(length for _, length in rows) / max(1, len(rows))
    most = max(LEAST_LOOKED_AT, min(LOOKED_AT, int(LOOKED_AT_TOKENS / max(1.0, mean_tokens))))
    if len(rows) > most:
        rows = [rows[place * (len(rows) - 1) // (most - 1)] for place in range(most)]
    return [row for row, _ in rows]


def pick_samples(store: RunStore, rows: Sequence[int]) -> list[tuple[str, StoredRollout]]:
    """Best, median and worst reward of these (no rollout twice), and one that could not be scored."""
    rewards = [(*store.reward(row), row) for row in rows]
    scored = sorted((reward, uid, row) for reward, uid, row in rewards if reward is not None)
    places: dict[int, str] = {}
    if scored:
        last = len(scored) - 1
        for index, why in ((last, "best"), (last // 2, "median"), (0, "worst")):
            places.setdefault(index, why)
    picks = [(why, scored[index][2]) for index, why in places.items()]
    unscored = sorted((uid, row) for reward, uid, row in rewards if reward is None)
    picks += [("unscored", row) for _, row in unscored[:1]]
    return [(why, store.rollout(row)) for why, row in picks]


def _read_config(text: str) -> Config | None:
    try:
        return build_config(parse_yaml(text, "config.yaml")) if text else None
    except ValueError:
        return None  # of another version, or edited: the text is shown as it is, only the arithmetic is missing


def _header(name: str, config: Config | None, metrics: Metrics, wall_s: float, width: int) -> str:
    done = max([*metrics.get("reward/mean", {}), *metrics.get("rollout/tokens", {})], default=0)
    values = {"steps": f"{done} of {config.train.steps}" if config else f"{done}"}
    values["wall time"] = format_duration(wall_s)
    values["reward"] = _first_to_last(metrics.get("reward/mean", {}), smoothed_steps=5)
    for evaluation in _evaluations(metrics)[:2]:
        values[evaluation.removeprefix("eval/")] = _first_to_last(metrics[evaluation])
    if metrics.get("rollout/tokens"):
        values["tokens generated"] = _short(total(metrics["rollout/tokens"]))
    if metrics.get("perf/throughput"):
        throughput = metrics["perf/throughput"]
        values["tokens/s, mean"] = f"{total(throughput) / count(throughput):,.0f}"
    head = f"<h1>{page.escape(name)}</h1>"
    if width > 1:
        head += page.sentence(f"A point of a curve, or a bar, stands for {width} steps and shows their mean.")
    if config is None:
        return head + page.sentence("No readable config.yaml beside this run.") + page.tiles(values)
    sources = ", ".join(task.source for task in config.tasks.train)
    held_out = ", ".join(f"{key} ({task.source})" for key, task in config.tasks.eval.items())
    head += page.sentence(f"{config.model} trained with {config.algorithm.name} on {sources}")
    about = {"model": config.model, "trained on": sources, "evaluated on": held_out or "nothing"}
    if config.warmup:
        about["warm start"] = f"{config.warmup.steps} supervised steps before RL"
    return head + page.tiles(values) + page.card("The run in numbers", page.facts(about | config.arithmetic()))


def _not_exact(store: RunStore) -> str:
    """Nothing for a run whose rollouts are the same in every batch, as engine.exact promises."""
    events = store.newest_events(1, ["NotExact"])
    return page.card("Not exact", page.sentence(events[-1].payload["reason"])) if events else ""


def _hints(store: RunStore, config: Config | None) -> str:
    """What the run said of itself while it went on; nothing for one that had nothing to say."""
    if config is None:
        return ""  # the conditions depend on settings
    advice = Advice(config)
    first_step = max(0, store.newest_step() - HINT_STEPS)
    hints = advice.replay_rows(store.metric_rows(first_step))
    when = f"Since step {first_step}" if first_step else "Over the whole run"
    html = "".join(page.sentence(f"{when}: {text}.") for text in advice.verdict())
    for hint in hints:
        first, *example = hint.lines(store)
        html += page.sentence(f"{first[0].upper()}{first[1:]}.") + "".join(page.sentence(line) for line in example)
    return "<h2>Hints</h2>" + page.card("What to look at", html) if html else ""


def _learning(metrics: Metrics) -> str:
    evaluation = _show(figures.evaluation_curve(metrics), "This run has no evaluation (eval/<set>/avg@k).")
    names = _evaluations(metrics)
    if names:
        rows = [[name.removeprefix("eval/"), *_first_best_last(metrics[name])] for name in names]
        evaluation += page.table(("set", "first", "best", "last"), rows)
    return "<h2>Learning</h2>" + _grid(
        "two",
        page.card("Reward in training", _show(figures.reward_curve(metrics), "No reward/mean yet.")),
        page.card("Evaluation", evaluation),
    )


def _some_lengths(store: RunStore) -> dict[int, list[int]]:
    """Response lengths by step, of a number of steps that bounds how many lengths are read."""
    newest = store.newest_steps(1)
    if not newest:
        return {}
    most = min(MOST_POINTS, max(LEAST_LENGTH_STEPS, MOST_LENGTHS // max(1, store.num_rollouts(newest[-1]))))
    return {step: [length for _, length in store.rows_of_step(step)] for step in store.some_steps(most)}


def _lengths_and_time(metrics: Metrics, lengths: Mapping[int, list[int]], wall_s: float) -> str:
    timing, rate = figures.time_stack(metrics), figures.throughput_curve(metrics)
    return (
        "<h2>Lengths and time</h2>"
        + _grid(
            "two",
            page.card(
                "Response length",
                _show(figures.length_bands(lengths), "No training rollouts in the store yet."),
            ),
            page.card("Tokens per second", _show(rate, "This run has no perf/throughput.")),
        )
        + page.card(
            "Where the time went", _show(timing, "This run has no timing_s/ metrics."), _shares(metrics, wall_s)
        )
    )


def _ledger(by_step: Sequence[Entry], by_name: Sequence[Entry]) -> str:
    """Every device-second on one account; nothing for a run that kept no ledger."""
    figure = figures.ledger_stack(by_step)
    if figure is None:
        return ""
    by_device = shares(by_name)
    left_out = max(0, len(by_device) - MOST_DEVICES)
    by_device = dict(list(by_device.items())[:MOST_DEVICES])
    by_device["all devices"] = shares([replace(entry, device="all") for entry in by_name])["all"]
    names = [name for name in ACCOUNTS if any(name in spent for spent in by_device.values())]
    rows = [
        [device, *(f"{spent[name]:.1%}" if name in spent else "" for name in names)]
        for device, spent in by_device.items()
    ]
    about = page.facts({name: ACCOUNTS[name] for name in names})
    note = f"{left_out} more are in run.db only" if left_out else ""
    return (
        "<h2>Where every device-second went</h2>"
        + page.card("By step", figures.figure_html(figure))
        + page.card("By device", page.table(("device", *names), rows) + about, note)
    )


def _workers(store: RunStore) -> str:
    """What happened to the rollout workers; nothing for a run without any."""
    first, events = store.first_event(), store.newest_events(READ_HAPPENINGS, HAPPENINGS)
    found = happenings(events)
    if first is None or not found:
        return ""
    rows = [[format_duration(at_s - first.at_s), str(step), what] for at_s, step, what in found[-MOST_HAPPENINGS:]]
    is_cut = len(found) > len(rows) or store.num_events(*HAPPENINGS) > len(events)
    note = "the newest; earlier ones are in run.db only" if is_cut else "the same as marks in trace.json"
    return page.card("Rollout workers", page.table(("after", "step", "what happened"), rows), note)


def _what_if(what_if: WhatIf | str | None) -> str:
    if what_if is None:
        return ""
    title = "What another setting would save"
    if isinstance(what_if, str):
        return page.card(title, page.sentence(what_if))
    steps, rows = what_if
    table = page.table(("setting", "seconds of a step", "times as fast", "devices idle"), rows)
    note = f"simulated with the rollouts and speeds of {steps}; further devices are taken to be like this run's own"
    return page.card(title, table, note)


def _drafts(run_dir: Path, store: RunStore, metrics: Metrics) -> str:
    """How much came from drafts, and where from; nothing for a run without any."""
    gained, shares = figures.draft_yield(metrics), figures.draft_shares(metrics)
    if gained is None or shares is None:
        return ""
    saved_s = total(metrics.get("rollout/spec_saved_s", {}))
    saved = f"{saved_s:.1f} s" if saved_s < 10 else format_duration(saved_s)
    note = (
        f"at most {saved} of rollout saved, as estimated from the steps without drafts: what sequences gained that "
        "others outlasted is in it"
        if saved_s > 0
        else ""
    )
    html = "<h2>Drafts</h2>" + _grid(
        "two",
        page.card("Tokens a forward pass", figures.figure_html(gained), note),
        page.card("Tokens that were drafts", figures.figure_html(shares), "by where the draft came from"),
    )
    html += page.card("Rollouts by where their tokens came from", _coloured_rollouts(run_dir, store))
    html += _drafter(store, metrics)
    choices = [event.payload for event in store.newest_events(READ_CHOICES, ["DraftChosen"])]
    if not choices:
        return html
    newest: dict[tuple[int, bool], list[str]] = {}
    for choice in choices:
        most = 1 << (int(choice["batch"]) - 1).bit_length()  # sizes that the selector judges together
        least = most // 2 + 1
        is_matching = bool(choice.get("is_matching"))  # older runs have none
        says_why = "is not tried" not in choice["reason"]
        if not says_why and (most, is_matching) in newest:
            continue
        sizes = str(most) if least >= most else f"{least}-{most}"
        texts = "repeat others" if is_matching else "new"
        reason = choice["reason"] if says_why else "nothing that was tried gives more"
        newest[most, is_matching] = [sizes, texts, choice["strategy"], reason]
    rows = [newest[key] for key in sorted(newest)]
    table = page.table(("sequences", "texts", "way of drafting", "why"), rows)
    return html + page.card("What pays, by how many sequences run", table, "the last choice of each; all are events")


def _drafter(store: RunStore, metrics: Metrics) -> str:
    """How the learned drafter was taught; nothing for a run without one."""
    updates = metrics.get("drafter/updates")
    if not updates:
        return ""
    in_tail, slowdown = metrics.get("drafter/updates_in_tail", {}), metrics.get("drafter/tail_slowdown", {})
    text = f"{last(updates):,.0f} updates"
    num_sessions = store.num_events("TrainRound")
    if metrics.get("workers/drafter_s"):
        given_up = total(metrics.get("drafter/updates_given_up", {}))
        text += (
            f", {total(in_tail):,.0f} of them by workers that had nothing to sample, in {num_sessions} "
            f"round(s); {given_up:,.0f} more were given up when there was something"
        )
    elif num_sessions:
        text += (
            f", {total(in_tail):,.0f} of them beside the last sequences of rollouts, in {num_sessions} "
            f"session(s), which slowed that part by {total(slowdown) / max(1, count(slowdown)):.1%} on the mean; "
            f"{total(metrics.get('drafter/free_s', {})):.1f} s of training cost nothing"
        )
    drafted = metrics.get(draft_share_name(MODEL_ORIGIN), {})
    if drafted:
        text += f". In the last step {last(drafted):.1%} of all tokens were its drafts"
    turns = store.newest_events(1, ["DrafterAsked"])
    if turns and not turns[-1].payload["is_asked"] and not metrics.get("workers/drafter_s"):  # each decides for itself
        text += f", and since step {turns[-1].step} it is left alone: {turns[-1].payload['reason']}"
    if turns:
        text += (
            f". Whether it is asked has changed {store.num_events('DrafterAsked'):,} time(s); each is in the events, "
            "with its reason"
        )
    html, right = page.sentence(text + "."), figures.drafter_lessons(metrics)
    if right is not None:
        html += page.sentence("Right in its lessons, in each step before it learned from them:")
        html += figures.figure_html(right)
    return page.card("The drafter", html)


def _coloured_rollouts(run_dir: Path, store: RunStore) -> str:
    decode = find_decoder(run_dir)
    if decode is None:
        return page.sentence("Texts are shown here once a checkpoint holds a tokenizer.json, which tells tokens apart.")
    html = page.legend(ORIGIN_NAMES)
    for step in store.some_steps(2):
        for row in reversed([row for row, _ in store.rows_of_step(step)][-LOOKED_AT:]):  # the longest
            rollout = store.rollout(row)
            origins = store.origins_of(rollout.uid)
            if any(origins):
                share = sum(map(bool, origins)) / len(origins)
                html += page.sentence(
                    f"Step {step}, {rollout.uid}: {len(origins):,} tokens, {share:.0%} of them drafts"
                )
                html += page.coloured(spans(rollout.token_ids, origins, decode))
                break
    return html


def _health(metrics: Metrics) -> str:
    cards, missing = [], []
    for name, title in figures.HEALTH.items():
        figure = figures.health_curve(metrics, name)
        if figure is None:
            missing.append(name)
        else:
            broken = bool(bad_steps(metrics[name]))
            note = f"{name} (red x: NaN or infinity)" if broken else name
            cards.append(page.card(title, figures.figure_html(figure), note))
    about = page.sentence(_TAUGHT_ONLY) if any(metrics.get(name) for name in ("actor/entropy", "mismatch_kl")) else ""
    left_out = page.sentence(f"Not measured in this run: {', '.join(missing)}.") if missing else ""
    return "<h2>Training health</h2>" + about + (_grid("many", *cards) if cards else "") + left_out


def _logged(metrics: Metrics) -> str:
    """Metrics that reward functions logged; nothing for a run without any."""
    names = sorted(name for name in metrics if re.match(r"(eval/.+/)?logged/", name))
    shown = {name: figures.health_curve(metrics, name) for name in names}
    cards = [
        page.card(name.replace("logged/", ""), figures.figure_html(figure), name)
        for name, figure in shown.items()
        if figure is not None
    ]
    return "<h2>Logged by reward functions</h2>" + _grid("many", *cards) if cards else ""


def _samples(store: RunStore) -> str:
    html = "<h2>Samples</h2>"
    steps = store.some_steps(3)
    if not steps:
        return html + page.sentence("No training rollouts in the store yet.")
    for step in steps:
        rows = some_rollouts(store, step)
        reward, num_rollouts = store.metric(step, "reward/mean"), store.num_rollouts(step)
        note = "mean reward not recorded" if reward is None else f"mean reward {reward:.3f}"
        if len(rows) < num_rollouts:
            note += f"; picked from {len(rows)} of its {num_rollouts:,} rollouts"
        table = page.sample_table(pick_samples(store, rows), store.extras_of)
        html += page.card(f"Step {step}", table, note)
    return html


def _show(figure: figures.Figure | None, otherwise: str) -> str:
    return page.sentence(otherwise) if figure is None else figures.figure_html(figure)


def _grid(kind: str, *cards: str) -> str:
    return f'<div class="{kind}">{"".join(cards)}</div>'


def _evaluations(metrics: Metrics) -> list[str]:
    return sorted(name for name in metrics if re.fullmatch(r"eval/.+/avg@\d+", name))


def _shares(metrics: Metrics, wall_s: float) -> str:
    """`rollout 71 %, training 22 %, ...` of the run's wall time."""
    if not wall_s:
        return ""
    spent = {label: total(metrics.get(name, {})) for name, (label, _) in figures.PHASES.items()}
    return ", ".join(f"{label} {100 * s / wall_s:.0f} %" for label, s in spent.items() if s >= 0.005 * wall_s)


def _first_to_last(series: Series, smoothed_steps: int = 1) -> str:
    """First and last value; at the ends of a noisy curve, means of up to `smoothed_steps`."""
    values = [value for value in series.values() if math.isfinite(value)]
    if not values:
        return "none yet"
    if len(values) == 1:
        return f"{values[0]:.2f}"
    width = min(math.ceil(smoothed_steps / width_of(series)), len(values) // 4) or 1
    return f"{sum(values[:width]) / width:.2f} → {sum(values[-width:]) / width:.2f}"


def _first_best_last(series: Series) -> list[str]:
    steps = list(series)
    best = max(steps, key=lambda step: series[step])
    return [f"{series[step]:.3f} (step {step})" for step in (steps[0], best, steps[-1])]


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"
