"""Problems of a config: place, value found, values allowed, fix. Rendered as text, JSON or GitHub annotations."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tqppo.untrusted import printable

MIN_WRAPPED = 20
Severity = Literal["error", "warning"]
_COLOURS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "bold": "\x1b[1m", "blue": "\x1b[1;34m", "off": "\x1b[0m"}


@dataclass(frozen=True, slots=True)
class Span:
    """A token in a file, a `--set` argument or an environment variable. Lines and columns count from 1."""

    source: str  # a path, "--set" or "environment"
    line: int
    column: int  # in characters
    width: int
    text: str  # the whole line

    def __str__(self) -> str:
        if self.source == "environment":
            return f"environment:{printable(self.text.split('=', 1)[0])}:{self.column}"
        return f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One problem. `notes` show the other settings involved and where they were set."""

    severity: Severity
    code: str
    message: str
    span: Span | None = None
    key: str = ""
    found: str = ""
    allowed: str = ""
    fix: str = ""
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        span = self.span
        return {
            "severity": self.severity,
            "code": self.code,
            "key": self.key,
            "message": self.message,
            "file": span.source if span else None,
            "line": span.line if span else None,
            "column": span.column if span else None,
            "end_column": span.column + span.width if span else None,
            "source": span.text if span else None,
            "found": self.found,
            "allowed": self.allowed,
            "fix": self.fix,
            "notes": list(self.notes),
        }


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Errors first, then by place, without duplicates: a base that is extended twice reports its problems twice."""

    def place(each: Diagnostic) -> tuple[bool, bool, str, int, str]:
        span = each.span
        return (
            each.severity != "error",
            span is None,
            span.source if span else "",
            span.line if span else 0,
            each.code,
        )

    return sorted(dict.fromkeys(diagnostics), key=place)


def render_text(diagnostics: Sequence[Diagnostic], *, color: bool = False, width: int = 0) -> str:
    """Each problem with its source line and a caret, then the number of errors and warnings.

    Explanations are wrapped at words to `width` columns; 0: one line each.
    """
    if not diagnostics:
        return ""
    blocks = [_block(_printable(each), color, width) for each in in_order(diagnostics)]
    return "\n\n".join([*blocks, summary(diagnostics)]) + "\n"


def render_github(diagnostics: Sequence[Diagnostic]) -> str:
    """GitHub workflow commands, shown beside the lines of a pull request."""
    return "".join(_github_line(_printable(each)) + "\n" for each in in_order(diagnostics))


def _printable(each: Diagnostic) -> Diagnostic:
    """The problem with everything that a terminal would obey escaped; the line of the file keeps its columns."""
    return replace(
        each,
        message=printable(each.message),
        span=each.span and replace(each.span, source=printable(each.span.source)),
        key=printable(each.key),
        found=printable(each.found),
        allowed=printable(each.allowed),
        fix=printable(each.fix),
        notes=tuple(map(printable, each.notes)),
    )


def summary(diagnostics: Sequence[Diagnostic]) -> str:
    unique = in_order(diagnostics)
    errors = sum(each.severity == "error" for each in unique)
    parts = [f"{n} {word}{'s' if n != 1 else ''}" for n, word in ((errors, "error"), (len(unique) - errors, "warning"))]
    return ", ".join(part for part in parts if not part.startswith("0 ")) or "no problems"


def _block(each: Diagnostic, color: bool, width: int) -> str:
    def paint(text: str, how: str) -> str:
        return f"{_COLOURS[how]}{text}{_COLOURS['off']}" if color else text

    head = f"{paint(f'{each.severity}[{each.code}]', each.severity)}: {paint(each.message, 'bold')}"
    lines = [head]
    margin = " " * len(str(each.span.line)) if each.span else " "
    bar = paint(f"{margin} |", "blue")
    if each.span:
        lines += [f"{margin}{paint('-->', 'blue')} {each.span}", bar]
        lines += [f"{paint(f'{each.span.line} |', 'blue')} {_shown(each.span.text)}"]
        lines += [f"{bar} {paint(_caret(each.span), each.severity)}"]
    labelled = [("found", each.found), ("allowed", each.allowed), ("fix", each.fix)]
    labelled += [("note", note) for note in each.notes]
    for label, text in labelled:
        if text:
            indent = f"{margin}   {' ' * (len(label) + 2)}"
            indented = _wrapped(text, width - len(indent)).replace("\n", f"\n{indent}")
            lines.append(f"{margin} {paint('=', 'blue')} {paint(label, 'bold')}: {indented}")
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> str:
    """Each line of a text broken at spaces; a terminal that is too narrow breaks it by itself."""
    if width < MIN_WRAPPED:
        return text
    lines = [textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")]
    return "\n".join("\n".join(each) for each in lines)


def _shown(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _cells(text: str) -> int:
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(bool(unicodedata.combining(char)) for char in text)


def _caret(span: Span) -> str:
    before, token = span.text[: span.column - 1], span.text[span.column - 1 : span.column - 1 + span.width]
    return " " * _cells(before) + "^" * max(1, _cells(token))


def _github_line(each: Diagnostic) -> str:
    def escape(text: str, extra: str = "") -> str:
        for char in "%\r\n" + extra:
            text = text.replace(char, f"%{ord(char):02X}")
        return text

    place = {"title": f"tqppo {each.code}"}
    text = "\n".join(part for part in (each.message, each.fix and f"fix: {each.fix}", *each.notes) if part)
    if each.span and each.span.source in ("--set", "environment"):
        text += f"\nin {each.span.source}: {_shown(each.span.text)}"
    elif each.span:
        place |= {"file": each.span.source, "line": str(each.span.line), "col": str(each.span.column)}
        place["endColumn"] = str(each.span.column + each.span.width)
    properties = ",".join(f"{name}={escape(value, ':,')}" for name, value in place.items())
    return f"::{each.severity} {properties}::{escape(text)}"
