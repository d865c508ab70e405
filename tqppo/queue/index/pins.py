"""Blocks that snapshots are being made of: should their last row go meanwhile, they stay until the snapshot is done."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping

from tqppo.protocols import Locator


class Pins:
    """Guarded by the index's lock."""

    def __init__(self) -> None:
        self._pins: dict[int, tuple[frozenset[int], float]] = {}  # blocks by number, and since when
        self._lingering: dict[int, Locator] = {}
        self._numbers = itertools.count(1)

    def add(self, blocks: Collection[int]) -> int:
        pin = next(self._numbers)
        self._pins[pin] = frozenset(blocks), time.monotonic()
        return pin

    def unpinned(self, blocks: Mapping[int, Locator]) -> list[Locator]:
        """Those of these dead blocks that may be freed; the others linger."""
        free = []
        for number, locator in blocks.items():
            if any(number in pinned for pinned, _ in self._pins.values()):
                self._lingering[number] = locator
            else:
                free.append(locator)
        return free

    def remove(self, pin: int) -> dict[int, Locator]:
        """What lingered until now; some of it may be pinned still."""
        self._pins.pop(pin, None)
        lingered, self._lingering = self._lingering, {}
        return lingered

    def expire(self, older_than_s: float) -> dict[int, Locator]:
        old = time.monotonic() - older_than_s
        self._pins = {pin: (blocks, since) for pin, (blocks, since) in self._pins.items() if since >= old}
        return self.remove(0)

    def lingering(self) -> Collection[Locator]:
        return self._lingering.values()
