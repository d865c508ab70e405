"""Prints the tests of what has changed since the last commit, or in it if nothing has. For `make check`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

TESTS = Path("tests")
ALWAYS = ("tests/test_house.py",)
OTHERS = {"presets": "tests/config", "docs": "tests/test_docs.py", "README.md": "tests/test_readme.py"}


def folders_of(changed: Iterable[str]) -> list[str]:
    """The folder of tests beside each changed file, or the nearest one above it that exists."""
    found = set(ALWAYS)
    for name in changed:
        path = Path(name)
        if path.parts[0] in OTHERS:
            found.add(OTHERS[path.parts[0]])
        elif path.parts[0] == "tests":
            found.add(name if path.name.startswith("test_") else str(path.parent))
        elif path.parts[0] in ("tqppo", "backends"):
            found.add(_mirror(path))
    return sorted(each for each in found if Path(each).exists() and each != "tests")


def _mirror(path: Path) -> str:
    """`tests/queue/link` for `tqppo/queue/link/wire.py`, `tests/test_space.py` for `tqppo/space.py`."""
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
