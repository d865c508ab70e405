"""Memory that is used again: gathering into pages that were touched before is several times faster than into new ones.

A buffer is lent as a numpy array; when the last tensor over it is gone, so is the array, and the buffer comes back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from typing import Any

import numpy as np

SMALL = 256 * 1024  # below, malloc reuses memory well enough by itself


class Arena:
    """A process's spare buffers, by size. `keep_bytes` bounds what stays allocated while nobody uses it.

    Buffers come back when garbage is collected: in any thread, and in the middle of anything. There is no lock to wait
    for then, nor after a fork; every step is one operation of a dict or a deque.
    """

    def __init__(self, keep_bytes: int = 1 << 30) -> None:
        self.keep_bytes = keep_bytes
        self._spare: dict[int, deque[np.ndarray]] = {}

    def lend(self, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 [num_bytes], contents undefined, aligned to 64 bytes; the caller owns it until it drops it."""
        if num_bytes < SMALL:
            return np.empty(num_bytes, np.uint8)
        buffer = self._claim(num_bytes)
        if buffer is None:  # some room, since the next batch is seldom smaller
            buffer = _aligned(_rounded(num_bytes + num_bytes // 8))
        lent = np.frombuffer(buffer.data, np.uint8, num_bytes)  # an object of its own, whose death we hear of
        weakref.finalize(lent, self._take_back, buffer).atexit = False
        return lent

    def _claim(self, num_bytes: int) -> np.ndarray | None:
        for size in sorted(size for size in list(self._spare) if num_bytes <= size <= 2 * num_bytes):
            with contextlib.suppress(IndexError):
                return self._spare[size].pop()
        return None

    def _take_back(self, buffer: np.ndarray) -> None:
        self._spare.setdefault(buffer.nbytes, deque()).append(buffer)
        for size in sorted(self._spare):
            while self._spare[size] and self.spare_bytes() > self.keep_bytes:
                with contextlib.suppress(IndexError):
                    self._spare[size].popleft()

    def spare_bytes(self) -> int:
        return sum(size * len(self._spare[size]) for size in list(self._spare))


def _rounded(num_bytes: int) -> int:
    """Up to one of the few sizes that there are: eight to sixteen between a power of two and the next."""
    step = 1 << (num_bytes.bit_length() - 4)
    return -(-num_bytes // step) * step


def _aligned(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    raw = np.empty(num_bytes + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + num_bytes]
