"""The queue's metadata: per partition, key → row, column → (block, row in it), tags; waiting calls; bytes per node.

Pure Python and numpy without I/O, used by the Ray actor (`link.ray_link`) and by a local queue alike. A row becomes
visible after its bytes are in place, and every change is atomic.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from tqppo.errors import QueueError
from tqppo.queue.index.answers import Listing, Located, PartitionStats, Published, Stats
from tqppo.queue.index.blocks import Blocks, Free, Record
from tqppo.queue.index.budget import Budget
from tqppo.queue.index.compaction import Compaction
from tqppo.queue.index.partitions import Partitions
from tqppo.queue.index.snapshots import Snapshots
from tqppo.queue.index.waiters import Waiter
from tqppo.queue.link.calls import Pending
from tqppo.queue.meta import Tags
from tqppo.queue.storage import Locator

SNAPSHOT_PATIENCE = 5  # a snapshot may take this many times as long as other calls


class Index:
    def __init__(self, budget_bytes: int, free: Free) -> None:
        self._lock = threading.RLock()
        self._budget = Budget(budget_bytes, self._lock)
        self._blocks = Blocks(self._budget, free)
        self._partitions = Partitions()
        self.compaction = Compaction(self._lock, self._partitions, self._blocks)
        self.snapshots = Snapshots(self._lock, self._partitions, self._blocks)

    # -- writing ---------------------------------------------------------------------------------------------------

    def room(self, node: str, num_bytes: int, ticket: str) -> Pending[None]:
        """Reserve bytes of a node under a ticket once they fit. Asked before a large block is written."""
        with self._lock:
            return self._budget.reserve(node, num_bytes, ticket, holders=lambda: self._blocks.holders(node))

    def release(self, prefix: str) -> None:
        """Give back the bytes reserved under all tickets with this prefix."""
        with self._lock:
            self._budget.release(prefix)

    def publish(
        self, partition: str, keys: Sequence[str], tags: Sequence[Tags] | None, columns: Sequence[str],
        locator: Locator, ticket: str | None = None, must_exist: bool = False,
    ) -> Pending[Published]:  # fmt: skip
        """Make a written block visible: at once with a ticket of `room`, otherwise when the node's budget allows."""
        if tags is not None and len(tags) != len(keys):
            raise QueueError(f"{len(keys)} rows were given {len(tags)} tags")

        def grant() -> Published:
            if must_exist:
                self._partitions.existing(partition, keys).slots(keys, partition)
            return self._publish(partition, keys, tags, tuple(columns), locator)

        with self._lock:
            if not self._budget.redeem(ticket):
                return self._budget.ask(
                    locator.node, locator.num_bytes, grant=grant, holders=lambda: self._blocks.holders(locator.node)
                )
            try:
                return Pending.done(grant())
            except QueueError:
                self._budget.give_back([locator])
                raise

    def _publish(
        self, partition: str, keys: Sequence[str], tags: Sequence[Tags] | None, columns: tuple[str, ...],
        locator: Locator,
    ) -> Published:  # fmt: skip
        table = self._partitions.add(partition)
        slots, known = table.add(keys)
        number = self._blocks.add(Record(locator, partition, slots, columns, len(keys) * len(columns)))
        replaced = table.place(slots, columns, number, np.arange(len(keys), dtype=np.int32))
        had_tags = any(table.tags[slot] for slot in slots[known].tolist())
        if tags is not None:
            table.merge(slots, tags)
        self._partitions.mark_changed(partition, keys, slots)
        stored = table.tags_at(slots) if had_tags else None
        version = self._partitions.version
        self._blocks.release_cells(replaced)  # last, because waiting puts may be granted the memory at once
        return {"tags": stored, "version": version, "spare": self._budget.spare(locator.node)}

    def tag(self, partition: str, keys: Sequence[str], tags: Sequence[Tags]) -> int:
        """Merge tags into rows; unknown keys become rows without columns. Returns the version."""
        with self._lock:
            table = self._partitions.add(partition)
            slots, _ = table.add(keys)
            table.merge(slots, tags)
            self._partitions.mark_changed(partition, keys, slots)
            return self._partitions.version

    def clear(self, partition: str, keys: Sequence[str]) -> list[int]:
        """Remove rows; returns the blocks that are worth compacting."""
        with self._lock:
            shrunk = self._partitions.remove_rows(partition, keys)
            self._blocks.release_cells(shrunk)
            return [block for block in shrunk if self.compaction.is_worthwhile(block)]

    # -- reading ---------------------------------------------------------------------------------------------------

    def locate(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> Located:
        """Where the cells are. An unknown key, or a column missing on one row, is an error that names them."""
        with self._lock:
            table = self._partitions.existing(partition, keys)
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
            return Located([(int(n), self._blocks.records[int(n)].locator) for n in numbers], compact)

    def list(self, partition: str, where: Tags | None, cursor: int | None) -> Listing:
        """The rows whose tags match; with a cursor, only those that changed after it."""
        with self._lock:
            return self._partitions.find(partition, where or {}, -1 if cursor is None else cursor)

    def wait(self, partition: str, keys: Sequence[str], where: Tags, at_least: int) -> Pending[Listing]:
        """The rows of these keys that match, like `list`, once there are `at_least` so many."""
        waiters, waiter = self._partitions.waiters, Waiter(partition, keys, where, at_least)

        def explain() -> str:
            with self._lock:
                return waiters.missing(waiter)

        def drop() -> bool:
            with self._lock:
                return waiters.drop(waiter)

        with self._lock:
            waiters.add(waiter)
        return Pending(waiter.future, explain, drop)

    # -- accounts --------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        with self._lock:
            partitions: dict[str, PartitionStats] = {
                name: {"rows": len(table.rows), "columns": sorted(table.columns), "bytes": 0, "blocks": 0}
                for name, table in self._partitions.tables.items()
            }
            for record in self._blocks.records.values():
                partitions[record.partition]["bytes"] += record.locator.num_bytes
                partitions[record.partition]["blocks"] += 1
            nodes = self._budget.stats()
            rows = sum(each["rows"] for each in partitions.values())
            used = sum(node["bytes"] for node in nodes.values())
            blocks = len(self._blocks.records)
            return {"rows": rows, "bytes": used, "blocks": blocks, "partitions": partitions, "nodes": nodes}

    def known(self) -> Sequence[Locator]:
        """Every block that a call may still ask for."""
        with self._lock:
            return self._blocks.known()

    def holds(self, locator: Locator) -> bool:
        with self._lock:
            return any(record.locator.block == locator.block for record in self._blocks.records.values())

    def expire(self, older_than_s: float) -> None:
        """Release what clients that died had reserved, pinned or announced."""
        with self._lock:
            self._budget.expire(older_than_s)
            self._blocks.expire(SNAPSHOT_PATIENCE * older_than_s)
