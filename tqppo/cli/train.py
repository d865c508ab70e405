"""`train`: compile the config, then start the run; `tqppo.run.start` does the work."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tqppo.cli.compiling import compile_named, print_diagnostics
from tqppo.cli.options import ConfigFiles, MaxSteps, Overrides, Preset, Quiet, Verbose, set_log_level, verbosity
from tqppo.errors import ConfigError


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
    """Train a model with a preset and settings.

    Settings come from, later ones winning: defaults, the preset, --config files, TQPPO__SECTION__KEY, --set.
    """
    shorthands = {"run.name": json.dumps(name) if name else "", "run.max_steps": str(max_steps or "")}
    settings = [*(overrides or []), *(f"{key}={value}" for key, value in shorthands.items() if value)]
    compilation = compile_named(preset, config, settings)
    print_diagnostics(compilation.diagnostics)
    if not compilation.ok:
        raise typer.Exit(ConfigError.exit_code)
    if dry_run:
        from tqppo.config.plan.plan import make_plan
        from tqppo.config.plan.text import plan_text

        typer.echo(plan_text(make_plan(compilation)).rstrip("\n"))
        return
    from tqppo.run import start

    level = verbosity(ctx, verbose, quiet)
    set_log_level(level)
    raise typer.Exit(start.train(compilation, verbosity=level))
