"""`resume`: continue a run; `tqppo.run.start` does the work."""

from __future__ import annotations

from typing import Annotated

import typer

from tqppo.cli.options import MaxSteps, Overrides, Quiet, Verbose, set_log_level, verbosity
from tqppo.errors import UsageError


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
        str,
        typer.Option(
            "--fork", metavar="NAME", help="Continue under another name, also with other settings; the first run stays."
        ),
    ] = "",
    verbose: Verbose = 0,
    quiet: Quiet = 0,
) -> None:
    """Continue a run exactly where it stopped."""
    if run and checkpoint:
        raise UsageError(f"resume {run} or --checkpoint {checkpoint}: name one of them")
    from tqppo.run import start

    level = verbosity(ctx, verbose, quiet)
    set_log_level(level)
    where = run or checkpoint or "latest"
    raise typer.Exit(start.resume(where, list(overrides or []), max_steps=max_steps, fork=fork, verbosity=level))
