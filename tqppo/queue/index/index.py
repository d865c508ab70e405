"""The queue's metadata: per partition, key → row, column → (block, row in it), tags; who waits; bytes per node.

Pure Python and numpy, no I/O, used by the Ray actor (`service`) and in one process alike. Rows appear when
their bytes are in place, so there are no ghost keys; every change is atomic.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tqppo.errors import CheckpointError, QueueError
from tqppo.protocols import Locator
from tqppo.queue.index.budget import Budget
from tqppo.queue.index.pins import Pins
from tqppo.queue.index.table import Table
from tqppo.queue.index.waiters import Waiter, Waiters
from tqppo.queue.link.calls import Waiting
from tqppo.queue.meta import shorten

log = logging.getLogger(__name__)

COMPACT_ABOVE_BYTES = 64 * 1024
Rows = tuple[list[str], list[dict[str, Any]], tuple[str, ...], int]  # keys, tags, common columns, version


@dataclass(slots=True)
class Record:
    """One block: where it is, which cells were put with it, and how many of them still live."""

    locator: Locator
    partition: str
    slots: np.ndarray  # row in the block → slot of the table
    columns: tuple[str, ...]
    live: int

    @property
    def cells(self) -> int:
        return len(self.slots) * len(self.columns)


@dataclass(frozen=True, slots=True)
class Located:
    """The answer to `locate`: blocks, and per group of columns the cells (index into `blocks`, row in it)."""

    blocks: list[tuple[int, Locator]]
    groups: list[tuple[list[str], np.ndarray, np.ndarray]]


class Index:
    def __init__(self, budget_bytes: int, free: Callable[[Sequence[Locator]], None]) -> None:
        self._lock = threading.RLock()
        self.budget = Budget(budget_bytes, self._lock)
        self._free = free
        self._tables: dict[str, Table] = {}
        self._blocks: dict[int, Record] = {}
        self._expected: dict[str, tuple[Locator, float]] = {}  # by block, and since when
        self._pins = Pins()
        self._waiters = Waiters(self._tags_of, self._rows)
        self._next_block = 0
        self._version = 0

    # -- writing ---------------------------------------------------------------------------------------------------

    def room(self, node: str, num_bytes: int, ticket: str) -> Waiting:
        """Wait until this many bytes fit on a node, and reserve them: asked before a large block is written."""
        with self._lock:
            return self.budget.reserve(node, num_bytes, ticket, holders=lambda: self._holders(node))

    def release(self, tickets: str) -> None:
        """Of bytes that were reserved and will not be written, under all tickets that begin like this."""
        with self._lock:
            self.budget.release(tickets)

    def publish(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]] | None, columns: Sequence[str],
        locator: Locator, ticket: str | None = None, must_exist: bool = False,
    ) -> Waiting | dict[str, Any]:  # fmt: skip
        """Make a written block visible: at once with a ticket of `room`, else when the budget of its node allows."""
        if tags is not None and len(tags) != len(keys):
            raise QueueError(f"{len(keys)} rows were given {len(tags)} tags")

        def grant() -> dict[str, Any]:
            if must_exist:
                self._table(partition, keys).slots(keys, partition)
            return self._publish(partition, keys, tags, tuple(columns), locator)

        with self._lock:
            if not self.budget.redeem(ticket):
                return self.budget.ask(
                    locator.node, locator.num_bytes, grant=grant, holders=lambda: self._holders(locator.node)
                )
            try:
                return grant()
            except QueueError:
                self.budget.give_back([locator])
                raise

    def _publish(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]] | None, columns: tuple[str, ...],
        locator: Locator,
    ) -> dict[str, Any]:  # fmt: skip
        table = self._tables.setdefault(partition, Table())
        slots, known = table.add(keys)
        number = self._next_block = self._next_block + 1
        self._blocks[number] = Record(locator, partition, slots, columns, len(keys) * len(columns))
        replaced = table.place(slots, columns, number, np.arange(len(keys), dtype=np.int32))
        had_tags = any(table.tags[slot] for slot in slots[known].tolist())
        if tags is not None:
            table.merge(slots, tags)
        self._changed(partition, keys, slots)
        stored = table.tags_at(slots) if had_tags else None  # None: just what the caller gave
        version = self._version
        self._release(replaced)  # last, because others may be granted the memory at once
        return {"tags": stored, "version": version, "spare": self.budget.spare(locator.node)}

    def tag(self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> int:
        """Merge tags into rows; rows that do not exist are made, without columns."""
        with self._lock:
            table = self._tables.setdefault(partition, Table())
            slots, _ = table.add(keys)
            table.merge(slots, tags)
            self._changed(partition, keys, slots)
            return self._version

    def clear(self, partition: str, keys: Sequence[str]) -> list[int]:
        """Forget rows; answers with the blocks that are worth compacting."""
        with self._lock:
            table = self._table(partition, keys)
            slots = table.slots(keys, partition)
            shrunk = table.remove(keys, slots)
            if not table.rows:
                del self._tables[partition]
            self._version += 1
            self._waiters.changed(partition, keys)
            self._release(shrunk)
            return [block for block in shrunk if self._is_sparse(block)]

    # -- compaction ------------------------------------------------------------------------------------------------

    def _is_sparse(self, block: int) -> bool:
        """Whether a copy of the rows and columns that still have something would be half as large, or smaller."""
        record = self._blocks.get(block)
        if record is None or record.locator.num_bytes < COMPACT_ABOVE_BYTES or 2 * record.live > record.cells:
            return False
        alive = self._alive(block, record)
        return 2 * int(alive.any(axis=0).sum()) * int(alive.any(axis=1).sum()) <= record.cells

    def survivors(self, block: int) -> tuple[Locator, tuple[str, ...], np.ndarray] | None:
        """What is left of a block: where it is, the columns and rows that still live. None: nothing."""
        with self._lock:
            record = self._blocks.get(block)
            if record is None:
                return None
            alive = self._alive(block, record)
            columns = tuple(name for name, cells in zip(record.columns, alive, strict=True) if cells.any())
            return record.locator, columns, np.flatnonzero(alive.any(axis=0))

    def _alive(self, block: int, record: Record) -> np.ndarray:
        """bool [columns, rows]"""
        table = self._tables[record.partition]
        return np.stack([table.holds(name, record.slots, block) for name in record.columns])

    def replace(self, block: int, rows: np.ndarray, columns: tuple[str, ...], locator: Locator) -> bool:
        """Swap a block for a copy of these rows and columns of it. False: the copy came too late and may go."""
        with self._lock:
            record = self._blocks.get(block)
            if record is None:
                return False
            table, number = self._tables[record.partition], self._next_block + 1
            self._next_block = number
            moved = 0
            for name in columns:
                still = table.holds(name, record.slots, block)[rows]
                places = np.flatnonzero(still).astype(np.int32)
                table.place(record.slots[rows[still]], (name,), number, places)
                moved += len(places)
            self._blocks[number] = Record(locator, record.partition, record.slots[rows], columns, moved)
            self.budget.add(locator)
            self._release({block: moved, number: 0})
            return True

    def _release(self, dead: Mapping[int, int]) -> None:
        """Count cells of blocks as gone; blocks without any are freed."""
        empty = {}
        for number, cells in dead.items():
            record = self._blocks[number]
            record.live -= cells
            if record.live == 0:
                empty[number] = self._blocks.pop(number).locator
        self._retire(empty)

    def _retire(self, blocks: Mapping[int, Locator]) -> None:
        """Free blocks; those that a snapshot is about to read, later."""
        freed = self._pins.unpinned(blocks)
        if not freed:
            return
        try:
            self._free(freed)
        except (OSError, QueueError) as error:  # the rows are gone all the same
            log.warning("%d blocks could not be freed: %s", len(freed), error)
        self.budget.give_back(freed)

    # -- reading ---------------------------------------------------------------------------------------------------

    def locate(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> Located:
        """Where the cells are. An unknown key, or a column missing on one row, is an error that names them."""
        with self._lock:
            table = self._table(partition, keys)
            slots = table.slots(keys, partition)
            table.check_columns(partition, keys, slots, columns)
            groups: list[tuple[list[str], np.ndarray, np.ndarray]] = []
            for name in columns:
                block, row = table.cells(name, slots)
                for names, other, rows in groups:
                    if np.array_equal(block, other) and np.array_equal(row, rows):
                        names.append(name)
                        break
                else:
                    groups.append(([name], block, row))
            numbers = np.unique(np.concatenate([block for _, block, _ in groups]))
            compact = [(names, np.searchsorted(numbers, block).astype(np.int32), row) for names, block, row in groups]
            return Located([(int(n), self._blocks[int(n)].locator) for n in numbers], compact)

    def list(self, partition: str, where: Mapping[str, Any] | None, cursor: int | None) -> Rows:
        """Rows whose tags match, of those changed after `cursor`."""
        with self._lock:
            table = self._tables.get(partition)
            found = [] if table is None else table.find(where or {}, -1 if cursor is None else cursor)
            return self._rows(partition, found)

    def _rows(self, partition: str, keys: Sequence[str]) -> Rows:
        table = self._tables.get(partition)
        if table is None:
            return [], [], (), self._version
        slots = np.array([table.rows[key] for key in keys], np.int64)
        return [*keys], table.tags_at(slots), table.common_columns(slots), self._version

    def wait(self, partition: str, keys: Sequence[str], where: Mapping[str, Any], at_least: int) -> Waiting:
        """Answer like `list`, of these keys, when `at_least` of them match."""
        waiter = Waiter(partition, keys, where, at_least)

        def explain() -> str:
            with self._lock:
                return self._waiters.missing(waiter)

        def drop() -> bool:
            with self._lock:
                return self._waiters.drop(waiter)

        with self._lock:
            self._waiters.add(waiter)
        return Waiting(waiter.future, explain, drop)

    def _tags_of(self, partition: str, key: str) -> Mapping[str, Any] | None:
        table = self._tables.get(partition)
        return None if table is None else table.tags_of(key)

    def _changed(self, partition: str, keys: Sequence[str], slots: np.ndarray) -> None:
        self._version += 1
        self._tables[partition].versions[slots] = self._version
        self._waiters.changed(partition, keys)

    # -- accounts --------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        with self._lock:
            partitions: dict[str, dict[str, Any]] = {
                name: {"rows": len(table.rows), "columns": sorted(table.columns), "bytes": 0, "blocks": 0}
                for name, table in self._tables.items()
            }
            for record in self._blocks.values():
                partitions[record.partition]["bytes"] += record.locator.num_bytes
                partitions[record.partition]["blocks"] += 1
            nodes = self.budget.stats()
            rows = sum(len(table.rows) for table in self._tables.values())
            held = sum(node["bytes"] for node in nodes.values())
            return {"rows": rows, "bytes": held, "blocks": len(self._blocks), "partitions": partitions, "nodes": nodes}

    def _holders(self, node: str) -> str:
        """Who fills a node, largest first."""
        held: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for record in self._blocks.values():
            if record.locator.node == node:
                entry = held.setdefault((record.partition, record.columns), [0, 0])
                entry[0] += record.locator.num_bytes
                entry[1] += record.live // max(1, len(record.columns))
        largest = sorted(held.items(), key=lambda item: -item[1][0])[:5]
        parts = [f"{size:,} bytes: {rows} rows of {p!r} × {', '.join(c)}" for (p, c), (size, rows) in largest]
        lingering = sum(locator.num_bytes for locator in self._pins.lingering() if locator.node == node)
        if lingering:
            parts.append(f"{lingering:,} bytes: a snapshot under way")
        return "; ".join(parts) or "nobody"

    def known(self) -> Sequence[Locator]:
        """Every block that somebody may still ask for."""
        with self._lock:
            published = [record.locator for record in self._blocks.values()]
            return [*published, *(locator for locator, _ in self._expected.values()), *self._pins.lingering()]

    def holds(self, locator: Locator) -> bool:
        with self._lock:
            return any(record.locator.block == locator.block for record in self._blocks.values())

    def expire(self, older_than_s: float) -> None:
        """Let go of what processes reserved or pinned that never came back."""
        with self._lock:
            self.budget.expire(older_than_s)
            patience_s = 5 * older_than_s  # a snapshot may take a while
            self._retire(self._pins.expire(patience_s))
            old = time.monotonic() - patience_s
            self._expected = {block: each for block, each in self._expected.items() if each[1] >= old}

    # -- snapshots -------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot. The blocks stay until `unpin`, whatever becomes of their rows."""
        with self._lock:
            tables = {name: table.dump() for name, table in self._tables.items()}
            return {
                "tables": tables,
                "blocks": {number: record.locator for number, record in self._blocks.items()},
                "pin": self._pins.add(self._blocks),
            }

    def unpin(self, pin: int) -> None:
        with self._lock:
            self._retire(self._pins.remove(pin))

    def expect(self, locator: Locator) -> None:
        """A block that a `load` is going to bring; until then it counts as known."""
        with self._lock:
            self._expected[locator.block] = locator, time.monotonic()

    def forget(self, blocks: Sequence[str]) -> None:
        """Of blocks that were expected and will not come."""
        with self._lock:
            for block in blocks:
                self._expected.pop(block, None)

    def load(self, tables: Mapping[str, Mapping[str, Any]], blocks: Mapping[int, Locator]) -> None:
        """Replace everything by a dump, its blocks written anew at these places."""
        with self._lock:
            numbers = {block: self._next_block + i for i, block in enumerate(blocks, start=1)}
            places = {numbers[block]: locator for block, locator in blocks.items()}
            records: dict[int, Record] = {}
            try:
                loaded = {name: _loaded(name, dumped, numbers, places, records) for name, dumped in tables.items()}
            except (KeyError, ValueError, TypeError, IndexError) as error:
                raise CheckpointError(f"the snapshot's index is damaged: {type(error).__name__} {error}") from error
            old = {number: record.locator for number, record in self._blocks.items()}
            self._tables, self._blocks, self._expected = loaded, records, {}
            self._next_block += len(blocks)
            self._version += 1
            for table in loaded.values():
                table.versions[:] = self._version
            for record in records.values():
                self.budget.add(record.locator)
            self._waiters.all_changed()
            self._retire(old)

    def _table(self, partition: str, keys: Sequence[str]) -> Table:
        table = self._tables.get(partition)
        if table is None:
            known = ", ".join(sorted(self._tables)) or "none"
            raise QueueError(f"no rows in partition {partition!r} (partitions: {known}); asked for {shorten(keys)}")
        return table


def _loaded(
    name: str, dumped: Mapping[str, Any], numbers: Mapping[int, int], places: Mapping[int, Locator],
    records: dict[int, Record],
) -> Table:  # fmt: skip
    """A partition of a dump; its blocks are added to the records."""
    table = Table()
    slots, _ = table.add(dumped["keys"])
    table.merge(slots, dumped["tags"])
    for column, (block_of, row_of) in dumped["columns"].items():
        block_of, row_of = np.asarray(block_of, np.int64), np.asarray(row_of, np.int32)
        for block in np.unique(block_of[block_of >= 0]).tolist():
            here, number = block_of == block, numbers[block]
            table.place(slots[here], (column,), number, row_of[here])
            record = records.setdefault(number, Record(places[number], name, np.full(0, -1, np.int64), (), 0))
            _count_cells(record, column, slots[here], row_of[here])
    return table


def _count_cells(record: Record, column: str, slots: np.ndarray, rows: np.ndarray) -> None:
    size = max(len(record.slots), int(rows.max()) + 1)
    record.slots = np.concatenate((record.slots, np.full(size - len(record.slots), -1, np.int64)))
    record.slots[rows] = slots
    record.columns = (*record.columns, column)
    record.live += len(rows)
