"""Takes a parsed file apart into assignments, one per setting."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config.diagnostics import Span
from tqppo.config.read.assignment import KeyAssignment
from tqppo.config.read.replacements import replacement_of
from tqppo.config.read.spans import Document
from tqppo.config.schema import settings
from tqppo.config.sections import Config


def assignments_of(document: Document) -> Iterator[KeyAssignment]:
    """The leaves of a file with their places. An unknown section stays whole, at its header."""
    for name, value in document.values.items():
        if name != "extends":
            yield from _leaves(document, (name,), value, whole=name not in Config.model_fields)


def _leaves(document: Document, path: tuple[str, ...], value: object, whole: bool) -> Iterator[KeyAssignment]:
    free = len(path) > (3 if path[0] == "teachers" else 2)
    whole = whole or (isinstance(value, dict) and _is_unknown(path))
    if isinstance(value, dict) and value and not whole and not free:
        for name, inner in value.items():
            yield from _leaves(document, (*path, name), inner, whole=False)
        return
    if path[1:] or not isinstance(value, dict) or value or whole or path[0] == "teachers":
        key_span = document.key_span(path)
        if whole and isinstance(value, dict):
            yield from _unknown_leaves(document, path, value, key_span)
            return
        value_span = document.value_spans.get(path, key_span)
        count = len(value) if isinstance(value, list) else 0
        elements = tuple(document.value_spans.get((*path, i), value_span) for i in range(count))
        yield KeyAssignment(path, value, key_span, value_span, elements)


def _is_unknown(path: tuple[str, ...]) -> bool:
    """Whether a section has no key for this table, as in [actor.optim]."""
    if path[0] == "teachers":
        return len(path) == 3 and f"teachers.*.{path[2]}" not in settings()
    return len(path) == 2 and ".".join(path) not in settings()


def _unknown_leaves(
    document: Document, path: tuple[str, ...], value: dict[str, object], header: Span
) -> Iterator[KeyAssignment]:
    """Each key of an unknown section that another tool has; the section once if it has other keys."""
    leaves = list(walk(path, value))
    known = [leaf for leaf, _ in leaves if replacement_of(leaf)]
    if len(known) < len(leaves) or not leaves:
        yield KeyAssignment(path, {}, header, header)
    for leaf, inner in leaves:
        key_span = document.key_spans.get(leaf)
        if leaf in known and key_span is not None:
            yield KeyAssignment(leaf, inner, key_span, document.value_spans.get(leaf, key_span))


def walk(path: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """The leaves below a path. A table that another tool has under this name counts as one leaf."""
    if isinstance(value, dict) and value and replacement_of(path) is None:
        for name, inner in value.items():
            yield from walk((*path, name), inner)
    else:
        yield path, value
