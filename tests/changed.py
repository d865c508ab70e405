"""Prints the tests of what has changed since the last commit, or in it if nothing has. For `make check`.

A file is tested by the folder that mirrors its own, and by the folders of the files that import it. A file that all
rooms use, such as those of the ground floor, is tested by everything.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

TESTS = Path("tests")
ALL = ["tests", "--ignore", "tests/cli"]
ALWAYS = ("tests/test_house.py",)
OTHERS = {"presets": "tests/config", "docs": "tests/test_docs.py", "README.md": "tests/test_readme.py"}
USED_BY_ALL = ("pyproject.toml", "constraints.txt", "tests/conftest.py")


def folders_of(changed: Iterable[str]) -> list[str]:
    """Arguments for pytest."""
    found = set(ALWAYS)
    for name in changed:
        path = Path(name)
        if name in USED_BY_ALL or path.parent == Path("tqppo"):
            return ALL
        if path.parts[0] in OTHERS:
            found.add(OTHERS[path.parts[0]])
        elif path.parts[0] == "tests":
            found.add(name if path.name.startswith("test_") else str(path.parent))
        elif path.parts[0] in ("tqppo", "backends"):
            found |= {_mirror(each) for each in (path, *_importers(path))}
    if str(TESTS) in found:  # a helper that several rooms use
        return ALL
    return sorted(each for each in found if Path(each).exists())


def _importers(path: Path) -> list[Path]:
    """Files that import this one directly."""
    module = ".".join(path.with_suffix("").parts)
    package, _, name = module.rpartition(".")
    pattern = re.compile(rf"from {re.escape(module)} import|from {re.escape(package)} import .*\b{name}\b")
    return [each for each in Path("tqppo").rglob("*.py") if pattern.search(each.read_text())]


def _mirror(path: Path) -> str:
    """`tests/queue/link` for `tqppo/queue/link/wire.py`, `tests/test_main.py` for `tqppo/main.py`."""
    parts = path.parts[1:] if path.parts[0] == "tqppo" else path.parts
    if len(parts) == 1:
        return str(TESTS / f"test_{parts[0]}")
    folders = [TESTS.joinpath(*parts[:end]) for end in range(len(parts) - 1, 0, -1)]
    return str(next((each for each in folders if each.is_dir()), TESTS))


def changed_files() -> list[str]:
    since = _git("diff", "--name-only", "HEAD") + _git("ls-files", "--others", "--exclude-standard")
    return since or _git("diff", "--name-only", "HEAD~1", "HEAD")


def _git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.splitlines()


if __name__ == "__main__":
    print(*folders_of(changed_files()))
