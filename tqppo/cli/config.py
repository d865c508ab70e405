"""`validate-config`, `config explain` and `schema`: the compiler, from the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tqppo.cli.options import AsJson, ConfigFiles, Overrides, Preset, Quiet, Verbose, verbosity
from tqppo.cli.output import emit_json, table
from tqppo.errors import ConfigError, PreflightError, UsageError

if TYPE_CHECKING:
    from tqppo.config.compilation import Compilation
    from tqppo.config.diagnostics import Diagnostic
    from tqppo.config.schema import Setting

FORMATS = ("text", "json", "github")
app = typer.Typer(no_args_is_help=True, help="Ask about the config.")


def validate(
    ctx: typer.Context,
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    format_: Annotated[
        str, typer.Option("--format", metavar="text|json|github", help="For people, programs, or pull requests.")
    ] = "text",
    as_json: AsJson = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also load tokenizer, data, reward function; look for engines, devices.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show how the memory estimates are computed.")] = False,
    verbose: Verbose = 0,
    quiet: Quiet = 0,
) -> None:
    """Find every mistake before anything starts.

    All problems are reported at once, each at its place; when there is none, the plan is printed.
    """
    format_ = "json" if as_json else format_
    if format_ not in FORMATS:
        raise UsageError(f"--format {format_}: there is {', '.join(FORMATS)}")
    compilation = compile_or_refuse(preset, config, overrides)
    found = _probe(compilation) if probe and compilation.ok else []
    level = verbosity(ctx, verbose, quiet)
    {"text": _as_text, "json": _as_json, "github": _as_github}[format_](compilation, found, explain, level)
    if not compilation.ok:
        raise typer.Exit(ConfigError.exit_code)
    if has_errors(found):
        raise typer.Exit(PreflightError.exit_code)


def compile_or_refuse(preset: str | None, config: Sequence[str] | None, overrides: Sequence[str] | None) -> Compilation:
    """Compile what the command line names; naming nothing is a mistake of usage."""
    if not preset and not config:
        raise UsageError("name what to run: --preset NAME (`tqppo presets list` shows them) or --config FILE")
    from tqppo.config.compile import compile_config

    return compile_config(preset, list(config or []), list(overrides or []), os.environ)


def print_diagnostics(diagnostics: Sequence[Diagnostic]) -> None:
    from tqppo.config.diagnostics import render_text

    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    typer.echo(render_text(diagnostics, color=color), err=True, nl=False, color=color)


def has_errors(diagnostics: Sequence[Diagnostic]) -> bool:
    return any(each.severity == "error" for each in diagnostics)


def _probe(compilation: Compilation) -> list[Diagnostic]:
    from tqppo.doctor.probe import probe

    return probe(compilation)


def _as_text(compilation: Compilation, found: list[Diagnostic], explain: bool, level: int) -> None:
    from tqppo.config.plan.plan import make_plan
    from tqppo.config.plan.text import plan_text

    problems = [*compilation.diagnostics, *found]
    if problems:
        print_diagnostics(problems)
    if compilation.ok and level >= 0:
        typer.echo(plan_text(make_plan(compilation), formulas=explain).rstrip("\n"))


def _as_json(compilation: Compilation, found: list[Diagnostic], explain: bool, level: int) -> None:
    from tqppo.config.diagnostics import in_order
    from tqppo.config.plan.plan import make_plan

    answer: dict[str, Any] = {
        "ok": compilation.ok and not has_errors(found),
        "diagnostics": [each.as_dict() for each in in_order([*compilation.diagnostics, *found])],
        "plan": make_plan(compilation).as_dict() if compilation.ok else None,
    }
    emit_json(answer)


def _as_github(compilation: Compilation, found: list[Diagnostic], explain: bool, level: int) -> None:
    from tqppo.config.diagnostics import render_github

    typer.echo(render_github([*compilation.diagnostics, *found]), nl=False)


@app.command("explain")
def explain_key(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A setting, as `actor.lr`, or a section, as `actor`.")],
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """What a setting means, its value, and which file, variable or option it comes from."""
    from tqppo.config.compile import compile_config
    from tqppo.config.show.explain import explain, explain_section

    if section := explain_section(key):
        _print_section(section, as_json)
        return
    compilation = compile_config(preset, list(config or []), list(overrides or []), os.environ)
    explanation = explain(compilation, key)
    if as_json:
        emit_json(explanation.as_dict())
    else:
        typer.echo(explanation.text().rstrip("\n"))
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


def schema() -> None:
    """Print the config's JSON Schema, for editors."""
    from tqppo.config.show.explain import json_schema

    emit_json(json_schema())
