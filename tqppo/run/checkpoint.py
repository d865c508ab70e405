"""Checkpoints on disk: written whole or not at all, hashed, pruned; and what `resume` may find there. No torch.

A checkpoint is a folder `step_000012` that exists only once it is complete: it is written under another
name, synced, hashed into its MANIFEST.json, then renamed; `latest` moves last. Ranks write their parts themselves and
return the hashes; without every one of these parts there is no manifest. The manifest also has the hashes of the run's
own files that a resume reads, such as its config. Only the run whose process holds the lock writes here.

Whatever is on its way in or out has a name that begins with a dot: `.partial-step_…` is deleted when the run next
starts or ends, `.later-step_…` when the run, resumed from an earlier checkpoint, has saved that step again.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqppo import space
from tqppo.config.read.nearest import did_you_mean
from tqppo.errors import CheckpointError, TqppoError
from tqppo.space import Digest
from tqppo.untrusted import read_json

FORMAT = 3
OLDEST_FORMAT = 2  # has no parts: one rank wrote all
MANIFEST = "MANIFEST.json"
DRIVER = "driver.json"
PREFIX = "step_"
CONFIG = "config.resolved.toml"
_STEP_NAME = re.compile(rf"{PREFIX}(\d{{6}}|[1-9]\d{{6,15}})", re.ASCII)
PARTIAL, LATER = f".partial-{PREFIX}", f".later-{PREFIX}"
MAX_MANIFEST_BYTES = 1 << 26
SMALL_FILES_BYTES = 1 << 20  # what a checkpoint takes besides tensors, at most
MAX_READERS = 8  # files that are hashed at the same time

# Fills a checkpoint's folder; returns the digests of files that were hashed where they were written.
SaveParts = Callable[[Path], Mapping[str, Digest]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint, its files checked against their hashes."""

    folder: Path
    step: int

    def driver_state(self) -> dict[str, Any]:
        """The driver's own state; `CheckpointError` if it is none, whatever its hash says."""
        try:
            state = read_json(self.folder / DRIVER, MAX_MANIFEST_BYTES)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.folder / DRIVER} cannot be read: {error}") from None
        if not isinstance(state, dict):
            raise CheckpointError(f"{self.folder / DRIVER} is corrupt: it is not a table")
        return state


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint on its way in, of `num_bytes` at least; it has the driver's own state."""

    folder: Path
    step: int
    num_bytes: int


