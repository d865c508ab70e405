"""Disks that are full, for tests."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A write beyond this size is short, and the next one fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def can_mount() -> bool:
    """Whether this process may mount file systems: root of a machine, or of a container with the right to do so."""
    unshare = shutil.which("unshare")
    if os.getuid() != 0 or unshare is None:
        return False
    return not subprocess.call([unshare, "-m", "true"], stderr=subprocess.DEVNULL)
