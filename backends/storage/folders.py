"""Where a run's files are on a node, and what dead runs left there."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

from .mappings import discard

log = logging.getLogger(__name__)

SHARED = Path("/dev/shm")
ENOUGH = 512 << 20  # less free shared memory than this (and than the budget) is too small to be useful


def parents(base: str) -> list[Path]:
    return [Path(base)] if base else [SHARED, Path(tempfile.gettempdir())]


def choose_parent(budget_bytes: int, base: str = "") -> Path:
    """Shared memory where there is enough of it, else the temporary folder; a given folder always."""
    if base:
        Path(base).mkdir(parents=True, exist_ok=True)
        return Path(base)
    fallback = Path(tempfile.gettempdir())
    if not os.access(SHARED, os.W_OK):
        log.warning("%s is not there: the queue keeps its blocks in %s, which is slower", SHARED, fallback)
        return fallback
    spare = shutil.disk_usage(SHARED).free
    if spare < min(budget_bytes, ENOUGH):
        log.warning("%s has only %d MB left: the queue keeps its blocks in %s", SHARED, spare >> 20, fallback)
        return fallback
    if spare < budget_bytes:
        log.warning("%s has %d MB left, less than the budget of %d MB", SHARED, spare >> 20, budget_bytes >> 20)
    return SHARED


def reap(parent: Path) -> list[str]:
    """Delete what runs left behind whose owner is dead: its lock can be taken."""
    reaped = []
    for folder in [*parent.glob("tqppo-*"), *_abandoned(parent)]:
        try:
            lock = os.open(folder / "owner", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # not one of ours, somebody else's, or just gone
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            delete(folder)
            reaped.append(folder.name)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
    if reaped:
        log.info("removed the shared memory of dead runs: %s", ", ".join(reaped))
    return reaped


def remove_run(prefix: str, base: str = "") -> None:
    """Delete all folders of a run on this machine."""
    for parent in parents(base):
        for folder in parent.glob(f"{prefix}*"):
            delete(folder)


def delete(folder: Path) -> None:
    for file in [*folder.glob("live/*"), *folder.glob("free/*")]:
        with contextlib.suppress(OSError):
            discard(str(file))
    shutil.rmtree(folder, ignore_errors=True)


def _abandoned(parent: Path) -> list[Path]:
    """Folders whose maker died before it named them."""
    found = []
    for folder in parent.glob(".tqppo-*"):
        with contextlib.suppress(FileNotFoundError):  # named just now
            if folder.stat().st_mtime < time.time() - 600:
                found.append(folder)
    return found
