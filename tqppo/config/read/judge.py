"""Judges each written value on its own: is the key known, is the value of its kind, is it in range.

A value with a mistake is left out, and its key is *doubtful* from then on: the checks across sections
do not speak of doubtful keys, so that one mistake is one message.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from tqppo.config.diagnostics import Diagnostic, Span
from tqppo.config.read.foreign import Foreign, foreign
from tqppo.config.read.layers import Layer, Written
from tqppo.config.read.nearest import nearest
from tqppo.config.read.spans import Document
from tqppo.config.sections import Config
from tqppo.config.show.schema import Slot, describe, section_of, slots


@dataclass(slots=True)
class Judge:
    problems: list[Diagnostic] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)  # keys, and sections as `name.*`

    def accepted(self, layer: Layer) -> list[Written]:
        """The layer's values that are right, one per leaf key."""
        written = layer.written if layer.document is None else list(_of_document(layer.document))
        if layer.document is not None and (layer.document.problems or layer.document.too_deep):
            self.doubtful.add("*")  # what stood in the broken lines cannot be known
        return [each for one in written for each in self._judged(one)]

    def _judged(self, one: Written) -> Iterator[Written]:
        """A value under a key, taken apart when it is a table (an inline table, or `--set actor={…}`)."""
        name, *rest = one.path
        section = section_of(name)
        if name not in Config.model_fields:
            yield from self._unknown(one)
        elif section is None:
            yield from self._field(one, slots()[name], 1)
        elif not rest:
            yield from self._section(one)
        elif name == "teachers":
            yield from self._teacher(one)
        else:
            key = f"{name}.{rest[0]}"
            yield from self._field(one, slots()[key], 2) if key in slots() else self._unknown(one)

    def _section(self, one: Written) -> Iterator[Written]:
        name = one.path[0]
        if isinstance(one.value, dict):
            yield from self._inside(one)
            return
        teachers = name == "teachers"
        fix = "write [teachers.NAME], one table per teacher" if teachers else f"write [{name}] and the keys below it"
        self._problem("E107", f"{name} is a section, not a value", one.key, name, found=shown(one.value), fix=fix)
        self.doubtful.add(f"{name}.*")

    def _inside(self, one: Written) -> Iterator[Written]:
        for inner, value in one.value.items():
            yield from self._judged(Written((*one.path, inner), value, one.key, one.at))

    def _teacher(self, one: Written) -> Iterator[Written]:
        if len(one.path) == 2:
            if isinstance(one.value, dict) and one.value:
                yield from self._inside(one)
            elif isinstance(one.value, dict):
                yield one
            else:
                self._misplaced_teacher(one)
            return
        slot = slots().get(f"teachers.*.{one.path[2]}")
        yield from self._field(one, slot, 3) if slot else self._unknown(one)

    def _misplaced_teacher(self, one: Written) -> None:
        """`[teachers] path = …`: a key of a teacher without the teacher's name."""
        name = one.path[1]
        known = f"teachers.*.{name}" in slots()
        message = f"{name} belongs to one teacher, and [teachers] holds them all" if known else ""
        message = message or f"teachers.{name} is a teacher, and a teacher is a table"
        fix = "name the teacher: [teachers.NAME], then the keys below it"
        self._problem("E107", message, one.key, f"teachers.{name}", found=shown(one.value), fix=fix)
        self.doubtful.add("teachers.*")

    def _field(self, one: Written, slot: Slot, depth: int) -> Iterator[Written]:
        """A value of a known key; a free table such as data.task_args is judged entry by entry."""
        if slot.is_table and len(one.path) == depth and isinstance(one.value, dict) and one.value:
            yield from (each for inner in self._entries(one) for each in self._field(inner, slot, depth))
        elif slot.is_table and len(one.path) > depth:
            inner = one.path[depth]
            yield from self._valued(one, slot, {inner: _nested(one.path[depth + 1 :], one.value)})
        elif len(one.path) > depth:
            key = ".".join(one.path[:depth])
            self._problem("E103", f"{key} is a value, not a table", one.key, key, allowed=slot.allowed)
            self.doubtful.add(key)
        else:
            yield from self._valued(one, slot, one.value)

    def _entries(self, one: Written) -> Iterator[Written]:
        for inner, value in one.value.items():
            yield Written((*one.path, inner), value, one.key, one.at)

    def _valued(self, one: Written, slot: Slot, value: Any) -> Iterator[Written]:
        from pydantic import ValidationError

        if one.bare is not None and slot.bare_is_string and not isinstance(value, str):
            one = Written(one.path, one.bare, one.key, one.at, (), one.bare)
            value = one.bare
        try:
            slot.adapter().validate_python(value)
        except ValidationError as error:
            self._wrong(one, slot, error.errors(include_url=False, include_context=True))
            self.doubtful.add(".".join(one.path))
            self.doubtful.add(".".join(one.path[: slot.key.count(".") + 1]))
        else:
            yield one

    def _wrong(self, one: Written, slot: Slot, errors: list[Any]) -> None:
        key, first = ".".join(one.path), errors[0]
        index = next((part for part in first["loc"] if isinstance(part, int)), None)
        at = one.elements[index] if index is not None and index < len(one.elements) else one.at
        value = first["input"] if index is not None else one.value
        found, kind = shown(value), first["type"]
        if kind == "literal_error" and isinstance(value, str):
            names = [str(each) for each in slot.choices]
            close = nearest(value, names, limit=1)
            fix = f'did you mean "{close[0]}"?' if close else f"write one of {', '.join(names)}"
            message = f"{key} cannot be {found}"
            self._problem("E104", message, at, key, found=found, allowed=slot.allowed, fix=fix)
        elif kind in _RANGE and len(errors) == 1:
            message = f"{key} is out of range: {found}"
            self._problem("E105", message, at, key, found=found, allowed=slot.allowed, fix=_RANGE[kind](first))
        else:
            inside = len(one.path) > slot.key.count(".") + 1
            allowed = describe(get_args(slot.field.annotation)[1]) if inside else slot.allowed
            message = f"{key} must be {allowed}"
            found = f"{kind_of(value)} {found}" if not isinstance(value, bool) else found
            fix = conversion(value, slot) if not inside else f"write {allowed}"
            self._problem("E103", message, at, key, found=found, allowed=allowed, fix=fix)

    def _unknown(self, one: Written) -> Iterator[Written]:
        """An unknown key: another tool's, misplaced, or mistyped. Yields nothing."""
        yield from ()
        if one.path == ("extends",):
            message = "extends works only in files"
            fix = "use --preset NAME, or a --config file that extends it"
            self._problem("E101", message, one.key, "extends", found=one.key.text, fix=fix)
            return
        for path, known in _foreign_leaves(one) if not _is_mistyped_section(one.path) else ():
            sibling = f"{one.path[0]}.{known.here.rpartition('.')[2]}"  # critic.learning_rate is critic.lr
            known = replace(known, here=sibling) if sibling in slots() else known
            key, source = ".".join(path), f"{known.origin}'s name" if known.origin != "removed" else "removed"
            message = f"{key} is not a key of tqppo: it is {source}"
            message = f"{key} was removed" if known.origin == "removed" else message
            if known.here and known.origin != "removed":
                message += f" for {known.here}"
            use = known.here and known.origin != "removed" and f"use {known.here}"
            fix = "; ".join(each for each in (use, known.why) if each)
            self._problem("E102", message, one.key, key, found=key, fix=fix)
            self.doubtful.update((known.here, f"{known.here}.*"))
            return
        self._mistyped(one)

    def _mistyped(self, one: Written) -> None:
        name, *rest = one.path
        at_top = not rest or name not in Config.model_fields
        if at_top:
            wrong, prefix, siblings = name, "", list(Config.model_fields)
        else:
            depth = 2 if name == "teachers" and len(rest) > 1 else 1
            wrong, prefix = rest[depth - 1], ".".join(one.path[:depth]) + "."
            pattern = "teachers.*." if name == "teachers" else prefix
            siblings = [key.removeprefix(pattern) for key in slots() if key.startswith(pattern)]
        close = nearest(wrong, siblings)
        elsewhere = [key for key in slots() if key.rpartition(".")[2] == wrong]
        self.doubtful.update(f"{prefix}{each}" for each in close)
        self.doubtful.update(f"{each}.*" for each in close if at_top)
        fix = f"did you mean {prefix}{close[0]}?" if close else ""
        fix = fix or (f"did you mean {' or '.join(elsewhere)}?" if elsewhere else "see `tqppo schema`, or delete it")
        self.doubtful.update(elsewhere if not close else ())
        what = "section" if at_top and (rest or isinstance(one.value, dict)) else "key"
        message = f"unknown {what} {prefix}{wrong}"
        allowed = ", ".join(sorted(siblings))
        self._problem("E101", message, one.key, f"{prefix}{wrong}", found=f"{prefix}{wrong}", allowed=allowed, fix=fix)

    def _problem(
        self, code: str, message: str, at: Span, key: str, *, found: str = "", allowed: str = "", fix: str = ""
    ) -> None:
        self.problems.append(Diagnostic("error", code, message, at, key, found, allowed, fix))


