"""Checkpoints on disk: written whole or not at all, hashed, pruned; and what `resume` may find there. No torch.

A checkpoint is a folder `step_000012` that exists only once it is complete: it is written under another
name, synced, hashed into its MANIFEST.json, then renamed; `latest` moves last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqppo.errors import CheckpointError

FORMAT = 1
MANIFEST = "MANIFEST.json"
DRIVER = "driver.json"
PREFIX = "step_"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint, its files checked against their hashes."""

    folder: Path
    step: int

    def driver_state(self) -> dict[str, Any]:
        return json.loads((self.folder / DRIVER).read_text())


class CheckpointStore:
    """The `checkpoints` folder of one run."""

    def __init__(self, folder: Path, *, keep_last: int = 2, keep_every: int = 0) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.keep_every = keep_every

    def write(self, step: int, save_parts: Callable[[Path], None], driver_state: Mapping[str, Any]) -> Path:
        """Save atomically: `save_parts` fills the given folder with everything but the driver's own state."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.remove_partial()
        partial = self.folder / f".partial-{PREFIX}{step:06d}"
        partial.mkdir()
        save_parts(partial)
        (partial / DRIVER).write_text(json.dumps(driver_state, indent=2, sort_keys=True) + "\n")
        files = {str(path.relative_to(partial)): _digest(path) for path in _files(partial)}
        manifest = {"format": FORMAT, "step": step, "files": files}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        _sync_tree(partial)
        final = self.folder / f"{PREFIX}{step:06d}"
        if final.exists():  # left by an earlier attempt that was resumed from before it
            shutil.rmtree(final)
        partial.rename(final)
        _sync(self.folder)
        self._point_latest(final)
        self._prune()
        return final

    def remove_partial(self) -> None:
        """What a killed save left behind."""
        for path in self.folder.glob(f".partial-{PREFIX}*"):
            shutil.rmtree(path)

    def steps(self) -> list[int]:
        """Steps that have a folder, oldest first; whether they are complete is for `open_checkpoint` to say."""
        return sorted(int(path.name[len(PREFIX) :]) for path in self.folder.glob(f"{PREFIX}*") if _is_step(path))

    def newest(self, warn: Callable[[str], None] = lambda message: None) -> Checkpoint | None:
        """The newest complete checkpoint; those that are not are named to `warn` and passed over."""
        for step in reversed(self.steps()):
            try:
                return open_checkpoint(self.folder / f"{PREFIX}{step:06d}")
            except CheckpointError as error:
                warn(f"{error}; trying the one before it")
        return None

    def _point_latest(self, target: Path) -> None:
        link = self.folder / ".latest"
        with suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(target.name)
        link.replace(self.folder / "latest")

    def _prune(self) -> None:
        steps = self.steps()
        for step in steps[: -self.keep_last]:
            if not (self.keep_every and step % self.keep_every == 0):
                shutil.rmtree(self.folder / f"{PREFIX}{step:06d}")


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint with every file as it was written, or an error that names the first one that is not."""
    manifest_file = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint at {folder}")
    if not manifest_file.is_file():
        raise CheckpointError(f"{manifest_file} is missing: this checkpoint is partial")
    try:
        manifest = json.loads(manifest_file.read_bytes())
        step, files = int(manifest["step"]), dict(manifest["files"])
        version = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest_file} is corrupt: {error}") from None
    if version != FORMAT:
        raise CheckpointError(f"{folder} has checkpoint format {version}; this tqppo reads format {FORMAT}")
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: this checkpoint is partial")
        if path.stat().st_size != expected["bytes"] or _digest(path) != expected:
            raise CheckpointError(f"{path} is corrupt: it is not what {MANIFEST} recorded when it was saved")
    return Checkpoint(folder.resolve(), step)


def find_run(checkpoint: str, runs: Path) -> tuple[Path, Path | None]:
    """What `--checkpoint` means: the run's folder, and a certain checkpoint in it (None: its newest complete one).

    Accepts the path of a checkpoint, of a run or of its `checkpoints` folder, the name of a run under `runs`,
    or `latest`: the run that was written to last.
    """
    if checkpoint == "latest":
        return _last_run(runs), None
    path = Path(checkpoint)
    for candidate in (path, runs / checkpoint):
        if candidate.name == "checkpoints" and _is_run(candidate.parent):
            return candidate.parent, None
        if _is_run(candidate):
            return candidate, None
    if path.name == "latest" and _is_run(path.parent.parent):
        return path.parent.parent, None
    if _is_step(path) and path.is_dir() and _is_run(path.resolve().parent.parent):
        return path.resolve().parent.parent, path
    names = ", ".join(sorted(run.name for run in _runs(runs))[-8:]) or "none"
    raise CheckpointError(f"{checkpoint!r} is neither a checkpoint nor a run; runs in {runs}/: {names}")


def _last_run(runs: Path) -> Path:
    found = sorted(_runs(runs), key=lambda run: (run / "config.resolved.toml").stat().st_mtime_ns)
    if not found:
        raise CheckpointError(f"there is no run in {runs}/ to resume; start one with `tqppo train`")
    return found[-1]


def _runs(runs: Path) -> list[Path]:
    return [path for path in runs.glob("*") if _is_run(path)]


def _is_run(path: Path) -> bool:
    return (path / "config.resolved.toml").is_file()


def _is_step(path: Path) -> bool:
    return path.name.startswith(PREFIX) and path.name[len(PREFIX) :].isdigit()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _digest(path: Path) -> dict[str, Any]:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sha256.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": sha256.hexdigest()}


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
