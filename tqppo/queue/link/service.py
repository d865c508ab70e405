"""The index with its storage, behind one coroutine: as a Ray actor for a cluster, or in the caller's process."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import ray

from tqppo import plugins
from tqppo.errors import QueueError
from tqppo.processes.ray_calls import call, this_node
from tqppo.queue.index.index import Index
from tqppo.queue.link.calls import GRACE_S, Heartbeat, Pending, RayReply, run
from tqppo.queue.link.wire import INDEX, Disconnected, NotJson, SocketClient, SocketServer
from tqppo.queue.storage import Locator, Storage, StorageSpec


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
        self.storage.sweep([*self.index.known(), *self._arriving.values()], self._patience_s)

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


class IndexActor:
    """The service as an asynchronous Ray actor."""

    def __init__(self, storage: str, spec: StorageSpec) -> None:
        self._service = Service(storage, spec)
        self._joining = asyncio.Lock()
        self._server = SocketServer(spec, self._service.call)

    async def join(self, node: str) -> None:
        async with self._joining:
            await self._server.open()
            await self._service.join(node)

    async def call(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        return await self._service.call(method, args, timeout_s)

    async def ping(self) -> None:
        return None

    async def collect(self, number: int) -> Any:
        return self._server.collect(number)

    async def close(self) -> None:
        self._server.close()
        await self._service.close()


class Link(Protocol):
    """How a client reaches the service. `call` and `join` return awaitables that `calls.run` can drive."""

    def call(self, method: str, *args: Any, timeout_s: float) -> Awaitable[Any]: ...
    def ticket(self) -> str: ...
    def join(self, node: str, *, timeout_s: float) -> Awaitable[None]: ...
    def close(self) -> None: ...


class LocalLink:
    """The service in this process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        run(service.join("local"))

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


class RayLink:
    """The service in its actor, found by name; processes on the actor's node send frequent calls over a socket.

    The actor ends when the handle returned by `start` is dropped.
    """

    def __init__(self, namespace: str, node: str, spec: StorageSpec, actor: Any = None) -> None:
        self.name, self.namespace, self.node, self.spec = f"tqppo-{spec.run}-index", namespace, node, spec
        self._actor = actor
        self._socket = SocketClient(spec)
        self._is_near: bool | None = None
        self._heartbeat = Heartbeat(lambda: self._handle().ping.remote())
        self._is_up = True

    @staticmethod
    def start(storage: str, spec: StorageSpec) -> RayLink:
        """Start the actor on this node; it takes no CPU from the plan."""
        link = RayLink(ray.get_runtime_context().namespace, this_node(), spec)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(link.node, soft=False)
        options = {"name": link.name, "num_cpus": 0, "max_concurrency": 10_000, "scheduling_strategy": here}
        link._actor = ray.remote(IndexActor).options(**options).remote(storage, spec)
        link._is_up = False
        return link

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        by_socket = self._socket.call(method, args, timeout_s, GRACE_S, [self._heartbeat]) if self._near() else None
        if by_socket is None:
            answer = call(self._handle(), IndexActor.call, method, args, timeout_s)
            return await self._reply(answer, timeout_s + GRACE_S)
        try:
            return await by_socket
        except NotJson as answer:
            return await self._reply(call(self._handle(), IndexActor.collect, answer.number), GRACE_S)

    def _near(self) -> bool:
        if self._is_near is None:
            self._is_near = this_node() == self.node
        return self._is_near

    async def join(self, node: str, *, timeout_s: float) -> None:
        joining = self._handle().join.remote(node)  # not cancelled at the deadline: other processes may wait for it too
        joined: RayReply[None] = RayReply(joining, INDEX, timeout_s, self._heartbeats())
        await joined
        self._is_up = True

    def ticket(self) -> str:
        """A new ticket for a reservation at the index. On the index's node it is released when this process ends."""
        return f"{self._socket.client_name() if self._near() else ''}-{uuid.uuid4().hex}"

    def _reply(self, answer: ray.ObjectRef[Any], timeout_s: float) -> RayReply[Any]:
        return CancellableCall(answer, INDEX, timeout_s, self._heartbeats())

    def _heartbeats(self) -> list[Heartbeat]:
        return [self._heartbeat] if self._is_up else []  # a process that is starting answers no ping yet

    def close(self) -> None:
        self._socket.close()
        if not ray.is_initialized():  # Ray ended first, and the actor with it
            return
        actor, self._actor = self._handle(), None
        try:
            run(_close(actor))
        finally:
            ray.kill(actor)

    def _handle(self) -> Any:
        if self._actor is None:
            try:
                self._actor = ray.get_actor(self.name, self.namespace)
            except ValueError as error:
                raise QueueError(f"the queue {self.name!r} is closed, or its index died") from error
        return self._actor

    def __reduce__(self) -> Any:
        return RayLink, (self.namespace, self.node, self.spec)


class CancellableCall(RayReply[Any]):
    """A call that Ray cancels when its caller gives it up, so that it does not go on waiting at the index."""

    def _abandon(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.cancel(self.ref, recursive=False)


async def _close(actor: Any) -> None:
    closed: RayReply[None] = RayReply(actor.close.remote(), INDEX, GRACE_S)
    await closed
