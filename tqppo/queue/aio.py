"""The queue's calls as coroutines, for event loops; `Queue` offers the same calls blocking.

They await nothing but `calls.Reply`, so that `calls.run` can drive them without an event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tqppo.errors import DataLost, QueueError
from tqppo.queue import snapshots
from tqppo.queue.blocks.arena import Arena
from tqppo.queue.blocks.block import Block
from tqppo.queue.blocks.encode import encode
from tqppo.queue.blocks.gather import Runs, Shape, excerpt, gather, nothing
from tqppo.queue.connection import Connection
from tqppo.queue.fetch import Fetched, fetch
from tqppo.queue.index.answers import Listing, Located, Stats
from tqppo.queue.index.compaction import Compaction
from tqppo.queue.index.index import Index
from tqppo.queue.link.calls import NoAnswer, clean_up
from tqppo.queue.meta import BatchMeta, ColumnData, Json, TagDict, Tags, check_keys, plain, plain_tags, shorten
from tqppo.queue.storage import Locator, Storage

log = logging.getLogger(__name__)

FINISHED_OR_FAILED = {"status": ("finished", "failed")}
RETRIES = 8  # a block may move between the look-up and the read; each retry asks the index again


class AsyncQueue:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._arena = Arena(keep_bytes=min(connection.spec.budget_bytes, 1 << 30))
        self._spare = 0  # bytes left on this node, by the last answer of the index

    async def put(
        self, keys: Sequence[str] | BatchMeta, columns: Mapping[str, ColumnData], *, partition: str | None = None,
        tags: Sequence[Tags] | None = None, timeout_s: float | None = None,
    ) -> BatchMeta:  # fmt: skip
        """See `Queue.put`."""
        is_append = isinstance(keys, BatchMeta)
        batch = _rows_to_put(keys, partition, tags)
        if not len(batch) or not columns:
            if len(batch):
                raise QueueError(f"a put needs at least one column; to set tags only, use tag(): {shorten(batch.keys)}")
            return batch.with_columns(*columns)
        sent = None if tags is None else plain_tags(batch.keys, tags)
        if timeout_s is None:
            timeout_s = self.connection.spec.timeout_s
        names, deadline = tuple(columns), time.monotonic() + timeout_s
        locator, ticket = await self._write(encode(columns, batch.keys), batch, names, deadline)
        publish = self.connection.call(Index.publish, timeout_s=_seconds_until(deadline))
        answer = await publish(batch.partition, batch.keys, sent, names, locator, ticket, is_append)
        self._spare = answer["spare"]
        stored = batch.tags if is_append and tags is None else tuple(answer["tags"] or sent or batch.tags)
        return BatchMeta(batch.partition, batch.keys, stored, batch.columns, answer["version"]).with_columns(*names)

    async def _write(
        self, block: Block, batch: BatchMeta, names: Sequence[str], deadline: float
    ) -> tuple[Locator, str | None]:
        """Write a block. Where memory may be short, reserve it first; the ticket is of that reservation."""
        store = await self.connection.storage()
        ticket = await self._reserve(block.num_bytes, deadline) if self._spare < 4 * block.num_bytes else None
        try:
            return await store.write(block), ticket
        except BaseException as error:
            if ticket is not None:
                await clean_up(self.connection.call(Index.release)(ticket))
            if isinstance(error, (DataLost, NoAnswer)):
                raise DataLost(f"columns {', '.join(names)} of {_describe(batch)} were not put: {error}") from error
            raise

    async def _reserve(self, num_bytes: int, deadline: float) -> str:
        """A ticket for this many bytes of this node."""
        ticket = self.connection.link.ticket()
        room = self.connection.call(Index.room, timeout_s=_seconds_until(deadline))
        try:
            await room(self.connection.node, num_bytes, ticket)
        except QueueError:
            raise
        except BaseException:  # cancelled, perhaps after the grant
            await clean_up(self.connection.call(Index.release)(ticket))
            raise
        return ticket

    async def get(self, batch: BatchMeta, columns: Sequence[str]) -> dict[str, ColumnData]:
        """See `Queue.get`."""
        names = [columns] if isinstance(columns, str) else list(dict.fromkeys(columns))
        if not len(batch):
            return {name: nothing(name) for name in names}
        if not names:
            return {}
        store = await self.connection.storage()
        for _ in range(RETRIES):
            located = await self.connection.call(Index.locate)(batch.partition, batch.keys, names)
            fetched = await self._fetch(store, located, batch, names)
            if not fetched.missing:
                return self._gather(fetched, names)
        raise _lost(located, fetched.missing, batch, "their blocks are not where the index says")

    async def _fetch(self, store: Storage, located: Located, batch: BatchMeta, names: Sequence[str]) -> Fetched:
        try:
            return await fetch(store, located, names, self.connection.node)
        except (DataLost, NoAnswer) as error:
            raise _lost(located, range(len(located.blocks)), batch, str(error)) from error

    def _gather(self, fetched: Fetched, names: Sequence[str]) -> dict[str, ColumnData]:
        found: dict[str, ColumnData] = {}
        shapes: dict[bytes, Shape] = {}
        for group, block, row in fetched.cells:
            runs = Runs.of(block, row)
            found.update((name, gather(fetched.views, runs, name, self._arena, shapes)) for name in group)
        return {name: found[name] for name in names}

    async def tag(self, tags: Mapping[str, Tags], *, partition: str = "train") -> None:
        """See `Queue.tag`."""
        if tags:
            keys = tuple(tags)
            check_keys(keys)
            await self.connection.call(Index.tag)(partition, keys, plain_tags(keys, list(tags.values())))

    async def list(
        self, partition: str = "train", *, where: Tags | None = None, cursor: int | None = None
    ) -> BatchMeta:
        """See `Queue.list`."""
        return _batch(partition, await self.connection.call(Index.list)(partition, _filter(where or {}), cursor))

    async def wait(
        self, keys: Sequence[str], *, partition: str = "train", where: Tags = FINISHED_OR_FAILED,
        timeout_s: float | None = None, at_least: int | None = None,
    ) -> BatchMeta:  # fmt: skip
        """See `Queue.wait`."""
        _check_list(keys)
        wanted = len(keys) if at_least is None else min(at_least, len(keys))
        wait = self.connection.call(Index.wait, timeout_s=timeout_s)
        return _batch(partition, await wait(partition, tuple(keys), _filter(where), wanted))

    async def clear(self, batch: BatchMeta) -> None:
        """See `Queue.clear`."""
        if not len(batch):
            return
        for block in await self.connection.call(Index.clear)(batch.partition, batch.keys):
            try:
                await self._compact(block)
            except QueueError as error:  # the rows are gone all the same
                log.warning("part of a block stays allocated until its other rows are cleared: %s", error)

    async def stats(self) -> Stats:
        """See `Queue.stats`."""
        return await self.connection.call(Index.stats)()

    async def snapshot(self, folder: str | Path) -> None:
        """See `Queue.snapshot`."""
        await snapshots.save(Path(folder), self.connection)

    async def restore(self, folder: str | Path) -> None:
        """See `Queue.restore`."""
        await snapshots.load(Path(folder), self.connection)

    async def _compact(self, block: int) -> None:
        """Copy what is left of a block into a smaller one, so that the rest of its memory is freed."""
        survivors = await self.connection.call(Compaction.survivors)(block)
        if survivors is None:
            return
        locator, columns, rows = survivors
        store, here = await self.connection.storage(), self.connection.node
        if locator.node != here and await self._spare_bytes(here) < locator.num_bytes:
            return  # the copy would move to this node, which has no room for it
        (view,) = await store.read([locator], columns)
        if view is None:
            return
        smaller = await store.write(excerpt(view, columns, rows))
        if not await self.connection.call(Compaction.replace)(block, rows, columns, smaller):
            store.free([smaller])

    async def _spare_bytes(self, node: str) -> int:
        account = (await self.stats())["nodes"].get(node)
        return self.connection.spec.budget_bytes if account is None else account["budget"] - account["bytes"]


def _lost(located: Located, lost: Collection[int], batch: BatchMeta, why: str) -> DataLost:
    """An error that names the rows, columns and nodes of the blocks that could not be read."""
    keys: dict[str, None] = {}
    columns: list[str] = []
    for names, block, _ in located.groups:
        rows = [i for i, b in enumerate(block.tolist()) if b in lost]
        keys.update(dict.fromkeys(batch.keys[i] for i in rows))
        columns += names if rows else []
    nodes = sorted({located.blocks[i][1].node for i in lost})
    return DataLost(
        f"columns {', '.join(columns)} of {_describe(batch, keys)} are lost with node {', '.join(nodes)}: {why}"
    )


def _rows_to_put(keys: Sequence[str] | BatchMeta, partition: str | None, tags: Sequence[Tags] | None) -> BatchMeta:
    if not isinstance(keys, BatchMeta):
        _check_list(keys)
    if tags is not None and len(tags) != len(keys):
        raise QueueError(f"{len(keys)} keys were given {len(tags)} tags")
    if not isinstance(keys, BatchMeta):
        return BatchMeta(partition or "train", tuple(keys))
    if partition not in (None, keys.partition):
        raise QueueError(f"rows of partition {keys.partition!r} cannot be put into partition {partition!r}")
    return keys


def _check_list(keys: Sequence[str]) -> None:
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        raise QueueError(f"keys are a list of strings, not a {type(keys).__name__}: {keys!r}")
    check_keys(keys)


def _batch(partition: str, listing: Listing) -> BatchMeta:
    keys, tags, columns, version = listing
    return BatchMeta(partition, tuple(keys), tuple(tags), tuple(columns), version)


def _filter(where: Tags) -> TagDict:
    return plain({name: _as_list(wanted) for name, wanted in where.items()})


def _as_list(wanted: Json) -> Json:
    return list(wanted) if isinstance(wanted, (set, frozenset, tuple)) else wanted


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _describe(batch: BatchMeta, keys: Collection[str] | None = None) -> str:
    return f"rows {shorten(batch.keys if keys is None else keys)} of partition {batch.partition!r}"
