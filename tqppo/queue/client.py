"""The transfer queue: rows by key, columns by name, tensors straight to and from storage.

A `Queue` is a small picklable handle; in another process it connects when it is first used. Every call has a deadline
and returns all the rows it was asked for, or raises. `queue.aio` has the same calls for event loops.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tqppo.columns import Column, custom, declare
from tqppo.errors import QueueError
from tqppo.processes.nodes import is_on_ray
from tqppo.queue.aio import FINISHED_OR_FAILED, AsyncQueue
from tqppo.queue.connection import Connection
from tqppo.queue.index.answers import Stats
from tqppo.queue.link.calls import run
from tqppo.queue.link.service import Link, LocalLink, Service
from tqppo.queue.meta import BatchMeta, ColumnData, Jagged, Tags
from tqppo.queue.storage import StorageSpec

__all__ = ["BatchMeta", "Jagged", "Queue"]


class Queue:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.storage, self.spec = connection.storage_name, connection.spec
        self.aio = AsyncQueue(connection)

    @classmethod
    def create(
        cls, storage: str = "simple", *, budget_bytes: int = 4 << 30, timeout_s: float = 60.0, dir: str = "",
        local: bool = False,
    ) -> Queue:  # fmt: skip
        """A new, empty queue. `local`: all in this process, without Ray."""
        if not local and not is_on_ray():
            raise QueueError("a queue needs Ray to be started first; or make it with local=True, for one process")
        spec = StorageSpec(
            run=uuid.uuid4().hex[:12], budget_bytes=int(budget_bytes), timeout_s=timeout_s, dir=dir,
            token=uuid.uuid4().hex, distributed=not local,
        )  # fmt: skip
        connection = Connection(storage, spec, _new_link(storage, spec))
        connection.own()
        return cls(connection)

    def put(
        self, keys: Sequence[str] | BatchMeta, columns: Mapping[str, ColumnData], *, partition: str | None = None,
        tags: Sequence[Tags] | None = None, timeout_s: float | None = None,
    ) -> BatchMeta:  # fmt: skip
        """Write columns of rows, and return the rows with these columns.

        By keys: new rows or known ones, in partition "train" unless another is given. By a batch: its rows, which must
        exist. Tags are JSON and merged into those that the rows have.
        """
        return run(self.aio.put(keys, columns, partition=partition, tags=tags, timeout_s=timeout_s))

    def get(self, batch: BatchMeta, columns: Sequence[str]) -> dict[str, ColumnData]:
        """Read columns: dense [B, *trailing], jagged nested tensors, or lists of JSON, which the caller may change."""
        return run(self.aio.get(batch, columns))

    def tag(self, tags: Mapping[str, Tags], *, partition: str = "train") -> None:
        """Merge tags into rows, atomically; unknown keys become rows without columns."""
        return run(self.aio.tag(tags, partition=partition))

    def list(self, partition: str = "train", *, where: Tags | None = None, cursor: int | None = None) -> BatchMeta:
        """Rows by tags: equal, one of a tuple, or absent (None). With the `cursor` of a batch, those changed since."""
        return run(self.aio.list(partition, where=where, cursor=cursor))

    def wait(
        self, keys: Sequence[str], *, partition: str = "train", where: Tags = FINISHED_OR_FAILED,
        timeout_s: float | None = None, at_least: int | None = None,
    ) -> BatchMeta:  # fmt: skip
        """Wait until all rows (or `at_least` so many) match, and return those that do."""
        return run(self.aio.wait(keys, partition=partition, where=where, timeout_s=timeout_s, at_least=at_least))

    def clear(self, batch: BatchMeta) -> None:
        """Remove rows and free their memory."""
        return run(self.aio.clear(batch))

    def stats(self) -> Stats:
        """Rows, bytes and blocks: in total, per partition, per node."""
        return run(self.aio.stats())

    def snapshot(self, folder: str | Path) -> None:
        """Write everything to a new folder, from which a queue with any storage can restore it."""
        run(self.aio.snapshot(folder))

    def restore(self, folder: str | Path) -> None:
        """Replace everything by what a snapshot holds."""
        run(self.aio.restore(folder))

    def close(self) -> None:
        """End the queue, if this is the handle that made it; otherwise only disconnect."""
        self._connection.close()

    def handle(self) -> Queue:
        """Another handle of this queue with buffers of its own, as another process or thread needs it."""
        return Queue(Connection(self.storage, self.spec, self._connection.link))

    def __reduce__(self) -> tuple[Callable[..., Queue], tuple[object, ...]]:
        return _unpickled, (self.storage, self.spec, self._connection.link, custom())


def _new_link(storage: str, spec: StorageSpec) -> Link:
    if not spec.distributed:
        return LocalLink(Service(storage, spec))
    from tqppo.queue.link.ray_link import RayLink

    return RayLink.start(storage, spec)


def _unpickled(storage: str, spec: StorageSpec, link: Link, columns: Sequence[Column]) -> Queue:
    """A handle in another process, which declares the columns that its sender has declared."""
    for each in columns:
        declare(each)
    return Queue(Connection(storage, spec, link))
