"""The modules of config import each other in one direction, and of tqppo only the ground floor."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import tqppo

PACKAGE = Path(tqppo.__file__).parent
GROUND_FLOOR = {"builtin", "columns", "dataflow", "devices", "engines", "errors", "plugins", "protocols"}
GROUND_FLOOR |= {"space", "tables", "units", "untrusted"}


def module_name(path: Path) -> str:
    return ".".join(["tqppo", *path.relative_to(PACKAGE).with_suffix("").parts])


MODULES = {module_name(path): path for path in PACKAGE.joinpath("config").rglob("*.py") if path.stem != "__init__"}


def imports(path: Path) -> set[str]:
    """Every module of tqppo that a file imports, at the top, inside functions or for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{each.name}" for each in node.names}
            found |= below & MODULES.keys() or ({node.module} if node.module != "tqppo" else below)
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return {name for name in found if name.split(".")[0] == "tqppo"}


def test_config_imports_the_ground_floor_only() -> None:
    for name, path in MODULES.items():
        rooms = {each.split(".")[1] for each in imports(path)}
        assert rooms <= {"config", *GROUND_FLOOR}, name


def test_config_has_no_import_cycle() -> None:
    graph = {name: imports(path) & MODULES.keys() for name, path in MODULES.items()}
    assert any(graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a cycle
