"""`config explain`: what a setting means, its value and its origin."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tqppo.cli.compiling import print_diagnostics
from tqppo.cli.options import AsJson, ConfigFiles, Overrides, Preset
from tqppo.cli.output import emit_json, say, table
from tqppo.errors import ConfigError

if TYPE_CHECKING:
    from tqppo.config.schema import Setting

app = typer.Typer(no_args_is_help=True, help="Explain settings.")


@app.command("explain")
def explain_key(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="[KEY]", help="A setting, as `actor.lr`, or a section, as `actor`. Default: all of them."
        ),
    ] = None,
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say what a setting means, its value, and what set it.

    That is a file with its line, a variable, an option or the default.
    """
    from tqppo.config.compile import compile_config
    from tqppo.config.schema import settings
    from tqppo.config.show.explain import explain, explain_section

    compilation = compile_config(preset, list(config or []), list(overrides or []), os.environ)
    if not key or (section := explain_section(key)):
        if compilation.ok:
            _print_section(section if key else list(settings().values()), as_json)
            return
        print_diagnostics(compilation.diagnostics)
        raise typer.Exit(ConfigError.exit_code)
    explanation = explain(compilation, key)
    if as_json:
        emit_json(explanation.as_dict())
    else:
        say(explanation.text().rstrip("\n"))
    if not compilation.ok:
        print_diagnostics(compilation.diagnostics)
        raise typer.Exit(ConfigError.exit_code)


def _print_section(section: Sequence[Setting], as_json: bool) -> None:
    from tqppo.config.values import toml_value

    if as_json:
        emit_json([{"key": s.key, "default": s.default, "allowed": s.allowed, "doc": s.doc} for s in section])
        return
    rows = [[each.key, "-" if each.default is None else toml_value(each.default), each.doc] for each in section]
    table(["setting", "default", "what it means"], rows)
