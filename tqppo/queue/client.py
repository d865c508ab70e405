"""The transfer queue as everybody uses it: rows by key, columns by name, tensors straight to and from storage.

A `Queue` is a small picklable handle; in another process it connects when it is first used. Every call has a
deadline, a blocking form and an `a…` twin for event loops, and never returns fewer rows than it was asked for.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from tqppo import plugins
from tqppo.columns import Column, custom, declare
from tqppo.errors import DataLost, QueueError
from tqppo.protocols import Locator, Storage, StorageSpec
from tqppo.queue import snapshots
from tqppo.queue.blocks.arena import Arena
from tqppo.queue.blocks.block import Block, BlockView
from tqppo.queue.blocks.encode import encode
from tqppo.queue.blocks.gather import Runs, Shape, excerpt, gather, nothing
from tqppo.queue.index.index import Located
from tqppo.queue.link.calls import START_S, Silence, run, tidy
from tqppo.queue.link.service import Link, LocalLink, RayLink, Service, this_node
from tqppo.queue.meta import BatchMeta, Jagged, Tags, check_keys, plain, plain_tags, shorten

__all__ = ["BatchMeta", "Jagged", "Queue"]

Columns = Mapping[str, Any]
log = logging.getLogger(__name__)

SETTLED = {"status": ("finished", "failed")}
RETRIES = 8  # a block may move while it is looked up; each retry asks the index again


class Queue:
    def __init__(self, storage: str, spec: StorageSpec, link: Link) -> None:
        self.storage, self.spec = storage, spec
        self._link = link
        self._store: Storage | None = None
        self._arena = Arena(keep_bytes=min(spec.budget_bytes, 1 << 30))
        self._end: weakref.finalize | None = None
        self._closed = False
        self._spare = 0  # bytes left on this node, when the index was last heard

    @classmethod
    def create(
        cls, storage: str = "simple", *, budget_bytes: int = 4 << 30, timeout_s: float = 60.0, dir: str = "",
        local: bool = False,
    ) -> Queue:  # fmt: skip
        """A new, empty queue. `local`: all in this process, without Ray."""
        if not local and not ray.is_initialized():
            raise QueueError("a queue needs Ray to be started first; or make it with local=True, for one process")
        spec = StorageSpec(
            run=uuid.uuid4().hex[:12], budget_bytes=int(budget_bytes), timeout_s=timeout_s, dir=dir,
            token=uuid.uuid4().hex, distributed=not local,
        )  # fmt: skip
        link: Link = LocalLink(Service(storage, spec)) if local else RayLink.start(storage, spec)
        queue = cls(storage, spec, link)
        run(queue._storage())
        queue._end = weakref.finalize(queue, _end, os.getpid(), link, queue._store)
        return queue

    # -- blocking --------------------------------------------------------------------------------------------------

    def put(
        self, keys: Sequence[str] | BatchMeta, columns: Columns, *, partition: str | None = None,
        tags: Sequence[Tags] | None = None, timeout_s: float | None = None,
    ) -> BatchMeta:  # fmt: skip
        """Write columns of rows: by keys, new or known, of partition "train" if none is given; or of a batch, whose
        rows must be there, and which is answered with the columns added. Tags are merged, and are JSON."""
        return run(self.aput(keys, columns, partition=partition, tags=tags, timeout_s=timeout_s))

    def get(self, batch: BatchMeta, columns: Sequence[str]) -> dict[str, Any]:
        """Columns of rows: dense [B, *trailing], jagged nested tensors, lists of JSON. The caller may change them."""
        return run(self.aget(batch, columns))

    def tag(self, tags: Mapping[str, Tags], *, partition: str = "train") -> None:
        """Merge tags into rows, atomically; unknown keys become rows without columns."""
        return run(self.atag(tags, partition=partition))

    def list(self, partition: str = "train", *, where: Tags | None = None, cursor: int | None = None) -> BatchMeta:
        """Rows by tags: equal, one of a tuple, or absent (None). With a `cursor` (of a batch), those changed since."""
        return run(self.alist(partition, where=where, cursor=cursor))

    def wait(
        self, keys: Sequence[str], *, partition: str = "train", where: Tags = SETTLED, timeout_s: float | None = None,
        at_least: int | None = None,
    ) -> BatchMeta:  # fmt: skip
        """Wait at the index until all rows (or `at_least` so many) match; answers with those that do."""
        return run(self.await_(keys, partition=partition, where=where, timeout_s=timeout_s, at_least=at_least))

    def clear(self, batch: BatchMeta) -> None:
        """Forget rows, and give their memory back."""
        return run(self.aclear(batch))

    def stats(self) -> dict[str, Any]:
        """Rows, bytes and blocks: in all, per partition, per node."""
        return run(self.astats())

    def snapshot(self, folder: str | Path) -> None:
        """Write everything to a new folder; any storage can restore it."""
        run(self.asnapshot(folder))

    def restore(self, folder: str | Path) -> None:
        """Replace everything by what a snapshot holds."""
        run(self.arestore(folder))

    def close(self) -> None:
        """End the queue, if this is the handle that made it; otherwise only let go of it."""
        if self._end is not None:
            self._end()
            self._closed = True
        self._store = None

    # -- asynchronous ----------------------------------------------------------------------------------------------

    async def aput(
        self, keys: Sequence[str] | BatchMeta, columns: Columns, *, partition: str | None = None,
        tags: Sequence[Tags] | None = None, timeout_s: float | None = None,
    ) -> BatchMeta:  # fmt: skip
        is_append = isinstance(keys, BatchMeta)
        batch = _rows_to_put(keys, partition, tags)
        if not len(batch) or not columns:
            if len(batch):
                raise QueueError(f"a put needs at least one column; to set tags only, use tag(): {shorten(batch.keys)}")
            return batch.with_columns(*columns)
        sent = None if tags is None else plain_tags(batch.keys, tags)
        names, deadline = tuple(columns), time.monotonic() + (self.spec.timeout_s if timeout_s is None else timeout_s)
        block = encode(columns, batch.keys)
        locator, ticket = await self._write(block, batch, names, deadline)
        answer = await self._ask(
            "publish", batch.partition, batch.keys, sent, names, locator, ticket, is_append, timeout_s=_until(deadline)
        )
        self._spare = answer["spare"]
        stored = batch.tags if is_append and tags is None else tuple(answer["tags"] or sent or batch.tags)
        return BatchMeta(batch.partition, batch.keys, stored, batch.columns, answer["version"]).with_columns(*names)

    async def _write(
        self, block: Block, batch: BatchMeta, names: Sequence[str], deadline: float
    ) -> tuple[Locator, str | None]:
        """Place a block; where memory is (or may be) short, not before there is room for it."""
        store = await self._storage()
        ticket = await self._room(block.num_bytes, deadline) if self._spare < 4 * block.num_bytes else None
        try:
            return await store.write(block), ticket
        except BaseException as error:
            if ticket is not None:
                await tidy(self._ask("release", ticket))
            if isinstance(error, (DataLost, Silence)):
                raise DataLost(f"columns {', '.join(names)} of {_rows_of(batch)} were not put: {error}") from error
            raise

    async def _room(self, num_bytes: int, deadline: float) -> str:
        """A ticket for so much memory of this node."""
        ticket = self._link.ticket()
        try:
            await self._ask("room", this_place(self.spec), num_bytes, ticket, timeout_s=_until(deadline))
        except QueueError:
            raise
        except BaseException:  # cancelled, when it may have been granted already
            await tidy(self._ask("release", ticket))
            raise
        return ticket

    async def aget(self, batch: BatchMeta, columns: Sequence[str]) -> dict[str, Any]:
        names = [columns] if isinstance(columns, str) else list(dict.fromkeys(columns))
        if not len(batch):
            return {name: nothing(name) for name in names}
        if not names:
            return {}
        store = await self._storage()
        for _ in range(RETRIES):
            located: Located = await self._ask("locate", batch.partition, batch.keys, names)
            views = await self._open(store, located, batch, names)
            if None not in views:
                return self._gathered(located, views, names)
        raise self._lost(located, views, batch, "their blocks are not where the index says")

    async def atag(self, tags: Mapping[str, Tags], *, partition: str = "train") -> None:
        if tags:
            keys = tuple(tags)
            check_keys(keys)
            await self._ask("tag", partition, keys, plain_tags(keys, list(tags.values())))

    async def alist(
        self, partition: str = "train", *, where: Tags | None = None, cursor: int | None = None
    ) -> BatchMeta:
        return BatchMeta(partition, *await self._ask("list", partition, _plain_filter(where or {}), cursor))

    async def await_(
        self, keys: Sequence[str], *, partition: str = "train", where: Tags = SETTLED, timeout_s: float | None = None,
        at_least: int | None = None,
    ) -> BatchMeta:  # fmt: skip
        _check_list(keys)
        wanted = len(keys) if at_least is None else min(at_least, len(keys))
        answer = await self._ask("wait", partition, tuple(keys), _plain_filter(where), wanted, timeout_s=timeout_s)
        return BatchMeta(partition, *answer)

    async def aclear(self, batch: BatchMeta) -> None:
        if not len(batch):
            return
        for block in await self._ask("clear", batch.partition, batch.keys):
            try:
                await self._compact(block)
            except QueueError as error:  # the rows are gone all the same
                log.warning("part of a block's memory does not come back before its other rows are cleared: %s", error)

    async def astats(self) -> dict[str, Any]:
        return await self._ask("stats")

    async def asnapshot(self, folder: str | Path) -> None:
        await snapshots.save(Path(folder), self._ask, await self._storage())

    async def arestore(self, folder: str | Path) -> None:
        await snapshots.load(Path(folder), self._ask, await self._storage(), self.spec.budget_bytes)

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _storage(self) -> Storage:
        """The storage, connected once per process."""
        if self._closed:
            raise QueueError("the queue is closed")
        if self._store is None:
            store: Storage = plugins.load("storage", self.storage)(self.spec)
            await self._link.join(this_place(self.spec), timeout_s=max(self.spec.timeout_s, START_S))
            self._store = store
        return self._store

    async def _ask(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        if self._closed:
            raise QueueError("the queue is closed")
        return await self._link.call(method, *args, timeout_s=self.spec.timeout_s if timeout_s is None else timeout_s)

    async def _open(
        self, store: Storage, located: Located, batch: BatchMeta, names: Sequence[str]
    ) -> Sequence[BlockView | None]:
        try:
            return await store.read([locator for _, locator in located.blocks], names)
        except (DataLost, Silence) as error:
            raise self._lost(located, [None] * len(located.blocks), batch, str(error)) from error

    def _gathered(self, located: Located, views: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        shapes: dict[bytes, Shape] = {}
        for group, block, row in located.groups:
            runs = Runs.of(block, row)
            found.update((name, gather(views, runs, name, self._arena, shapes)) for name in group)
        return {name: found[name] for name in names}

    def _lost(self, located: Located, views: Sequence[Any], batch: BatchMeta, why: str) -> DataLost:
        """Name the rows, columns and nodes behind the blocks that could not be read."""
        gone = [i for i, view in enumerate(views) if view is None]
        keys: dict[str, None] = {}
        columns: list[str] = []
        for names, block, _ in located.groups:
            rows = [i for i, b in enumerate(block.tolist()) if b in gone]
            keys.update(dict.fromkeys(batch.keys[i] for i in rows))
            columns += names if rows else []
        nodes = sorted({located.blocks[i][1].node for i in gone})
        return DataLost(
            f"columns {', '.join(columns)} of {_rows_of(batch, keys)} are lost with node {', '.join(nodes)}: {why}"
        )

    async def _compact(self, block: int) -> None:
        """Copy what is left of a block into a smaller one, so that the rest of its memory comes back."""
        survivors = await self._ask("survivors", block)
        if survivors is None:
            return
        locator, columns, rows = survivors
        store, here = await self._storage(), this_place(self.spec)
        if locator.node != here and await self._spare_of(here) < locator.num_bytes:
            return  # it would come to this node, which has no room for it
        (view,) = await store.read([locator], columns)
        if view is None:
            return
        smaller = await store.write(excerpt(view, columns, rows))
        if not await self._ask("replace", block, rows, columns, smaller):
            store.free([smaller])

    async def _spare_of(self, node: str) -> int:
        account = (await self.astats())["nodes"].get(node)
        return self.spec.budget_bytes if account is None else account["budget"] - account["bytes"]

    def __reduce__(self) -> Any:
        return _arrived, (self.storage, self.spec, self._link, custom())


def _arrived(storage: str, spec: StorageSpec, link: Link, columns: Sequence[Column]) -> Queue:
    """A handle in another process, which learns the columns that its sender had declared."""
    for each in columns:
        declare(each)
    return Queue(storage, spec, link)


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


def _plain_filter(where: Tags) -> Any:
    several = (set, frozenset, tuple)
    return plain({name: list(wanted) if isinstance(wanted, several) else wanted for name, wanted in where.items()})


def _until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _rows_of(batch: BatchMeta, keys: Collection[str] | None = None) -> str:
    return f"rows {shorten(batch.keys if keys is None else keys)} of partition {batch.partition!r}"


def this_place(spec: StorageSpec) -> str:
    """The node of this process, as storages and the index call it."""
    return this_node() if spec.distributed else "local"


def _end(owner: int, link: Link, store: Storage | None) -> None:
    if os.getpid() != owner:  # a child that was forked has inherited the handle, not the queue
        return
    try:
        link.close()
    except QueueError as error:
        log.warning("the queue ends without its index: %s", error)
    if store is not None:  # what the index could not remove any more
        run(store.close())
