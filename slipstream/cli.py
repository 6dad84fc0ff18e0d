"""The command line. A command parses, calls one function, and says plainly what went wrong.

Exit codes: 0 done; 1 the run failed (disk, graders, numbers); 2 the user can fix it; 130 stopped by Ctrl-C or SIGTERM.
Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    help="Train language models to reason, with RL. Start with: slipstream train quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

bench = typer.Typer(help="Time a part of Slipstream on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Of typer itself or of click, which earlier versions of it are built on."""

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""What a user's text may hold and a terminal should not be sent: control characters, bytes that are not UTF-8."""
STOPPED = 130
_TAKES_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_TAKES_OVERRIDES)
def train(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="A .yaml file, or the name of a recipe that comes with Slipstream.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run's last checkpoint; begin if it recorded nothing yet.")
    ] = False,
    resume_from: Annotated[Path | None, typer.Option(help="Go on from this checkpoint folder.")] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Delete the run in run.dir first; with --resume-from, what it recorded after that checkpoint.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings and what follows from them.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Train a model with RL.

    Any setting of the recipe can be given as key=value or --key value, for example:
    slipstream train quickstart train.steps=20 seed=3 run.dir=runs/mine

    With mode=sync, async or rhyme, rollout.workers processes sample beside train.ranks that train: on this machine, a
    GPU each while there are enough, or with runtime=ray as actors on the Ray cluster of RAY_ADDRESS, or on its own.
    """
    from slipstream.config import dump_config, load_config
    from slipstream.recipe import collect_overrides

    config = load_config(recipe, collect_overrides(context.args))
    if dry_run:
        from slipstream.runtime.capacity import check_start

        check_start(config)
        _check_model_folder(config.model)
        typer.echo(dump_config(config))
        for name, value in config.arithmetic().items():
            typer.echo(f"# {name}: {value}")
        return
    from slipstream.runtime.local import run_training

    outcome = run_training(config, resume=resume_from or resume, overwrite=overwrite, quiet=quiet)
    if outcome.reason == "done":
        lines = [
            f"done after {outcome.step} steps. Look at: {outcome.run_dir / 'report.html'}",
            f"the model: {outcome.run_dir / 'checkpoints' / f'step_{outcome.step}'}",
            f"evaluate it again: slipstream eval {outcome.run_dir}",
        ]
    else:
        again = shlex.join(["slipstream", "train", str(recipe), *context.args, "--resume"])
        lines = [f"{outcome.reason} after step {outcome.step}; go on with: {again}"]
    lines += [f"warning: {text}" for text in outcome.advice]
    if not quiet:
        typer.echo("\n".join(lines))
    if outcome.reason != "done":
        raise typer.Exit(STOPPED)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one, e.g. to copy it out.")] = None,
) -> None:
    """List the recipes that come with Slipstream, or print one.

    A copy of your own: slipstream recipes quickstart > mine.yaml

    A recipe of your own that changes some keys of one begins with: defaults: quickstart
    """
    from slipstream.recipe import first_comment, shipped_recipes

    shipped = shipped_recipes()
    if name is not None:
        if name not in shipped:
            raise ValueError(f"no recipe {name!r} comes with Slipstream; those that do: {', '.join(shipped)}")
        typer.echo(shipped[name].read_text(encoding="utf-8"), nl=False)
        return
    width = max(map(len, shipped))
    for each, path in shipped.items():
        typer.echo(f"{each:{width}}  {first_comment(path)}")
    typer.echo("\nrun one: slipstream train quickstart\ncopy one: slipstream recipes quickstart > mine.yaml")


@app.command()
def init(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Your data: a .jsonl, .json or .parquet file.")],
    out: Annotated[Path | None, typer.Option(help="The recipe to write; else DATA's name with .yaml, here.")] = None,
    model: Annotated[str, typer.Option(help="Model to train: a folder, a hub id, smollm2 or tiny.")] = "smollm2",
    prompt: Annotated[str | None, typer.Option(help="Column with the prompt, if it is not found.")] = None,
    answer: Annotated[str | None, typer.Option(help="Column with the reference answer, if it is not found.")] = None,
) -> None:
    """Write a recipe for data of your own, after a look at its columns.

    Prompts may be texts or messages, and files made for verl or SkyRL are understood. For example:
    slipstream init train.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
    """
    from slipstream.tasks.new_recipe import write_recipe

    typer.echo("\n".join(write_recipe(data, out, model=model, prompt=prompt, answer=answer).lines))


@app.command()
def scale(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that is going on.")],
    rollout: Annotated[int, typer.Option(help="Processes that sample, from now on.", min=1)],
) -> None:
    """Add rollout workers to a run that is going on, or take some away; no rollout is harmed.

    For runs with mode=sync, async or rhyme, for example: slipstream scale runs/quickstart --rollout 3
    """
    from slipstream.runtime.control import ask_for_workers

    lack = ask_for_workers(run, rollout)
    typer.echo(f"{run} will have {rollout} rollout worker(s) in a moment; see workers/count in {run / 'metrics.jsonl'}")
    if lack is not None:
        typer.echo(lack)


@app.command("eval", context_settings=_TAKES_OVERRIDES)
def evaluate(
    context: typer.Context,
    target: Annotated[
        Path, typer.Argument(help="A run folder, a checkpoint folder, or a recipe (its model as it is).")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate a checkpoint on the recipe's named sets: avg@k and pass@k.

    Settings can be changed as in train, for example: slipstream eval runs/quickstart eval.samples_per_prompt=8

    Another model on the sets of a run, say the one it began with: slipstream eval runs/quickstart model=smollm2
    """
    from slipstream.recipe import collect_overrides
    from slipstream.runtime.standalone import evaluate_target

    metrics = evaluate_target(target, collect_overrides(context.args), quiet=as_json)
    if as_json:
        typer.echo(json.dumps(metrics))
    else:
        for name, value in sorted(metrics.items()):
            typer.echo(f"{name:40} {value:.4f}")


