"""Checkpoints on disk: written whole or not at all, hashed, pruned; and what `resume` may find there. No torch.

A checkpoint is a folder `step_000012` that exists only once it is complete: it is written under another
name, synced, hashed into its MANIFEST.json, then renamed; `latest` moves last. The manifest also has the hashes of the
run's own files that a resume reads, such as its config. Only the process that holds the run's lock writes here.
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

from tqppo import space
from tqppo.errors import CheckpointError, TqppoError

FORMAT = 2
MANIFEST = "MANIFEST.json"
DRIVER = "driver.json"
PREFIX = "step_"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint, its files checked against their hashes."""

    folder: Path
    step: int

    def driver_state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / DRIVER).read_text())
        return state


class CheckpointStore:
    """The `checkpoints` folder of one run. `run_files` are the run's own files that a resume reads."""

    def __init__(
        self, folder: Path, *, keep_last: int = 2, keep_every: int = 0, run_files: Callable[[], list[Path]] = list
    ) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.run_files = run_files

    def write(
        self, step: int, save_parts: Callable[[Path], None], driver_state: Mapping[str, Any], *, num_bytes: int = 0
    ) -> Path:
        """Save atomically: `save_parts` fills the given folder with everything but the driver's own state.

        A save that fails leaves the checkpoints that are there as they are. `num_bytes` is what it will take, at
        least: without that much room it is not begun. `OutOfSpace` if the disk is full.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.remove_partial()
        space.require(self.folder, num_bytes)
        try:
            with space.explained(self.folder, num_bytes):
                partial = self._fill(step, save_parts, driver_state)
        except (OSError, TqppoError):
            self.remove_partial()
            raise
        final = self.folder / f"{PREFIX}{step:06d}"
        if final.exists():  # left by an earlier attempt that was resumed from before it
            shutil.rmtree(final)
        partial.rename(final)
        _sync(self.folder)
        self._point_latest(final)
        self._prune()
        return final

    def _fill(self, step: int, save_parts: Callable[[Path], None], driver_state: Mapping[str, Any]) -> Path:
        partial = self.folder / f".partial-{PREFIX}{step:06d}"
        partial.mkdir()
        save_parts(partial)
        (partial / DRIVER).write_text(json.dumps(driver_state, indent=2, sort_keys=True) + "\n")
        manifest = {
            "format": FORMAT,
            "step": step,
            "files": {str(path.relative_to(partial)): _digest(path) for path in _files(partial)},
            "run_files": {str(path.relative_to(self.folder.parent)): _digest(path) for path in self.run_files()},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        _sync_tree(partial)
        return partial

    def remove_partial(self) -> None:
        """Remove what a save that was killed or failed left behind."""
        for path in self.folder.glob(f".partial-{PREFIX}*"):
            shutil.rmtree(path)

    def steps(self) -> list[int]:
        """Steps that have a folder, oldest first; `open_checkpoint` finds out whether they are complete."""
        return sorted(int(path.name[len(PREFIX) :]) for path in self.folder.glob(f"{PREFIX}*") if _is_step(path))

    def newest(self, warn: Callable[[str], None] = lambda message: None) -> Checkpoint:
        """The newest complete checkpoint; later ones that are damaged are named to `warn` and passed over.

        Raises `CheckpointError` if there is none, and for a checkpoint of a newer format, which is not damaged.
        """
        problems: list[str] = []
        for step in reversed(self.steps()):
            try:
                found = open_checkpoint(self.folder / f"{PREFIX}{step:06d}")
            except NewerFormat:
                raise
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                warn(f"{problem}; trying the one before it")
            return found
        if problems:
            listed = "\n  ".join(problems)
            raise CheckpointError(f"no checkpoint in {self.folder} can be read; nothing was changed:\n  {listed}")
        raise CheckpointError(f"there is no checkpoint in {self.folder} to resume from; nothing was changed")

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


class NewerFormat(CheckpointError):
    """The checkpoint was written by a later version of tqppo."""


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint whose files, and the run's files that belong to it, are as they were when it was written.

    Otherwise a `CheckpointError` that names the first file that is not.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint at {folder}")
    manifest = _manifest(folder)
    unlisted = {str(path.relative_to(folder)) for path in _files(folder)} - {MANIFEST, *manifest.files}
    if unlisted:
        raise CheckpointError(
            f"{folder / min(unlisted)} is not in {MANIFEST}: it was added after the checkpoint was saved"
        )
    for base, files in ((folder, manifest.files), (folder.resolve().parent.parent, manifest.run_files)):
        for name, expected in files.items():
            _check_file(base, name, expected)
    return Checkpoint(folder.resolve(), manifest.step)


@dataclass(frozen=True, slots=True)
class Manifest:
    step: int
    files: dict[str, Any]
    run_files: dict[str, Any]


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: this checkpoint is partial")
    try:
        read = json.loads(path.read_bytes())
        version = int(read["format"])
        if version > FORMAT:
            raise NewerFormat(
                f"{folder} has checkpoint format {version}, and this tqppo reads format {FORMAT}: "
                "resume with the version that wrote it, or a later one"
            )
        if version < FORMAT:
            raise CheckpointError(f"{folder} has checkpoint format {version}; this tqppo reads format {FORMAT}")
        found = Manifest(int(read["step"]), dict(read["files"]), dict(read["run_files"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is corrupt: {type(error).__name__}: {error}") from None
    if DRIVER not in found.files:
        raise CheckpointError(f"{path} is corrupt: it does not list {DRIVER}")
    if _is_step(folder.resolve()) and int(folder.resolve().name[len(PREFIX) :]) != found.step:
        raise CheckpointError(f"{path} is corrupt: it says step {found.step}")
    for name in (*found.files, *found.run_files):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{path} is corrupt: it names a file outside of its folder, {name!r}")
    return found


def _check_file(base: Path, name: str, expected: Any) -> None:
    path = base / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: this checkpoint is partial")
    if not isinstance(expected, dict) or path.stat().st_size != expected.get("bytes") or _digest(path) != expected:
        raise CheckpointError(f"{path} is corrupt: it is not what {MANIFEST} recorded when it was saved")


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
