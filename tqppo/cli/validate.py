"""`validate-config`: every mistake of a config, and the plan when there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from tqppo.cli.compiling import bare_settings, compile_named, has_errors, print_diagnostics
from tqppo.cli.options import AsJson, BareSettings, ConfigFiles, Overrides, Preset, Quiet, Unset, Verbose, verbosity
from tqppo.cli.output import emit_json, say, tick
from tqppo.errors import ConfigError, PreflightError, UsageError

if TYPE_CHECKING:
    from tqppo.config.compilation import Compilation
    from tqppo.config.diagnostics import Diagnostic

FORMATS = ("text", "json", "github")


def validate(
    ctx: typer.Context,
    settings: BareSettings = None,
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    unset: Unset = None,
    format_: Annotated[
        str, typer.Option("--format", metavar="text|json|github", help="For people, programs, or pull requests.")
    ] = "text",
    as_json: AsJson = False,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Also load tokenizer, data, reward function; try teachers; look for engines."),
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
    compilation = compile_named(preset, config, [*(overrides or []), *bare_settings(settings)], unset=unset)
    findings: list[str] = []
    found = (_probe(compilation, findings.append) if probe else _files(compilation)) if compilation.ok else []
    level = verbosity(ctx, verbose, quiet)
    if format_ == "text":
        _as_text(compilation, found, findings if level >= 0 else [], explain, level)
    elif format_ == "json":
        _as_json(compilation, found, findings)
    else:
        _as_github(compilation, found)
    if not compilation.ok:
        raise typer.Exit(ConfigError.exit_code)
    if has_errors(found):
        raise typer.Exit(PreflightError.exit_code)


def _probe(compilation: Compilation, tell: Callable[[str], None]) -> list[Diagnostic]:
    from tqppo.doctor.probe import probe

    return probe(compilation, tell)


def _files(compilation: Compilation) -> list[Diagnostic]:
    from tqppo.doctor.files import missing_files

    return missing_files(compilation)


def _as_text(compilation: Compilation, found: list[Diagnostic], findings: list[str], explain: bool, level: int) -> None:
    from tqppo.config.plan.machine import on_this_machine
    from tqppo.config.plan.plan import make_plan
    from tqppo.config.plan.text import plan_text

    print_diagnostics([*compilation.diagnostics, *found])
    for each in findings:
        tick(each)
    if compilation.ok and level >= 0:
        say(plan_text(make_plan(on_this_machine(compilation)), formulas=explain).rstrip("\n"))


def _as_json(compilation: Compilation, found: list[Diagnostic], findings: list[str]) -> None:
    from tqppo.config.diagnostics import in_order
    from tqppo.config.plan.machine import on_this_machine
    from tqppo.config.plan.plan import make_plan

    answer: dict[str, object] = {
        "ok": compilation.ok and not has_errors(found),
        "diagnostics": [each.as_dict() for each in in_order([*compilation.diagnostics, *found])],
        "findings": findings,
        "plan": make_plan(on_this_machine(compilation)).as_dict() if compilation.ok else None,
    }
    emit_json(answer)


def _as_github(compilation: Compilation, found: list[Diagnostic]) -> None:
    from tqppo.config.diagnostics import render_github

    say(render_github([*compilation.diagnostics, *found]), nl=False)
