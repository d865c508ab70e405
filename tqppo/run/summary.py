"""A run as its files show it: state, steps, scores, age, size. `tqppo runs` prints it. No torch."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tqppo.display.progress import REWARD
from tqppo.errors import UsageError
from tqppo.metrics import files as metrics_files
from tqppo.run.checkpoint import CONFIG, PREFIX, find_run, saved_steps
from tqppo.run.folder import RunFolder
from tqppo.run.lock import RunLock, is_held
from tqppo.untrusted import read_file

START = "start"  # the event that every attempt at a run begins with


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
    steps, most = run.trained_steps, max_steps(run)
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
        checkpoints=[f"{PREFIX}{step:06d}" for step in saved_steps(run.checkpoints)],
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


def max_steps(run: RunFolder) -> int:
    """The steps that the last attempt at the run was to end with: a resume may have moved the end."""
    found = metrics_files.last_event(run.events, START).get("max_steps") or setting(run, "run.max_steps")
    return found if isinstance(found, int) else 0


def setting(run: RunFolder, name: str) -> object:
    """A value of the run's own config, such as `run.max_steps`; None if it is not there."""
    from tqppo.config.read.files import MAX_BYTES
    from tqppo.config.read.spans import parse

    try:
        text = read_file(run.config, MAX_BYTES).decode(errors="replace")
    except OSError:
        return None
    found: object = parse(text, str(run.config)).values
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
    """Whether a process works on the run. Looking does not disturb it."""
    return is_held(run.path)


def named_run(name: str, runs: Path) -> RunFolder:
    """A run by name, folder, checkpoint or `latest`."""
    return RunFolder(find_run(name, runs)[0])


def run_to_remove(name: str, runs: Path) -> RunFolder:
    """A run by name or folder. A folder inside a run stands for that part, and not for the whole run."""
    found, checkpoint = find_run(name, runs)
    if checkpoint is not None or Path(name).name in ("checkpoints", "latest"):
        raise UsageError(f"{name} does not name a whole run. To delete all of {found}: tqppo runs rm {found.name}")
    return RunFolder(found)


def remove(run: RunFolder) -> int:
    """Delete a run that no process works on; returns the bytes that this frees.

    The folder loses its name first, under the lock: a process that starts a run of that name meanwhile keeps its files.
    """
    if not run.config.is_file() or run.path.is_symlink():
        raise UsageError(f"{run.path} is not a run's folder")
    size = summarise(run).size_bytes
    with RunLock(run.path):
        going = RunFolder(run.path.with_name(f".removed-{run.name}-{secrets.token_hex(4)}"))
        run.path.rename(going.path)
        going.clear()
        shutil.rmtree(going.path)
    return size


def age(started: float, now: float | None = None) -> str:
    """How long ago, in one unit: 5 s, 12 min, 3 h, 9 d."""
    seconds = max(0.0, (time.time() if now is None else now) - started)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"
