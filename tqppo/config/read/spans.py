"""Parses TOML and records the place of every key and value: `tomllib` gives the values, tree-sitter the places.

In a path, strings are keys and integers are indices of array elements, arrays of tables included.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from tqppo.config.diagnostics import Span

if TYPE_CHECKING:
    from tree_sitter import Node

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_DEPTH = 24
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class SyntaxProblem:
    message: str
    span: Span


@dataclass(slots=True)
class Document:
    """A parsed file. After a syntax error, `values` holds what could be read outside the broken lines."""

    source: str
    text: str
    values: dict[str, object] = field(default_factory=dict)
    key_spans: dict[KeyPath, Span] = field(default_factory=dict)  # a table's is its header, or its key if it is inline
    value_spans: dict[KeyPath, Span] = field(default_factory=dict)
    problems: list[SyntaxProblem] = field(default_factory=list)
    too_deep: Span | None = None

    def key_span(self, path: KeyPath) -> Span:
        """The place of a key, or of the innermost table around it that has one."""
        found = next((self.key_spans[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.key_spans), None)
        return found or Span(self.source, 1, 1, 1, self.line(1))

    def line(self, number: int) -> str:
        lines = self.text.split("\n")
        return lines[number - 1].rstrip("\r") if number <= len(lines) else ""


def parse(text: str, source: str) -> Document:
    document = Document(source, text)
    _Walker(document).walk()
    if document.too_deep is not None:
        return document
    try:
        document.values = _loads(text)
    except TooDeep:
        document.too_deep = _deep_bracket(document)
    except tomllib.TOMLDecodeError as error:
        return _recover(document, error)
    return document


class TooDeep(ValueError):
    """tomllib reached Python's recursion limit inside arrays or inline tables."""


