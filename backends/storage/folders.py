"""Where a run's files are on a node. `tqppo.processes.reaper` decides which folders belong to dead runs."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from tqppo.processes import reaper
from tqppo.queue.storage import FOLDER_PREFIX
from tqppo.space import SHARED_MEMORY

from .mappings import discard

log = logging.getLogger(__name__)

MIN_FREE_BYTES = 512 << 20  # with less than this (and than the budget) free, shared memory is not used


def parents(base: str) -> list[Path]:
    return [Path(base)] if base else [SHARED_MEMORY, Path(tempfile.gettempdir())]


def choose_parent(budget_bytes: int, base: str = "") -> Path:
    """The folder `base` if it is given; otherwise shared memory, or the temporary folder where that is too small."""
    if base:
        Path(base).mkdir(parents=True, exist_ok=True)
        return Path(base)
    fallback = Path(tempfile.gettempdir())
    if not os.access(SHARED_MEMORY, os.W_OK):
        log.warning("%s does not exist: the queue keeps its blocks in %s, which is slower", SHARED_MEMORY, fallback)
        return fallback
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < min(budget_bytes, MIN_FREE_BYTES):
        log.warning("%s has only %d MB left: the queue keeps its blocks in %s", SHARED_MEMORY, free >> 20, fallback)
        return fallback
    if free < budget_bytes:
        log.warning("%s has %d MB left, less than the budget of %d MB", SHARED_MEMORY, free >> 20, budget_bytes >> 20)
    return SHARED_MEMORY


def reap(parent: Path) -> list[str]:
    """Delete the folders of dead runs."""
    return reaper.reap(parent, FOLDER_PREFIX, discard_files)


def remove_run(prefix: str, base: str = "") -> None:
    """Delete all folders of a run on this machine."""
    for parent in parents(base):
        for folder in parent.glob(f"{prefix}*"):
            reaper.remove(folder, discard_files)


def discard_files(folder: Path) -> None:
    """Delete the files of a run so that processes that still have them mapped hold no memory."""
    for file in [*folder.glob("live/*"), *folder.glob("free/*")]:
        with contextlib.suppress(OSError):
            discard(str(file))
