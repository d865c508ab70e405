"""Validates each assignment on its own: whether its key exists, and whether the value has the right type and range.

An invalid value is left out and its key becomes *unresolved*. Checks across sections skip unresolved keys, so that
one mistake gives one message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from tqppo.config.diagnostics import Diagnostic
from tqppo.config.read.assignment import KeyAssignment, SettingsLayer
from tqppo.config.read.flatten import assignments_of
from tqppo.config.read.paths import unusable_text
from tqppo.config.read.unknown_key import unknown_key
from tqppo.config.read.wrong_value import wrong_value
from tqppo.config.schema import Setting, section_of, settings
from tqppo.config.sections import Config
from tqppo.config.values import brief_toml

MAX_PROBLEMS = 200


@dataclass(slots=True)
class AssignmentValidator:
    problems: list[Diagnostic] = field(default_factory=list)
    unresolved: set[str] = field(default_factory=set)  # keys, `section.*` for whole sections, `*` for everything

    def valid(self, layer: SettingsLayer) -> list[KeyAssignment]:
        """The layer's valid assignments, one per setting."""
        document = layer.document
        assignments = layer.assignments if document is None else list(assignments_of(document))
        if document is not None and (document.problems or document.too_deep):
            self.unresolved.add("*")  # the broken lines may have set any key
        found: list[KeyAssignment] = []
        for one in assignments:
            if len(self.problems) >= MAX_PROBLEMS:
                self._stop(one)
                break
            found += self._validated(one)
        return found

    def _stop(self, one: KeyAssignment) -> None:
        """Leave the rest out: a file with so many mistakes is probably no config, and suggestions take time."""
        message = f"there are more than {MAX_PROBLEMS} problems; the settings from here on were not looked at"
        self.problems.append(Diagnostic("error", "E015", message, one.key_span, one.key))
        self.unresolved.add("*")

    def _validated(self, one: KeyAssignment) -> Iterator[KeyAssignment]:
        """The valid parts of an assignment; a table, inline or as in `--set actor={…}`, is taken apart."""
        name, *rest = one.path
        section = section_of(name)
        if name not in Config.model_fields:
            self._unknown(one)
        elif section is None:
            yield from self._setting(one, settings()[name])
        elif not rest:
            yield from self._section(one)
        elif name == "teachers":
            yield from self._teacher(one)
        else:
            yield from self._known_or_not(one, settings().get(f"{name}.{rest[0]}"))

    def _known_or_not(self, one: KeyAssignment, setting: Setting | None) -> Iterator[KeyAssignment]:
        if setting is None:
            self._unknown(one)
        else:
            yield from self._setting(one, setting)

    def _section(self, one: KeyAssignment) -> Iterator[KeyAssignment]:
        name = one.path[0]
        if isinstance(one.value, dict):
            yield from self._entries(one)
            return
        teachers = name == "teachers"
        fix = "write [teachers.NAME], one table per teacher" if teachers else f"write [{name}] and the keys below it"
        self._not_a_value(one, name, f"{name} is a section, not a value", fix)

    def _entries(self, one: KeyAssignment) -> Iterator[KeyAssignment]:
        assert isinstance(one.value, dict), "callers pass tables only"
        for name, value in one.value.items():
            yield from self._validated(one.entry(name, value))

    def _teacher(self, one: KeyAssignment) -> Iterator[KeyAssignment]:
        if len(one.path) > 2:
            yield from self._known_or_not(one, settings().get(f"teachers.*.{one.path[2]}"))
        elif not isinstance(one.value, dict):
            self._teacher_without_name(one)
        elif one.value:
            yield from self._entries(one)
        else:
            yield one

    def _teacher_without_name(self, one: KeyAssignment) -> None:
        """Report `[teachers] path = …`: a teacher's key without the teacher's name."""
        name = one.path[1]
        if f"teachers.*.{name}" in settings():
            message = f"{name} is a setting of one teacher, and [teachers] holds all of them"
        else:
            message = f"teachers.{name} is a teacher, and a teacher is a table"
        self._not_a_value(one, f"teachers.{name}", message, "name the teacher: [teachers.NAME], then the keys below it")

    def _setting(self, one: KeyAssignment, setting: Setting) -> Iterator[KeyAssignment]:
        """A value of a known key. A free table such as data.task_args is validated entry by entry."""
        depth = setting.depth
        if setting.is_table and len(one.path) == depth and isinstance(one.value, dict) and one.value:
            for name, value in one.value.items():
                yield from self._setting(one.entry(name, value), setting)
        elif setting.is_table and len(one.path) > depth:
            yield from self._value(one, setting, _nested(one.path[depth:], one.value))
        elif len(one.path) > depth:
            key = ".".join(one.path[:depth])
            message = f"{key} is a value, not a table"
            self.problems.append(Diagnostic("error", "E103", message, one.key_span, key, allowed=setting.allowed))
            self.unresolved.add(key)
        else:
            yield from self._value(one, setting, one.value)

    def _value(self, one: KeyAssignment, setting: Setting, value: object) -> Iterator[KeyAssignment]:
        if one.unquoted is not None and setting.takes_only_text and not isinstance(value, str):
            value = one.unquoted
            one = replace(one, value=value)
        try:
            setting.adapter().validate_python(value)
        except ValidationError as error:
            problem = wrong_value(one, setting, error.errors(include_url=False, include_context=True))
        else:
            if not (why := _unusable(one.path, value)):
                yield one
                return
            problem = Diagnostic("error", "E108", f"{one.key} cannot be used: {why}", one.value_span, one.key)
        self.problems.append(problem)
        self.unresolved |= {one.key, ".".join(one.path[: setting.depth])}

    def _unknown(self, one: KeyAssignment) -> None:
        found = unknown_key(one)
        self.problems.append(found.problem)
        self.unresolved.update(found.meant)

    def _not_a_value(self, one: KeyAssignment, key: str, message: str, fix: str) -> None:
        found = brief_toml(one.value)
        self.problems.append(Diagnostic("error", "E107", message, one.key_span, key, found, fix=fix))
        self.unresolved.add(f"{one.path[0]}.*")


def _unusable(path: tuple[str, ...], value: object) -> str:
    """Why a value of the right type is refused all the same; empty if it is not."""
    return "a whole number has more than 64 bits" if _is_huge(value) else unusable_text(path, value)


def _is_huge(value: object) -> bool:
    """Whether there is a whole number that TOML does not have. Products of such numbers cannot be printed."""
    if isinstance(value, dict | list):
        return any(map(_is_huge, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) >= 2**63


def _nested(path: tuple[str, ...], value: object) -> object:
    for name in reversed(path):
        value = {name: value}
    return value