def _loads(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise TooDeep("nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python reads no number of thousands of digits
        raise tomllib.TOMLDecodeError(f"a number has too many digits{_place_of_digits(text)}") from None


def _place_of_digits(text: str) -> str:
    """Where the first overlong number is, as tomllib's messages say it."""
    found = re.search(r"\d[\d_]{4000,}", text)
    if found is None:
        return ""
    line, column = text.count("\n", 0, found.start()) + 1, found.start() - text.rfind("\n", 0, found.start())
    return f" (at line {line}, column {column})"


def _deep_bracket(document: Document) -> Span:
    """The first bracket below MAX_DEPTH, found by counting: tree-sitter sees no array in an unclosed bracket."""
    depth = 0
    for number, line in enumerate(document.text.split("\n"), 1):
        for column, char in enumerate(line, 1):
            depth += (char in "[{") - (char in "]}")
            if depth > MAX_DEPTH:
                return Span(document.source, number, column, 1, document.line(number))
    return Span(document.source, 1, 1, 1, document.line(1))


def _recover(document: Document, error: tomllib.TOMLDecodeError) -> Document:
    """Blank the broken line and parse again, until an error concerns a line that is valid on its own."""
    lines = document.text.split("\n")
    found = _problem(document, str(error))
    for _ in range(20):
        document.problems.append(found)
        broken, lines[found.span.line - 1] = lines[found.span.line - 1], ""
        if broken.lstrip().startswith("["):  # without its header, the keys below would belong to another table
            return document
        try:
            values = _loads("\n".join(lines))
        except TooDeep:
            return document
        except tomllib.TOMLDecodeError as next_error:
            found = _problem(document, str(next_error))
            if _is_valid_alone(lines[found.span.line - 1]):
                return document
        else:
            rest = Document(document.source, "\n".join(lines), values, problems=document.problems)
            _Walker(rest).walk()
            return rest
    return document


def _is_valid_alone(line: str) -> bool:
    try:
        _loads(line)
    except ValueError:
        return False
    return True


def parse_value(text: str) -> object:
    """One TOML value. Raises ValueError for anything else, including several lines of TOML."""
    values = _loads(f"v = {text}\n")
    if list(values) != ["v"]:
        raise ValueError("more than one value")
    return values["v"]


def parse_key(text: str) -> tuple[str, ...]:
    """A dotted TOML key. Raises ValueError for anything else."""
    values: object = _loads(f"{text} = 0\n")
    path: list[str] = []
    while isinstance(values, dict):
        if len(values) != 1:
            raise ValueError("more than one key")
        ((name, values),) = values.items()
        path.append(name)
    return tuple(path)


def _problem(document: Document, message: str) -> SyntaxProblem:
    lines = document.text.split("\n")
    place = re.search(r"\(at line (\d+), column (\d+)\)", message)
    if place:
        line, column = int(place[1]), int(place[2])
    else:  # the error is at the end of the document: point behind its last character
        line = max((i for i, each in enumerate(lines, 1) if each.strip()), default=1)
        column = len(document.line(line).rstrip()) + 1
    # tomllib counts the line break as a character of its line
    column = min(column, len(document.line(line)) + 1)
    plain = re.sub(r" \(at .*\)$", "", message)
    return SyntaxProblem(plain, Span(document.source, line, column, 1, document.line(line)))


class _Walker:
    """Records the places of keys and values from tree-sitter's syntax tree."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.data = document.text.encode()
        self.lines = self.data.split(b"\n")
        self.arrays: dict[KeyPath, int] = {}
        self.known: dict[int, tuple[str, Sequence[int] | None]] = {}  # see `line`

    def walk(self) -> None:
        import tree_sitter
        import tree_sitter_toml

        language = tree_sitter.Language(tree_sitter_toml.language())
        root = tree_sitter.Parser(language).parse(self.data).root_node
        self.statements(root, ())
        for child in root.children:
            if child.type in ("table", "table_array_element"):
                self.table(child)

    def span(self, node: Node) -> Span:
        row, column = node.start_point
        text, places = self.line(row)
        before = column if places is None else places[column]
        width = len(self.data[node.start_byte : node.end_byte].decode(errors="replace"))
        return Span(self.document.source, row + 1, before + 1, width, text)

    def line(self, row: int) -> tuple[str, Sequence[int] | None]:
        """The text of a line, and the characters before each of its bytes if that is not the same number.

        All places in a line share its text: a list of a thousand names may be one line of a hundred thousand bytes.
        """
        if row not in self.known:
            raw = self.lines[row] if row < len(self.lines) else b""
            starts = (byte & 0xC0 != 0x80 for byte in raw)  # bytes that begin a character of UTF-8
            places = None if raw.isascii() else array("I", accumulate(starts, initial=0))
            self.known[row] = raw.decode(errors="replace").rstrip("\r"), places
        return self.known[row]

    def key(self, node: Node) -> tuple[str, ...]:
        text = self.data[node.start_byte : node.end_byte].decode()
        if node.type == "bare_key":
            return (text,)
        try:
            return parse_key(text)
        except (ValueError, RecursionError):
            return (text,)

    def table(self, node: Node) -> None:
        header = next((child for child in node.children if child.type.endswith("_key")), None)
        if header is None:
            return
        written = self.key(header)
        if len(written) > MAX_DEPTH:
            self.document.too_deep = self.document.too_deep or self.span(header)
            return
        prefix = self.path_of(written[:-1])
        prefix = (*prefix, written[-1])
        for n in range(1, len(prefix) + 1):
            self.document.key_spans.setdefault(prefix[:n], self.span(header))
        if node.type == "table_array_element":
            index = self.arrays[prefix] = self.arrays.get(prefix, -1) + 1
            prefix = (*prefix, index)
            self.document.key_spans.setdefault(prefix, self.span(header))
        else:
            prefix = self.path_of(written)
        self.statements(node, prefix)

    def path_of(self, names: tuple[str, ...]) -> KeyPath:
        """The path of a table header; the name of an array of tables means its newest element."""
        path: KeyPath = ()
        for name in names:
            path = (*path, name)
            if path in self.arrays:
                path = (*path, self.arrays[path])
        return path

    def statements(self, node: Node, prefix: KeyPath) -> None:
        for child in node.children:
            if child.type == "pair":
                self.pair(child, prefix)

    def pair(self, node: Node, prefix: KeyPath) -> None:
        parts = [child for child in node.children if child.type not in ("comment", "=")]
        if len(parts) != 2:
            return
        path = (*prefix, *self.key(parts[0]))
        for n in range(len(prefix) + 1, len(path)):
            self.document.key_spans.setdefault(path[:n], self.span(parts[0]))
        self.document.key_spans.setdefault(path, self.span(parts[0]))
        self.value(parts[1], path)

    def value(self, node: Node, path: KeyPath) -> None:
        if len(path) > MAX_DEPTH:
            self.document.too_deep = self.document.too_deep or self.span(node)
            return
        self.document.value_spans.setdefault(path, self.span(node))
        if node.type == "inline_table":
            self.statements(node, path)
        elif node.type == "array":
            for index, element in enumerate(self.elements(node)):
                self.value(element, (*path, index))

    def elements(self, node: Node) -> Iterator[Node]:
        return (child for child in node.children if child.type not in ("[", "]", ",", "comment"))
