"""The index with its storage, behind one coroutine: as a Ray actor for a cluster, or called in the same process."""

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
from tqppo.protocols import Locator, Storage, StorageSpec
from tqppo.queue.index.index import Index
from tqppo.queue.link import wire
from tqppo.queue.link.calls import GRACE_S, Pulse, Remote, Waiting, run

_METHODS = frozenset({
    "publish", "room", "release", "tag", "clear", "survivors", "replace", "locate", "list", "wait", "stats", "dump",
    "unpin", "expect", "forget", "load",
})  # fmt: skip


class Service:
    """Answers the clients' calls; the index never sees bytes, the storage never sees keys."""

    def __init__(self, storage: str, spec: StorageSpec) -> None:
        self.storage: Storage = plugins.load("storage", storage)(spec)
        self.index = Index(spec.budget_bytes, self.storage.free)
        self._joined: set[str] = set()
        self._arriving: dict[str, Locator] = {}  # blocks whose put waits for the budget
        self._patience_s = 2 * (spec.timeout_s + GRACE_S)  # by then a producer has published its block, or never will
        self._swept_at = time.monotonic()

    async def join(self, node: str) -> None:
        """Make a node ready for writers and readers."""
        if node not in self._joined:
            await self.storage.start(node)
            self._joined.add(node)

    async def call(
        self, method: str, args: tuple[Any, ...], timeout_s: float, gone: Callable[[], Awaitable[Any]] | None = None
    ) -> Any:
        """Answer within the deadline; not if whoever asks is `gone` before."""
        assert method in _METHODS, f"the index has no method {method!r}"
        arriving = {arg.block: arg for arg in args if isinstance(arg, Locator)} if method == "publish" else {}
        self._arriving.update(arriving)
        try:
            self._sweep()
            answer = getattr(self.index, method)(*args)
            return await _unless(gone, answer.within(timeout_s)) if isinstance(answer, Waiting) else answer
        except BaseException:  # the block was written, but nobody will ever see it
            self.storage.free([locator for locator in arriving.values() if not self.index.holds(locator)])
            raise
        finally:
            for block in arriving:
                del self._arriving[block]

    def _sweep(self) -> None:
        """Now and then, free what producers left that died before they could publish it."""
        if time.monotonic() < self._swept_at + self._patience_s:
            return
        self._swept_at = time.monotonic()
        self.index.expire(self._patience_s)
        self.storage.sweep([*self.index.known(), *self._arriving.values()], self._patience_s)

    async def close(self) -> None:
        await self.storage.close()


async def _unless(gone: Callable[[], Awaitable[Any]] | None, waiting: Waiting) -> Any:
    if gone is None or waiting.future.done():
        return await waiting
    answer, end = asyncio.ensure_future(waiting.resolve()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answer, end}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ConnectionError("whoever asked is gone")
    finally:
        answer.cancel()
        end.cancel()
        await asyncio.wait({answer, end})


class IndexActor:
    """The service as an asynchronous Ray actor."""

    def __init__(self, storage: str, spec: StorageSpec) -> None:
        self._service = Service(storage, spec)
        self._joining = asyncio.Lock()
        self._desk = wire.Desk(spec, self._service.call)

    async def join(self, node: str) -> None:
        async with self._joining:
            await self._desk.open()
            await self._service.join(node)

    async def call(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        return await self._service.call(method, args, timeout_s)

    async def ping(self) -> None:
        return None

    async def collect(self, ticket: int) -> Any:
        return self._desk.collect(ticket)

    async def close(self) -> None:
        self._desk.close()
        await self._service.close()


class Link(Protocol):
    """How a client reaches the service; the answers are awaitables that `calls.run` can drive."""

    def call(self, method: str, *args: Any, timeout_s: float) -> Any: ...
    def ticket(self) -> str: ...
    def join(self, node: str, *, timeout_s: float) -> Any: ...
    def close(self) -> None: ...


class LocalLink:
    """The service in this process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        run(service.join("local"))

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return self._service.call(method, args, timeout_s)

    def ticket(self) -> str:
        return uuid.uuid4().hex

    def join(self, node: str, *, timeout_s: float) -> Any:
        return self._service.join(node)

    def close(self) -> None:
        run(self._service.close())

    def __reduce__(self) -> Any:
        raise QueueError("a local queue lives in one process; make it with local=False to share it")


class RayLink:
    """The service in its actor, found by name; on the actor's own node, frequent calls take the short way.

    The first holder of the actor's handle decides when it ends.
    """

    def __init__(self, namespace: str, node: str, spec: StorageSpec, actor: Any = None) -> None:
        self.name, self.namespace, self.node, self.spec = f"tqppo-{spec.run}-index", namespace, node, spec
        self._actor = actor
        self._wire = wire.Wire(spec)
        self._is_near: bool | None = None
        self._pulse = Pulse(lambda: self._handle().ping.remote())
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
        exchange = self._wire.call(method, args, timeout_s, GRACE_S, [self._pulse]) if self._near() else None
        if exchange is None:
            return await self._actor_call("call", method, args, timeout_s, timeout_s=timeout_s + GRACE_S)
        try:
            return await exchange
        except wire.NotPlain as answer:
            return await self._actor_call("collect", answer.ticket, timeout_s=GRACE_S)

    def _near(self) -> bool:
        if self._is_near is None:
            self._is_near = this_node() == self.node
        return self._is_near

    async def join(self, node: str, *, timeout_s: float) -> None:
        pulses = [self._pulse] if self._is_up else []
        await Remote(self._handle().join.remote(node), wire.WHO, timeout_s, pulses)  # given up, it goes on for others
        self._is_up = True

    def ticket(self) -> str:
        """A new name for something asked of the index; what is asked from its own node ends with this process."""
        return f"{self._wire.client() if self._near() else ''}-{uuid.uuid4().hex}"

    def _actor_call(self, method: str, *args: Any, timeout_s: float) -> Remote:
        pulses = [self._pulse] if self._is_up else []  # a process that is being started has none yet
        return ActorCall(getattr(self._handle(), method).remote(*args), wire.WHO, timeout_s, pulses)

    def close(self) -> None:
        self._wire.close()
        if not ray.is_initialized():  # Ray ended first, and the actor with it
            return
        actor, self._actor = self._handle(), None
        try:
            run(_closed(actor))
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


class ActorCall(Remote):
    """Given up, it is cancelled: a call that waits at the index is not answered to nobody."""

    def _abandon(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.cancel(self.ref, recursive=False)


async def _closed(actor: Any) -> None:
    await Remote(actor.close.remote(), wire.WHO, GRACE_S)


def this_node() -> str:
    return ray.get_runtime_context().get_node_id()
