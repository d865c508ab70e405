"""A run on disk: which file is where under `runs/<name>/`, and how a name is found. No torch."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from tqppo.errors import UsageError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.resolved.toml"

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

    def next_attempt(self) -> Path:
        """A fresh folder for the logs of this start; `logs/latest` points to it."""
        logs = self.path / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(each.name[8:]) for each in logs.glob("attempt_*")), default=0)
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
        raise UsageError(
            f"there is a run at {folder} already. Go on with it: `tqppo resume --checkpoint {name}`; "
            "or choose another run.name"
        ) from None
    except NotADirectoryError as error:
        raise UsageError(f"run.dir cannot hold runs: {error.filename} is not a folder") from None
    return RunFolder(folder)


def _slug(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9.]+", "-", text).strip("-").lower()[:32] or "model"
