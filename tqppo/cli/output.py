"""The output of commands: tables on a terminal, plain aligned lines elsewhere, JSON for programs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence

import typer

from tqppo.untrusted import printable, printable_json

WHOLE_CELL = 12  # characters of a cell that is never cut or wrapped
GAP = 3  # columns of the terminal between two cells of a table


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text of any origin: names of files, data and what a model says hold nothing that the terminal obeys."""
    typer.echo(printable(text), err=err, nl=nl)


def emit_json(value: object) -> None:
    typer.echo(printable_json(json.dumps(value, indent=2, ensure_ascii=False)))


def tick(finding: str) -> None:
    """Print something that was tried and is in order."""
    mark = "✓" if "utf" in (sys.stdout.encoding or "").lower() else "ok"
    typer.secho(mark, fg="green", nl=False)
    say(f" {finding}")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Cells are literal text: rich's markup is off. Names, numbers and short cells stay whole."""
    longest = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    least = [length if i == 0 else min(length, WHOLE_CELL) for i, length in enumerate(longest)]
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # `>&-` leaves none
    if not is_terminal or shutil.get_terminal_size().columns < sum(least) + GAP * len(least):
        say("\n".join(plain_lines(header, rows)))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from tqppo.display.console import SafeConsole

    grid = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for i, name in enumerate(header):
        is_whole = least[i] == longest[i]
        style = "cyan" if i == 0 else None
        grid.add_column(name, style=style, no_wrap=is_whole, min_width=least[i], overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    SafeConsole().print(grid)


def plain_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
