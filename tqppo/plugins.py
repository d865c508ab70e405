"""Back ends and modes by name, through entry points: `tqppo.rollout`, `tqppo.storage`, `tqppo.mode`.

Importing this module imports nothing heavy.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import EntryPoint, entry_points
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
