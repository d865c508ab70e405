"""Metrics to TensorBoard and Weights & Biases, when the config asks for them. Both are extras, imported only then."""

from __future__ import annotations

import importlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tqppo.errors import PreflightError, UsageError


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in `<run>/tensorboard`; a resumed run purges what it is about to write again."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        module = _import("tensorboard", "torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A W&B run with the id of ours, so that a resumed run goes on in the same one. Secrets come from WANDB_*."""

    def __init__(self, folder: Path, *, project: str, config: Mapping[str, Any]) -> None:
        module = _import("wandb", "wandb", "wandb")
        self._run = module.init(
            project=project, name=folder.name, id=_run_id(folder), dir=str(folder), config=dict(config), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All of them at once. Values that are not finite are left out."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for tracker in self._trackers:
            tracker.log(step, finite)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def load(
    names: Iterable[str],
    folder: str | Path,
    *,
    project: str = "tqppo",
    config: Mapping[str, Any] | None = None,
    first_step: int = 0,
) -> Trackers:
    """The trackers of a run in this folder. One that is not installed is an error that says how to install it."""
    folder = Path(folder)
    return Trackers(
        [_make(name, folder, project=project, config=config or {}, first_step=first_step) for name in names]
    )


def check(names: Iterable[str]) -> None:
    """The same error before anything is started."""
    for name in names:
        _import(name, "torch.utils.tensorboard" if name == "tensorboard" else name, name)


def _make(name: str, folder: Path, *, project: str, config: Mapping[str, Any], first_step: int) -> Tracker:
    if name == "tensorboard":
        return TensorBoard(folder, first_step=first_step)
    if name == "wandb":
        return Wandb(folder, project=project, config=config)
    raise UsageError(f"there is no tracker called {name!r}; trackers: tensorboard, wandb")


def _import(name: str, module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise PreflightError(f"tracker {name!r} is not installed: pip install 'tqppo[{extra}]'") from None


def _run_id(folder: Path) -> str:
    """One id per run folder, kept in it: two runs of one name in two places are two runs."""
    file = folder / "wandb.id"
    if not file.exists():
        file.write_text(secrets.token_hex(4))
    return file.read_text().strip()
