"""Memory that is used again: gathering into pages that were touched before is several times faster than into new ones.

A buffer is lent as a numpy array; when the last tensor over it is gone, so is the array, and the buffer comes back.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from typing import Any

import numpy as np

SMALL = 256 * 1024  # below, malloc reuses memory well enough by itself


class Arena:
    """A process's spare buffers, by size. `keep_bytes` bounds what stays allocated while nobody uses it."""

    def __init__(self, keep_bytes: int = 1 << 30) -> None:
        self.keep_bytes = keep_bytes
        self._spare: list[tuple[int, int]] = []  # (size, id), sorted
        self._buffers: dict[int, np.ndarray] = {}
        self._returned: deque[np.ndarray] = deque()  # not sorted in yet
        self._lock = threading.Lock()

    def lend(self, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 [num_bytes], contents undefined, aligned to 64 bytes; the caller owns it until it drops it."""
        if num_bytes < SMALL:
            return np.empty(num_bytes, np.uint8)
        with self._lock:
            self._sort_in()
            buffer = self._claim(num_bytes)
        if buffer is None:
            buffer = _aligned(num_bytes + num_bytes // 8)  # some room, since the next batch is seldom smaller
        lent = np.frombuffer(buffer.data, np.uint8, num_bytes)  # an object of its own, whose death we hear of
        weakref.finalize(lent, self._take_back, buffer).atexit = False
        return lent

    def _claim(self, num_bytes: int) -> np.ndarray | None:
        place = bisect_left(self._spare, (num_bytes, 0))
        if place == len(self._spare) or self._spare[place][0] > 2 * num_bytes:
            return None
        return self._buffers.pop(self._spare.pop(place)[1])

    def _take_back(self, buffer: np.ndarray) -> None:
        """Called when garbage is collected: in any thread, and in the middle of anything, such as `lend`."""
        self._returned.append(buffer)
        if self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._buffers[id(buffer)] = buffer
            insort(self._spare, (buffer.nbytes, id(buffer)))
        while self._spare and sum(size for size, _ in self._spare) > self.keep_bytes:
            del self._buffers[self._spare.pop(0)[1]]


def _aligned(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    raw = np.empty(num_bytes + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + num_bytes]
