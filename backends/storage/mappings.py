"""Files of the queue that a process keeps open and mapped: filling page tables costs more than reading the bytes.

A file is used under a lock, the lease; between two leases it stays mapped, but others may write it again or delete it.
A deleted file gives its memory back with its last lease, whoever still has it mapped; if the last holder was killed,
when the others use a file again.
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

Spans = Sequence[tuple[int, int]]  # from start to stop
MOST = 32  # files that a process keeps for reading, and as many for writing; two handles each
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


# Also after the fork: other threads may take leases between our hook and the fork itself.
os.register_at_fork(before=_count_fork, after_in_parent=_count_fork, after_in_child=_count_fork)


class LeasedFile:
    """An open file, mapped when it is used. What nobody refers to any more is closed, and so unlocked."""

    def __init__(self, path: str, name: str, flags: int = os.O_RDWR) -> None:
        self.name = name
        self.handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self.memory: mmap.mmap | None = None
        self._lease = fcntl.LOCK_UN
        self._forks = _forks

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be opened
            os.close(self.handle)

    def lock(self, kind: int) -> bool:
        """Take the lease, LOCK_SH or LOCK_EX; False: somebody else's is in the way."""
        try:
            fcntl.flock(self.handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._lease = kind
        return True

    def unlock(self) -> None:
        """End the lease. What is deleted, and nobody's any more, gives its memory back at once."""
        if self._lease == fcntl.LOCK_SH and self.is_forked():
            return  # a child may still read it; the lease ends when both have closed the file
        fcntl.flock(self.handle, fcntl.LOCK_UN)
        if self.is_deleted() and self.lock(fcntl.LOCK_EX):
            os.ftruncate(self.handle, 0)

    def is_forked(self) -> bool:
        """Another process has inherited it: what one locks, the other unlocks."""
        return self._forks != _forks

    def is_deleted(self) -> bool:
        return os.fstat(self.handle).st_nlink == 0

    def size(self) -> int:
        return os.fstat(self.handle).st_size

    def map(self, num_bytes: int, access: int) -> mmap.mmap:
        """The whole file's memory, of which the caller knows that it has so many bytes."""
        if self.memory is None or len(self.memory) < num_bytes:
            self.memory = mmap.mmap(self.handle, 0, access=access)
        return self.memory


def discard(path: str) -> None:
    """Delete a file and, unless somebody is using it, give its memory back, whoever has it mapped."""
    with contextlib.suppress(FileNotFoundError):
        file = LeasedFile(path, "")
        os.unlink(path)
        file.unlock()


class Kept:
    """A process's files between two leases: at most one of a name, and those used least recently go first.

    Readers' files come back when their last array is found to be garbage: in any thread, and in the middle of anything.
    There is no lock to wait for then, nor after a fork; every step is one operation of a dict.
    """

    def __init__(self) -> None:
        self._idle: dict[str, LeasedFile] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._idle

    def has_room(self) -> bool:
        return len(self._idle) < MOST

    def take(self, name: str) -> LeasedFile | None:
        file = self._idle.pop(name, None)
        return None if file is None or file.is_forked() else file

    def take_back(self, file: LeasedFile) -> None:
        """End a file's lease, and keep it if its mapping may be used again."""
        file.unlock()
        if file.memory is not None and not file.is_forked():
            self._idle.pop(file.name, None)
            self._idle[file.name] = file
        self._let_go()

    def _let_go(self) -> None:
        """Of files that were deleted, and of the oldest if there are too many."""
        names = list(self._idle)
        excess = len(names) - MOST
        for i, name in enumerate(names):
            idle = self._idle.get(name)
            if idle is None or (i >= excess and not idle.is_deleted()):
                continue
            dropped = self._idle.pop(name, None)
            if dropped is not None and not dropped.is_forked():
                dropped.unlock()

    def lend(self, file: LeasedFile, num_bytes: int, used: Spans) -> Bytes:
        """The bytes of a file, under a lease that ends with the last array over them.

        Copy-on-write: the reader may change them within what it uses, and nobody else sees that.
        """
        lent = np.frombuffer(file.map(num_bytes, mmap.ACCESS_COPY), np.uint8, num_bytes)
        address = lent.__array_interface__["data"][0]
        weakref.finalize(lent, self._return, file, address, used).atexit = False
        return lent

    def _return(self, file: LeasedFile, address: int, used: Spans) -> None:
        assert file.memory is not None, "it was lent"
        try:
            for start, num_bytes in _private_pages(address, used):
                file.memory.madvise(mmap.MADV_DONTNEED, start, num_bytes)
        except OSError:  # this system does not tell what was written, so the mapping is not used again
            file.memory = None
        self.take_back(file)


def _private_pages(address: int, used: Spans) -> list[tuple[int, int]]:
    """(start, bytes) within a copy-on-write mapping: of each span, from the first page that was written to the last."""
    found = []
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for begin, end in used:
            first = begin // mmap.PAGESIZE
            entries = np.empty(-(-end // mmap.PAGESIZE) - first, np.uint64)
            count = os.preadv(pagemap, [entries.view(np.uint8).data], (address // mmap.PAGESIZE + first) * 8)
            if count != entries.nbytes:
                raise OSError("the page table ends early")
            state = entries >> np.uint64(61)  # present, swapped, of a file
            private = np.flatnonzero((state == 4) | (state == 2))
            if len(private):
                start, stop = first + int(private[0]), first + int(private[-1]) + 1
                found.append((start * mmap.PAGESIZE, (stop - start) * mmap.PAGESIZE))
    finally:
        os.close(pagemap)
    return found
