"""Writes files so that a full file system is an error with figures, and no file is left half written.

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

SHARED_MEMORY = Path("/dev/shm")
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


def require(folder: Path, num_bytes: int) -> None:
    """Raise `OutOfSpace` unless the file system of `folder` has room for this many bytes."""
    if shutil.disk_usage(folder).free < num_bytes:
        with explained(folder, num_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def append(path: Path, data: bytes) -> None:
    """Append all of `data` to a file, or nothing: a write that fails halfway is taken back."""
    with path.open("ab", buffering=0) as file, explained(path.parent, len(data)):
        size, left = os.fstat(file.fileno()).st_size, memoryview(data)
        try:
            while left:
                left = left[file.write(left) or 0 :]
        except OSError:
            file.truncate(size)
            raise


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file by one with this content: readers, and a crash at any moment, see the old file or the new one."""
    draft = path.with_name(f".{path.name}.draft")
    with explained(path.parent, len(data)):
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            draft.unlink(missing_ok=True)
            raise
    draft.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