class CheckpointStore:
    """The `checkpoints` folder of one run.

    `run_files` are the run's own files that a resume reads. `check` raises if this process may no longer write here.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        run_files: Callable[[], list[Path]] = list,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.keep_last, self.keep_every = folder, keep_last, keep_every
        self.run_files, self.check = run_files, check
        self._run_digests: dict[str, Digest] | None = None

    def remember_run_files(self) -> None:
        """Hash the run's own files now: one that is changed while the run goes on must not pass for the original."""
        self._run_digests = {name: Digest.of(self.folder.parent / name) for name in self._run_file_names()}

    def _run_file_names(self) -> list[str]:
        return [str(path.relative_to(self.folder.parent)) for path in self.run_files()]

    def write(self, step: int, save_parts: SaveParts, driver_state: Mapping[str, Any], *, num_bytes: int = 0) -> Path:
        """Save atomically: `save_parts` fills the given folder with everything but the driver's own state.

        A save that fails leaves the checkpoints that are there as they are. `num_bytes` is what it will take, at
        least: without that much room it is not begun. `OutOfSpace` if the disk is full.
        """
        draft = self.begin(step, driver_state, num_bytes=num_bytes)
        with self.filling(draft):
            written = save_parts(draft.folder)
        return self.complete(draft, written)

    def begin(self, step: int, driver_state: Mapping[str, Any], *, num_bytes: int = 0) -> Draft:
        """A new checkpoint to be filled and then completed; those of other steps that were begun are removed."""
        self.check()
        draft = Draft(self._unused(step), step, num_bytes)
        with self.filling(draft):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.remove_partial()
            space.require(self.folder, num_bytes + SMALL_FILES_BYTES if num_bytes else 0)
            draft.folder.mkdir()
            (draft.folder / DRIVER).write_text(json.dumps(driver_state, indent=2, sort_keys=True) + "\n")
        return draft

    @contextmanager
    def filling(self, draft: Draft) -> Iterator[None]:
        """Remove the draft if what is done in this context fails."""
        try:
            with space.explained(self.folder, draft.num_bytes):
                yield
        except (OSError, TqppoError):
            shutil.rmtree(draft.folder, ignore_errors=True)  # no other: the run may have been lost to another process
            raise

    def complete(self, draft: Draft, written: Mapping[str, Digest]) -> Path:
        """Make a draft with the parts of all ranks a checkpoint; `written` are the files that they have hashed."""
        with self.filling(draft):
            self._seal(draft, written)
            self.check()
            return self._move_in(draft.folder, draft.step)

    def _move_in(self, partial: Path, step: int) -> Path:
        """Give a finished checkpoint its name; then those go that are no longer kept."""
        final = self._path(step)
        self._discard(final)  # left by an earlier attempt that was resumed from before it
        partial.rename(final)
        space.sync(self.folder)
        self._point_latest(final)
        self._prune(step)
        return final

    def _path(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step:06d}"

    def _later(self, step: int) -> Path:
        return self.folder / f"{LATER}{step:06d}"

    def _seal(self, draft: Draft, written: Mapping[str, Digest]) -> None:
        """Write the manifest; when this returns, the draft is on the disk."""
        if self._run_digests is None:
            self.remember_run_files()
        assert self._run_digests is not None, "just remembered"
        manifest = {
            "format": FORMAT,
            "step": draft.step,
            "files": {name: digest.as_json() for name, digest in _digests(draft.folder, written).items()},
            "run_files": {name: digest.as_json() for name, digest in self._run_digests.items()},
        }
        (draft.folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        space.sync_tree(draft.folder)

    def remove_partial(self) -> None:
        """Remove what a save that was killed or failed left behind."""
        for path in self.folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)  # a worker of a killed run may write here for another moment
        for step in self.steps():
            shutil.rmtree(self._later(step), ignore_errors=True)  # it has been saved again

    def _unused(self, step: int) -> Path:
        """A new name for what is on its way in or out."""
        return self.folder / f"{PARTIAL}{step:06d}-{secrets.token_hex(4)}"

    def _discard(self, checkpoint: Path) -> None:
        """Remove a checkpoint, if there is one. Its name is gone first: no reader finds half of it under that name."""
        going = self._unused(_step_of(checkpoint))
        with suppress(FileNotFoundError):
            checkpoint.rename(going)
        shutil.rmtree(going, ignore_errors=True)

    def set_later_aside(self, step: int) -> list[int]:
        """Hide the checkpoints after `step`, from where the run goes on: a later resume must not jump to them.

        They are deleted once the run has saved their step again. Returns their steps. The last one is hidden first: a
        kill in between leaves no step that is hidden before one that is not.
        """
        later = [each for each in self.steps() if each > step]
        for each in reversed(later):
            self._discard(self._later(each))
            self._path(each).rename(self._later(each))
        if later:
            self._point_latest(self._path(step))
        return later

    def steps(self) -> list[int]:
        """Steps that have a folder, oldest first; whether they are complete is for `open_checkpoint` to say."""
        return saved_steps(self.folder)

    def newest(self, warn: Callable[[str], None] = lambda message: None) -> Checkpoint:
        """The newest complete checkpoint; later ones that are damaged are named to `warn` and passed over.

        Raises `CheckpointError` if there is none, and for a checkpoint of a newer format, which is not damaged.
        """
        problems: list[str] = []
        for step in reversed(self.steps()):
            try:
                found = self.open(self._path(step))
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

    def open(self, checkpoint: Path) -> Checkpoint:
        """One checkpoint, complete and with all of the run's files that a resume reads."""
        return open_checkpoint(checkpoint, self._run_file_names())

    def _point_latest(self, target: Path) -> None:
        link = self.folder / ".latest"
        with suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(target.name)
        link.replace(self.folder / "latest")

    def _prune(self, newest: int) -> None:
        steps = [step for step in self.steps() if step <= newest]
        for step in steps[: -self.keep_last]:
            if not (self.keep_every and step % self.keep_every == 0):
                self._discard(self._path(step))
        for later in self.folder.glob(f"{LATER}*"):
            if later.name[len(LATER) :].isdecimal() and _step_of(later) <= newest:
                self._discard(later)


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint's folder, oldest first."""
    return sorted(_step_of(path) for path in folder.glob(f"{PREFIX}*") if _is_step(path))


class NewerFormat(CheckpointError):
    """The checkpoint was written by a later version of tqppo."""


