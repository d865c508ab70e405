"""What the pages say exists: every path and module that they name, and the number of files that a recipe needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if path.stem != "troubleshooting"),
]
FOLDERS = ("tqppo", "backends", "presets", "tests", "docs", "completions", ".ci", ".github")


def named_paths(text: str) -> set[str]:
    """Paths in back quotes, and dotted names of modules as the paths of their files."""
    quoted = set(re.findall(r"`([^`\s]+)`", text))
    paths = {each for each in quoted if each.startswith(tuple(f"{folder}/" for folder in FOLDERS)) or each in FOLDERS}
    modules = {each for each in quoted if re.fullmatch(r"tqppo(\.\w+)+", each) and not is_entry_point_group(each)}
    return {each.partition(":")[0] for each in paths} | {module.replace(".", "/") for module in modules}


def is_entry_point_group(name: str) -> bool:
    return any(f"`{name}`" in (ROOT / "tqppo" / file).read_text() for file in ("plugins.py", "engines/capabilities.py"))


def exists(path: str) -> bool:
    """Also for `tqppo/dataflow/Mode`: a name that the module defines."""
    place = ROOT / path
    if place.exists() or place.with_suffix(".py").is_file():
        return True
    module, name = place.parent.with_suffix(".py"), place.name
    return module.is_file() and re.search(rf"^(class |def |){name}\b", module.read_text(), re.MULTILINE) is not None


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page: str) -> None:
    named = named_paths((ROOT / page).read_text())
    assert named, page
    assert not [path for path in sorted(named) if not exists(path)]


def test_files_beside_a_path_exist_in_its_folder() -> None:
    """In the map's table: `app.py` in the row of `tqppo/cli/` is `tqppo/cli/app.py`."""
    rows = re.findall(
        r"^\| `((?:tqppo|backends)/[\w/]+/)` \| (.*) \|$", (ROOT / "docs/architecture.md").read_text(), re.M
    )
    assert len(rows) > 15
    named = {folder + each for folder, words in rows for each in re.findall(r"`(\w+(?:\.py|/))`", words)}
    assert not [path for path in sorted(named) if not exists(path)]


def test_the_map_has_a_row_for_every_room() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = [f"tqppo/{path.parent.name}/" for path in (ROOT / "tqppo").glob("*/__init__.py")]
    assert not [room for room in rooms if f"| `{room}` |" not in text]


def test_the_readme_has_a_line_for_every_room() -> None:
    tree = (ROOT / "README.md").read_text().split("## The tree")[1]
    rooms = [f"  {path.parent.name}/ " for path in (ROOT / "tqppo").glob("*/__init__.py")]
    assert not [room for room in rooms if room not in tree]


@pytest.mark.parametrize(("recipe", "most"), [("A mode", 5), ("A loss", 3), ("An engine", 3), ("A storage", 2)])
def test_a_recipe_touches_few_files(recipe: str, most: int) -> None:
    (section,) = re.findall(rf"^### {recipe}$(.*?)(?=^###|\Z)", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    rows = re.findall(r"^\| `", section, re.MULTILINE)
    assert 0 < len(rows) <= most


def test_the_map_has_a_row_for_every_file_of_the_ground_floor() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    files = [path.name for path in (ROOT / "tqppo").glob("*.py") if path.name != "__init__.py"]
    assert not [name for name in files if f"| `tqppo/{name}` |" not in text]
