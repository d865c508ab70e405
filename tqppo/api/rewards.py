"""Reward functions given as objects from Python: shipped to the processes that score by name, or as a pickled file.

A function of a module or of a file is shipped by its name. Anything else (a closure, an instance, a function typed into
a notebook) is pickled by value into a folder beside the runs, because scoring happens in other processes.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tqppo.errors import UsageError
from tqppo.rewards.calls import RewardCall

RewardLike = str | Callable[..., object]
FOLDER = ".rewards"


def reward_names(rewards: RewardLike | Sequence[RewardLike], runs: Path) -> list[str]:
    """The rewards as `reward.function` names them; objects without a name of their own are written below `runs`."""
    return [each if isinstance(each, str) else _shipped(each, runs) for each in _listed(rewards)]


def put_back(names: Sequence[str], rewards: RewardLike | Sequence[RewardLike]) -> None:
    """Write objects again into the files that a run's config names, in the same order."""
    given = _listed(rewards)
    if len(given) != len(names):
        raise UsageError(f"the run has {len(names)} reward functions ({', '.join(names)}), and {len(given)} are given")
    for name, each in zip(names, given, strict=True):
        path = Path(name.rpartition(":")[0])
        if path.suffix == ".pkl" and not isinstance(each, str):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_dumped(each, name.rpartition(":")[2]))


def _listed(rewards: RewardLike | Sequence[RewardLike]) -> list[RewardLike]:
    return [rewards] if isinstance(rewards, str) or callable(rewards) else list(rewards)


def _shipped(function: Callable[..., object], runs: Path) -> str:
    label = str(getattr(function, "__name__", type(function).__name__))
    RewardCall(label, function)  # raises for a signature that cannot be called
    return _own_name(function, label) or _pickled(function, label, runs)


def _own_name(function: Callable[..., object], label: str) -> str:
    """`module:name` if another process can import it and gets this object; empty otherwise."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    if module is None or not inspect.isfunction(function) or getattr(module, label, None) is not function:
        return ""
    if module.__name__ in ("__main__", "builtins"):
        return ""
    file = getattr(module, "__file__", None)
    is_installed = "site-packages" in str(file)
    return f"{module.__name__}:{label}" if is_installed or file is None else f"{file}:{label}"


def _pickled(function: Callable[..., object], label: str, runs: Path) -> str:
    data = _dumped(function, label)
    folder = runs / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{label.strip('<>')}-{hashlib.sha256(data).hexdigest()[:12]}.pkl"
    path.write_bytes(data)
    return f"{path.resolve()}:{label.strip('<>')}"


def _dumped(function: Callable[..., object], label: str) -> bytes:
    from ray import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    except (TypeError, pickle.PicklingError) as error:
        raise UsageError(
            f"the reward {label} cannot be sent to another process: {error}. Define it in a file of its own, and pass "
            f'reward="file.py:{label}"'
        ) from None
    return data
