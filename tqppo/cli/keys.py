"""The keys that `--set` accepts, read from the text of `config/sections.py`.

Importing the models takes longer than a Tab may, parsing their source does not; a test holds the two together.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: what it may be (if that is a short list) and the first sentence about it."""

    values: tuple[str, ...]
    help: str


@cache
def sections() -> dict[str, dict[str, Key]]:
    """Settings by section; those outside sections under "", those of every teacher under "teachers"."""
    source = _Source()
    found: dict[str, dict[str, Key]] = {"": {}}
    for field, note in source.fields("Config"):
        named = {node.id for node in ast.walk(field.annotation) if isinstance(node, ast.Name)}
        inner = next((name for name in named if name.endswith("Section")), "")
        if inner:
            found[_name(field)] = {_name(each): source.key(each, text) for each, text in source.fields(inner)}
        else:
            found[""][_name(field)] = source.key(field, note)
    return found


class _Source:
    """The class and alias definitions of `sections.py`."""

    def __init__(self) -> None:
        spec = find_spec("tqppo.config")
        assert spec is not None, "tqppo.config is part of tqppo"
        assert spec.submodule_search_locations, "tqppo.config is a package"
        text = Path(spec.submodule_search_locations[0], "sections.py").read_text(encoding="utf-8")
        tree = ast.parse(text)
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.aliases = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def fields(self, name: str) -> list[tuple[ast.AnnAssign, str]]:
        """Fields of a class and of those it derives from, each with the string under it."""
        node = self.classes.get(name)
        if node is None:
            return []
        inherited = [field for base in node.bases if isinstance(base, ast.Name) for field in self.fields(base.id)]
        return inherited + [
            (statement, _text(following))
            for statement, following in zip(node.body, [*node.body[1:], None], strict=True)
            if isinstance(statement, ast.AnnAssign)
        ]

    def key(self, field: ast.AnnAssign, note: str) -> Key:
        return Key(self.values(field.annotation), note.split("\n")[0])

    def values(self, annotation: ast.expr) -> tuple[str, ...]:
        if isinstance(annotation, ast.Name):
            if annotation.id == "bool":
                return ("true", "false")
            return self.values(self.aliases[annotation.id]) if annotation.id in self.aliases else ()
        if isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", "") == "Literal":
            listed = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            return tuple(str(each.value) for each in listed if isinstance(each, ast.Constant))
        return ()


def _name(field: ast.AnnAssign) -> str:
    assert isinstance(field.target, ast.Name), "fields of a class are plain names"
    return field.target.id


def _text(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return str(statement.value.value)
    return ""
