"""`data`: make the files of a well-known dataset that presets train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tqppo.cli.options import AsJson
from tqppo.cli.output import emit_json
from tqppo.errors import UsageError


def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="gsm8k, dapo-math, aime-2024, math or code.")],
    copies: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="PATH", help="A copy here: a folder, a .parquet or .jsonl file. Repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to write. Default: data/NAME.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make the data files that presets read.

    Rows come from the hub, or from a copy on this machine (--from).
    """
    from tqppo.data.make import make_files
    from tqppo.data.recipes import RECIPES

    if name not in RECIPES:
        raise UsageError(f"there is no dataset {name!r}; there is {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    made = make_files(recipe, copies or [], out or Path(recipe.folder))
    if as_json:
        emit_json({str(path): rows for path, rows in made.items()})
        return
    for path, rows in made.items():
        typer.echo(f"{path}: {rows:,} prompts")
