"""`presets list|show|diff`: the presets that exist, their files, and how they differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tqppo.cli.options import AsJson
from tqppo.cli.output import emit_json, say, table
from tqppo.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from tqppo.config.compilation import Compilation

app = typer.Typer(no_args_is_help=True, help="List, print and compare presets.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A preset.")]


@app.command("list")
def list_all(as_json: AsJson = False) -> None:
    """List every preset, built-in and your own, and where each is."""
    from tqppo.config.read.presets import list_presets

    found = list_presets()
    if as_json:
        emit_json([{"name": p.name, "summary": p.summary, "place": p.place, "path": str(p.path)} for p in found])
        return
    table(["preset", "found in", "what it shows"], [[p.name, p.place, p.summary] for p in found])


@app.command("show")
def show(
    preset: Name,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Every setting, defaults included, as TOML that reproduces the run.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print a preset's file, or with --resolved all its settings."""
    from tqppo.config.read.presets import MAX_HEADER_BYTES
    from tqppo.untrusted import read_file

    path = _known(preset)
    text = _resolved(preset) if resolved else read_file(path, MAX_HEADER_BYTES).decode(errors="replace")
    if as_json:
        emit_json({"name": preset, "path": str(path), "toml": text})
    else:
        say(text.rstrip("\n"))


@app.command("diff")
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A preset.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    as_json: AsJson = False,
) -> None:
    """Print the settings in which two presets differ."""
    from tqppo.config.show.difference import diff_presets

    for name in (first, second):
        _compiled(name)
    rows = diff_presets(first, second)
    if as_json:
        emit_json([{"key": key, first: a, second: b} for key, a, b in rows])
    elif rows:
        table(["setting", first, second], [[key, a or "-", b or "-"] for key, a, b in rows])
    else:
        say(f"{first} and {second} do not differ")


def _known(name: str) -> Path:
    """The preset's file; UsageError with similar names if there is none."""
    from tqppo.config.read.nearest import did_you_mean
    from tqppo.config.read.presets import find_preset, list_presets

    path = find_preset(name)
    if path is None:
        names = [each.name for each in list_presets()]
        hint = did_you_mean(name, names)
        raise UsageError(f"no preset is called {name!r}; {hint or 'there are ' + ', '.join(names)}")
    return path


def _compiled(name: str) -> Compilation:
    from tqppo.cli.compiling import print_diagnostics
    from tqppo.config.compile import compile_config

    _known(name)
    compilation = compile_config(name, [], [], {})
    if not compilation.ok:
        print_diagnostics(compilation.diagnostics)
        raise ConfigError(f"preset {name} does not compile")
    return compilation


def _resolved(name: str) -> str:
    from tqppo.config.show.export import resolved_toml

    return resolved_toml(_compiled(name).draft)
