"""What `slipstream simulate` and `slipstream plan` show: tables on the screen, and a page with timelines and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from slipstream.files import check_output_file, read_json
from slipstream.observe.figures import drawing_script, figure_html, lines, ranking
from slipstream.observe.page import card, headline, page, sentence, table
from slipstream.observe.store import RunStore, RunStoreError
from slipstream.schedule.speeds import SpeedCurve, curve_of_bench
from slipstream.simulate.against import Phase, foretell, read_config
from slipstream.simulate.costs import GPUS, check_count, costs_of
from slipstream.simulate.outcome import least_steps
from slipstream.simulate.planning import Need, Offer, Plan, make_plans
from slipstream.simulate.streamed import foretell_streamed
from slipstream.simulate.study import Result, compare, renting
from slipstream.simulate.system import Costs, System
from slipstream.simulate.systems import SYSTEMS
from slipstream.simulate.what_if import what_if
from slipstream.simulate.workloads import PRESETS, SimulatedStep, recorded_steps

BASELINE = "colocated"
POINTS = 300
"""Of a timeline."""
PPO_IS_SIMULATED = "PPO is simulated only: slipstream train has no critic."


def read_curve(file: Path, shape: str | None) -> SpeedCurve:
    """A measured speed curve; ValueError says what to write instead."""
    record = read_json(file, f"write one with `slipstream bench engine --json {file}`")
    if shape is None:
        raise ValueError("which of its shapes? Give --shape, e.g. --shape qwen2.5-7b")
    try:
        return curve_of_bench(record, shape)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def draw(
    lengths: str, *, prompts: int, samples: int, steps: int, seed: int, growth: float = 1.0
) -> list[SimulatedStep]:
    if lengths not in PRESETS:
        raise ValueError(f"unknown lengths '{lengths}'; known: {', '.join(PRESETS)}")
    if not 0.5 <= growth <= 2:
        raise ValueError(f"--growth {growth:g}: times as long from step to step, 0.5 to 2, e.g. 1.03")
    return replace(PRESETS[lengths], growth=growth).draw(
        num_prompts=4 * prompts, prompts_per_step=prompts, samples=samples, steps=steps, seed=seed
    )


def read_run(run: Path, steps: int) -> list[SimulatedStep]:
    """The rollouts of the first steps of a recorded run, as long as they were."""
    with RunStore(run, read_only=True) as store:
        recorded = recorded_steps((one.step, one.uid, one.prompt_key, one.length) for one in store.rollout_facts())
    if len(recorded) < steps:
        raise ValueError(f"{run} has {len(recorded)} steps, not {steps}: give --steps {len(recorded)} or fewer")
    return recorded[:steps]


def choose_systems(names: str) -> dict[str, System]:
    if names == "all":
        return dict(SYSTEMS)
    chosen = [name.strip() for name in names.split(";")]
    unknown = [name for name in chosen if name not in SYSTEMS]
    if unknown:
        raise ValueError(f"unknown system '{unknown[0]}'; known: {'; '.join(SYSTEMS)}")
    return {name: SYSTEMS[name] for name in chosen}


def show_comparison(
    *,
    billions: float,
    gpu: str,
    num_gpus: int,
    lengths: str,
    prompts: int,
    samples: int,
    steps: int,
    seed: int,
    training: str,
    systems: str,
    curve_file: Path | None = None,
    shape: str | None = None,
    scaling: Sequence[int] = (),
    growth: float = 1.0,
    rent: int = 0,
    run: Path | None = None,
    html_file: Path | None = None,
    json_file: Path | None = None,
) -> dict[str, Any]:
    """The record that is also written to `json_file`."""
    if gpu not in GPUS:
        raise ValueError(f"unknown GPU '{gpu}'; known: {', '.join(GPUS)}")
    if num_gpus < 1:
        raise ValueError(f"--gpus {num_gpus}: at least 1 is needed, and 2 where generation and training are apart")
    for option, count in (("--gpus", num_gpus), ("--rent", rent), ("--scaling", max(scaling, default=0))):
        check_count(count, option)
    chosen = choose_systems(systems)
    least = least_steps(max(system.rules.staleness for system in chosen.values()))
    if steps < least:
        raise ValueError(f"--steps {steps}: pipelines fill in the first steps, so at least {least} are needed")
    if run is not None and scaling:
        raise ValueError("--scaling draws more rollouts for more GPUs, and a run has those it has: leave one out")
    if rent and all(system.colocated for system in chosen.values()):
        raise ValueError("--rent is of workers, and these systems share all GPUs: choose another one, or leave it out")
    check_output_file(json_file, "--json")
    check_output_file(html_file, "--html")
    if rent and rent < num_gpus:
        raise ValueError(f"--rent {rent}: GPUs in all at most, so no fewer than --gpus {num_gpus}")
    if run is not None and growth != 1:
        raise ValueError("--growth is for lengths that are drawn, and a run has those it has: leave one out")
    if run is None:
        work = draw(lengths, prompts=prompts, samples=samples, steps=steps, seed=seed, growth=growth)
    else:
        work, lengths = read_run(run, steps), f"of {run.name}"
    curve = read_curve(curve_file, shape) if curve_file is not None else None
    costs = costs_of(billions, GPUS[gpu], work, training=training, curve=curve)
    console = Console()
    with _progress(console) as say:
        results = compare(chosen, costs, work, num_gpus, lambda done: say(f"{done.name} is done"))
        if rent:
            apart = [one for one in results if one.train_gpus]
            results += [renting(one, chosen[one.name], costs, work, num_gpus, rent) for one in apart]
        by_size: dict[str, dict[int, Result]] = {name: {} for name in chosen} if scaling else {}
        for size in scaling:
            each = max(1, prompts * size // num_gpus)
            scaled = draw(lengths, prompts=each, samples=samples, steps=steps, seed=seed, growth=growth)
            for result in compare(chosen, costs, scaled, size, lambda done: say(f"{done.name} is done, with scaling")):
                by_size[result.name][size] = result
    num_rollouts = round(sum(len(step.lengths) for step in work) / len(work))
    title = f"{billions:g}B on {num_gpus} {gpu.upper()}, {num_rollouts} rollouts a step, lengths {lengths}"
    first = next((result for result in results if result.name == BASELINE), results[0])
    baseline = first.step_s
    assumptions = _assumptions(costs, curve_file, training)
    console.print(_table(title, results, baseline, costs.gpus_a_worker))
    console.print(f"speed-up over {first.name}; GPU-s: GPU-seconds of a step.")
    console.print(assumptions)
    record = {
        "what": "slipstream simulate",
        "billions": billions,
        "gpu": gpu,
        "gpus": num_gpus,
        "lengths": lengths,
        "rollouts_a_step": num_rollouts,
        "steps": steps,
        "seed": seed,
        "growth": growth,
        "rent": rent,
        "training": training,
        "slots": costs.slots,
        "gpus_a_worker": costs.gpus_a_worker,
        "results": [result.as_dict() | {"speedup": baseline / result.step_s} for result in results],
        "scaling": {
            name: {size: result.as_dict() for size, result in found.items()} for name, found in by_size.items()
        },
    }
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"written to {json_file}")
    if html_file is not None:
        html_file.write_text(_page(title, results, first, by_size, num_rollouts, assumptions))
        console.print(f"look at {html_file}")
    return record


def show_against(run: Path, json_file: Path | None = None) -> None:
    check_output_file(json_file, "--json")
    phases, num_steps = foretell(run) if read_config(run).mode == "colocated" else _streamed(run)
    title = f"{run}: {num_steps} steps foretold from those before"
    shown = _new_table(title, "phase", "measured s", "foretold s", "error")
    for phase in phases:
        shown.add_row(phase.name, f"{phase.measured_s:.2f}", f"{phase.foretold_s:.2f}", f"{phase.error:.1%}")
    console = Console()
    console.print(shown)
    console.print("error: of the time of each step, whichever way, on average.")
    if json_file is not None:
        record = {"what": "slipstream simulate --against", "run": run.name, "steps": num_steps}
        json_file.write_text(json.dumps(record | {"phases": [asdict(phase) for phase in phases]}, indent=1) + "\n")
        console.print(f"written to {json_file}")


def _streamed(run: Path) -> tuple[list[Phase], int]:
    told = foretell_streamed(run)
    return [Phase("step", told.measured_s, told.foretold_s, abs(told.error))], told.num_steps


def what_if_rows(run: Path) -> tuple[str, list[tuple[str, ...]]] | str:
    """For the report: (of which steps, [(setting, seconds of a step, times as fast, share idle)]); or why there is
    nothing to say."""
    try:
        if (mode := read_config(run).mode) != "colocated":
            return f"Simulated for runs with mode=colocated only, whose phases follow each other; this one has {mode}."
        told = what_if(run)
    except (ValueError, RunStoreError) as error:
        return f"Not simulated: {error}."
    first = told.settings[0]
    rows: list[tuple[str, ...]] = [
        (
            "colocated, one device"
            if one is first
            else f"{one.mode}, {one.rollout_devices} sample{'s' if one.rollout_devices == 1 else ''} and 1 trains",
            f"{one.step_s:.2f}",
            f"{first.step_s / one.step_s:.2f}",
            f"{one.idle_share:.0%}",
        )
        for one in told.settings
    ]
    return f"steps {told.first_step} to {told.last_step}", rows


def show_plan(*, offers: str, need: Need, as_json: bool = False) -> list[Plan]:
    """The plans, the best first; ValueError if there is none that reaches the target."""
    console = Console()
    parsed = [Offer.parse(text) for text in offers.split(",")]
    with _progress(console) as say:
        plans, reaches = make_plans(parsed, need, say)
    record = {"what": "slipstream plan", "reaches_target": reaches, "plans": [plan.as_dict() for plan in plans]}
    if as_json:
        console.print_json(json.dumps(record))
    else:
        console.print(_plan_table(plans, need))
        console.print(
            "Simulated with drafts from history and one step of staleness; +-: half the range over three workloads "
            "drawn. Decoding is reckoned from data sheets." + (f" {PPO_IS_SIMULATED}" if need.training == "ppo" else "")
        )
        if need.target is not None and reaches:
            other, found = ("rent an hour", "hour") if need.cheapest == "step" else ("cost a step", "step")
            chosen = "cost a step" if need.cheapest == "step" else "rent an hour"
            console.print(f"best: the lowest {chosen} that reaches the target; --cheapest {found}: the lowest {other}.")
    if not reaches:
        raise ValueError(
            f"{need.target:g} rollouts a second cannot be reached: these GPUs give {plans[0].rollouts_a_s:.2f} at "
            "most. Offer more, or ask for less"
        )
    return plans


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """A line that turns and says what it is told."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=None)
        yield lambda what: progress.update(task, description=what)


