"""Compiles the config that a command line names, and prints its diagnostics. Commands that need a config use it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from tqppo.errors import UsageError

if TYPE_CHECKING:
    from tqppo.config.compilation import Compilation
    from tqppo.config.diagnostics import Diagnostic


def compile_named(preset: str | None, config: Sequence[str] | None, overrides: Sequence[str] | None) -> Compilation:
    """Compile the preset, files and settings of a command line; UsageError if it names neither preset nor file."""
    if not preset and not config:
        raise UsageError("name what to run: --preset NAME (`tqppo presets list` shows them) or --config FILE")
    from tqppo.config.compile import compile_config

    return compile_config(preset, list(config or []), list(overrides or []), os.environ)


def print_diagnostics(diagnostics: Sequence[Diagnostic]) -> None:
    """Print problems to stderr; nothing if there are none."""
    if not diagnostics:
        return
    from tqppo.config.diagnostics import render_text

    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    typer.echo(render_text(diagnostics, color=color), err=True, nl=False, color=color)


def has_errors(diagnostics: Sequence[Diagnostic]) -> bool:
    return any(each.severity == "error" for each in diagnostics)
