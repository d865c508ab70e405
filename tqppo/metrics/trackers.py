"""Sends metrics to TensorBoard and Weights & Biases. Both are extras, imported only if the config asks for them."""

from __future__ import annotations

import importlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Protocol

from tqppo import space
from tqppo.errors import PreflightError, UsageError


class Tracker(Protocol):
    """A place that shows metrics by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in `<run>/tensorboard`. A resumed run purges the steps that it writes again.

    The writer's thread ends when the disk is full; the next step then begins another file.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        module = _import("tensorboard", "torch.utils.tensorboard", "tensorboard")
        self._open = partial(module.SummaryWriter, str(folder / "tensorboard"))
        self._writer = self._open(purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._writer = self._writer or self._open()
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError:
            self._writer = None
            raise

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A W&B run with one id per run folder, so that a resumed run continues it. Secrets come from WANDB_*."""

    def __init__(self, folder: Path, *, project: str, config: Mapping[str, object]) -> None:
        module = _import("wandb", "wandb", "wandb")
        self._run = module.init(
            project=project, name=folder.name, id=_run_id(folder), dir=str(folder), config=dict(config), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """Every tracker of a run. Values that are not finite are left out. `OutOfSpace` if the disk of `folder` is full."""

    def __init__(self, trackers: Sequence[Tracker], folder: Path) -> None:
        self._trackers, self._folder = trackers, folder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        with space.explained(self._folder, 0):
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
    config: Mapping[str, object] | None = None,
    first_step: int = 0,
) -> Trackers:
    """Start the trackers of a run. PreflightError, with the command to install it, if one is not installed."""
    folder = Path(folder)
    made = [_make(name, folder, project=project, config=config or {}, first_step=first_step) for name in names]
    return Trackers(made, folder)


def check(names: Iterable[str]) -> None:
    """Raise the error of `load` for a tracker that is not installed, without starting any."""
    for name in names:
        _import(name, "torch.utils.tensorboard" if name == "tensorboard" else name, name)


def _make(name: str, folder: Path, *, project: str, config: Mapping[str, object], first_step: int) -> Tracker:
    if name == "tensorboard":
        return TensorBoard(folder, first_step=first_step)
    if name == "wandb":
        return Wandb(folder, project=project, config=config)
    raise UsageError(f"there is no tracker called {name!r}; trackers: tensorboard, wandb")


def _import(name: str, module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise PreflightError(f"tracker {name!r} is not installed: pip install 'tqppo[{extra}]'") from None


def _run_id(folder: Path) -> str:
    """The id in the run's folder, made at first use, so that runs of one name in two places stay apart."""
    file = folder / "wandb.id"
    if not file.exists():
        space.write_whole(file, secrets.token_hex(4).encode())
    return file.read_text().strip()
