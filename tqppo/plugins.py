"""Back ends and modes by name, through entry points: `tqppo.rollout`, `tqppo.storage`, `tqppo.mode`.

A user's own functions and classes are imported here as well, as `module:name` or `file.py:name`. Importing this module
imports nothing heavy.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from tqppo.errors import BackendError

KINDS = ("rollout", "storage")  # back ends; modes are found the same way
GROUPS = (*KINDS, "mode")


def available(kind: str) -> dict[str, EntryPoint]:
    """Every registered back end of a kind, whether or not what it needs is installed."""
    if kind not in GROUPS:
        raise BackendError(f"there is no kind of plugin called {kind!r}; kinds: {', '.join(GROUPS)}")
    return {point.name: point for point in sorted(entry_points(group=f"tqppo.{kind}"))}


def names(kind: str) -> list[str]:
    return list(available(kind))


def load(kind: str, name: str) -> Any:
    """The back end's class. An unknown name says what is installed."""
    points = available(kind)
    if name in points:
        return points[name].load()
    close = difflib.get_close_matches(name, points, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    installed = ", ".join(points) or "none (is tqppo installed? try `pip install -e .`)"
    raise BackendError(f"no {kind} back end is called {name!r}; installed: {installed}.{hint}")


def import_object(path: str) -> Any:
    """The object that `module:name` stands for."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def import_own(path: str) -> object:
    """A user's object by `module:name`, `file.py:name` or `file.pkl:name`; None if the module lacks it.

    Raises ImportError, OSError or SyntaxError if there is no such module.
    """
    place, _, name = path.rpartition(":")
    if place.endswith(".pkl"):
        return _unpickled(Path(place))
    module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    found: object = getattr(module, name, None)
    return found


def _unpickled(path: Path) -> object:
    """An object that was given from Python, as `tqppo.api.rewards` writes it. As trusted as a file of code."""
    import pickle

    found: object = pickle.loads(path.read_bytes())
    return found


def absolute(path: str) -> str:
    """`file.py:name` with the file's full path, so that every process finds it; other names unchanged."""
    place, colon, name = path.rpartition(":")
    return f"{Path(place).expanduser().resolve()}{colon}{name}" if place.endswith(".py") else path


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that its classes can be pickled
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that the file can import its neighbours
    spec.loader.exec_module(module)
    return module
