"""Reads presets and config files, each after the files that it extends. Does not look at keys or values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tqppo.builtin import DATA_FILES
from tqppo.config.diagnostics import Diagnostic, Span
from tqppo.config.read.assignment import SettingsLayer, SourceKind
from tqppo.config.read.nearest import did_you_mean, nearest
from tqppo.config.read.paths import display
from tqppo.config.read.presets import find_preset, is_built_in, list_presets
from tqppo.config.read.spans import Document, parse
from tqppo.untrusted import TooLarge, read_file

MAX_BYTES = 1024 * 1024
MAX_NAME = 200  # characters of a name that messages show
MAX_FILES = 100  # files that extend each other read some of them many times


@dataclass(slots=True)
class FileReader:
    """Collects the layers of files, and the problems met while reading them."""

    environ: Mapping[str, str]
    layers: list[SettingsLayer] = field(default_factory=list)
    problems: list[Diagnostic] = field(default_factory=list)
    num_files: int = 0

    def preset(self, name: str) -> None:
        path = self._named(name, None, None)
        if path is not None:
            self.file(path, "preset")

    def file(self, path: Path, kind: SourceKind, chain: tuple[Path, ...] = (), at: Span | None = None) -> None:
        """Read a file, after the files that it extends."""
        self.num_files += 1
        if self.num_files > MAX_FILES:
            self._report_too_many(at)
            return
        text = self._text(path, at)
        if text is None:
            return
        document = parse(text, display(path))
        self._syntax(document)
        for name, span in self._extends(document):
            base = self._named(name, span, path)
            if base is None:
                continue
            if os.path.realpath(base) in map(os.path.realpath, (*chain, path)):
                self._cycle((*chain, path, base), span)
            else:
                self.file(base, kind, (*chain, path), span)
        folder = None if is_built_in(path) else path.parent
        self.layers.append(SettingsLayer(kind, document.source, document, folder=folder))

    def _named(self, name: str, at: Span | None, child: Path | None) -> Path | None:
        """The path of a preset or file; one beside the file that extends it comes first."""
        sibling = child.parent / f"{name}.toml" if child is not None else None
        if child is not None and sibling is not None and os.path.isfile(sibling) and not sibling.samefile(child):
            return sibling
        if (name.endswith(".toml") or "/" in name) and "\0" not in name:
            return Path(name) if child is None else child.parent / name
        found = find_preset(name, self.environ, beyond=child)
        if found is not None or (child is not None and name == child.stem):
            return found or child
        names = [each.name for each in list_presets(self.environ)]
        fix = did_you_mean(name, names) or "list them with `tqppo presets list`"
        self.problems.append(
            Diagnostic(
                "error",
                "E009",
                f'there is no preset called "{brief(name)}"',
                at,
                "extends" if at else "--preset",
                found=f'"{brief(name)}"',
                allowed=", ".join(names) + "; or the path of a .toml file",
                fix=fix,
            )
        )
        return None

    def _report_too_many(self, at: Span | None) -> None:
        """Report once that a config is made of too many files; the others are left out."""
        if self.num_files == MAX_FILES + 1:
            message, fix = f"a config is made of more than {MAX_FILES} files", "extend fewer files"
            self.problems.append(Diagnostic("error", "E014", message, at, "extends", fix=fix))

    def _cycle(self, chain: tuple[Path, ...], at: Span) -> None:
        first = [os.path.realpath(each) for each in chain].index(os.path.realpath(chain[-1]))
        names = " → ".join(display(each) for each in chain[first:])
        message = f"extends is circular: {names}"
        fix = "remove the file from one of the extends"
        self.problems.append(Diagnostic("error", "E010", message, at, "extends", found=at.text.strip(), fix=fix))

    def _extends(self, document: Document) -> list[tuple[str, Span]]:
        if "extends" not in document.values:
            return []
        value = document.values["extends"]
        at = document.value_spans.get(("extends",)) or document.key_span(("extends",))  # the second of a table
        names = [value] if isinstance(value, str) else value
        if isinstance(names, list) and all(isinstance(each, str) for each in names):
            named = enumerate(names[: MAX_FILES + 1])
            return [(name, document.value_spans.get(("extends", i), at)) for i, name in named]
        self.problems.append(
            Diagnostic(
                "error",
                "E011",
                "extends must be the name of a preset, or a list of names",
                at,
                "extends",
                found=at.text[at.column - 1 : at.column - 1 + at.width],
                allowed='a string or a list of strings: extends = "base-tiny", extends = ["base-7b", "mine.toml"]',
                fix="write the name in quotes",
            )
        )
        return []

    def _syntax(self, document: Document) -> None:
        if document.too_deep is not None:
            message = "nested too deeply: a config only has sections, keys and values"
            allowed = "at most two levels: [section] key = value"
            fix = "write each setting on a line of its own, below its [section]"
            self.problems.append(Diagnostic("error", "E007", message, document.too_deep, allowed=allowed, fix=fix))
        is_data = document.source.endswith(DATA_FILES)
        for problem in document.problems[:1] if is_data else document.problems:
            message = f"not valid TOML: {problem.message[0].lower()}{problem.message[1:]}"
            fix = syntax_fix(problem.span)
            notes: tuple[str, ...] = ()
            if "overwrite a value" in problem.message and (first := first_place(document, problem.span)):
                fix = "delete one of the two lines: a key is set once"
                notes = (f"first set here: {first}: {first.text.strip()}",)
            fix = f'a config is a TOML file; name data in it: [data] train = "{document.source}"' if is_data else fix
            self.problems.append(Diagnostic("error", "E006", message, problem.span, fix=fix, notes=notes))
        if not document.values and not document.problems and document.too_deep is None:
            message = f"{document.source} sets nothing: it is empty, or holds only comments"
            place, fix = (
                Span(document.source, 1, 1, 1, document.line(1)),
                'begin with extends = "quickstart", or a setting',
            )
            self.problems.append(Diagnostic("warning", "W008", message, place, fix=fix))

    def _text(self, path: Path, at: Span | None) -> str | None:
        """The file's text. A problem is reported at the `extends` that names the file, if there is one."""
        name = display(path)

        def problem(code: str, message: str, fix: str, allowed: str = "") -> None:
            key = "extends" if at else "--config"
            self.problems.append(Diagnostic("error", code, message, at, key, found=name, allowed=allowed, fix=fix))

        if os.path.isdir(path):
            inside = ", ".join(sorted(each.name for each in path.glob("*.toml"))[:5]) or "no .toml file"
            problem("E002", f"{name} is a folder, not a file", f"name a file in it ({inside})")
            return None
        try:
            data = read_file(path, MAX_BYTES)
        except TooLarge:
            size = f"{path.stat().st_size / MAX_BYTES:.1f} MiB"
            problem("E005", f"{name} is too large for a config: {size}", "is it a dataset?", "at most 1 MiB")
            return None
        except FileNotFoundError:
            near = nearest(path.name, [each.name for each in path.parent.glob("*.toml")], limit=1)
            fix = f'did you mean "{path.parent / near[0]}"?' if near else "check the path; presets need --preset NAME"
            problem("E001", f"there is no file {name}", fix)
            return None
        except (OSError, ValueError) as error:  # ValueError: the name holds a NUL
            why = (error.strerror if isinstance(error, OSError) else None) or error
            problem("E003", f"{brief(name)} cannot be read: {why}", "name a file that can be read")
            return None
        return self._decoded(data, name)

    def _decoded(self, data: bytes, name: str) -> str | None:
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            start = data.rfind(b"\n", 0, error.start) + 1
            line = data[start:].split(b"\n", 1)[0].rstrip(b"\r")
            column = len(data[start : error.start].decode(errors="replace")) + 1
            at = Span(name, data.count(b"\n", 0, error.start) + 1, column, 1, line.decode(errors="replace"))
            found = f"byte 0x{data[error.start]:02x}"
            fix = "save the file as UTF-8"
            message = f"{name} is not UTF-8 text"
            self.problems.append(Diagnostic("error", "E004", message, at, found=found, allowed="UTF-8", fix=fix))
            return None


