"""The rules of the house: which room may import which, what no file may contain, which tests belong to which module.

`docs/architecture.md` has the map. There is no list of exceptions to the import order: a new import that breaks it
means that code lives in the wrong room.
"""

from __future__ import annotations

import ast
import re
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tqppo.columns import PromptTags, RowTags

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]

ROOF = "roof"  # the package's `__init__`, which gives the public names, and `__main__`, which is the command
GROUND = "ground floor"  # every file directly in tqppo/, and these folders
GROUND_FOLDERS = {"devices", "engines", "processes"}

# From the top of the house to its ground floor. A room imports itself and the floors below its own.
FLOORS = (
    (ROOF,),
    ("cli", "api"),
    ("doctor",),
    ("run",),
    ("trainers", "contracts"),
    ("rollout", "workers"),
    ("weights", "rewards", "data", "queue", "tiny", "metrics", "display"),
    ("algorithms",),
    (GROUND,),
)
CONFIG_IMPORTERS = {ROOF, "cli", "api", "doctor", "run"}
BACKENDS_MAY_IMPORT = {"queue", "weights", "algorithms", GROUND}

MAX_METHODS = 20
MAX_FUNCTION_LINES = 50
MAX_ANY_PER_THOUSAND_LINES = 8


@dataclass(frozen=True)
class Module:
    """One file of `tqppo/` or `backends/`; `name` is its dotted name, a package's without `__init__`."""

    path: Path
    name: str

    @property
    def room(self) -> str:
        top, *rest = self.name.split(".")
        if top == "backends":
            return "backends"
        if self.name in ("tqppo", "tqppo.__main__"):
            return ROOF
        return rest[0] if rest and rest[0] not in GROUND_FOLDERS and (ROOT / top / rest[0]).is_dir() else GROUND

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def tree(self) -> ast.Module:
        return parsed(self.path)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def modules() -> dict[str, Module]:
    found = {}
    for path in [*(ROOT / "tqppo").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(path, name)
    return found


def imported(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Every import of a file with its line: at the top, inside functions, and for type checkers only.

    `from a import b` yields `a.b`, and `a` unless b is a module of ours.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            if not all(name in modules() for name in names):
                yield node.lineno, base
            yield from ((node.lineno, name) for name in names)


def our_imports(module: Module) -> Iterator[tuple[int, Module]]:
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    seen = set()
    for line, name in imported(module.tree, package):
        name = re.sub(r"^tqppo_backends\b", "backends", name)
        target = modules().get(name)
        is_parent = target is not None and target.path.name == "__init__.py" and not target.tree.body
        if target is not None and not is_parent and target is not module and (line, name) not in seen:
            seen.add((line, name))
            yield line, target


def may_import(room: str, target: str) -> bool:
    if room == target:
        return True
    if room == "config":
        return target == GROUND
    if target == "config":
        return room in CONFIG_IMPORTERS
    if room == "backends":
        return target in BACKENDS_MAY_IMPORT
    return target != "backends" and floor(room) < floor(target)


def floor(room: str) -> int:
    (found,) = (number for number, rooms in enumerate(FLOORS) if room in rooms)
    return found


def import_violations() -> list[str]:
    return [
        f"{module.where}:{line}: {module.room} imports {target.name} ({target.room})"
        for module in modules().values()
        for line, target in our_imports(module)
        if not may_import(module.room, target.room)
    ]


def dynamic_attributes() -> list[str]:
    """Functions called `__getattr__`. Two are meant: one gives the public names of `tqppo`, one stands in for a package
    that SGLang imports and does not use on a CPU."""
    meant = ("tqppo", "backends.rollout.sglang_cpu.sgl_kernel")
    return [
        f"{module.where}:{node.lineno}: {node.name}"
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__getattribute__")
        if module.name not in meant or node not in module.tree.body
    ]


def large_classes() -> list[str]:
    found = []
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                count = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                if count > MAX_METHODS:
                    found.append(f"{module.where}:{node.lineno}: {node.name} has {count} methods")
    return found


def long_functions() -> list[str]:
    return [
        f"{module.where}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def shared_names() -> list[str]:
    """Classes and type aliases of one name in two modules: a reader could not tell which one is meant."""
    places: dict[str, list[str]] = {}
    for module in modules().values():
        for node in module.tree.body:
            for name in _type_names(node):
                places.setdefault(name, []).append(f"{module.where}:{node.lineno}")
    return [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def _type_names(node: ast.stmt) -> list[str]:
    """The class, or the type aliases in CamelCase, that a statement defines; type variables are local to their file."""
    if isinstance(node, ast.ClassDef):
        return [node.name]
    if not isinstance(node, ast.Assign) or re.match(r"(TypeVar|ParamSpec)\(", ast.unparse(node.value)):
        return []
    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if re.fullmatch(r"[A-Z][A-Za-z]*[a-z][A-Za-z]*", name)]


def any_counts() -> tuple[dict[str, int], int]:
    """`Any` per file and the number of lines, without `queue/link`: it carries other people's values."""
    counts, lines = {}, 0
    for module in modules().values():
        if module.name.startswith("tqppo.queue.link"):
            continue
        lines += module.path.read_text().count("\n")
        counts[module.where] = sum(_is_any(node) for node in ast.walk(module.tree))
    return counts, lines


def _is_any(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "Any") or (isinstance(node, ast.Attribute) and node.attr == "Any")


# Parts of the command line, which tests run as a process: what a test of tests/cli passes to it, or reads of it.
COMMANDS = {
    "tqppo.cli.app": "--help",
    "tqppo.cli.backends": "backends list",
    "tqppo.cli.candidates": "tqppo train --preset ",
    "tqppo.cli.chat": "sample",
    "tqppo.cli.completion": "tqppo train --",
    "tqppo.cli.config": "config explain",
    "tqppo.cli.crash": "tqppo-crash-",
    "tqppo.cli.datasets": "data show",
    "tqppo.cli.doctor": "doctor logprobs",
    "tqppo.cli.environment": "env --json",
    "tqppo.cli.evaluate": "eval",
    "tqppo.cli.explain": "explain",
    "tqppo.cli.export": "export",
    "tqppo.cli.options": "-q validate-config",
    "tqppo.cli.output": "presets list --json",
    "tqppo.cli.presets": "presets diff",
    "tqppo.cli.reward": "reward try",
    "tqppo.cli.runs": "runs list",
    "tqppo.cli.scripts": "--show-completion bash",
    "tqppo.cli.template": "template check",
    "tqppo.cli.train": "train --preset",
}

# Files for the interpreters of vLLM and SGLang, which ours cannot import: tests with the genuine engines run them.
FOR_OTHER_INTERPRETERS = (
    "backends.rollout.sglang_cpu",
    "backends.rollout.sglang_guard",
    "backends.rollout.vllm_guard",
)


def mirrored_folder(module: Module) -> Path:
    """The folder of `tests/` for a module's room; the ground floor's is `tests/` itself."""
    parts = module.path.relative_to(ROOT).parts[:-1]
    if parts[0] == "backends":
        return ROOT.joinpath("tests", *parts[:2])
    return ROOT.joinpath("tests", *(parts[1:2] if module.room != GROUND else ()))


@cache
def names_in_tests(folder: Path) -> frozenset[str]:
    """Names that the files in and below a folder of `tests/` import, their strings, and their calls' strings as one.

    Strings count because tests load back ends with `import_module`, and start processes with `-m`.
    """
    trees = [parsed(path) for path in folder.rglob("*.py") if path != Path(__file__)]
    names = {name for tree in trees for _, name in imported(tree, "")}
    strings = {text for tree in trees for node in ast.walk(tree) for text in _strings(node)}
    return frozenset(re.sub(r"^tqppo_backends\b", "backends", name) for name in names | strings)


def _strings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Call):
        yield " ".join(each.value for each in node.args if isinstance(each, ast.Constant) and type(each.value) is str)


@cache
def entry_points() -> dict[str, str]:
    """The name under which each module of `backends/` is loaded, by module."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    return {
        re.sub(r"^tqppo_backends\b", "backends", target.split(":")[0]): name
        for group in groups.values()
        for name, target in group.items()
    }


def is_named_by_a_test(module: Module) -> bool:
    named = names_in_tests(mirrored_folder(module))
    if module.name in named or module.name.startswith(FOR_OTHER_INTERPRETERS):
        return True
    if module.name in entry_points():
        return entry_points()[module.name] in named | names_in_tests(ROOT / "tests" / "contracts")
    command = COMMANDS.get(module.name)
    return command is not None and any(each.startswith(command) for each in named)


def modules_without_a_test() -> list[str]:
    """Modules that no test in the mirrored folder names, and that no tested file of their own folder uses either."""
    with_code = [each for each in modules().values() if any(not isinstance(node, ast.Expr) for node in each.tree.body)]
    tested = {module for module in with_code if is_named_by_a_test(module)}
    found = list(tested)
    while found:
        module = found.pop()
        parts = {used for _, used in our_imports(module) if used.path.parent == module.path.parent} - tested
        tested |= parts
        found += parts
    return [
        f"{module.where}: no test in {mirrored_folder(module).relative_to(ROOT)}/ imports it"
        for module in with_code
        if module not in tested
    ]


# Folders of tests that belong to no single room.
WHOLE_HOUSE = {"e2e", "faults", "bench", "fuzz", "soak"}


def misplaced_tests() -> list[str]:
    """Tests in a folder that neither `tqppo/` nor, below `tests/backends/`, `backends/` has."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folders = path.relative_to(ROOT / "tests").parts[:-1]
        if not folders or folders[0] in WHOLE_HOUSE:
            continue
        mirrored = ROOT.joinpath(*folders) if folders[0] == "backends" else ROOT.joinpath("tqppo", *folders)
        if not mirrored.is_dir():
            found.append(f"{path.relative_to(ROOT)}: there is no folder {mirrored.relative_to(ROOT)}")
    return found


def report(violations: list[str]) -> str:
    return "\n".join([f"{len(violations)}:", *violations])


def test_imports_point_down_the_house() -> None:
    violations = import_violations()
    assert not violations, report(violations)


def test_every_folder_of_the_package_has_its_floor() -> None:
    known = {room for rooms in FLOORS for room in rooms} | GROUND_FOLDERS | {"config"}
    folders = {path.parent.name for path in (ROOT / "tqppo").glob("*/__init__.py")}
    assert folders == known - {GROUND, ROOF}


def test_the_import_order_sees_lazy_imports_and_those_for_type_checkers() -> None:
    code = "def f():\n    import tqppo.cli\nif TYPE_CHECKING:\n    from tqppo.run import loop\nfrom . import near\n"
    found = {name for _, name in imported(ast.parse(code), "tqppo.data")}
    assert found == {"tqppo.cli", "tqppo.run.loop", "tqppo.data", "tqppo.data.near"}


def test_the_import_order_is_the_one_of_the_map() -> None:
    assert may_import("trainers", "workers")
    assert not may_import("workers", "trainers")
    assert not may_import("workers", "rollout")
    assert may_import("run", "config")
    assert not may_import("trainers", "config")
    assert not may_import("config", "data")
    assert not may_import("run", "backends")
    assert not may_import("backends", "workers")
    assert not may_import(GROUND, "algorithms")


def test_no_attribute_is_made_up_at_run_time() -> None:
    violations = dynamic_attributes()
    assert not violations, report(violations)


def test_no_class_has_more_than_twenty_methods() -> None:
    violations = large_classes()
    assert not violations, report(violations)


def test_no_two_types_have_one_name() -> None:
    violations = shared_names()
    assert not violations, report(violations)


def test_every_function_fits_on_a_screen() -> None:
    violations = long_functions()
    assert not violations, report(violations)


def test_any_is_rare() -> None:
    counts, lines = any_counts()
    most = sorted(counts.items(), key=lambda item: -item[1])[:15]
    rate = 1000 * sum(counts.values()) / lines
    assert rate <= MAX_ANY_PER_THOUSAND_LINES, report([f"{rate:.1f} per thousand lines", *map(str, most)])


def test_every_module_has_a_test_in_its_folder() -> None:
    violations = modules_without_a_test()
    assert not violations, report(violations)


def test_tests_lie_in_the_folder_of_what_they_test() -> None:
    violations = misplaced_tests()
    assert not violations, report(violations)


def read_tags() -> dict[str, str]:
    """Tag → a place that reads it, as `tags["reward"]` or `tags.get("reward")`."""
    found: dict[str, str] = {}
    for module in modules().values():
        for node in ast.walk(module.tree):
            name = _tag_of(node)
            if name is not None:
                found[name] = f"{module.where}:{node.lineno}"  # type: ignore[attr-defined]
    return found


def _tag_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tags" and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "tags.get" and isinstance(node.args[0], ast.Constant):
        return str(node.args[0].value)
    return None


def test_every_tag_that_is_read_is_declared() -> None:
    found = read_tags()
    assert {"reward", "status", "session"} <= found.keys()
    declared = typing.get_type_hints(RowTags).keys() | typing.get_type_hints(PromptTags).keys()
    assert {name: place for name, place in found.items() if name not in declared} == {}
