"""Where published weights are on a node: one folder per process, in shared memory where there is any.

The driver names the trainer's folder, rollout workers on other nodes name their own. The process that writes a folder
claims it, so that `remove_abandoned` finds the folders of dead processes.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from tqppo.reaper import reap
from tqppo.space import SHARED_MEMORY

PREFIX = "tqppo-weights-"
_TOKEN = secrets.token_hex(8)  # containers that share /dev/shm may have processes of the same id


def parent() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def new_folder() -> Path:
    """A new name for a folder of this process; the folder does not exist yet."""
    return parent() / f"{PREFIX}{os.getpid()}-{_TOKEN}-{secrets.token_hex(3)}"


def pattern() -> str:
    """A glob pattern that matches every folder named by this process, and no other."""
    return str(parent() / f"{PREFIX}{os.getpid()}-{_TOKEN}-*")


def remove_abandoned() -> None:
    """Delete the folders of processes that no longer exist."""
    reap(parent(), PREFIX)
