"""Files of the queue that a process keeps open and mapped, because filling page tables costs more than reading bytes.

`make bench-queue` shows what that buys: the lines by "remapped" map each block again whenever it is read.

A process uses a file under a lock, its lease. Between two leases the file stays mapped, but other processes may reuse
or delete it. The memory of a deleted file is freed with its last lease even if other processes have it mapped; if the
last holder was killed, when one of the others next uses any file.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np

from tqppo.queue.blocks.block import Bytes

Spans = Sequence[tuple[int, int]]  # (start, stop)
MAX_IDLE_FILES = 32  # that a process keeps for reading, and as many for writing; each takes two descriptors
_num_forks = 0


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


# Counted before and after the fork, because another thread may take a lease between the first hook and the fork.
os.register_at_fork(before=_count_fork, after_in_parent=_count_fork, after_in_child=_count_fork)


class LeasedFile:
    """An open file, mapped when it is used. Dropping the last reference closes it, and so ends its lease."""

    def __init__(self, path: str, name: str, flags: int = os.O_RDWR) -> None:
        self.name = name
        self.handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self.memory: mmap.mmap | None = None
        self._lease = fcntl.LOCK_UN
        self._forks_at_open = _num_forks

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be opened
            os.close(self.handle)

    def lock(self, kind: int) -> bool:
        """Take the lease, LOCK_SH or LOCK_EX; False if the lease of another process prevents it."""
        try:
            fcntl.flock(self.handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._lease = kind
        return True

    def unlock(self) -> None:
        """End the lease. If the file is deleted and no lease is left, free its memory."""
        if self._lease == fcntl.LOCK_SH and self.is_forked():
            return  # a child may still read it; the lease ends when both have closed the file
        fcntl.flock(self.handle, fcntl.LOCK_UN)
        if self.is_deleted() and self.lock(fcntl.LOCK_EX):
            os.ftruncate(self.handle, 0)

    def is_forked(self) -> bool:
        """Whether a forked process shares this file. The lock is shared too: if one releases it, both lose it."""
        return self._forks_at_open != _num_forks

    def is_deleted(self) -> bool:
        return os.fstat(self.handle).st_nlink == 0

    def size(self) -> int:
        return os.fstat(self.handle).st_size

    def map(self, num_bytes: int, access: int) -> mmap.mmap:
        """The memory of the whole file, which must have at least this many bytes."""
        if self.memory is None or len(self.memory) < num_bytes:
            if access == mmap.ACCESS_WRITE:  # on a full disk a hole would be SIGBUS at the first write, not ENOSPC here
                os.posix_fallocate(self.handle, 0, self.size())
            self.memory = mmap.mmap(self.handle, 0, access=access)
        return self.memory


def discard(path: str) -> None:
    """Delete a file. Unless a process has a lease on it, free its memory even if it is mapped somewhere."""
    with contextlib.suppress(FileNotFoundError):
        file = LeasedFile(path, "")
        os.unlink(path)
        file.unlock()


class IdleFiles:
    """The files of a process between two leases: at most one of each name. The least recently used are closed first.

    The garbage collector returns readers' files in any thread and between any two instructions, and a fork may copy a
    held lock. So there is no lock; every step is one atomic operation of a dict.
    """

    def __init__(self) -> None:
        self._idle: dict[str, LeasedFile] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._idle

    def has_room(self) -> bool:
        return len(self._idle) < MAX_IDLE_FILES

    def take(self, name: str) -> LeasedFile | None:
        file = self._idle.pop(name, None)
        return None if file is None or file.is_forked() else file

    def take_back(self, file: LeasedFile) -> None:
        """End a file's lease, and keep the file if its mapping may be used again."""
        file.unlock()
        if file.memory is not None and not file.is_forked():
            self._idle.pop(file.name, None)
            self._idle[file.name] = file
        self._close_excess()

    def _close_excess(self) -> None:
        """Close deleted files, and the oldest while there are too many."""
        names = list(self._idle)
        excess = len(names) - MAX_IDLE_FILES
        for i, name in enumerate(names):
            idle = self._idle.get(name)
            if idle is None or (i >= excess and not idle.is_deleted()):
                continue
            dropped = self._idle.pop(name, None)
            if dropped is not None and not dropped.is_forked():
                dropped.unlock()

    def lend(self, file: LeasedFile, num_bytes: int, used: Spans) -> Bytes:
        """The bytes of a file, under a lease that ends with the last array over them.

        The mapping is copy-on-write: the reader may change the spans that it uses, and no other process sees that.
        """
        lent: Bytes = np.frombuffer(file.map(num_bytes, mmap.ACCESS_COPY), np.uint8, num_bytes)
        address = lent.__array_interface__["data"][0]
        weakref.finalize(lent, self._return, file, address, used).atexit = False
        return lent

    def _return(self, file: LeasedFile, address: int, used: Spans) -> None:
        assert file.memory is not None, "only mapped files are lent"
        try:
            for start, num_bytes in _private_pages(address, used):
                file.memory.madvise(mmap.MADV_DONTNEED, start, num_bytes)
        except OSError:  # without a readable page table the changed pages are unknown, so the mapping is not reused
            file.memory = None
        self.take_back(file)


def _private_pages(address: int, used: Spans) -> list[tuple[int, int]]:
    """(start, bytes) within a copy-on-write mapping: per span, from the first to the last page that was written."""
    found = []
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for begin, end in used:
            first = begin // mmap.PAGESIZE
            entries = np.empty(-(-end // mmap.PAGESIZE) - first, np.uint64)
            count = os.preadv(pagemap, [entries.view(np.uint8).data], (address // mmap.PAGESIZE + first) * 8)
            if count != entries.nbytes:
                raise OSError("the page table ends early")
            state = entries >> np.uint64(61)  # bit 2: present, bit 1: swapped, bit 0: of a file
            private = np.flatnonzero((state == 4) | (state == 2))
            if len(private):
                start, stop = first + int(private[0]), first + int(private[-1]) + 1
                found.append((start * mmap.PAGESIZE, (stop - start) * mmap.PAGESIZE))
    finally:
        os.close(pagemap)
    return found
