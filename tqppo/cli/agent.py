"""`agent try`: one session of an agent loop, printed turn by turn."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tqppo.cli.compiling import compile_named, print_diagnostics
from tqppo.cli.options import AsJson, ConfigFiles, Overrides
from tqppo.cli.output import emit_json, say
from tqppo.errors import ConfigError, UsageError

app = typer.Typer(no_args_is_help=True, help="Try agent loops.")


@app.callback()
def root() -> None:
    """Try agent loops."""


@app.command("try")
def try_session(
    named: Annotated[
        str | None, typer.Argument(metavar="[PRESET]", help="A preset; `tqppo presets list` shows them.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", "-p", metavar="NAME", help="The same, spelled as an option.")
    ] = None,
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="TEXT", help="What to ask. Without it: a prompt of the dataset.")
    ] = "",
    answer: Annotated[
        str, typer.Option("--answer", metavar="TEXT", help="The right answer to --prompt, for the reward.")
    ] = "",
    index: Annotated[int, typer.Option("--index", metavar="N", min=0, help="Which prompt of the dataset.")] = 0,
    session: Annotated[int, typer.Option("--session", metavar="N", min=0, help="Another number, other samples.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest tokens instead of samples.")] = False,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Play one session of an agent loop, and print it turn by turn.

    Uses the preset's engine and shows which tokens are trained on, and the log-probability of each. Starts no Ray.
    """
    if named and preset:
        raise UsageError(f"agent try {named} or --preset {preset}: name one of them")
    compilation = compile_named(named or preset, config, overrides)
    print_diagnostics(compilation.diagnostics)
    if not compilation.ok or compilation.config is None:
        raise typer.Exit(ConfigError.exit_code)
    from tqppo.doctor.agent import Wanted, play, render

    wanted = Wanted(prompt, answer, index, session, greedy)
    played = play(compilation.config, wanted, announce=lambda what: say(f"{what} …", err=True))
    if as_json:
        emit_json(asdict(played))
    else:
        render(played, say)
