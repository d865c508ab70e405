"""The keys of the config as data: which exist, what each accepts, in words. Built from `sections.Config`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from tqppo.config.sections import Config, Section, TeacherSection

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Slot:
    """One key that a user can set; `teachers.*.path` for every teacher's path."""

    key: str
    field: FieldInfo

    @property
    def doc(self) -> str:
        return self.field.description or ""

    @property
    def default(self) -> Any:
        return None if self.field.is_required() else self.field.get_default(call_default_factory=True)

    @property
    def is_table(self) -> bool:
        return get_origin(self.field.annotation) is dict

    @property
    def choices(self) -> tuple[Any, ...]:
        return _choices(self.field.annotation)

    @property
    def allowed(self) -> str:
        return describe(self.field.annotation, self.field.metadata)

    @property
    def bare_is_string(self) -> bool:
        """Whether an unquoted 42 in `--set run.name=42` can only be meant as text."""
        plain = get_origin(self.field.annotation) is Literal or self.field.annotation is str
        return plain and all(isinstance(each, str) for each in self.choices)

    def adapter(self) -> TypeAdapter[Any]:
        return _adapter(self.key)


@cache
def slots() -> dict[str, Slot]:
    """Every leaf key, in the order of the sections."""
    return dict(_slots())


def _slots() -> Iterator[tuple[str, Slot]]:
    for name, field in Config.model_fields.items():
        section = section_of(name)
        if section is None:
            yield name, Slot(name, field)
            continue
        prefix = "teachers.*" if name == "teachers" else name
        for inner, inner_field in section.model_fields.items():
            key = f"{prefix}.{inner}"
            yield key, Slot(key, inner_field)


@cache
def section_of(name: str) -> type[Section] | None:
    """The section's class; None for a top-level value such as `mode`, or an unknown name."""
    if name == "teachers":
        return TeacherSection
    annotation = Config.model_fields[name].annotation if name in Config.model_fields else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def slot_of(key: str) -> Slot | None:
    """The slot of a concrete key: `teachers.math.path` is `teachers.*.path`, `data.task_args.digits` its table's."""
    parts = key.split(".")
    if parts[0] == "teachers" and len(parts) > 2:
        parts[1] = "*"
    depth = 3 if parts[0] == "teachers" else 2
    known = slots()
    return known.get(".".join(parts[:depth])) or known.get(parts[0])


@cache
def _adapter(key: str) -> TypeAdapter[Any]:
    field = slots()[key].field
    annotation: Any = field.annotation
    for each in field.metadata:
        annotation = Annotated[annotation, each]
    return TypeAdapter(annotation, config=_STRICT)


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    if get_origin(annotation) is list:
        return _choices(get_args(annotation)[0])
    return (True, False) if annotation is bool else ()


def describe(annotation: Any, metadata: Any = ()) -> str:
    """A type in words: `a whole number, at least 1`, `one of ppo, grpo, distill`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(args[0], [*args[1:], *metadata])
    if origin is Literal:
        return "one of " + ", ".join(f'"{each}"' for each in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(each) for each in args)
    if origin is list:
        return f"a list of {_plural(describe(args[0]))}"
    if origin is dict:
        return "a table" if args[1] is Any else f"a table of {describe(args[1])}"
    words = _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))
    return ", ".join([words, *_bounds(metadata)])


def _plural(words: str) -> str:
    return {"a string": "strings", "a whole number": "whole numbers"}.get(words, words)


def _bounds(metadata: Any) -> Iterator[str]:
    for each in metadata:
        if isinstance(each, FieldInfo):
            yield from _bounds(each.metadata)
        for name, words in _BOUNDS.items():
            bound = getattr(each, name, None)
            if bound is not None:
                yield f"{words} {bound}"
