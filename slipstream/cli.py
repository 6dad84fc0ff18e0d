"""The command line: train | eval | check | report. Parses, calls one function, and says plainly what went wrong.

Exit codes: 0 done; 1 the run failed (disk, graders, numbers); 2 the user can fix it; 130 stopped by Ctrl-C.
Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Train language models to reason, with RL. Start with: slipstream train recipes/quickstart.yaml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_TAKES_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_TAKES_OVERRIDES)
def train(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="A .yaml file; those that come with Slipstream are in recipes/.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run's last checkpoint, if it has one.")
    ] = False,
    resume_from: Annotated[Path | None, typer.Option(help="Go on from this checkpoint folder.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run in run.dir first.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings and what follows from them.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Train a model with RL.

    Any setting of the recipe can be given as key=value or --key value, for example:
    slipstream train recipes/quickstart.yaml train.steps=20 seed=3 run.dir=runs/mine
    """
    from slipstream.config import collect_overrides, dump_config, load_config

    config = load_config(recipe, collect_overrides(context.args))
    if dry_run:
        typer.echo(dump_config(config))
        for name, value in config.arithmetic().items():
            typer.echo(f"# {name}: {value}")
        return
    if overwrite:
        _remove_run(config.run.dir)

    from slipstream.runtime.local import run_training

    outcome = run_training(config, resume=resume_from or resume, quiet=quiet)
    if quiet:
        return
    if outcome.reason == "done":
        typer.echo(f"done after {outcome.step} steps. Look at: {outcome.run_dir / 'report.html'}")
        typer.echo(f"the model: {outcome.run_dir / 'checkpoints' / f'step_{outcome.step}'}")
        typer.echo(f"evaluate it again: slipstream eval {outcome.run_dir}")
    else:
        typer.echo(f"{outcome.reason} after step {outcome.step}; go on with: slipstream train {recipe} --resume")
        raise typer.Exit(130)


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
    """
    from slipstream.config import collect_overrides
    from slipstream.runtime.standalone import evaluate_target

    metrics = evaluate_target(target, collect_overrides(context.args), quiet=as_json)
    if as_json:
        typer.echo(json.dumps(metrics))
    else:
        for name, value in sorted(metrics.items()):
            typer.echo(f"{name:40} {value:.4f}")


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
        raise typer.Exit(1)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run folder, e.g. runs/quickstart.")]) -> None:
    """Write report.html of a run, also while it is running."""
    from slipstream.observe.report import write_report

    typer.echo(write_report(run))


def _remove_run(folder: Path) -> None:
    import shutil

    if not folder.exists():
        return
    if not (folder / "run.db").is_file():
        raise ValueError(f"--overwrite: {folder} does not look like a run (it has no run.db); delete it by hand")
    shutil.rmtree(folder)


def main(arguments: list[str] | None = None) -> Any:
    """The console command."""
    try:
        return app(args=arguments)
    except ValueError as error:
        _fail(error, 2)
    except KeyboardInterrupt:
        _fail(RuntimeError("stopped at once; the last checkpoint is intact"), 130)
    except (OSError, RuntimeError, ArithmeticError) as error:
        if type(error).__module__.startswith("torch"):
            raise
        _fail(error, 1)


def _fail(error: BaseException, code: int) -> None:
    sys.stdout.flush()
    print(f"slipstream: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