@app.command("train-drafter", context_settings=_TAKES_OVERRIDES)
def train_drafter(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, with or without a drafter.")],
    updates: Annotated[int, typer.Option(help="Of the drafter, in all.", min=1)] = 400,
    out: Annotated[Path | None, typer.Option(help="A new folder for the drafter; without it RUN/drafter.")] = None,
    begin_with: Annotated[
        Path | None, typer.Option("--from", help="Begin with this drafter: a run's, or a folder of train-drafter.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the drafter in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Teach a drafter from the rollouts that a run recorded, and say what it is worth on some that it was not shown.

    Ctrl-C writes what it has learned. Settings can be changed as in train, for example:
    slipstream train-drafter runs/quickstart --updates 800 --out drafters/mine drafter.lr=1e-3 drafter.kind=eagle1

    A run uses it from its first step on: slipstream train quickstart draft.source=both drafter.warm_from=DIR
    """
    from slipstream.recipe import collect_overrides
    from slipstream.runtime.offline import train_offline

    taught = train_offline(
        run,
        collect_overrides(context.args),
        updates=updates,
        out=out,
        begin_with=begin_with,
        resume=resume,
        quiet=quiet,
    )
    lines = [*taught.lines, f"the drafter: {taught.folder}; in vLLM: slipstream export-drafter {taught.folder} NEW_DIR"]
    if not taught.is_done:
        lines.append(f"stopped after {taught.num_updates} updates; go on with the same command and --resume")
    if not quiet:
        typer.echo("\n".join(lines))
    if not taught.is_done:
        raise typer.Exit(STOPPED)


@app.command("export-drafter")
def export_drafter(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, a checkpoint folder, or a folder of train-drafter.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder to write.")],
    file_format: Annotated[
        str | None, typer.Option("--format", help="eagle3 or eagle; without it that of the drafter's kind.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    target: Annotated[
        Path | None, typer.Option(help="The model that it drafts for, if that is not where it was any more.")
    ] = None,
) -> None:
    """Write a run's drafter as vLLM loads it, and SGLang those of the format eagle3: config.json and model.safetensors.

    For example: slipstream export-drafter runs/mine --format eagle3 drafters/mine
    """
    from slipstream.runtime.drafters import export_from

    typer.echo("\n".join(export_from(source, folder, file_format=file_format, dtype=dtype, target=target)))


@app.command()
def check(
    model: Annotated[
        str | None, typer.Argument(help="Also load this model and say whether the engine serves it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine can run, which extras are missing and how to get them."""
    from slipstream.runtime.machine import check_machine

    report = check_machine(model)
    typer.echo(json.dumps(report.as_dict()) if as_json else report.as_text())
    if not report.usable:
        raise typer.Exit(1 if report.missing_required else 2)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run folder, e.g. runs/quickstart.")]) -> None:
    """Write report.html of a run, also while it is running.

    What other modes and more devices would save is simulated for runs with mode=colocated only.
    """
    from slipstream.observe.report import write_report
    from slipstream.simulate.show import what_if_rows

    typer.echo(write_report(run, what_if_rows(run)))


@app.command()
def simulate(
    size: Annotated[float, typer.Option(help="Billions of weights of the model.")] = 7.0,
    gpu: Annotated[str, typer.Option(help="a100, h20, h800, h100, h200, b200, l40s or rtx4090.")] = "h100",
    gpus: Annotated[int, typer.Option(help="How many.")] = 32,
    lengths: Annotated[str, typer.Option(help="Lengths of rollouts, by the limit: 5k, 10k, 20k or 32k.")] = "20k",
    prompts: Annotated[int, typer.Option(help="Prompts of a step.", min=1)] = 128,
    samples: Annotated[int, typer.Option(help="Samples of a prompt.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Steps to simulate.")] = 12,
    training: Annotated[
        str, typer.Option(help="grpo, or ppo, whose critic is trained too: simulated only, train has no PPO.")
    ] = "grpo",
    systems: Annotated[str, typer.Option(help="Which systems, separated by semicolons.")] = "all",
    curve: Annotated[
        Path | None, typer.Option(help="Measured decoding: a file of slipstream bench engine --json; with --shape.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Which shape of that file a worker runs.")] = None,
    scaling: Annotated[
        str, typer.Option(help="Also on so many GPUs, separated by commas, with as many rollouts for each.")
    ] = "",
    growth: Annotated[
        float, typer.Option(help="Times as long as in the step before are the rollouts of a step.")
    ] = 1.0,
    rent: Annotated[
        int, typer.Option(help="Also with workers rented and given back as steps need, up to so many GPUs.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the lengths drawn.")] = 0,
    run: Annotated[Path | None, typer.Option(help="Instead of drawn lengths those of a recorded run.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Instead: foretell the second half of this run, without drafts, by its first."),
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write plots to this page.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace these files if they are there.")] = False,
) -> None:
    """Compare systems of RL on GPUs you need not have: step times, and how long GPUs are idle.

    Each system is given its best split between sampling and training. For example:
    slipstream simulate --size 32 --gpu h100 --gpus 64 --lengths 20k --scaling 8,64,512 --html simulated.html

    Only two of them: slipstream simulate --systems "colocated; Slipstream"

    Rollouts that grow, and workers that are rented as they do: slipstream simulate --growth 1.03 --rent 64 --steps 30

    With the lengths of a run of yours: slipstream simulate --run runs/quickstart --gpus 4

    How far to trust it: slipstream simulate --against runs/quickstart
    """
    from slipstream.simulate.show import show_against, show_comparison

    _keep_results(json_file, "--json", overwrite)
    _keep_results(html_file, "--html", overwrite)
    if against is not None:
        if html_file is not None:
            raise ValueError("--against has no page: leave out --html, or give --json")
        show_against(against, json_file)
        return
    if shape is not None and curve is None:
        raise ValueError("--shape says which row of --curve counts: give both")
    show_comparison(
        billions=size,
        gpu=gpu,
        num_gpus=gpus,
        lengths=lengths,
        prompts=prompts,
        samples=samples,
        steps=steps,
        seed=seed,
        training=training,
        systems=systems,
        curve_file=curve,
        shape=shape,
        scaling=[_whole_number(text, "--scaling") for text in scaling.split(",")] if scaling else [],
        growth=growth,
        rent=rent,
        run=run,
        html_file=html_file,
        json_file=json_file,
    )


@app.command()
def plan(
    gpus: Annotated[str, typer.Option(help="What is on offer: kind:count@price an hour, separated by commas.")],
    size: Annotated[float, typer.Option(help="Billions of weights of the model.")] = 7.0,
    prompts: Annotated[int, typer.Option(help="Prompts of a step.", min=1)] = 128,
    samples: Annotated[int, typer.Option(help="Samples of a prompt.", min=1)] = 8,
    median: Annotated[float, typer.Option(help="Tokens of a typical rollout.")] = 5200,
    limit: Annotated[float, typer.Option(help="Tokens at which rollouts are cut.")] = 20000,
    training: Annotated[
        str, typer.Option(help="grpo, or ppo, whose critic is trained too: simulated only, train has no PPO.")
    ] = "grpo",
    target: Annotated[
        float | None, typer.Option(help="Rollouts a second: the cheapest plan that reaches it; else the fastest.")
    ] = None,
    cheapest: Annotated[
        str, typer.Option(help="With --target, the least of: the cost of a step, or the rent of an hour (step, hour).")
    ] = "step",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how many GPUs should sample and how many train, what a step takes and costs, and the second-best plan.

    With two kinds of GPU, each is tried for both, and one for each side. For example:
    slipstream plan --size 7 --gpus h100:32@2.5,h20:64@1.0 --prompts 128 --samples 8 --target 10

    With --target the first plan is the one whose steps cost least; with --cheapest hour the one whose GPUs do, though
    its steps may take longer and cost more. Without prices every GPU counts the same.
    """
    from slipstream.simulate.planning import Need, lengths_from
    from slipstream.simulate.show import show_plan

    need = Need(size, lengths_from(median, limit), prompts, samples, training, target, cheapest)
    show_plan(offers=gpus, need=need, as_json=as_json)


@bench.command("engine")
def bench_engine(
    shapes: Annotated[
        str, typer.Option(help="Model shapes (random weights) or model names, separated by commas.")
    ] = "smollm2-135m",
    batches: Annotated[str, typer.Option(help="Sequences at once, separated by commas.")] = "1,4,16,64,256",
    new_tokens: Annotated[int, typer.Option(help="Tokens sampled for each sequence.", min=16)] = 512,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    exact: Annotated[bool, typer.Option(help="Matrix products that give the same bits in every batch.")] = True,
    plain: Annotated[bool, typer.Option("--plain", help="The plain twin: no fused modules, no CUDA graphs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace that file if it is there.")] = False,
) -> None:
    """Time decoding: tokens/s, ms a step, share of the memory bandwidth, graph memory, start-up.

    Shapes known by name: smollm2-135m, qwen2.5-1.5b, qwen2.5-7b; any model folder works too. For example:
    slipstream bench engine --shapes smollm2-135m,qwen2.5-1.5b --batches 1,64 --json engine.json
    """
    from slipstream.runtime.benches import bench_engines

    _keep_results(json_file, "--json", overwrite)
    sizes = [_whole_number(text, "--batches") for text in batches.split(",")]
    bench_engines(
        shapes.split(","), sizes, new_tokens=new_tokens, dtype=dtype, exact=exact, plain=plain, json_file=json_file
    )


@bench.command("history")
def bench_history_drafts(
    shape: Annotated[str, typer.Option(help="A model shape (random weights) or a model name.")] = "smollm2-135m",
    batches: Annotated[str, typer.Option(help="Sequences at once, separated by commas.")] = "1,8,32",
    likenesses: Annotated[
        str, typer.Option(help="Shares of tokens that the history can give, separated by commas.")
    ] = "0,0.5,0.75,0.9,0.95",
    new_tokens: Annotated[int, typer.Option(help="Tokens of each sequence.", min=16)] = 512,
    trace: Annotated[
        Path | None, typer.Option(help="Instead: a recorded run, epoch by epoch; its folder, or a file of rollouts.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace that file if it is there.")] = False,
) -> None:
    """Time drafts from history against none: texts more or less like their history, and misleading ones.

    Texts are replayed at the full cost of sampling them, so any shape can be timed. For example:
    slipstream bench history --shape qwen2.5-1.5b --batches 1,16,64 --json history.json

    A run of yours shows what drafts would have given it, on any shape: slipstream bench history --trace
    runs/quickstart --batches 16. A file has a line of JSON a rollout: {"p": prompt, "ep": epoch, "t": [token ids]}.
    """
    from slipstream.runtime.bench_history import bench_history

    _keep_results(json_file, "--json", overwrite)
    sizes = [_whole_number(text, "--batches") for text in batches.split(",")]
    shares = [_share(text, "--likenesses") for text in likenesses.split(",")]
    bench_history(shape, sizes, shares, new_tokens=new_tokens, trace=trace, json_file=json_file)


def _check_model_folder(name: str) -> None:
    """Of a model on this machine; others would have to be downloaded to be looked at."""
    from slipstream.models.model_folder import is_folder

    if is_folder(name):
        from slipstream.models.loading import check_model, load_tokenizer

        check_model(name)
        load_tokenizer(name)


def _keep_results(file: Path | None, option: str, overwrite: bool) -> None:
    """ValueError if the file cannot be written, or holds something already. For before the work."""
    from slipstream.files import check_output_file

    check_output_file(file, option)
    if file is not None and file.is_file() and file.stat().st_size and not overwrite:
        raise ValueError(f"{option} {file} is there already: add --overwrite to replace it, or name another file")


def _share(text: str, option: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 0.99:
        raise ValueError(f"{option} takes numbers from 0 to 0.99 separated by commas, not '{text}'")
    return share


def _whole_number(text: str, option: str) -> int:
    try:
        number = int(text)
    except ValueError:  # also of one with more digits than Python reads
        number = 0
    if number < 1:
        raise ValueError(f"{option} takes whole numbers from 1 on separated by commas, not '{text:.40}'")
    return number


def main(arguments: list[str] | None = None) -> None:
    """The console command. With `arguments`, as a function of another program, it leaves that one's signals alone."""
    if arguments is not None:
        _run(arguments)
    with _signals_of_a_command():
        _run(None)


def _run(arguments: list[str] | None) -> NoReturn:
    from slipstream.runtime.openmp import bound_spinning

    bound_spinning()
    try:
        code = app(args=arguments, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        _fail("stopped at once; the last checkpoint is intact", STOPPED)
    except Exception as error:
        _explain(error)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _signals_of_a_command() -> Iterator[None]:
    """SIGTERM is Ctrl-C, from the first line to the last: whenever it comes, the exit code says how the command ended.

    Python gives both back to the system before it is done, and one that comes then would end the process by itself."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = 1
    try:
        try:
            yield
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else code
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(code))
            atexit.register(signal.signal, number, signal.SIG_IGN)


def _explain(error: Exception) -> NoReturn:
    """One sentence for what the user or the machine did; anything else is a bug of ours and keeps its traceback."""
    if isinstance(error, UsageError):
        error.show()  # type: ignore[attr-defined]
        sys.exit(2)
    if isinstance(error, ValueError) and _raised_by_us(error):
        _fail(str(error), 2)
    if type(error).__name__ == "OutOfMemoryError":
        _fail(f"out of memory: lower train.micro_batch_tokens or engine.max_sequences ({error})", 1)
    if isinstance(error, OSError) or type(error).__module__.startswith("slipstream."):
        _fail(str(error), 1)
    raise error


def _raised_by_us(error: Exception) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__", "")) if trace is not None else ""
    return module.startswith("slipstream") or module == __name__  # "__main__" with `python -m slipstream.cli`


def _fail(sentence: str, code: int) -> NoReturn:
    sys.stdout.flush()
    print(f"slipstream: {_UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], sentence)}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
