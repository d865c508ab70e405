"""Options that several commands share, spelled once."""

from __future__ import annotations

from typing import Annotated

import typer

Preset = Annotated[
    str | None, typer.Option("--preset", "-p", metavar="NAME", help="A preset; `tqppo presets list` shows them.")
]
ConfigFiles = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="FILE", help="A TOML file on top of the preset. Repeatable; later wins."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="One setting, as `rollout.group_size=8`. Repeatable; wins over all."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say more; twice for debugging.")
]
Quiet = Annotated[int, typer.Option("--quiet", "-q", count=True, show_default=False, help="Say only what went wrong.")]


def verbosity(ctx: typer.Context, verbose: int, quiet: int) -> int:
    """-1 quiet, 0 as usual, 1 verbose, 2 debug; the flags count before and after the command's name."""
    given = ctx.find_root().params
    total = verbose + given.get("verbose", 0) - quiet - given.get("quiet", 0)
    return max(-1, min(2, total))
