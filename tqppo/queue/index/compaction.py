"""Copying what is left of a block into a smaller one, so that the memory of its cleared rows is freed.

The client copies the bytes; the index says what is left and swaps the blocks.
"""

from __future__ import annotations

import threading

import numpy as np

from tqppo.queue.index.blocks import Blocks, Record
from tqppo.queue.index.partitions import Partitions
from tqppo.queue.storage import Locator

COMPACT_ABOVE_BYTES = 64 * 1024


class Compaction:
    def __init__(self, lock: threading.RLock, partitions: Partitions, blocks: Blocks) -> None:
        self._lock, self._partitions, self._blocks = lock, partitions, blocks

    def is_worthwhile(self, block: int) -> bool:
        """Whether a copy of the rows and columns in use would be at most half as large. Needs the index lock."""
        record = self._blocks.records.get(block)
        if record is None or record.locator.num_bytes < COMPACT_ABOVE_BYTES or 2 * record.live > record.cells:
            return False
        live = self._live_cells(block, record)
        return 2 * int(live.any(axis=0).sum()) * int(live.any(axis=1).sum()) <= record.cells

    def survivors(self, block: int) -> tuple[Locator, tuple[str, ...], np.ndarray] | None:
        """The place of a block and its columns and rows in use; None if no row is."""
        with self._lock:
            record = self._blocks.records.get(block)
            if record is None:
                return None
            live = self._live_cells(block, record)
            columns = tuple(name for name, cells in zip(record.columns, live, strict=True) if cells.any())
            return record.locator, columns, np.flatnonzero(live.any(axis=0))

    def replace(self, block: int, rows: np.ndarray, columns: tuple[str, ...], locator: Locator) -> bool:
        """Swap a block for a copy of these rows and columns. False if the block is gone, so the copy is not needed."""
        with self._lock:
            record = self._blocks.records.get(block)
            if record is None:
                return False
            table = self._partitions.tables[record.partition]
            copy = Record(locator, record.partition, record.slots[rows], columns, 0)
            number = self._blocks.add(copy)
            for name in columns:
                is_live = table.holds(name, record.slots, block)[rows]
                places = np.flatnonzero(is_live).astype(np.int32)
                table.place(record.slots[rows[is_live]], (name,), number, places)
                copy.live += len(places)
            self._blocks.budget.add(locator)
            self._blocks.release_cells({block: copy.live, number: 0})
            return True

    def _live_cells(self, block: int, record: Record) -> np.ndarray:
        """bool [columns, rows]"""
        table = self._partitions.tables[record.partition]
        return np.stack([table.holds(name, record.slots, block) for name in record.columns])
