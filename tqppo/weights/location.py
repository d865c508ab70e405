"""Where published weights are on a node: one folder per process, in shared memory where there is room for them.

The driver names the trainer's folder, rollout workers on other nodes name their own. The process that writes a folder
claims it, so that `remove_abandoned` finds the folders of dead processes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

from tqppo.errors import PreflightError
from tqppo.processes.reaper import reap
from tqppo.space import SHARED_MEMORY
from tqppo.units import size

PREFIX = "tqppo-weights-"
VERSIONS = 2  # that are there at once: engines may still read the one before the newest
_TOKEN = secrets.token_hex(8)  # containers that share /dev/shm may have processes of the same id


def parents() -> list[Path]:
    """Folders that may hold weights, the fastest first."""
    places = [SHARED_MEMORY, Path(tempfile.gettempdir())]
    return [place for place in places if place.is_dir() and os.access(place, os.W_OK)]


def parent(model_bytes: int = 0) -> Path:
    """The first folder with room for the versions of a model; an error with the figures if there is none."""
    needed = VERSIONS * model_bytes
    for place in parents():
        if shutil.disk_usage(place).free >= needed:
            return place
    free = ", ".join(f"{place} has {size(shutil.disk_usage(place).free)}" for place in parents())
    raise PreflightError(
        f"published weights need {size(needed)} ({VERSIONS} versions of {size(model_bytes)}), and there is no room: "
        f"{free or 'no folder can be written'}\n  enlarge shared memory (of a container: --shm-size), or set TMPDIR to "
        "a folder with room"
    )


def new_folder(model_bytes: int = 0) -> Path:
    """A new name for a folder of this process, where a model of this size fits; the folder does not exist yet."""
    return parent(model_bytes) / f"{PREFIX}{os.getpid()}-{_TOKEN}-{secrets.token_hex(3)}"


def patterns() -> list[str]:
    """Glob patterns that match every folder named by this process, and no other."""
    return [str(place / f"{PREFIX}{os.getpid()}-{_TOKEN}-*") for place in parents()]


def remove_abandoned() -> None:
    """Delete the folders of processes that no longer exist."""
    for place in parents():
        reap(place, PREFIX)
