"""The queue's metadata: per partition, key → row, column → (block, row in it), tags; who waits; bytes per node.

Pure Python and numpy, no I/O, used by the Ray actor (`service`) and in one process alike. Rows appear when
their bytes are in place, so there are no ghost keys; every change is atomic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from tqppo.errors import QueueError
from tqppo.protocols import Locator
from tqppo.queue.budget import Budget
from tqppo.queue.calls import Waiting
from tqppo.queue.meta import shorten
from tqppo.queue.table import Table, matches

COMPACT_ABOVE_BYTES = 64 * 1024


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
        self._expected: list[Locator] = []
        self._next_block = 0
        self._version = 0
        self._waiters: list[tuple[str, Callable[[], Any], Future[Any]]] = []

    # -- writing ---------------------------------------------------------------------------------------------------

    def room(self, node: str, num_bytes: int) -> Waiting:
        """Wait until this many bytes fit on a node, without taking them: asked before a large block is written."""

        def grant() -> None:
            self.budget.give_back([Locator(node, "", num_bytes)])

        with self._lock:
            return self.budget.ask(node, num_bytes, grant=grant, holders=lambda: self._holders(node))

    def publish(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]] | None, columns: tuple[str, ...],
        locator: Locator,
    ) -> Waiting:  # fmt: skip
        """Make a written block visible, as soon as the budget of its node allows."""
        with self._lock:
            return self.budget.ask(
                locator.node,
                locator.num_bytes,
                grant=lambda: self._publish(partition, keys, tags, columns, locator),
                holders=lambda: self._holders(locator.node),
            )

    def _publish(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]] | None, columns: tuple[str, ...],
        locator: Locator,
    ) -> dict[str, Any]:  # fmt: skip
        table = self._tables.setdefault(partition, Table())
        slots, known = table.add(keys)
        number = self._next_block = self._next_block + 1
        self._blocks[number] = Record(locator, partition, slots, tuple(columns), len(keys) * len(columns))
        self._release(table.place(slots, columns, number, np.arange(len(keys), dtype=np.int32)))
        before = [dict(table.tags[slot]) for slot in slots[known]] if known.any() else []
        if tags is not None:
            table.merge(slots, tags)
        self._changed(partition, slots)
        stored = [table.tags[slot] for slot in slots] if any(before) else None  # None: just what the caller gave
        return {"tags": stored, "version": self._version, "spare": self.budget.spare(locator.node)}

    def tag(self, partition: str, tags: Mapping[str, Mapping[str, Any]]) -> int:
        """Merge tags into rows; rows that do not exist are made, without columns."""
        with self._lock:
            table = self._tables.setdefault(partition, Table())
            slots, _ = table.add(list(tags))
            table.merge(slots, list(tags.values()))
            self._changed(partition, slots)
            return self._version

    def clear(self, partition: str, keys: Sequence[str]) -> list[int]:
        """Forget rows; answers with the blocks that are worth compacting."""
        with self._lock:
            table = self._table(partition, keys)
            slots = table.slots(keys, partition)
            shrunk = table.remove(keys, slots)
            self._release(shrunk)
            if not table.rows:
                del self._tables[partition]
            self._version += 1
            return [block for block in shrunk if self._is_sparse(block)]

    # -- compaction ------------------------------------------------------------------------------------------------

    def _is_sparse(self, block: int) -> bool:
        record = self._blocks.get(block)
        if record is None or record.locator.num_bytes < COMPACT_ABOVE_BYTES:
            return False
        return 2 * record.live <= record.cells

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
        freed = []
        for number, cells in dead.items():
            record = self._blocks[number]
            record.live -= cells
            if record.live == 0:
                freed.append(self._blocks.pop(number).locator)
        if freed:
            self._free(freed)
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

    def list(
        self, partition: str, where: Mapping[str, Any] | None, cursor: int | None
    ) -> tuple[list[str], list[dict[str, Any]], tuple[str, ...], int]:
        """Rows whose tags match, of those changed after `cursor`: keys, tags, common columns, the new cursor."""
        with self._lock:
            table = self._tables.get(partition)
            if table is None:
                return [], [], (), self._version
            found = table.find(where or {}, -1 if cursor is None else cursor)
            slots = np.array([table.rows[key] for key in found], np.int64)
            return found, [table.tags[s] for s in slots], table.common_columns(slots), self._version

    def wait(self, partition: str, keys: Sequence[str], where: Mapping[str, Any], at_least: int) -> Waiting:
        """Answer like `list`, of these keys, when `at_least` of them match."""

        def ready() -> Any:
            table = self._tables.get(partition)
            tags = [] if table is None else [(key, table.tags_of(key)) for key in keys]
            done = [key for key, tag in tags if tag is not None and matches(tag, where)]
            if len(done) < at_least:
                return None
            assert table is not None or not done
            slots = np.array([table.rows[key] for key in done], np.int64) if table else np.zeros(0, np.int64)
            kept = [table.tags[s] for s in slots] if table else []
            return done, kept, (table.common_columns(slots) if table else ()), self._version

        with self._lock:
            future: Future[Any] = Future()
            future.set_running_or_notify_cancel()  # whoever waits may give up, but not cancel it
            entry = (partition, ready, future)
            self._waiters.append(entry)
            self._wake(partition)
            return Waiting(future, lambda: self._missing(partition, keys, where, at_least), lambda: self._drop(entry))

    def _missing(self, partition: str, keys: Sequence[str], where: Mapping[str, Any], at_least: int) -> str:
        with self._lock:
            table = self._tables.get(partition)
            late = []
            for key in keys:
                tag = table.tags_of(key) if table else None
                if tag is None:
                    late.append(f"{key} (no such row yet)")
                elif not matches(tag, where):
                    late.append(f"{key} ({', '.join(f'{name}={tag.get(name)!r}' for name in where)})")
        done = len(keys) - len(late)
        wanted = ", ".join(f"{name} in {value!r}" for name, value in where.items())
        return (
            f"{done} of {len(keys)} rows of partition {partition!r} have {wanted or 'appeared'} "
            f"({at_least} wanted); still missing: {shorten(late)}"
        )

    def _drop(self, entry: tuple[str, Callable[[], Any], Future[Any]]) -> bool:
        with self._lock:
            if entry not in self._waiters:
                return False
            self._waiters.remove(entry)
            return True

    def _changed(self, partition: str, slots: np.ndarray) -> None:
        self._version += 1
        self._tables[partition].versions[slots] = self._version
        self._wake(partition)

    def _wake(self, partition: str) -> None:
        for entry in [waiter for waiter in self._waiters if waiter[0] == partition]:
            answer = entry[1]()
            if answer is not None:
                self._waiters.remove(entry)
                entry[2].set_result(answer)

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
        return "; ".join(parts) or "nobody"

    def known(self) -> Sequence[Locator]:
        """Every block that somebody may still ask for."""
        with self._lock:
            return [*(record.locator for record in self._blocks.values()), *self._expected]

    def expect(self, locator: Locator) -> None:
        """A block that a `load` is going to bring; until then it counts as known."""
        with self._lock:
            self._expected.append(locator)

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot."""
        with self._lock:
            tables = {name: table.dump() for name, table in self._tables.items()}
            return {"tables": tables, "blocks": {number: r.locator for number, r in self._blocks.items()}}

    def load(self, tables: Mapping[str, Mapping[str, Any]], blocks: Mapping[int, Locator]) -> None:
        """Replace everything by a dump, its blocks written anew at these places."""
        with self._lock:
            old = [record.locator for record in self._blocks.values()]
            self._tables, self._blocks, self._expected = {}, {}, []
            self._free(old)
            for locator in blocks.values():
                self.budget.add(locator)
            self.budget.give_back(old)
            numbers = {block: self._next_block + i for i, block in enumerate(blocks, start=1)}
            self._next_block += len(blocks)
            for name, dumped in tables.items():
                self._load(name, dumped, numbers, blocks)

    def _load(
        self, name: str, dumped: Mapping[str, Any], numbers: Mapping[int, int], blocks: Mapping[int, Locator]
    ) -> None:
        table = self._tables[name] = Table()
        slots, _ = table.add(dumped["keys"])
        table.merge(slots, dumped["tags"])
        for column, (block_of, row_of) in dumped["columns"].items():
            block_of, row_of = np.asarray(block_of, np.int64), np.asarray(row_of, np.int32)
            for block in np.unique(block_of[block_of >= 0]).tolist():
                here = block_of == block
                table.place(slots[here], (column,), numbers[block], row_of[here])
                self._adopt(numbers[block], blocks[block], name, column, (slots[here], row_of[here]))
        self._changed(name, slots)

    def _adopt(
        self, number: int, locator: Locator, partition: str, column: str, cells: tuple[np.ndarray, np.ndarray]
    ) -> None:
        """Count a column's cells (slots, rows) in a block that was loaded."""
        slots, rows = cells
        record = self._blocks.setdefault(number, Record(locator, partition, np.full(0, -1, np.int64), (), 0))
        size = max(len(record.slots), int(rows.max()) + 1)
        record.slots = np.concatenate((record.slots, np.full(size - len(record.slots), -1, np.int64)))
        record.slots[rows] = slots
        record.columns = (*record.columns, column)
        record.live += len(rows)

    def _table(self, partition: str, keys: Sequence[str]) -> Table:
        table = self._tables.get(partition)
        if table is None:
            known = ", ".join(sorted(self._tables)) or "none"
            raise QueueError(f"no rows in partition {partition!r} (partitions: {known}); asked for {shorten(keys)}")
        return table
