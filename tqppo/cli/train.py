"""`train` and `resume`: compile, then hand over to `tqppo.run.start`."""

from __future__ import annotations

import json
import logging
from typing import Annotated

import typer

from tqppo.cli.config import compile_or_refuse, print_diagnostics
from tqppo.cli.options import ConfigFiles, Overrides, Preset, Quiet, Verbose, verbosity
from tqppo.errors import ConfigError, UsageError

MaxSteps = Annotated[
    int | None, typer.Option("--max-steps", min=1, help="Steps in all, counted from the very first start.")
]


def train(
    ctx: typer.Context,
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    name: Annotated[str, typer.Option("--name", "-n", metavar="NAME", help="Folder of the run under run.dir.")] = "",
    max_steps: MaxSteps = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    verbose: Verbose = 0,
    quiet: Quiet = 0,
) -> None:
    """Train a model, as a preset and settings say.

    Settings come from, later ones winning: defaults, the preset, --config files, TQPPO__SECTION__KEY, --set.
    """
    shorthands = {"run.name": json.dumps(name) if name else "", "run.max_steps": str(max_steps or "")}
    settings = [*(overrides or []), *(f"{key}={value}" for key, value in shorthands.items() if value)]
    compilation = compile_or_refuse(preset, config, settings)
    if compilation.diagnostics:
        print_diagnostics(compilation.diagnostics)
    if not compilation.ok:
        raise typer.Exit(ConfigError.exit_code)
    if dry_run:
        from tqppo.config.plan.plan import make_plan
        from tqppo.config.plan.text import plan_text

        typer.echo(plan_text(make_plan(compilation)).rstrip("\n"))
        return
    from tqppo.run.start import train as start

    raise typer.Exit(start(compilation, verbosity=_log(ctx, verbose, quiet)))


def resume(
    ctx: typer.Context,
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run's name or folder, a checkpoint's folder, or latest.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="PATH|latest|RUN", help="The same, spelled as an option.")
    ] = None,
    overrides: Overrides = None,
    max_steps: MaxSteps = None,
    fork: Annotated[
        str, typer.Option("--fork", metavar="NAME", help="Go on under another name; the first run stays as it is.")
    ] = "",
    verbose: Verbose = 0,
    quiet: Quiet = 0,
) -> None:
    """Go on with a run, exactly where it stopped."""
    if run and checkpoint:
        raise UsageError(f"resume {run} or --checkpoint {checkpoint}: name one of them")
    from tqppo.run.start import resume as go_on

    level = _log(ctx, verbose, quiet)
    where = run or checkpoint or "latest"
    code = go_on(where, list(overrides or []), max_steps=max_steps, fork=fork, verbosity=level)
    raise typer.Exit(code)


def _log(ctx: typer.Context, verbose: int, quiet: int) -> int:
    """Let our own log lines through as far as was asked for; other libraries' stay at warnings."""
    level = verbosity(ctx, verbose, quiet)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("tqppo").setLevel(
        {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO, 2: logging.DEBUG}[level]
    )
    return level
