"""Every setting as data: its key, its documentation, its default, and what it accepts, in words.

Built from `sections.Config`.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from tqppo.config.sections import Config, Section, TeacherSection
from tqppo.dataflow import modes_described

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_WORDS: dict[object, str] = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Setting:
    """One key that a user can set. `teachers.*.path` stands for the path of every teacher."""

    key: str
    field: FieldInfo

    @property
    def doc(self) -> str:
        """The sentence of the config's class; that of `mode` lists the built-in modes as they describe themselves."""
        return modes_described() if self.key == "mode" else self.field.description or ""

    @property
    def default(self) -> object:
        """The default value; None for a setting that must be set."""
        return None if self.field.is_required() else self.field.get_default(call_default_factory=True)

    @property
    def depth(self) -> int:
        """How many names the key has."""
        return self.key.count(".") + 1

    @property
    def is_table(self) -> bool:
        return get_origin(self.field.annotation) is dict

    @property
    def choices(self) -> tuple[object, ...]:
        return _choices(self.field.annotation)

    @property
    def allowed(self) -> str:
        return describe(self.field.annotation, self.field.metadata)

    @property
    def takes_only_text(self) -> bool:
        """Whether an unquoted 42, as in `--set run.name=42`, can only be meant as text."""
        plain = get_origin(self.field.annotation) is Literal or self.field.annotation is str
        return plain and all(isinstance(each, str) for each in self.choices)

    def adapter(self) -> TypeAdapter[object]:
        return _adapter(self.key)


@cache
def settings() -> dict[str, Setting]:
    """Every leaf key, in the order of the sections."""
    return dict(_settings())


def _settings() -> Iterator[tuple[str, Setting]]:
    for name, field in Config.model_fields.items():
        section = section_of(name)
        if section is None:
            yield name, Setting(name, field)
            continue
        prefix = "teachers.*" if name == "teachers" else name
        for inner, inner_field in section.model_fields.items():
            key = f"{prefix}.{inner}"
            yield key, Setting(key, inner_field)


@cache
def section_of(name: str) -> type[Section] | None:
    """The class of a section. None for a top-level value such as `mode`, and for an unknown name."""
    if name == "teachers":
        return TeacherSection
    annotation = Config.model_fields[name].annotation if name in Config.model_fields else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def setting_of(key: str) -> Setting | None:
    """The setting of a concrete key: `teachers.*.path` for `teachers.math.path`, and for an entry its free table."""
    parts = key.split(".")
    if parts[0] == "teachers" and len(parts) > 2:
        parts[1] = "*"
    depth = 3 if parts[0] == "teachers" else 2
    known = settings()
    return known.get(".".join(parts[:depth])) or known.get(parts[0])


@cache
def _adapter(key: str) -> TypeAdapter[object]:
    field = settings()[key].field
    annotation: Any = field.annotation
    for each in field.metadata:
        annotation = Annotated[annotation, each]
    return TypeAdapter(annotation, config=_STRICT)


def _choices(annotation: object) -> tuple[object, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    if get_origin(annotation) is list:
        return _choices(get_args(annotation)[0])
    return (True, False) if annotation is bool else ()


def describe(annotation: object, metadata: Iterable[object] = ()) -> str:
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


def _bounds(metadata: Iterable[object]) -> Iterator[str]:
    for each in metadata:
        if isinstance(each, FieldInfo):
            yield from _bounds(each.metadata)
        for name, words in _BOUNDS.items():
            bound = getattr(each, name, None)
            if bound is not None:
                yield f"{words} {bound}"