def _of_document(document: Document) -> Iterator[Written]:
    """The leaves of a file, each with its places; unknown sections stay whole, under their header."""
    for name, value in document.values.items():
        if name == "extends":
            continue
        yield from _leaves(document, (name,), value, whole=name not in Config.model_fields)


def _leaves(document: Document, path: tuple[str, ...], value: Any, whole: bool) -> Iterator[Written]:
    free = len(path) > (3 if path[0] == "teachers" else 2)
    whole = whole or (isinstance(value, dict) and _is_unknown(path))
    if isinstance(value, dict) and value and not whole and not free:
        for inner, inner_value in value.items():
            yield from _leaves(document, (*path, inner), inner_value, whole=False)
        return
    if path[1:] or not isinstance(value, dict) or value or whole or path[0] == "teachers":
        key = document.key_span(path)
        count = len(value) if isinstance(value, list) else 0
        at = document.at.get(path, key)
        elements = tuple(document.at.get((*path, i), at) for i in range(count))
        if whole and isinstance(value, dict):
            yield from _unknown_leaves(document, path, value, key)
        else:
            yield Written(path, value, key, at, elements)


def _is_unknown(path: tuple[str, ...]) -> bool:
    """A table where a section has no such key, such as [actor.optim]."""
    if path[0] == "teachers":
        return len(path) == 3 and f"teachers.*.{path[2]}" not in slots()
    return len(path) == 2 and ".".join(path) not in slots()


