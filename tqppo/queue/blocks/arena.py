"""Buffers that are reused: gathering into pages that were touched before is several times faster than into new ones.

A buffer is lent as a numpy array. When the last tensor over the array is garbage-collected, the buffer is reused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque

import numpy as np

from tqppo.queue.blocks.block import Bytes

SMALL_BYTES = 256 * 1024  # below, malloc reuses memory well enough


class Arena:
    """A process's spare buffers, by size. `keep_bytes` bounds what stays allocated while it is unused.

    The garbage collector returns buffers in any thread and between any two instructions, and a fork may copy a held
    lock. So there is no lock; every step is one atomic operation of a dict or a deque.
    """

    def __init__(self, keep_bytes: int = 1 << 30) -> None:
        self.keep_bytes = keep_bytes
        self._spare: dict[int, deque[Bytes]] = {}

    def lend(self, num_bytes: int) -> Bytes:
        """uint8 [num_bytes], contents undefined, aligned to 64 bytes; the caller's until it drops its reference."""
        if num_bytes < SMALL_BYTES:
            return np.empty(num_bytes, np.uint8)
        buffer = self._reusable(num_bytes)
        if buffer is None:  # with some room, because the next batch is often larger
            buffer = _aligned(_rounded(num_bytes + num_bytes // 8))
        lent = np.frombuffer(buffer.data, np.uint8, num_bytes)  # a new object, to which a finalizer can be attached
        weakref.finalize(lent, self._take_back, buffer).atexit = False
        return lent

    def _reusable(self, num_bytes: int) -> Bytes | None:
        for size in sorted(size for size in list(self._spare) if num_bytes <= size <= 2 * num_bytes):
            with contextlib.suppress(IndexError):
                return self._spare[size].pop()
        return None

    def _take_back(self, buffer: Bytes) -> None:
        self._spare.setdefault(buffer.nbytes, deque()).append(buffer)
        for size in sorted(self._spare):
            while self._spare[size] and self.spare_bytes() > self.keep_bytes:
                with contextlib.suppress(IndexError):
                    self._spare[size].popleft()

    def spare_bytes(self) -> int:
        return sum(size * len(self._spare[size]) for size in list(self._spare))


def _rounded(num_bytes: int) -> int:
    """Round up to one of eight sizes per power of two, so that buffers fit again."""
    step = 1 << (num_bytes.bit_length() - 4)
    return -(-num_bytes // step) * step


def _aligned(num_bytes: int) -> Bytes:
    raw = np.empty(num_bytes + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + num_bytes]
