"""Folders that must not outlive the process that made them: shared memory, Ray sessions, published weights.

A folder belongs to a live process for as long as an exclusive `flock` on its lock file is held. The kernel releases the
lock when the process ends, also by SIGKILL, and the rule holds across PID namespaces that share /dev/shm or /tmp, where
process ids mean nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

LOCK = ".lock"
GRACE_S = 60.0  # how long `claim` may take between making a folder and locking it


@dataclass(frozen=True, slots=True)
class Claim:
    """A folder that this process owns until it ends or calls `release`."""

    folder: Path
    descriptor: int

    def release(self, discard: Callable[[Path], None] | None = None) -> None:
        """Delete the folder and end the claim. In a forked child, which does not own the folder, do nothing."""
        if self in _held:
            remove(self.folder, discard)
            _held.remove(self)
            os.close(self.descriptor)


_held: set[Claim] = set()  # of this process


def claim(folder: Path) -> Claim:
    """Create a folder that only this user may enter, and own it. FileExistsError if it exists."""
    folder.mkdir(mode=0o700)
    pending = folder / f"{LOCK}.pending"
    descriptor = os.open(pending, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with contextlib.suppress(OSError):  # for people who look at the folder; no code relies on it
        os.write(descriptor, f"{os.getpid()}\n".encode())
    os.rename(pending, folder / LOCK)  # after the flock, so that a lock file without a lock means a dead owner
    made = Claim(folder, descriptor)
    _held.add(made)
    return made


def reap(parent: Path, prefix: str, discard: Callable[[Path], None] | None = None) -> list[str]:
    """Delete this user's folders `parent/prefix*` whose owner is dead; returns their names.

    `discard` runs before a folder's files are deleted. A folder without a lock file is left alone unless it is older
    than the grace period and empty, which is what a `claim` leaves that is killed halfway; it never holds data.
    """
    found = [folder for folder in sorted(parent.glob(f"{prefix}*")) if _is_ours(folder)]
    reaped = [folder.name for folder in found if _reap(folder, discard)]
    if reaped:
        log.info("removed from %s what dead runs left: %s", parent, ", ".join(reaped))
    return reaped


def _is_ours(folder: Path) -> bool:
    try:
        return folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _reap(folder: Path, discard: Callable[[Path], None] | None) -> bool:
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _reap_unfinished(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another reaper may have deleted the folder between the open and the flock, and its name may be in use again.
        if not _is_same(descriptor, folder / LOCK):
            return False
        return remove(folder, discard)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _reap_unfinished(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        is_empty = all(name.startswith(LOCK) for name in os.listdir(folder))
        if is_empty and folder.stat().st_mtime < time.time() - GRACE_S:
            return remove(folder, None)
    return False


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def remove(folder: Path, discard: Callable[[Path], None] | None = None) -> bool:
    """Delete a folder, the lock file last: what a kill or an error leaves can still be reaped. Whether it is gone."""
    if discard is not None:
        discard(folder)
    with contextlib.suppress(OSError):  # without a descriptor, say
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK:
                os.unlink(entry.path)
        if set(os.listdir(folder)) <= {LOCK}:  # otherwise a process still writes here; the next reaper tries again
            shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _close_in_child() -> None:
    """Keep a forked child that outlives the owner from holding the owner's locks."""
    for each in _held:
        os.close(each.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
