"""The index with its storage, behind one coroutine, in the caller's process. `ray_link` has it as a Ray actor."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from tqppo import plugins
from tqppo.errors import QueueError
from tqppo.queue.index.index import Index
from tqppo.queue.link.calls import GRACE_S, Pending, run
from tqppo.queue.storage import Locator, Storage, StorageSpec

if TYPE_CHECKING:
    from tqppo.queue.link.wire import Disconnected


class Service:
    """Answers the clients' calls. The index never sees bytes, the storage never sees keys."""

    def __init__(self, storage: str, spec: StorageSpec) -> None:
        self.storage: Storage = plugins.load("storage", storage)(spec)
        self.index = Index(spec.budget_bytes, self.storage.free)
        self._methods = methods_of(self.index)
        self._joined: set[str] = set()
        self._arriving: dict[str, Locator] = {}  # blocks whose put waits for the budget
        self._patience_s = 2 * (spec.timeout_s + GRACE_S)  # by then a producer has published its block, or is dead
        self._swept_at = time.monotonic()

    async def join(self, node: str) -> None:
        """Make a node ready for writers and readers."""
        if node not in self._joined:
            await self.storage.start(node)
            self._joined.add(node)

    async def call(
        self, method: str, args: tuple[Any, ...], timeout_s: float, disconnected: Disconnected | None = None
    ) -> Any:
        """Answer a call within its deadline; raises ConnectionError if the caller disconnects before."""
        arriving = {arg.block: arg for arg in args if isinstance(arg, Locator)} if method == "publish" else {}
        self._arriving.update(arriving)
        try:
            self._sweep()
            answer = self._methods[method](*args)
            if isinstance(answer, Pending):
                return await _unless(disconnected, answer.within(timeout_s))
            return answer
        except BaseException:  # the block is written, but no row refers to it
            self.storage.free([locator for locator in arriving.values() if not self.index.holds(locator)])
            raise
        finally:
            for block in arriving:
                del self._arriving[block]

    def _sweep(self) -> None:
        """Now and then, free the blocks of producers that died before they published them."""
        if time.monotonic() < self._swept_at + self._patience_s:
            return
        self._swept_at = time.monotonic()
        self.index.expire(self._patience_s)
        self.storage.sweep([*self.index.known(), *list(self._arriving.values())], self._patience_s)

    async def close(self) -> None:
        await self.storage.close()


def methods_of(index: Index) -> dict[str, Callable[..., Any]]:
    """Every method that clients may call, by its name. `Connection.call` takes them as `Index.locate` and so on."""
    compaction, snapshots = index.compaction, index.snapshots
    methods: list[Callable[..., Any]] = [
        index.room, index.release, index.publish, index.tag, index.clear, index.locate, index.list, index.wait,
        index.stats, compaction.survivors, compaction.replace, snapshots.dump, snapshots.unpin, snapshots.expect,
        snapshots.forget, snapshots.load,
    ]  # fmt: skip
    return {method.__name__: method for method in methods}


async def _unless(disconnected: Disconnected | None, pending: Pending[Any]) -> Any:
    if disconnected is None or pending.future.done():
        return await pending
    answer, end = asyncio.ensure_future(pending.resolve()), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({answer, end}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ConnectionError("the caller disconnected")
    finally:
        answer.cancel()
        end.cancel()
        await asyncio.wait({answer, end})


class Link(Protocol):
    """How a client reaches the service. `call` and `join` return awaitables that `calls.run` can drive."""

    @property
    def place(self) -> str:
        """Where the service is, as a sentence of an error message."""

    def call(self, method: str, *args: Any, timeout_s: float) -> Awaitable[Any]: ...
    def ticket(self) -> str: ...
    def join(self, node: str, *, timeout_s: float) -> Awaitable[None]: ...
    def close(self) -> None: ...


class LocalLink:
    """The service in this process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        run(service.join("local"))

    @property
    def place(self) -> str:
        return "It is in this process"

    def call(self, method: str, *args: Any, timeout_s: float) -> Awaitable[Any]:
        return self._service.call(method, args, timeout_s)

    def ticket(self) -> str:
        return uuid.uuid4().hex

    def join(self, node: str, *, timeout_s: float) -> Awaitable[None]:
        return self._service.join(node)

    def close(self) -> None:
        run(self._service.close())

    def __reduce__(self) -> Any:
        raise QueueError("a local queue lives in one process; make it with local=False to share it")