def _new_table(title: str, words: str, *numbers: str) -> Table:
    shown = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    shown.add_column(words, no_wrap=True)
    for column in numbers:
        shown.add_column(column, justify="right", no_wrap=True)
    return shown


def _plan_table(plans: Sequence[Plan], need: Need) -> Table:
    title = (
        f"{need.billions:g}B, {need.prompts * need.samples} rollouts a step, median {need.lengths.median:,.0f} tokens"
    )
    shown = _new_table(title, "", "sample", "train", "s/step", "rollouts/s", "idle", "rent an hour", "cost a step")
    for plan, rank in zip(plans, ("best", "second best", *[""] * len(plans)), strict=False):
        shown.add_row(
            rank,
            f"{plan.sampling.count} {plan.sampling.gpu}",
            f"{plan.training.count} {plan.training.gpu}",
            f"{plan.step_s:.0f} +- {plan.spread_s:.0f}",
            f"{plan.rollouts_a_s:.2f}",
            f"{plan.idle_share:.0%}",
            "no price" if plan.rent is None else f"{plan.rent:.2f}",
            "no price" if plan.cost is None else f"{plan.cost:.4f}" if plan.cost < 1 else f"{plan.cost:.2f}",
        )
    return shown


def _table(title: str, results: Sequence[Result], baseline: float, gpus_a_worker: int) -> Table:
    shown = _new_table(title, "system", "s/step", "speed-up", "GPU-s", "split", "idle")
    for result in results:
        sizes = [gpus_a_worker * step.num_workers for step in result.outcome.steps]
        sampling = f"{min(sizes)}-{max(sizes)}" if len(set(sizes)) > 1 else str(sizes[0])
        split = f"{sampling}:{result.train_gpus}" if result.train_gpus else "shared"
        shown.add_row(
            result.name,
            f"{result.step_s:.1f}",
            f"{baseline / result.step_s:.2f}",
            f"{result.outcome.gpu_s:,.0f}",
            split,
            f"{result.outcome.idle_share:.0%}",
        )
    return shown


