"""The sources of a config, in order: preset with its bases, files, environment, `--set`. Reads; judges no key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tqppo.config.diagnostics import Diagnostic, Span
from tqppo.config.read.nearest import did_you_mean, nearest
from tqppo.config.read.presets import find_preset, list_presets
from tqppo.config.read.spans import Document, parse

Kind = Literal["preset", "config", "environment", "set"]
MAX_BYTES = 1024 * 1024
ENV_PREFIX = "TQPPO__"


@dataclass(frozen=True, slots=True)
class Written:
    """A value as somebody wrote it: where its key and its value stand, and those of a list's elements."""

    path: tuple[str, ...]
    value: Any
    key: Span
    at: Span
    elements: tuple[Span, ...] = ()
    bare: str | None = None  # the text of a `--set` or environment value that has no quotes


@dataclass(slots=True)
class Layer:
    kind: Kind
    source: str
    document: Document | None = None  # of files
    written: list[Written] = field(default_factory=list)  # of environment and --set


@dataclass(slots=True)
class Reader:
    """Collects layers, and what is wrong with reading them."""

    environ: Mapping[str, str]
    layers: list[Layer] = field(default_factory=list)
    problems: list[Diagnostic] = field(default_factory=list)

    def preset(self, name: str) -> None:
        path = self._named(name, None, None)
        if path is not None:
            self.file(path, "preset")

    def file(self, path: Path, kind: Kind, chain: tuple[Path, ...] = (), at: Span | None = None) -> None:
        """A file, after the files that it extends."""
        text = self._text(path, at)
        if text is None:
            return
        document = parse(text, display(path))
        self._syntax(document)
        for name, span in self._extends(document):
            base = self._named(name, span, path)
            if base is None:
                continue
            if any(base.resolve() == each.resolve() for each in (*chain, path)):
                self._cycle((*chain, path, base), span)
            else:
                self.file(base, kind, (*chain, path), span)
        self.layers.append(Layer(kind, document.source, document))

    def _named(self, name: str, at: Span | None, child: Path | None) -> Path | None:
        """A preset's name, or a path; both are looked for beside the file that extends them first."""
        sibling = child.parent / f"{name}.toml" if child is not None else None
        if child is not None and sibling is not None and sibling.is_file() and not sibling.samefile(child):
            return sibling
        if name.endswith(".toml") or "/" in name:
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
                f'there is no preset called "{name}"',
                at,
                "extends" if at else "--preset",
                found=f'"{name}"',
                allowed=", ".join(names) + "; or the path of a .toml file",
                fix=fix,
            )
        )
        return None

    def _cycle(self, chain: tuple[Path, ...], at: Span) -> None:
        first = next(i for i, each in enumerate(chain) if each.resolve() == chain[-1].resolve())
        names = " → ".join(display(each) for each in chain[first:])
        message = f"extends goes round in a circle: {names}"
        fix = "take the file out of one of the extends"
        self.problems.append(Diagnostic("error", "E010", message, at, "extends", found=at.text.strip(), fix=fix))

    def _extends(self, document: Document) -> list[tuple[str, Span]]:
        if "extends" not in document.values:
            return []
        value, at = document.values["extends"], document.at[("extends",)]
        names = [value] if isinstance(value, str) else value
        if isinstance(names, list) and all(isinstance(each, str) for each in names):
            return [(name, document.at.get(("extends", i), at)) for i, name in enumerate(names)]
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
            message = "nested too deeply: a config has sections, keys and values, and no more"
            allowed = "at most two levels: [section] key = value"
            self.problems.append(Diagnostic("error", "E007", message, document.too_deep, allowed=allowed))
        for problem in document.problems:
            message = f"not valid TOML: {problem.message[0].lower()}{problem.message[1:]}"
            fix = syntax_hint(problem.span)
            self.problems.append(Diagnostic("error", "E006", message, problem.span, fix=fix))
        if not document.values and not document.problems and document.too_deep is None:
            message = f"{document.source} sets nothing: it is empty, or holds only comments"
            self.problems.append(
                Diagnostic("warning", "W008", message, Span(document.source, 1, 1, 1, document.line(1)))
            )

    def _text(self, path: Path, at: Span | None) -> str | None:
        """The file's text; what is wrong with the file is told where it was asked for, if that is a file."""
        name = display(path)

        def problem(code: str, message: str, fix: str, allowed: str = "") -> None:
            key = "extends" if at else "--config"
            self.problems.append(Diagnostic("error", code, message, at, key, found=name, allowed=allowed, fix=fix))

        if path.is_dir():
            inside = ", ".join(sorted(each.name for each in path.glob("*.toml"))[:5]) or "no .toml file"
            problem("E002", f"{name} is a folder, not a file", f"name a file in it ({inside})")
            return None
        try:
            if path.stat().st_size > MAX_BYTES:
                size = f"{path.stat().st_size / MAX_BYTES:.1f} MiB"
                problem("E005", f"{name} is too large for a config: {size}", "is it a dataset?", "at most 1 MiB")
                return None
            data = path.read_bytes()
        except FileNotFoundError:
            near = nearest(path.name, [each.name for each in path.parent.glob("*.toml")], limit=1)
            fix = f'did you mean "{path.parent / near[0]}"?' if near else "check the path; presets go by --preset NAME"
            problem("E001", f"there is no file {name}", fix)
            return None
        except OSError as error:
            problem("E003", f"{name} cannot be read: {error.strerror or error}", "check its permissions")
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


def syntax_hint(span: Span) -> str:
    """A fix for the TOML mistakes that people make most."""
    name, _, value = span.text.partition("=")
    value = value.split("#", 1)[0].strip()
    if span.text.lstrip().startswith("["):
        return "write a table's name in brackets, alone on its line: [actor]"
    if "=" not in span.text:
        return "write key = value"
    if not value:
        return f'give it a value: {name.strip()} = … (a string is written "…")'
    if value in ("True", "False"):
        return f"write {value.lower()}"
    if value in ("None", "null", "nil"):
        return "TOML has no null: delete the line, so that the default holds"
    if value[0].isalpha():
        return f'a string needs quotes: {name.strip()} = "{value}"'
    return ""


def display(path: Path) -> str:
    """A path as a user would write it: relative when it is under the current folder."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def read_layers(
    preset: str | None, files: Sequence[Path], overrides: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[Layer], list[Diagnostic]]:
    from tqppo.config.read.typed import environment_layer, override_layer

    reader = Reader(environ)
    if preset is not None:
        reader.preset(preset)
    for path in files:
        reader.file(Path(path), "config")
    if any(name.upper().startswith(ENV_PREFIX) for name in environ):
        reader.layers.append(environment_layer(environ))
    layer, problems = override_layer(overrides)
    return [*reader.layers, layer], [*reader.problems, *problems]
