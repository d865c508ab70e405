"""Presets by name: where they are looked for, what they say about themselves, how two of them differ."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset file. `place` is where it was found: project, path, user or built-in."""

    name: str
    path: Path
    place: str
    summary: str  # its first comment line


def search_path(environ: Mapping[str, str] | None = None) -> list[tuple[str, Path]]:
    """Folders in order: ./presets, $TQPPO_PRESET_PATH, the user's config folder, those that come with tqppo."""
    environ = os.environ if environ is None else environ
    folders = [("project", Path("presets"))]
    folders += [("path", Path(each)) for each in environ.get("TQPPO_PRESET_PATH", "").split(os.pathsep) if each]
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "~"), ".config")
    folders.append(("user", Path(home).expanduser() / "tqppo" / "presets"))
    return [*folders, ("built-in", _built_in())]


def _built_in() -> Path:
    from importlib.resources import files

    return Path(str(files("tqppo_presets")))


def list_presets(environ: Mapping[str, str] | None = None) -> list[Preset]:
    """Every preset that a name reaches, by name; bases (`base-…`) last."""
    found: dict[str, Preset] = {}
    for place, folder in search_path(environ):
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else []:
            found.setdefault(path.stem, Preset(path.stem, path, place, _summary(path)))
    return sorted(found.values(), key=lambda each: (each.name.startswith("base-"), each.name))


def find_preset(name: str, environ: Mapping[str, str] | None = None, *, beyond: Path | None = None) -> Path | None:
    """The first preset of that name; `beyond` is a file not to find, so that it can extend its namesake."""
    for _, folder in search_path(environ):
        path = folder / f"{name}.toml"
        if path.is_file() and not (beyond is not None and beyond.exists() and path.samefile(beyond)):
            return path
    return None


def preset_header(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The comment that a preset opens with, without its `#`s. Empty for an unknown name."""
    path = find_preset(name, environ)
    return "\n".join(_header(path)) if path else ""


def diff_presets(a: str, b: str, environ: Mapping[str, str] | None = None) -> list[tuple[str, str, str]]:
    """Keys whose resolved values differ: (key, value in a, value in b), as TOML; absent is an empty string."""
    from tqppo.config.compile import compile_config
    from tqppo.config.show.export import flat_toml

    left, right = (flat_toml(compile_config(name, environ=environ or {})) for name in (a, b))
    keys = [*left, *(key for key in right if key not in left)]
    pairs = [(key, left.get(key, ""), right.get(key, "")) for key in keys]
    return [each for each in pairs if each[1] != each[2]]


def _header(path: Path) -> list[str]:
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("#:"):  # an editor's schema directive
            lines.append(line.lstrip("#").strip())
    return lines


def _summary(path: Path) -> str:
    header = _header(path)
    return header[0] if header else ""