def _assumptions(costs: Costs, curve_file: Path | None, training: str) -> str:
    source = f"decoding as in {curve_file.name}" if curve_file is not None else "decoding reckoned from data sheets"
    alone, full = costs.curve.token_s(1), costs.curve.token_s(costs.slots)
    return (
        f"{source}: {alone * 1e3:.1f} ms a token alone, {full * 1e3:.1f} ms beside {costs.slots - 1} others; "
        f"workers of {costs.gpus_a_worker} GPU(s); training {costs.train_gpu_s * 1e6:.0f} us a token and GPU; weights "
        f"on their way for {costs.weights_s:.1f} s. idle: GPU-time in which nothing is decoded or trained."
        + (f" {PPO_IS_SIMULATED}" if training == "ppo" else "")
    )


def _page(
    title: str,
    results: Sequence[Result],
    first: Result,
    by_size: Mapping[str, Mapping[int, Result]],
    num_rollouts: int,
    assumptions: str,
) -> str:
    baseline = first.step_s
    speedups = {one.name: baseline / one.step_s for one in results}
    idle_shares = {one.name: 100 * one.outcome.idle_share for one in results}
    body = [card(f"Speed-up over {first.name}", figure_html(ranking(speedups, "times")))]
    body += [card("Idle GPU-time", figure_html(ranking(idle_shares, "%")))]
    charts = "".join(
        card(one.name, figure_html(lines({one.name: one.outcome.decoding_over(POINTS)}, "GPUs", "s", height=220)))
        for one in results
    )
    body += [card("GPUs that decode", f'<div class="two">{charts}</div>', "Over a few steps, once pipelines are full.")]
    if by_size:
        times = {name: {size: one.step_s for size, one in found.items()} for name, found in by_size.items()}
        note = "As many rollouts for each GPU: the flatter, the better it scales."
        body += [card("Seconds a step, by number of GPUs", figure_html(lines(times, "s", "GPUs")), note)]
        idle = {
            name: {size: 100 * one.outcome.idle_share for size, one in found.items()} for name, found in by_size.items()
        }
        body += [card("Idle GPU-time by number of GPUs", figure_html(lines(idle, "%", "GPUs")))]
    rows = [
        [
            one.name,
            f"{one.step_s:.1f}",
            f"{baseline / one.step_s:.2f}",
            f"{num_rollouts / one.step_s:.2f}",
            f"{one.outcome.idle_share:.0%}",
            f"{one.outcome.lent_share:.0%}",
        ]
        for one in results
    ]
    note = "Lent: of the idle time, that of workers without work, in which a drafter could be trained."
    columns = ["system", "s/step", "speed-up", "rollouts/s", "idle", "lent"]
    body += [card("In numbers", table(columns, rows), note)]
    if any(len({step.num_workers for step in one.outcome.steps}) > 1 for one in results):
        workers = {
            one.name: {number: float(step.num_workers) for number, step in enumerate(one.outcome.steps, 1)}
            for one in results
            if one.train_gpus
        }
        body += [card("Workers, from step to step", figure_html(lines(workers, "workers", "step")))]
    return page(title, "".join([headline(title), sentence(assumptions), *body]), drawing_script())
