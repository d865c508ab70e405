"""A run on disk: which file is where under `runs/<name>/`, and how a name is found. No torch."""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tqppo import space
from tqppo.errors import CheckpointError, PreflightError, UsageError
from tqppo.metrics import files as metrics_files
from tqppo.run.checkpoint import CONFIG, saved_steps
from tqppo.run.exported import ExportedModel
from tqppo.run.lock import LOCK
from tqppo.untrusted import FOLDER_NAMES, is_folder_name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @property
    def origins(self) -> Path:
        return self.path / "config.origins.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The model that the run starts from, when it is a tiny one made for it."""
        return self.path / "model"

    @property
    def scores(self) -> Path:
        """What the run's teachers have computed, kept so that a resumed run does not ask them twice."""
        return self.path / "teachers"

    @property
    def export(self) -> Path:
        return self.path / "export" / "hf"

    def files_of_resume(self) -> list[Path]:
        """The run's own files that a resume reads, besides a checkpoint. They never change once training begins."""
        model = sorted(path for path in self.model.rglob("*") if path.is_file()) if self.model.is_dir() else []
        return [path for path in (self.config, *model) if path.is_file()]

    def refuse_odd_files(self) -> None:
        """CheckpointError if a file that a resume reads and appends to is a pipe, a device or a folder."""
        for path in (self.metrics, self.events):
            if path.exists() and not path.is_file():
                raise CheckpointError(f"{path} is not a regular file; nothing was changed")

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return bool(saved_steps(self.checkpoints))

    def saved_bytes(self) -> int:
        """What its checkpoints and its export take on the disk; new ones come in their place."""
        files = [*self.checkpoints.rglob("*"), *self.export.parent.rglob("*")]
        return sum(path.lstat().st_size for path in files if path.is_file())

    @property
    def exported(self) -> ExportedModel:
        return ExportedModel(self.export)

    @property
    def trained_steps(self) -> int:
        """The last step that metrics, a checkpoint or an export tell of."""
        steps = [int(each["step"] or 0) for each in metrics_files.read(self.metrics)] if self.metrics.is_file() else []
        return max([self.exported.step or 0, *steps, *saved_steps(self.checkpoints)])

    def refuse_if_taken(self, *, overwrite: bool) -> None:
        """UsageError if the folder belongs to a run that has trained, or is not a run's at all."""
        is_run = self.config.is_file() or (
            self.path.is_dir() and {each.name for each in self.path.iterdir()} <= {LOCK, "logs", "events.jsonl"}
        )
        if not is_run:
            raise UsageError(f"{self.path} already exists and is not a run's folder. Choose another run.name")
        steps = self.trained_steps
        if overwrite or not (steps or self.export.is_dir()):
            return
        way_on = f"Continue it: `tqppo resume {self.name}`" if self.is_saved else "It has no checkpoint"
        longer = f"Train it longer: `tqppo resume {self.name} --max-steps {steps * 2}`"
        raise UsageError(
            f"there is already a run at {self.path}, with {steps} steps. "
            f"{longer if self.exported.step == steps else way_on}; replace it: --overwrite; or choose another --name"
        )

    def clear(self) -> None:
        """Remove the files of an earlier run. Call it with the run's lock.

        The config goes last: what a kill leaves is still known to be a run, and can be removed like one.
        """
        for each in sorted(self.path.iterdir(), key=lambda path: path == self.config):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            elif each.name != LOCK:
                each.unlink()

    def next_attempt(self) -> Path:
        """A fresh folder for the logs of this start; `logs/latest` points to it."""
        logs = self.path / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        number = 1 + max(
            (int(each.name[8:]) for each in logs.glob("attempt_*") if each.name[8:].isdecimal()), default=0
        )
        attempt = logs / f"attempt_{number}"
        attempt.mkdir()
        link = logs / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(attempt.name)
        link.replace(logs / "latest")
        return attempt


def runs_folder() -> Path:
    """Where commands look for runs by name: run.dir as the environment has it, or its default."""
    return Path(os.environ.get("TQPPO__RUN__DIR", "runs"))


def refuse_taken_name(runs: Path, name: str, *, overwrite: bool) -> None:
    """UsageError if a run of this name has trained; before anything of a new run is tried or made."""
    folder = RunFolder(runs / name)
    if name and folder.path.is_dir():
        folder.refuse_if_taken(overwrite=overwrite)


def new_run(runs: Path, name: str, *, preset: str, model: str, overwrite: bool = False) -> RunFolder:
    """Make the folder of a new run. A name that is taken is refused, unless `overwrite` or no step was trained there.

    The folder may hold files of such a run; `RunFolder.clear` removes them once the run is locked.
    """
    if name and not is_folder_name(name):
        raise UsageError(f"{name!r} cannot be the name of a run: it names a folder, so use {FOLDER_NAMES}")
    made = f"{_slug(preset or 'run')}-{_slug(Path(model).name)}-{time.strftime('%m%d-%H%M%S')}"
    chosen = name or unused_name(runs, made)
    folder = RunFolder(runs / chosen)
    try:
        folder.path.mkdir(parents=True)
    except FileExistsError:
        folder.refuse_if_taken(overwrite=overwrite)
    except NotADirectoryError as error:
        raise UsageError(f"run.dir cannot hold runs: {error.filename} is not a folder") from None
    except OSError as error:
        if error.errno in space.FULL:
            raise space.out_of_space(runs, 0, error) from error
        raise PreflightError(f"the run's folder {folder.path} cannot be made: {error.strerror}") from None
    return folder


def unused_name(runs: Path, name: str) -> str:
    """The name, or the name with a number if there is such a run."""
    numbered = (f"{name}-{number}" for number in count(2))
    return name if not (runs / name).exists() else next(each for each in numbered if not (runs / each).exists())


def _slug(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9.]+", "-", text).strip("-.").lower()[:32] or "model"
