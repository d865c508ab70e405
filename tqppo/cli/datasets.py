"""`data show`: rows as the model sees them. `data get`: the files that presets read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tqppo.cli.compiling import compile_or_exit
from tqppo.cli.options import AsJson, ConfigFiles, Overrides, Preset
from tqppo.cli.output import emit_json, say
from tqppo.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="Look at datasets; make those that presets read.")


@app.command("show")
def show(
    source: Annotated[
        str | None, typer.Argument(metavar="[SOURCE]", help="A file, a pattern, hub:NAME, task:NAME; or data.train.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Whose tokenizer to use. Default: model.path, or tiny.")
    ] = "",
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=0, help="Rows to print.")] = 3,
    first: Annotated[int, typer.Option("--first", metavar="N", min=0, help="The first row to print, from 0.")] = 0,
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show rows as the model sees them, and a histogram of their lengths.

    Columns, chat template and system prompt follow the [data] section of the preset, file or settings, if given.
    """
    written = [f"data.train={source}"] if source else []
    settings = compile_or_exit(preset, config, [*(overrides or []), *written], may_be_bare=bool(source))
    from tqppo.data.prompts import DataSpec
    from tqppo.doctor.data import look_at, render
    from tqppo.doctor.tokenizers import load_tokenizer

    name = model or settings.model.tokenizer or settings.model.path
    tokenizer = load_tokenizer(name, trust_remote_code=settings.model.trust_remote_code)
    spec = DataSpec.of(settings.data)
    look = look_at(spec, tokenizer, seed=settings.run.seed, first=first, count=rows)
    if as_json:
        emit_json(asdict(look))
    else:
        render(look, spec, name, say)


@app.command("get")
def get(
    dataset: Annotated[str, typer.Argument(metavar="NAME", help="gsm8k, dapo-math, aime-2024, math or code.")],
    copies: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="PATH", help="A copy here: a folder, or a file of data. Repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to write. Default: data/NAME.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make the data files that presets read.

    Rows come from the hub, or from a copy on this machine (--from).
    """
    from tqppo.data.make import make_files
    from tqppo.data.recipes import RECIPES

    if dataset not in RECIPES:
        raise UsageError(f"there is no dataset {dataset!r}; there is {', '.join(RECIPES)}")
    recipe = RECIPES[dataset]
    made = make_files(recipe, copies or [], out or Path(recipe.folder))
    if as_json:
        emit_json({str(path): rows for path, rows in made.items()})
        return
    for path, rows in made.items():
        say(f"{path}: {rows:,} prompts")