def _unknown_leaves(document: Document, path: tuple[str, ...], value: Any, header: Span) -> Iterator[Written]:
    """Of an unknown section: each key that another tool has, or else the section once."""
    leaves = list(_walk(path, value))
    known = [leaf for leaf, _ in leaves if foreign(leaf)]
    if len(known) < len(leaves) or not leaves:
        yield Written(path, {}, header, header)
    for leaf, inner in leaves:
        if leaf in known and leaf in document.keys:
            yield Written(leaf, inner, document.keys[leaf], document.at.get(leaf, document.keys[leaf]))


def _walk(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value and foreign(path) is None:
        for inner, inner_value in value.items():
            yield from _walk((*path, inner), inner_value)
    else:
        yield path, value


def _foreign_leaves(one: Written) -> Iterator[tuple[tuple[str, ...], Foreign]]:
    for path, _ in [(one.path, None), *_walk(one.path, one.value)]:
        known = foreign(path)
        if known is not None:
            yield path, known


def _is_mistyped_section(path: tuple[str, ...]) -> bool:
    """`[runn] seed`: the key exists in the section that was probably meant."""
    close = nearest(path[0], Config.model_fields, limit=1) if path[0] not in Config.model_fields else []
    return bool(close) and len(path) > 1 and ".".join((close[0], *path[1:2])) in slots()


def _nested(path: tuple[str, ...], value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def shown(value: Any) -> str:
    """A value as TOML would write it, not too long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, list):
        text = "[" + ", ".join(shown(each) for each in value) + "]"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{name} = {shown(each)}" for name, each in value.items()) + "}"
    else:
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def kind_of(value: Any) -> str:
    kinds: list[tuple[Any, str]] = [
        (bool, "true or false"),
        (int, "the whole number"),
        (float, "the number"),
        (str, "the string"),
        (list, "the list"),
        (dict, "the table"),
        ((datetime.date, datetime.time), "the date or time"),
    ]
    return next((words for kind, words in kinds if isinstance(value, kind)), type(value).__name__)


def conversion(value: Any, slot: Slot) -> str:
    """How to write the value that was probably meant."""
    kind = slot.field.annotation
    wants_list = "list" in str(kind)
    if isinstance(value, str) and value.lower() in ("true", "false") and kind is bool:
        return f"write {value.lower()}, without quotes"
    if isinstance(value, str) and kind in (int, float):
        return f"write {value}, without quotes" if _is_number(value) else "write a number"
    if isinstance(value, float) and kind is int:
        return f"write {round(value)}" if value == value and abs(value) < 1e15 else "write a whole number"
    if wants_list and not isinstance(value, list) and str in get_args(kind):
        return f'write ["{value}"]' if not isinstance(value, dict) else "write a list"
    if kind is str and not isinstance(value, (list, dict)):
        return f'write "{shown(value)}", in quotes'
    if kind is bool:
        return "write true or false"
    return f"write {slot.allowed}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_RANGE: dict[str, Any] = {
    "greater_than_equal": lambda error: f"write {error['ctx']['ge']} or more",
    "greater_than": lambda error: f"write a number above {error['ctx']['gt']:g}",
    "less_than_equal": lambda error: f"write {error['ctx']['le']:g} or less",
    "less_than": lambda error: f"write a number below {error['ctx']['lt']:g}",
    "finite_number": lambda error: "write a finite number",
}
