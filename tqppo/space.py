"""Writes files so that a full file system is an error with figures, and no file is left half written.

A page that cannot be allocated while a mapped file is written kills the process with SIGBUS, without a message.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqppo.errors import OutOfDescriptors, OutOfSpace

SHARED_MEMORY = Path("/dev/shm")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Digest:
    """What a file holds: its size and the SHA-256 of its bytes."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Digest:
        sha256 = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                sha256.update(chunk)
        return cls(path.stat().st_size, sha256.hexdigest())

    @classmethod
    def of_bytes(cls, data: bytes) -> Digest:
        return cls(len(data), hashlib.sha256(data).hexdigest())

    def as_json(self) -> dict[str, int | str]:
        return {"bytes": self.num_bytes, "sha256": self.sha256}


def allocate(path: Path, num_bytes: int, *, is_private: bool = False) -> None:
    """Create or resize a file with room for all its bytes; a file of this size keeps its pages.

    Only this user can read a private file.
    """
    with explained(path.parent, num_bytes), open(path, "r+b", opener=_private if is_private else _shared) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            file.truncate(num_bytes)
            if num_bytes:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError:
            file.truncate(min(before, num_bytes))  # gives back the part that was allocated
            raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o600)


def _shared(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)  # less what the user's umask takes away


@contextmanager
def explained(folder: Path, num_bytes: int) -> Iterator[None]:
    """Turn the error of a full file system into `OutOfSpace`, which names the folder, bytes wanted and bytes free."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise out_of_space(folder, num_bytes, error) from error


def out_of_space(folder: Path, num_bytes: int, error: OSError) -> OutOfSpace:
    """The error to raise for one of a full file system; `num_bytes` is 0 if it is not known how many were to come."""
    free = shutil.disk_usage(next(each for each in (folder, *folder.absolute().parents) if each.exists())).free
    wanted = f"{num_bytes} bytes" if num_bytes else "more"
    return OutOfSpace(
        f"{folder} has no room for {wanted}: {error.strerror}; {free} bytes are free there. "
        "Free some, enlarge it (a container's /dev/shm: --shm-size), or train a smaller model"
    )


def exhausted(error: OSError) -> OutOfSpace | OutOfDescriptors | None:
    """What to tell the user of an error raised anywhere, if a full file system or used-up descriptors are its cause."""
    cause = getattr(error, "cause", error)  # Ray's wrapper of a worker's error
    if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        whose = f"of this process, {limit}, is" if cause.errno == errno.EMFILE else "of this machine is"
        raise_it = "ulimit -n" if cause.errno == errno.EMFILE else "sysctl fs.file-max"
        return OutOfDescriptors(f"too many open files: the limit {whose} reached. Raise it: {raise_it}")
    return full_disk(cause) if isinstance(cause, OSError) and cause.errno in FULL else None


def full_disk(cause: OSError) -> OutOfSpace:
    """The error of a file system that is full, with the folder if the error names a file."""
    name = cause.filename2 or cause.filename  # of a copy: where to, or else where from
    folder = Path(os.fsdecode(name)).absolute().parent if name else None
    if folder is not None and folder.exists():
        return out_of_space(folder, 0, cause)
    places = [place for place in (Path.cwd(), Path(tempfile.gettempdir()), SHARED_MEMORY) if place.is_dir()]
    free = ", ".join(f"{shutil.disk_usage(place).free} bytes in {place}" for place in places)
    return OutOfSpace(f"a file system is full: {cause.strerror}. Free: {free}")


def require(folder: Path, num_bytes: int) -> None:
    """Raise `OutOfSpace` unless the file system of `folder` has room for this many bytes."""
    if shutil.disk_usage(folder).free < num_bytes:
        with explained(folder, num_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def append_line(path: Path, line: bytes) -> None:
    """Append a whole line to a file, or nothing: a write that fails halfway is taken back.

    If the file ends within a line, because a process was killed as it wrote, the new line does not join that one.
    """
    data = line if _ends_with_newline(path) else b"\n" + line
    with explained(path.parent, len(data)), path.open("ab", buffering=0) as file:
        size, left = os.fstat(file.fileno()).st_size, memoryview(data)
        try:
            while left:
                left = left[file.write(left) or 0 :]
        except OSError:
            file.truncate(size)
            raise


def _ends_with_newline(path: Path) -> bool:
    """Whether what is written next begins a line; also if there is no file, or one that cannot be read from the end."""
    if not path.is_file() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file by one with this content: readers, and a crash at any moment, see the old file or the new one."""
    draft = path.with_name(f".{path.name}.draft")
    with explained(path.parent, len(data)):
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            sync(path.parent)
        except BaseException:  # a signal may end the run here
            draft.unlink(missing_ok=True)
            raise


def sync(path: Path) -> None:
    """Return once a file or a folder is on the disk. Bytes written through a mapping count, and so do their errors."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Return once a folder and everything in it is on the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)
