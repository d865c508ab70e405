"""What one source of a config sets: keys, values, and their places in the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tqppo.config.diagnostics import Span
from tqppo.config.read.spans import Document

SourceKind = Literal["preset", "config", "environment", "set"]


@dataclass(frozen=True, slots=True)
class KeyAssignment:
    """One key with its value, and where both stand in the file, the argument or the variable."""

    path: tuple[str, ...]
    value: object
    key_span: Span
    value_span: Span
    element_spans: tuple[Span, ...] = ()  # of a list's elements
    unquoted: str | None = None  # the text of a `--set` or environment value without quotes

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def entry(self, name: str, value: object) -> KeyAssignment:
        """The assignment of one entry of a table that is set as a whole."""
        return KeyAssignment((*self.path, name), value, self.key_span, self.value_span)


@dataclass(slots=True)
class SettingsLayer:
    """One source. A file has a `document`; the environment and `--set` have `assignments`."""

    kind: SourceKind
    source: str
    document: Document | None = None
    assignments: list[KeyAssignment] = field(default_factory=list)
    folder: Path | None = None  # what the paths of a file are relative to; None: the current folder
