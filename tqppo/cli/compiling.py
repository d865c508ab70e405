"""Compiles the config that a command line names, and prints its diagnostics. Commands that need a config use it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from tqppo.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from tqppo.config.compilation import Compilation
    from tqppo.config.diagnostics import Diagnostic
    from tqppo.config.sections import Config


def compile_named(
    preset: str | None,
    config: Sequence[str] | None,
    overrides: Sequence[str] | None,
    *,
    unset: Sequence[str] | None = None,
    may_be_bare: bool = False,
) -> Compilation:
    """Compile the preset, files and settings of a command line.

    UsageError if it names neither preset nor file; with `may_be_bare`, the defaults hold then.
    """
    if not preset and not config and not may_be_bare:
        raise UsageError("name what to run: --preset NAME (`tqppo presets list` shows them) or --config FILE")
    from tqppo.config.compile import compile_config

    return compile_config(preset, list(config or []), list(overrides or []), os.environ, unset=list(unset or []))


def bare_settings(words: Sequence[str] | None) -> list[str]:
    """Arguments `key=value` without --set in front; UsageError for anything else."""
    if not words:
        return []
    from tqppo.cli.mistakes import as_settings
    from tqppo.config.read.presets import list_presets

    return as_settings(words, [each.name for each in list_presets()])


def print_diagnostics(diagnostics: Sequence[Diagnostic]) -> None:
    """Print problems to stderr; nothing if there are none."""
    if not diagnostics:
        return
    from tqppo.config.diagnostics import render_text

    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 0
    typer.echo(render_text(diagnostics, color=color, width=width), err=True, nl=False, color=color)


def compile_or_exit(
    preset: str | None, config: Sequence[str] | None, overrides: Sequence[str] | None, *, may_be_bare: bool = False
) -> Config:
    """The config of a command line. If it has errors, they are printed and the command ends; warnings are left out."""
    compilation = compile_named(preset, config, overrides, may_be_bare=may_be_bare)
    if not compilation.ok:
        print_diagnostics(compilation.diagnostics)
        raise typer.Exit(ConfigError.exit_code)
    return compilation.draft


def has_errors(diagnostics: Sequence[Diagnostic]) -> bool:
    return any(each.severity == "error" for each in diagnostics)
