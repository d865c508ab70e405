"""Finds presets by name, and reads the comment that each opens with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tqppo.untrusted import read_file

MAX_HEADER_BYTES = 1024 * 1024  # of a preset file


@dataclass(frozen=True, slots=True)
class PresetFile:
    """A preset file. `place` is the kind of folder it is in: project, path, user or built-in."""

    name: str
    path: Path
    place: str
    summary: str  # its first comment line


def search_path(environ: Mapping[str, str] | None = None) -> list[tuple[str, Path]]:
    """The folders in order: ./presets, $TQPPO_PRESET_PATH, the user's config folder, the built-in presets."""
    environ = os.environ if environ is None else environ
    folders = [("project", Path("presets"))]
    folders += [("path", Path(each)) for each in environ.get("TQPPO_PRESET_PATH", "").split(os.pathsep) if each]
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "~"), ".config")
    folders.append(("user", Path(home).expanduser() / "tqppo" / "presets"))
    return [*folders, ("built-in", _built_in())]


def _built_in() -> Path:
    from importlib.resources import files

    return Path(str(files("tqppo_presets")))


def is_built_in(path: Path) -> bool:
    """Whether a preset comes with tqppo."""
    return path.parent.resolve() == _built_in().resolve()


def list_presets(environ: Mapping[str, str] | None = None) -> list[PresetFile]:
    """Every preset that can be named, sorted by name, with bases (`base-…`) last."""
    found: dict[str, PresetFile] = {}
    for place, folder in search_path(environ):
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else []:
            found.setdefault(path.stem, PresetFile(path.stem, path, place, _summary(path)))
    return sorted(found.values(), key=lambda each: (each.name.startswith("base-"), each.name))


def find_preset(name: str, environ: Mapping[str, str] | None = None, *, beyond: Path | None = None) -> Path | None:
    """The first preset of that name. The file `beyond` is skipped, so that it can extend its namesake."""
    for _, folder in search_path(environ):
        path = folder / f"{name}.toml"
        if os.path.isfile(path) and not (beyond is not None and beyond.exists() and path.samefile(beyond)):
            return path
    return None


def _header(path: Path) -> list[str]:
    lines: list[str] = []
    try:
        text = read_file(path, MAX_HEADER_BYTES).decode(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("#:"):  # an editor's schema directive
            lines.append(line.lstrip("#").strip())
    return lines


def _summary(path: Path) -> str:
    header = _header(path)
    return header[0] if header else ""
