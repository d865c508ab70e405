"""Keys, documentation and choices for completion with Tab, read from the source text of `sections.py`.

Importing pydantic would take longer than a keystroke may. A test compares the result with what pydantic sees.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from inspect import cleandoc
from pathlib import Path

from tqppo import dataflow
from tqppo.builtin import AGENTS, TASKS

_TASKS = tuple(f"task:{name}" for name in TASKS)
BEGINNINGS = {  # words that a value may be, besides paths
    "teachers.*.path": ("student", *_TASKS),
    "data.train": _TASKS,
    "rollout.agent": AGENTS,
}


@dataclass(frozen=True, slots=True)
class Key:
    name: str  # `teachers.*.path` for every teacher's path
    doc: str
    values: tuple[str, ...]  # choices of an enumeration, true and false of a switch; else empty


def all_keys() -> tuple[Key, ...]:
    """Every key that `--set` takes, in the order of the sections."""
    return _read()


def values_of(name: str) -> tuple[str, ...]:
    """The values that can follow `name=`; empty if any value can."""
    parts = name.split(".")
    if parts[0] == "teachers" and len(parts) == 3:
        parts[1] = "*"
    wanted = ".".join(parts)
    if parts[-1] == "backend":
        from tqppo import plugins

        return tuple(plugins.names("storage" if parts[0] == "storage" else "rollout"))
    if wanted in BEGINNINGS:
        return BEGINNINGS[wanted]
    return next((key.values for key in all_keys() if key.name == wanted), ())


@cache
def _read() -> tuple[Key, ...]:
    tree = ast.parse(Path(__file__).parents[1].joinpath("sections.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    aliases = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    keys: list[Key] = []
    for name, annotation, doc in _fields(classes, "Config"):
        if isinstance(annotation, ast.Name) and annotation.id in classes:
            inner, prefix = annotation.id, name
        elif name == "teachers":
            inner, prefix = "TeacherSection", "teachers.*"
        else:
            keys.append(_mode() if name == "mode" else Key(name, doc, _values(annotation, aliases)))
            continue
        keys += [Key(f"{prefix}.{each}", text, _values(kind, aliases)) for each, kind, text in _fields(classes, inner)]
    return tuple(keys)


def _mode() -> Key:
    return Key("mode", dataflow.modes_described(), tuple(dataflow.mode_names()))


def _fields(classes: dict[str, ast.ClassDef], name: str) -> list[tuple[str, ast.expr, str]]:
    """Name, annotation and documentation of a section's fields, those of its bases first."""
    node = classes[name]
    fields = [field for base in node.bases if isinstance(base, ast.Name) and base.id in classes
              for field in _fields(classes, base.id)]  # fmt: skip
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_doc = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            doc = cleandoc(str(following.value.value)) if is_doc else ""  # type: ignore[union-attr]
            fields.append((statement.target.id, statement.annotation, doc))
    return fields


def _values(annotation: ast.expr, aliases: dict[str, ast.expr]) -> tuple[str, ...]:
    if isinstance(annotation, ast.Name):
        if annotation.id == "bool":
            return ("true", "false")
        return _values(aliases[annotation.id], aliases) if annotation.id in aliases else ()
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        if annotation.value.id == "Literal":
            each = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            return tuple(str(one.value) for one in each if isinstance(one, ast.Constant))
        if annotation.value.id == "list":
            return tuple(f'["{value}"]' for value in _values(annotation.slice, aliases))
    return ()
