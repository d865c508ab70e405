"""A run as its files show it: state, steps, scores, age, size. `tqppo runs` prints it. No torch."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tqppo.display.progress import REWARD
from tqppo.errors import PreflightError, UsageError
from tqppo.metrics import files as metrics_files
from tqppo.run.checkpoint import CONFIG, find_run
from tqppo.run.folder import RunFolder
from tqppo.run.lock import LOCK, RunLock


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. Scores are the main validation figure, or the training reward of a run that never validated."""

    name: str
    folder: str
    state: str  # running, finished, stopped (can be resumed), failed
    steps: int
    max_steps: int
    last_score: float | None
    best_score: float | None
    best_step: int | None
    score_name: str
    checkpoints: list[str]
    model: str  # the exported folder, empty if there is none
    started: float  # seconds since 1970
    size_bytes: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def runs_in(folder: Path) -> list[RunFolder]:
    """Every run, the one that was started first comes first."""
    found = [RunFolder(path) for path in folder.glob("*") if (path / CONFIG).is_file()]
    return sorted(found, key=lambda run: (run.config.stat().st_mtime, run.name))


def summarise(run: RunFolder) -> RunSummary:
    lines = metrics_files.read(run.metrics) if run.metrics.is_file() else []
    name, scores = scores_in(lines)
    best = max(scores, key=lambda each: each[1], default=None)
    steps, most = run.trained_steps, _max_steps(run)
    return RunSummary(
        name=run.name,
        folder=str(run.path),
        state=_state(run, steps, most),
        steps=steps,
        max_steps=most,
        last_score=scores[-1][1] if scores else None,
        best_score=best[1] if best else None,
        best_step=best[0] if best else None,
        score_name=name,
        checkpoints=sorted(each.name for each in run.checkpoints.glob("step_*")),
        model=str(run.export) if run.export.is_dir() else "",
        started=run.config.stat().st_mtime,
        size_bytes=sum(path.lstat().st_size for path in run.path.rglob("*") if path.is_file()),
    )


def scores_in(lines: list[metrics_files.Line]) -> tuple[str, list[tuple[int, float]]]:
    """The main figure's name, and its values by step."""
    names = sorted({name for line in lines for name in line if name.startswith("val-core/")}, key=_rank)
    trained = next((name for name in REWARD if any(name in line for line in lines)), "")
    chosen = names[0] if names else trained
    values = [(int(line["step"] or 0), line[chosen]) for line in lines if chosen and line.get(chosen) is not None]
    return chosen, [(step, float(value)) for step, value in values if value is not None]


def _rank(name: str) -> tuple[int, str]:
    figure = name.rpartition("/")[2]
    return (0 if figure.startswith("mean@") else 1 if figure == "greedy" else 2), name


def _max_steps(run: RunFolder) -> int:
    found = setting(run, "run.max_steps")
    return found if isinstance(found, int) else 0


def setting(run: RunFolder, name: str) -> object:
    """A value of the run's own config, such as `run.max_steps`; None if it is not there."""
    from tqppo.config.read.spans import parse

    found: object = parse(run.config.read_text(encoding="utf-8"), str(run.config)).values
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _state(run: RunFolder, steps: int, most: int) -> str:
    if is_running(run):
        return "running"
    if most and steps >= most:
        return "finished"
    return "stopped" if run.is_saved else "failed"


def is_running(run: RunFolder) -> bool:
    """Whether a process holds the run's lock."""
    lock = run.path / LOCK
    if not lock.is_file() or not lock.stat().st_size:
        return False
    if not os.access(lock, os.W_OK):
        return True
    try:
        with RunLock(run.path, settle_s=0.0):
            return False
    except PreflightError:
        return True


def named_run(name: str, runs: Path) -> RunFolder:
    """A run by name, folder, checkpoint or `latest`."""
    return RunFolder(find_run(name, runs)[0])


def remove(run: RunFolder) -> int:
    """Delete a run that no process works on; returns the bytes that this frees."""
    if not run.config.is_file():
        raise UsageError(f"{run.path} is not a run")
    size = summarise(run).size_bytes
    with RunLock(run.path, settle_s=0.0):
        run.clear()
    shutil.rmtree(run.path)
    return size


def age(started: float, now: float | None = None) -> str:
    """How long ago, in one unit: 5 s, 12 min, 3 h, 9 d."""
    seconds = max(0.0, (time.time() if now is None else now) - started)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


def size(num_bytes: int) -> str:
    for unit, length in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= length:
            return f"{num_bytes / length:.1f} {unit}"
    return f"{num_bytes} B"
