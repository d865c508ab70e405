"""The index's part of snapshots: what to save, and how a saved state takes the place of the current one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from tqppo.errors import CheckpointError
from tqppo.queue.index.answers import Dump, TableDump
from tqppo.queue.index.blocks import Blocks, Record
from tqppo.queue.index.partitions import Partitions
from tqppo.queue.index.table import Table
from tqppo.queue.storage import Locator


class Snapshots:
    def __init__(self, lock: threading.RLock, partitions: Partitions, blocks: Blocks) -> None:
        self._lock, self._partitions, self._blocks = lock, partitions, blocks

    def dump(self) -> Dump:
        """Everything the index knows. The blocks are pinned until `unpin`, even if their rows are cleared."""
        with self._lock:
            tables = {name: table.dump() for name, table in self._partitions.tables.items()}
            pin = self._blocks.pins.add(self._blocks.records)
            return {"tables": tables, "blocks": self._blocks.locators(), "pin": pin}

    def unpin(self, pin: int) -> None:
        with self._lock:
            self._blocks.unpin(pin)

    def expect(self, locator: Locator) -> None:
        """Announce a block that a `load` will bring, so that it is not swept meanwhile."""
        with self._lock:
            self._blocks.expect(locator)

    def forget(self, blocks: Sequence[str]) -> None:
        """Withdraw announced blocks whose `load` failed."""
        with self._lock:
            self._blocks.forget(blocks)

    def load(self, tables: Mapping[str, TableDump], blocks: Mapping[int, Locator]) -> None:
        """Replace everything by a dump whose blocks were written again, at these places."""
        with self._lock:
            numbers = dict(zip(blocks, self._blocks.new_numbers(len(blocks)), strict=True))
            places = {numbers[block]: locator for block, locator in blocks.items()}
            records: dict[int, Record] = {}
            try:
                loaded = {name: _load_table(name, dumped, numbers, places, records) for name, dumped in tables.items()}
            except (KeyError, ValueError, TypeError, IndexError) as error:
                raise CheckpointError(f"the snapshot's index is damaged: {type(error).__name__} {error}") from error
            self._partitions.replace_all(loaded)
            self._blocks.replace_all(records)


def _load_table(
    name: str, dumped: TableDump, numbers: Mapping[int, int], places: Mapping[int, Locator],
    records: dict[int, Record],
) -> Table:  # fmt: skip
    """One partition of a dump; its blocks are added to the records."""
    table = Table()
    slots, _ = table.add(dumped["keys"])
    table.merge(slots, dumped["tags"])
    for column, (block_numbers, rows_in_block) in dumped["columns"].items():
        block_of, row_of = np.asarray(block_numbers, np.int64), np.asarray(rows_in_block, np.int32)
        for block in np.unique(block_of[block_of >= 0]).tolist():
            here, number = block_of == block, numbers[block]
            table.place(slots[here], (column,), number, row_of[here])
            record = records.setdefault(number, Record(places[number], name, np.full(0, -1, np.int64), (), 0))
            record.add_column(column, slots[here], row_of[here])
    return table
