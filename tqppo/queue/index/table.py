"""One partition of the index: rows by key, their tags, and for every column the cell (block, row in it) of each row.

Cells are numpy arrays over row slots, so that looking up thousands of rows is a few array operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tqppo.errors import QueueError
from tqppo.queue.index.answers import TableDump
from tqppo.queue.meta import TagDict, Tags, shorten

_NONE = -1


class Cells:
    """A column of a partition: per slot the block's number (-1: no value) and the row in that block."""

    def __init__(self, size: int) -> None:
        self.block = np.full(size, _NONE, np.int64)
        self.row = np.zeros(size, np.int32)

    def grow(self, size: int) -> None:
        more = size - len(self.block)
        self.block = np.concatenate((self.block, np.full(more, _NONE, np.int64)))
        self.row = np.concatenate((self.row, np.zeros(more, np.int32)))


class Table:
    def __init__(self) -> None:
        self.rows: dict[str, int] = {}  # key → slot
        self.tags: list[TagDict] = []  # slot → tags
        self.versions = np.zeros(0, np.int64)
        self.columns: dict[str, Cells] = {}
        self._spare: list[int] = []

    def add(self, keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The slots of these keys, new ones where a key is unknown, and a mask of the known keys."""
        found = list(map(self.rows.get, keys))
        known = np.array([slot is not None for slot in found], bool)
        slots = np.empty(len(found), np.int64)
        slots[known] = [slot for slot in found if slot is not None]
        slots[~known] = self._new([key for key, slot in zip(keys, found, strict=True) if slot is None])
        self._grow(len(self.tags))
        return slots, known

    def _new(self, keys: Sequence[str]) -> list[int]:
        kept = max(0, len(self._spare) - len(keys))
        slots, self._spare = self._spare[kept:], self._spare[:kept]
        more = range(len(self.tags), len(self.tags) + len(keys) - len(slots))
        self.tags.extend({} for _ in more)
        slots.extend(more)
        self.rows.update(zip(keys, slots, strict=True))
        return slots

    def _grow(self, size: int) -> None:
        if size > len(self.versions):
            room = max(64, 2 * size)
            self.versions = np.concatenate((self.versions, np.zeros(room - len(self.versions), np.int64)))
            for cells in self.columns.values():
                cells.grow(room)

    def slots(self, keys: Sequence[str], partition: str) -> np.ndarray:
        found = list(map(self.rows.get, keys))
        if None in found:
            unknown = [key for key, slot in zip(keys, found, strict=True) if slot is None]
            raise QueueError(f"partition {partition!r} has no rows {shorten(unknown)} ({len(unknown)} of {len(keys)})")
        return np.array(found, np.int64)

    def merge(self, slots: np.ndarray, tags: Sequence[Tags]) -> None:
        for slot, tag in zip(slots.tolist(), tags, strict=True):
            self.tags[slot] = {**self.tags[slot], **tag}  # a new dict, because answers being sent refer to the old one

    def tags_of(self, key: str) -> TagDict | None:
        slot = self.rows.get(key)
        return None if slot is None else self.tags[slot]

    def tags_at(self, slots: np.ndarray) -> list[TagDict]:
        """Copies of the tags, because the caller of a local queue may change them."""
        return [dict(self.tags[slot]) for slot in slots.tolist()]

    def place(self, slots: np.ndarray, columns: Sequence[str], block: int, rows: np.ndarray) -> dict[int, int]:
        """Point cells at a block; returns the number of cells that this replaced, by block."""
        dead: dict[int, int] = {}
        for name in columns:
            if name not in self.columns:
                self.columns[name] = Cells(len(self.versions))
            cells = self.columns[name]
            _count(dead, cells.block[slots])
            cells.block[slots], cells.row[slots] = block, rows
        return dead

    def holds(self, name: str, slots: np.ndarray, block: int) -> np.ndarray:
        """A mask of the rows of a block that a column still points at. Row i of it is in slots[i] (-1: in none)."""
        cells = self.columns.get(name)
        if cells is None:
            return np.zeros(len(slots), bool)
        is_used: np.ndarray = (slots >= 0) & (cells.block[slots] == block) & (cells.row[slots] == np.arange(len(slots)))
        return is_used

    def cells(self, name: str, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = self.columns[name]
        return found.block[slots], found.row[slots]

    def remove(self, keys: Sequence[str], slots: np.ndarray) -> dict[int, int]:
        """Remove rows; returns the number of cells that died, by block."""
        dead: dict[int, int] = {}
        for name, cells in list(self.columns.items()):
            _count(dead, cells.block[slots])
            cells.block[slots] = _NONE
            if len(keys) == len(self.rows) or (cells.block == _NONE).all():
                del self.columns[name]
        for key, slot in zip(keys, slots.tolist(), strict=True):
            del self.rows[key]
            self.tags[slot] = {}
        self._spare.extend(slots.tolist())
        return dead

    def check_columns(self, partition: str, keys: Sequence[str], slots: np.ndarray, columns: Sequence[str]) -> None:
        unknown = [name for name in columns if name not in self.columns]
        if unknown:
            known = ", ".join(sorted(self.columns)) or "none"
            raise QueueError(f"partition {partition!r} has no columns {shorten(unknown)}; it has: {known}")
        for name in columns:
            lacking = np.flatnonzero(self.columns[name].block[slots] == _NONE)
            if len(lacking):
                raise QueueError(
                    f"column {name!r} of partition {partition!r} is missing on rows "
                    f"{shorten([keys[i] for i in lacking.tolist()])} ({len(lacking)} of {len(keys)})"
                )

    def common_columns(self, slots: np.ndarray) -> tuple[str, ...]:
        if not len(slots):
            return ()
        return tuple(name for name, cells in self.columns.items() if (cells.block[slots] != _NONE).all())

    def find(self, where: Tags, after: int) -> list[str]:
        """Keys of the rows that changed after a version and whose tags match, in the order of their first put."""
        changed = self.versions > after
        return [key for key, slot in self.rows.items() if changed[slot] and matches(self.tags[slot], where)]

    def dump(self) -> TableDump:
        slots = np.array(list(self.rows.values()), np.int64)
        columns: dict[str, Sequence[Sequence[int] | np.ndarray]]
        columns = {name: [cells.block[slots], cells.row[slots]] for name, cells in self.columns.items()}
        return {"keys": list(self.rows), "tags": [self.tags[slot] for slot in slots], "columns": columns}


def _count(dead: dict[int, int], blocks: np.ndarray) -> None:
    last = int(blocks.max(initial=_NONE))
    if last == _NONE:
        return
    if int(blocks.min()) == last:  # the usual case needs no sort
        dead[last] = dead.get(last, 0) + len(blocks)
        return
    for block, cells in zip(*np.unique(blocks[blocks != _NONE], return_counts=True), strict=True):
        dead[int(block)] = dead.get(int(block), 0) + int(cells)


def matches(tags: Tags, where: Tags) -> bool:
    """Whether each tag is equal to the wanted value, one of several (list, tuple), or absent (None)."""
    for name, wanted in where.items():
        found = tags.get(name)
        if isinstance(wanted, (list, tuple)):
            if found not in wanted:
                return False
        elif found != wanted:
            return False
    return True
