"""A process's connection to a queue: the index behind a link, and the storage. `Queue` and `AsyncQueue` share one."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from tqppo import plugins
from tqppo.errors import DataLost, QueueError
from tqppo.processes.nodes import this_node
from tqppo.queue.link.calls import START_S, Pending, Unresponsive, run
from tqppo.queue.link.service import Link
from tqppo.queue.meta import shorten
from tqppo.queue.storage import Storage, StorageSpec

log = logging.getLogger(__name__)

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


class Connection:
    """Connects when it is first used."""

    def __init__(self, storage: str, spec: StorageSpec, link: Link) -> None:
        self.storage_name, self.spec, self.link = storage, spec, link
        self._storage: Storage | None = None
        self._end: weakref.finalize[[int, Link, Storage], Connection] | None = None
        self._is_closed = False

    def own(self) -> None:
        """Connect, and end the queue with this object."""
        storage = run(self.storage())
        self._end = weakref.finalize(self, _end, os.getpid(), self.link, storage)

    async def storage(self) -> Storage:
        self._check_open()
        if self._storage is None:
            storage: Storage = plugins.load("storage", self.storage_name)(self.spec)
            await self.link.join(self.node, timeout_s=max(self.spec.timeout_s, START_S))
            self._storage = storage
        return self._storage

    @overload
    def call(
        self, method: Callable[Concatenate[S, P], Pending[T]], timeout_s: float | None = None
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def call(
        self, method: Callable[Concatenate[S, P], T], timeout_s: float | None = None
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def call(self, method: Callable[..., object], timeout_s: float | None = None) -> Callable[..., object]:
        """A method of the index, to be called and awaited here: `await connection.call(Index.locate)(…)`."""

        async def remote(*args: object) -> object:
            self._check_open()
            deadline_s = self.spec.timeout_s if timeout_s is None else timeout_s
            try:
                return await self.link.call(method.__name__, *args, timeout_s=deadline_s)
            except (DataLost, Unresponsive) as error:
                raise type(error)(f"{error}. {self._asked(args)}") from error

        return remote

    def _asked(self, args: Sequence[object]) -> str:
        """Where the index is, and the rows that a call to it is about."""
        place = self.link.place
        partition, keys = (*args, None, None)[:2]
        if not isinstance(partition, str) or not isinstance(keys, tuple | list) or not keys:
            return place
        return f"{place}, and was asked about rows {shorten(keys)} of partition {partition!r}"

    @property
    def node(self) -> str:
        """The node of this process, as storages and the index name it."""
        return this_node() if self.spec.distributed else "local"

    def close(self) -> None:
        """End the queue if this process owns it; otherwise only disconnect."""
        if self._end is not None:
            self._end()
            self._is_closed = True
        self._storage = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise QueueError("the queue is closed")


def _end(owner: int, link: Link, storage: Storage) -> None:
    if os.getpid() != owner:  # a forked child inherits the connection, but does not own the queue
        return
    try:
        link.close()
    except QueueError as error:
        log.warning("the queue's index did not answer while the queue was closed: %s", error)
    run(storage.close())  # removes what a dead index could not
