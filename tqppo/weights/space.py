"""Allocates files before they are written, so that a full file system is an error with figures.

A page that cannot be allocated while a mapped file is written kills the process with SIGBUS, without a message.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqppo.errors import OutOfSpace

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def allocate(path: Path, num_bytes: int) -> None:
    """Create or resize a file with room for all its bytes; a file of this size keeps its pages."""
    with open(path, "r+b" if path.exists() else "w+b") as file, explained(path.parent, num_bytes):
        before = os.fstat(file.fileno()).st_size
        try:
            file.truncate(num_bytes)
            if num_bytes:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError:
            file.truncate(min(before, num_bytes))  # gives back the part that was allocated
            raise


@contextmanager
def explained(folder: Path, num_bytes: int) -> Iterator[None]:
    """Turn the error of a full file system into `OutOfSpace`, which names the folder, bytes wanted and bytes free."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        free = shutil.disk_usage(folder).free
        raise OutOfSpace(
            f"{folder} has no room for {num_bytes} bytes: {os.strerror(error.errno)}; {free} bytes are free there. "
            "Free some, enlarge it (a container's /dev/shm: --shm-size), or train a smaller model"
        ) from error
