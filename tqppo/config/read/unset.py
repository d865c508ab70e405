"""`--unset KEY`: the default of a setting or of a whole section, whatever presets, files and variables say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tqppo.config.diagnostics import Diagnostic, Span
from tqppo.config.read.nearest import nearest
from tqppo.config.schema import setting_of, settings
from tqppo.config.sections import Config


def is_unset(path: Sequence[str], unset: Sequence[str]) -> bool:
    """Whether a key, or a table around it, is to have its default."""
    return any(".".join(path[:depth]) in unset for depth in range(1, len(path) + 1))


def unknown_unset(unset: Sequence[str]) -> Iterator[Diagnostic]:
    for number, key in enumerate(unset, 1):
        if key in Config.model_fields or (setting_of(key) is not None and "." in key) or key.startswith("teachers."):
            continue
        close = nearest(key, [*settings(), *Config.model_fields], limit=1)
        yield Diagnostic(
            "error",
            "E101",
            f"unknown key {key}",
            Span("--unset", number, 1, max(1, len(key)), key),
            key,
            found=key,
            fix=f"did you mean {close[0]}?" if close else "see `tqppo schema`",
        )
