"""Blocks pinned by a running snapshot: not freed until it finishes, even if all their rows are cleared."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping

from tqppo.queue.storage import Locator


class Pins:
    """Callers must hold the index lock."""

    def __init__(self) -> None:
        self._pins: dict[int, tuple[frozenset[int], float]] = {}  # pin → numbers of its blocks, start time
        self._lingering: dict[int, Locator] = {}
        self._numbers = itertools.count(1)

    def add(self, blocks: Collection[int]) -> int:
        pin = next(self._numbers)
        self._pins[pin] = frozenset(blocks), time.monotonic()
        return pin

    def unpinned(self, blocks: Mapping[int, Locator]) -> list[Locator]:
        """The dead blocks that may be freed now; those that are pinned are remembered for later."""
        free = []
        for number, locator in blocks.items():
            if any(number in pinned for pinned, _ in self._pins.values()):
                self._lingering[number] = locator
            else:
                free.append(locator)
        return free

    def remove(self, pin: int) -> dict[int, Locator]:
        """End a pin; returns all blocks that had to wait, of which other pins may still hold some."""
        self._pins.pop(pin, None)
        lingered, self._lingering = self._lingering, {}
        return lingered

    def expire(self, older_than_s: float) -> dict[int, Locator]:
        """End old pins; returns what `remove` does."""
        old = time.monotonic() - older_than_s
        self._pins = {pin: (blocks, since) for pin, (blocks, since) in self._pins.items() if since >= old}
        return self.remove(0)

    def lingering(self) -> Collection[Locator]:
        """Dead blocks that a pin keeps."""
        return self._lingering.values()
