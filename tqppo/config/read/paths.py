"""Settings that name files and folders. In a TOML file they are relative to that file, elsewhere to the current folder.

Presets that come with tqppo count as written in the current folder. `run.dir`, where a run writes, always does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tqppo.builtin import NO_FILE
from tqppo.config.read.assignment import KeyAssignment
from tqppo.untrusted import printable

DATA = ("data.train", "validation.data", "warm_start.data")
OWN_CODE = ("reward.function", "rollout.agent", "rollout.agent_args")  # `file.py:name`
MODELS = (
    "model.path",
    "model.tokenizer",
    "critic.path",
    "reference.path",
    "reward_model.path",
    "teachers.*.path",
    "rollout.python",
    "teachers.*.python",
)
WRITTEN = ("run.dir", "storage.dir")
NAMES = ("tiny", "student")  # models that are no folders, even if there is one of the name
NOT_RELATIVE = (*NO_FILE, "~")  # how values that are no relative path begin

MAX_PART_BYTES = 255  # of a file's name, on every usual file system
MAX_PATH_BYTES = 4095

PathForm = Callable[[Path], str]  # a path as the config shall have it


def display(path: Path) -> str:
    """The path relative to the current folder if it is inside it, otherwise unchanged."""
    try:
        return str(Path(os.path.realpath(path)).relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def rebased(one: KeyAssignment, folder: Path) -> KeyAssignment:
    """An assignment of a file in `folder`, with its paths as seen from the current folder."""
    return replace(one, value=placed(one.path, one.value, folder, display))


def absolute(path: tuple[str, ...], value: object) -> object:
    """The value of a key with full paths, so that it means the same from every folder."""
    return placed(path, value, Path(), lambda each: str(each.absolute()))


def placed(path: tuple[str, ...], value: object, folder: Path, place: PathForm) -> object:
    """The value with every path in it, taken as relative to `folder`, in the form that `place` gives."""
    key = _starred(path)
    if key in DATA:
        return _each(value, lambda text: _file(text, folder, place))
    if key.startswith(OWN_CODE):
        return _each(value, lambda text: _code(text, folder, place))
    return _each(value, lambda text: _model(text, folder, place)) if key in MODELS else value


def _starred(path: tuple[str, ...]) -> str:
    """The dotted key, with a star for the name of a teacher."""
    return ".".join((*path[:1], "*", *path[2:]) if path[0] == "teachers" else path)


def _each(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each(inner, change) for inner in value]
    if isinstance(value, dict):
        return {name: _each(inner, change) for name, inner in value.items()}
    return value


def _file(text: str, folder: Path, place: PathForm) -> str:
    return place(folder / text) if text and not text.startswith(NOT_RELATIVE) else text


def _code(text: str, folder: Path, place: PathForm) -> str:
    file, colon, name = text.rpartition(":")
    return f"{place(folder / file)}{colon}{name}" if file.endswith(".py") and not text.startswith("~") else text


def _model(text: str, folder: Path, place: PathForm) -> str:
    """A folder if there is one, or if it is written as one (`./mine`); anything else is the name of a hub."""
    if not text or text in NAMES or text.startswith(NOT_RELATIVE):
        return text
    is_written_as_one = text.startswith(("./", "../"))
    return place(folder / text) if is_written_as_one or os.path.exists(folder / text) else text


def unusable_text(path: tuple[str, ...], value: object) -> str:
    """Why a text in the value of a key can be neither printed nor opened; empty if there is no such text."""
    if isinstance(value, dict):
        return next((why for each in (*value, *value.values()) if (why := unusable_text(path, each))), "")
    if isinstance(value, list):
        return next((why for each in value if (why := unusable_text(path, each))), "")
    if not isinstance(value, str):
        return ""
    if control := next((char for char in value if char not in "\n\r\t" and printable(char) != char), ""):
        return f"it holds the control character {printable(control)}"
    return _unusable_path(value) if _names_file(_starred(path), value) else ""


def _names_file(key: str, text: str) -> bool:
    is_code = key.startswith(OWN_CODE) and text.rpartition(":")[0].endswith(".py")
    return is_code or key in (*DATA, *MODELS, *WRITTEN)


def _unusable_path(text: str) -> str:
    if any(len(part.encode()) > MAX_PART_BYTES for part in text.split("/")) or len(text.encode()) > MAX_PATH_BYTES:
        return "no file can have so long a name"
    is_unknown = text.startswith("~") and os.path.expanduser(text) == text
    return f"there is no user {text.partition('/')[0]}" if is_unknown else ""
