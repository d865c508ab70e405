"""`train`: compile the config, then start the run; `tqppo.run.start` does the work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tqppo.cli.compiling import bare_settings, compile_named, has_errors, print_diagnostics
from tqppo.cli.options import (
    BareSettings,
    ConfigFiles,
    MaxSteps,
    Overrides,
    Preset,
    Quiet,
    Unset,
    Verbose,
    set_log_level,
    verbosity,
)
from tqppo.cli.output import say, tick
from tqppo.errors import ConfigError, PreflightError

if TYPE_CHECKING:
    from tqppo.config.compilation import Compilation


def train(
    ctx: typer.Context,
    settings: BareSettings = None,
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    unset: Unset = None,
    name: Annotated[str, typer.Option("--name", "-n", metavar="NAME", help="Folder of the run under run.dir.")] = "",
    max_steps: MaxSteps = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Do not try tokenizer, data, reward and devices first.")
    ] = False,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Run everything in this process, without Ray: the fastest start.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove a run of this name, even if it has trained.")
    ] = False,
    verbose: Verbose = 0,
    quiet: Quiet = 0,
) -> None:
    """Train a model with a preset and settings.

    Settings come from, later ones winning: defaults, the preset, --config files, TQPPO__SECTION__KEY, --set.
    """
    shorthands = {
        "run.name": json.dumps(name) if name else "",
        "run.max_steps": str(max_steps or ""),
        "cluster.in_process": "true" if in_process else "",
    }
    short = [f"{key}={value}" for key, value in shorthands.items() if value]
    compilation = compile_named(preset, config, [*(overrides or []), *bare_settings(settings), *short], unset=unset)
    print_diagnostics(compilation.diagnostics)
    if not compilation.ok:
        raise typer.Exit(ConfigError.exit_code)
    if dry_run:
        from tqppo.config.plan.plan import make_plan
        from tqppo.config.plan.text import plan_text

        say(plan_text(make_plan(compilation)).rstrip("\n"))
        return
    level = verbosity(ctx, verbose, quiet)
    set_log_level(level)
    raise typer.Exit(_train(compilation, level, probes=not no_probe, overwrite=overwrite))


def _train(compilation: Compilation, level: int, *, probes: bool, overwrite: bool) -> int:
    from tqppo.processes.garbage import spared_while_importing
    from tqppo.run.launch import workers_ahead

    with workers_ahead(compilation.draft):
        with spared_while_importing():
            if probes:
                _probe(compilation, overwrite=overwrite, quiet=level < 0)
            from tqppo.run import start

        return start.train(compilation, verbosity=level, overwrite=overwrite)


def _probe(compilation: Compilation, *, overwrite: bool, quiet: bool) -> None:
    """Try what the config names before anything heavy starts; ends the command if something is missing."""
    from tqppo.doctor.probe import probe
    from tqppo.run.folder import refuse_taken_name

    run = compilation.draft.run
    refuse_taken_name(Path(run.dir), run.name, overwrite=overwrite)
    found = probe(compilation, (lambda _: None) if quiet else tick, starts_engines=False)
    print_diagnostics(found)
    if has_errors(found):
        raise typer.Exit(PreflightError.exit_code)
