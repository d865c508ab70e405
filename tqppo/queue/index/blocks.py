"""The blocks that the index knows: where each one is, which cells it holds, and when its memory may be freed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tqppo.errors import QueueError
from tqppo.queue.index.budget import Budget
from tqppo.queue.index.pins import Pins
from tqppo.queue.storage import Locator

log = logging.getLogger(__name__)

Free = Callable[[Sequence[Locator]], None]


@dataclass(slots=True)
class Record:
    """One block: where it is, which cells were put with it, and how many of them are still in use."""

    locator: Locator
    partition: str
    slots: np.ndarray  # row in the block → slot of the table
    columns: tuple[str, ...]
    live: int

    @property
    def cells(self) -> int:
        return len(self.slots) * len(self.columns)

    def add_column(self, name: str, slots: np.ndarray, rows: np.ndarray) -> None:
        """Count cells that a snapshot restores: these rows of the block, in these slots."""
        size = max(len(self.slots), int(rows.max()) + 1)
        self.slots = np.concatenate((self.slots, np.full(size - len(self.slots), -1, np.int64)))
        self.slots[rows] = slots
        self.columns = (*self.columns, name)
        self.live += len(rows)


class Blocks:
    """Callers must hold the index lock."""

    def __init__(self, budget: Budget, free: Free) -> None:
        self.budget = budget
        self.pins = Pins()
        self.records: dict[int, Record] = {}  # by number
        self._free = free
        self._expected: dict[str, tuple[Locator, float]] = {}  # by the block's name; the float is when it was announced
        self._last_number = 0

    def new_numbers(self, count: int) -> range:
        first = self._last_number + 1
        self._last_number += count
        return range(first, first + count)

    def add(self, record: Record) -> int:
        (number,) = self.new_numbers(1)
        self.records[number] = record
        return number

    def locators(self) -> dict[int, Locator]:
        return {number: record.locator for number, record in self.records.items()}

    def release_cells(self, dead: Mapping[int, int]) -> None:
        """Subtract dead cells, by block; free the blocks that have none left."""
        empty = {}
        for number, cells in dead.items():
            record = self.records[number]
            record.live -= cells
            if record.live == 0:
                empty[number] = self.records.pop(number).locator
        self.free(empty)

    def replace_all(self, records: dict[int, Record]) -> None:
        """Swap all blocks for those of a snapshot."""
        old, self.records, self._expected = self.locators(), records, {}
        for record in records.values():
            self.budget.add(record.locator)
        self.free(old)

    def free(self, blocks: Mapping[int, Locator]) -> None:
        """Free blocks now, or once no snapshot pins them."""
        freed = self.pins.unpinned(blocks)
        if not freed:
            return
        try:
            self._free(freed)
        except (OSError, QueueError) as error:  # the rows are gone all the same
            log.warning("%d blocks could not be freed: %s", len(freed), error)
        self.budget.give_back(freed)

    def unpin(self, pin: int) -> None:
        self.free(self.pins.remove(pin))

    def expect(self, locator: Locator) -> None:
        self._expected[locator.block] = locator, time.monotonic()

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self._expected.pop(name, None)

    def expire(self, older_than_s: float) -> None:
        """Forget pins and expected blocks of snapshots that never finished."""
        self.free(self.pins.expire(older_than_s))
        oldest = time.monotonic() - older_than_s
        self._expected = {name: each for name, each in self._expected.items() if each[1] >= oldest}

    def known(self) -> list[Locator]:
        """Every block that a call may still ask for."""
        expected = [locator for locator, _ in self._expected.values()]
        return [*self.locators().values(), *expected, *self.pins.lingering()]

    def holders(self, node: str) -> str:
        """What fills a node, largest first, for a message."""
        held: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for record in self.records.values():
            if record.locator.node == node:
                entry = held.setdefault((record.partition, record.columns), [0, 0])
                entry[0] += record.locator.num_bytes
                entry[1] += record.live // max(1, len(record.columns))
        largest = sorted(held.items(), key=lambda item: -item[1][0])[:5]
        parts = [f"{size:,} bytes: {rows} rows of {p!r} × {', '.join(c)}" for (p, c), (size, rows) in largest]
        lingering = sum(locator.num_bytes for locator in self.pins.lingering() if locator.node == node)
        if lingering:
            parts.append(f"{lingering:,} bytes: a snapshot under way")
        return "; ".join(parts) or "no rows"
