"""A run on disk: which file is where under `runs/<name>/`, and how a name is found. No torch."""

from __future__ import annotations

import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from tqppo import space
from tqppo.errors import PreflightError, UsageError
from tqppo.run.checkpoint import CONFIG


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

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return _is_saved(self.path)

    def saved_bytes(self) -> int:
        """What its checkpoints and its export take on the disk; new ones come in their place."""
        files = [*self.checkpoints.rglob("*"), *self.export.parent.rglob("*")]
        return sum(path.lstat().st_size for path in files if path.is_file())

    @property
    def exported_step(self) -> int | None:
        """The step whose weights are in `export`; None if there are none, or it is not known of which step."""
        try:
            step = int((self.export.parent / ".step").read_text())
        except (OSError, ValueError):
            return None
        return step if self.export.is_dir() else None

    @property
    def partial_export(self) -> Path:
        """Where an export is made, before `replace_export`."""
        return self.export.with_name(".partial-hf")

    @property
    def _export_before(self) -> Path:
        return self.export.with_name(".before-hf")

    def replace_export(self, step: int) -> None:
        """Put the export that was made in place of the one before, and note its step last: `exported_step` is never
        said of another one."""
        note = self.export.parent / ".step"
        space.sync_tree(self.partial_export)
        note.unlink(missing_ok=True)
        shutil.rmtree(self._export_before, ignore_errors=True)
        if self.export.exists():
            self.export.rename(self._export_before)
        self.partial_export.rename(self.export)
        space.write_whole(note, str(step).encode())
        shutil.rmtree(self._export_before, ignore_errors=True)

    def remove_partial_export(self) -> None:
        """Remove what an export that was killed or failed left behind; the one before it is in its place again."""
        if self._export_before.is_dir() and not self.export.exists():
            self._export_before.rename(self.export)
        for path in (self._export_before, self.partial_export):
            shutil.rmtree(path, ignore_errors=True)

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


def new_run(runs: Path, name: str, *, preset: str, model: str) -> RunFolder:
    """Make the folder of a new run. A name that is taken is refused: nothing is ever written over."""
    name = name or f"{preset or 'run'}-{_slug(Path(model).name)}-{secrets.token_hex(2)}"
    folder = runs / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        way_on = f"Go on with it: `tqppo resume --checkpoint {name}`; or choose" if _is_saved(folder) else "Choose"
        raise UsageError(f"there is a run at {folder} already. {way_on} another run.name") from None
    except NotADirectoryError as error:
        raise UsageError(f"run.dir cannot hold runs: {error.filename} is not a folder") from None
    except OSError as error:
        if error.errno in space.FULL:
            raise space.out_of_space(runs, 0, error) from error
        raise PreflightError(f"the run's folder {folder} cannot be made: {error.strerror}") from None
    return RunFolder(folder)


def _is_saved(run: Path) -> bool:
    return any((run / "checkpoints").glob("step_*"))


def _slug(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9.]+", "-", text).strip("-").lower()[:32] or "model"
