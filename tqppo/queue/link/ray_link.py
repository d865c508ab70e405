"""The index as a Ray actor, and how the processes of a cluster reach it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

import ray

from tqppo.errors import QueueError
from tqppo.processes.ray_calls import call, this_node
from tqppo.queue.link.calls import GRACE_S, run
from tqppo.queue.link.replies import Heartbeat, RayReply
from tqppo.queue.link.service import Service
from tqppo.queue.link.wire import INDEX, NotJson, SocketClient, SocketServer
from tqppo.queue.storage import StorageSpec


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

    @property
    def place(self) -> str:
        return f"It ran on node {self.node}"

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
