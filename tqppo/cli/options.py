"""Options that several commands share, and what -v and -q mean."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from tqppo.untrusted import printable

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
Unset = Annotated[
    list[str] | None,
    typer.Option("--unset", metavar="KEY", help="Use the default of a setting, whatever presets and files say."),
]
BareSettings = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, as with --set.")]
MaxSteps = Annotated[
    int | None, typer.Option("--max-steps", metavar="N", min=1, help="Steps in all, counted from the very first start.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Print more; twice for debugging.")
]
Quiet = Annotated[int, typer.Option("--quiet", "-q", count=True, show_default=False, help="Print only problems.")]


def verbosity(ctx: typer.Context, verbose: int, quiet: int) -> int:
    """-1 quiet, 0 normal, 1 verbose, 2 debug; flags before the command's name and after it add up."""
    before = ctx.find_root().params
    total = verbose + int(before.get("verbose", 0)) - quiet - int(before.get("quiet", 0))
    return max(-1, min(2, total))


class PrintableFormatter(logging.Formatter):
    """Log lines without anything that the terminal obeys: they quote data and other processes."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def set_log_level(level: int) -> None:
    """Print tqppo's own log lines as far as `level` asks for, and warnings of other libraries."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(message)s"))
    wanted = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO, 2: logging.DEBUG}[level]
    handler.setLevel(min(wanted, logging.WARNING))  # a teacher in this process logs more, into a file
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("tqppo").setLevel(wanted)