def brief(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}…"


def first_place(document: Document, again: Span) -> Span | None:
    """Where the key of this line was set before, in the same table."""
    key = again.text.partition("=")[0].strip()
    for number in range(again.line - 1, 0, -1):
        line = document.line(number)
        if line.partition("=")[0].strip() == key and "=" in line:
            return Span(document.source, number, len(line) - len(line.lstrip()) + 1, len(key), line)
        if line.lstrip().startswith("["):
            return None
    return None


def syntax_fix(span: Span) -> str:
    """A fix for the most common TOML mistakes; empty for others."""
    name, _, value = span.text.partition("=")
    value = value.split("#", 1)[0].strip()
    if span.text.lstrip().startswith("[") and span.text.split("#", 1)[0].rstrip().endswith("]"):
        return "a table is written once: give this one another name, or put its keys below the first"
    if span.text.lstrip().startswith("["):
        return "write a table's name in brackets, alone on its line: [actor]"
    if "=" not in span.text:
        return "write key = value"
    if not value:
        return f'give it a value: {name.strip()} = … (a string is written "…")'
    if value in ("True", "False"):
        return f"write {value.lower()}"
    if value in ("None", "null", "nil"):
        return "TOML has no null: delete the line to use the default"
    if value[0].isalpha():
        return f'a string needs quotes: {name.strip()} = "{value}"'
    return ""
