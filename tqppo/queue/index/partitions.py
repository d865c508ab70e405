"""The partitions of the index: a table of rows each, the version of the whole, and the calls that wait for rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tqppo.errors import QueueError
from tqppo.queue.index.answers import Listing
from tqppo.queue.index.table import Table
from tqppo.queue.index.waiters import Waiters
from tqppo.queue.meta import Tags, shorten


class Partitions:
    """Callers must hold the index lock."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.version = 0
        self.waiters = Waiters(self._tags_of, self.listing)

    def existing(self, name: str, keys: Sequence[str]) -> Table:
        """The table of a partition that must exist; `keys` are for the error message."""
        table = self.tables.get(name)
        if table is None:
            known = ", ".join(sorted(self.tables)) or "none"
            raise QueueError(f"no rows in partition {name!r} (partitions: {known}); asked for {shorten(keys)}")
        return table

    def add(self, name: str) -> Table:
        return self.tables.setdefault(name, Table())

    def mark_changed(self, name: str, keys: Sequence[str], slots: np.ndarray) -> None:
        self.version += 1
        self.tables[name].versions[slots] = self.version
        self.waiters.changed(name, keys)

    def remove_rows(self, name: str, keys: Sequence[str]) -> dict[int, int]:
        """Remove rows; returns the number of cells that died, by block."""
        table = self.existing(name, keys)
        dead = table.remove(keys, table.slots(keys, name))
        if not table.rows:
            del self.tables[name]
        self.version += 1
        self.waiters.changed(name, keys)
        return dead

    def replace_all(self, tables: Mapping[str, Table]) -> None:
        """Swap all partitions for those of a snapshot."""
        self.version += 1
        self.tables = dict(tables)
        for table in self.tables.values():
            table.versions[:] = self.version
        self.waiters.all_changed()

    def find(self, name: str, where: Tags, after: int) -> Listing:
        table = self.tables.get(name)
        return self.listing(name, [] if table is None else table.find(where, after))

    def listing(self, name: str, keys: Sequence[str]) -> Listing:
        table = self.tables.get(name)
        if table is None:
            return [], [], (), self.version
        slots = np.array([table.rows[key] for key in keys], np.int64)
        return [*keys], table.tags_at(slots), table.common_columns(slots), self.version

    def _tags_of(self, name: str, key: str) -> Tags | None:
        table = self.tables.get(name)
        return None if table is None else table.tags_of(key)