def open_checkpoint(folder: Path, run_files: Iterable[str] = ()) -> Checkpoint:
    """A checkpoint whose files, and the run's files that belong to it, are as they were when it was written.

    Otherwise a `CheckpointError` that names the first file that is not. `run_files` must be among the run's files.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint at {folder}")
    manifest = _manifest(folder)
    unlisted = {str(path.relative_to(folder)) for path in _files(folder)} - {MANIFEST, *manifest.files}
    if unlisted:
        raise CheckpointError(
            f"{folder / min(unlisted)} is not in {MANIFEST}: it was added after the checkpoint was saved"
        )
    if surplus := set(run_files) - manifest.run_files.keys():
        raise CheckpointError(
            f"{folder.resolve().parent.parent / min(surplus)} is not in {folder / MANIFEST}: the list is incomplete"
        )
    run = folder.resolve().parent.parent
    listed = [(folder, *each) for each in manifest.files.items()] + [
        (run, *each) for each in manifest.run_files.items()
    ]
    with ThreadPoolExecutor(MAX_READERS) as pool:  # hashing leaves Python to the other threads
        list(pool.map(lambda each: _check_file(*each), listed))
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
        read: Any = read_json(path, MAX_MANIFEST_BYTES)
        version = _whole_number(read["format"])
        if version > FORMAT:
            raise NewerFormat(
                f"{folder} has checkpoint format {version}, and this tqppo reads format {FORMAT}: "
                "resume with the version that wrote it, or a later one"
            )
        if version < OLDEST_FORMAT:
            raise CheckpointError(
                f"{folder} has checkpoint format {version}; this tqppo reads format {OLDEST_FORMAT} to {FORMAT}"
            )
        found = Manifest(_whole_number(read["step"]), dict(read["files"]), dict(read["run_files"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is corrupt: {type(error).__name__}: {error}") from None
    if DRIVER not in found.files:
        raise CheckpointError(f"{path} is corrupt: it does not list {DRIVER}")
    if _is_step(folder.resolve()) and _step_of(folder.resolve()) != found.step:
        raise CheckpointError(f"{path} is corrupt: it says step {found.step}")
    for name in (*found.files, *found.run_files):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{path} is corrupt: it names a file outside of its folder, {name!r}")
    return found


def _whole_number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r:.40} is not a whole number")
    return value


def _check_file(base: Path, name: str, expected: Any) -> None:
    path = base / name
    if not os.path.isfile(path):  # false for impossible names too, unlike `is_file`
        raise CheckpointError(f"{path} is missing: this checkpoint is partial")
    try:
        is_same = isinstance(expected, dict) and path.stat().st_size == expected.get("bytes")
        is_same = is_same and Digest.of(path).as_json() == expected
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not is_same:
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
    for candidate in (path, runs / checkpoint, *([path.parent.parent] if _is_step(path) else [])):
        if (candidate / "checkpoints").is_dir():
            raise CheckpointError(f"{candidate / CONFIG} is missing; the run cannot continue without it")
    names = sorted(run.name for run in _runs(runs))
    hint = did_you_mean(checkpoint, names) or f"runs in {runs}/: {', '.join(names[-8:]) or 'none'}"
    raise CheckpointError(f"{checkpoint!r} is neither a checkpoint nor a run; {hint}")


def _last_run(runs: Path) -> Path:
    found = sorted(_runs(runs), key=lambda run: (run / CONFIG).stat().st_mtime_ns)
    if not found:
        raise CheckpointError(f"there is no run in {runs}/ to resume; start one with `tqppo train`")
    return found[-1]


def _runs(runs: Path) -> list[Path]:
    return [path for path in runs.glob("*") if _is_run(path)]


def _is_run(path: Path) -> bool:
    return os.path.isfile(path / CONFIG)


def _is_step(path: Path) -> bool:
    return _STEP_NAME.fullmatch(path.name) is not None


def _step_of(path: Path) -> int:
    return int(path.name.rpartition(PREFIX)[2])


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _digests(folder: Path, written: Mapping[str, Digest]) -> dict[str, Digest]:
    """The digest of every file: as its writer hashed it, or read from it. What a rank wrote must be here."""
    for name, digest in written.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != digest.num_bytes:
            raise CheckpointError(
                f"{path} is not here as a rank wrote it: run.dir must be a folder that all nodes of the cluster share"
            )
    names = [str(path.relative_to(folder)) for path in _files(folder)]
    return {name: written[name] if name in written else Digest.of(folder / name) for name in names}
