"""One Ray actor per node, found by name. The index's process starts them, because it outlives every producer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tqppo.errors import DataLost
from tqppo.processes.ray_calls import call
from tqppo.queue.link.calls import GRACE_S, START_S, NoAnswer
from tqppo.queue.link.replies import Heartbeat, RayReply
from tqppo.queue.storage import StorageSpec

ActorHandle = Any  # Ray makes an actor's methods at run time
A = TypeVar("A", bound="NodeActor")
P = ParamSpec("P")
T = TypeVar("T")


class NodeActor:
    """What every storage actor answers."""

    def ready(self) -> bool:
        return True

    @ray.method(concurrency_group="ping")  # a thread of its own, so that it answers while other calls run
    def ping(self) -> None:
        return None

    def close(self) -> None:
        """Free what the actor holds."""
        raise NotImplementedError


class NodeActors:
    """The storage actors of a run, by node: started here, or looked up by their names."""

    def __init__(self, spec: StorageSpec) -> None:
        self.spec = spec
        self._started: dict[str, ActorHandle] = {}
        self._found: dict[str, ActorHandle] = {}
        self._heartbeats: dict[str, Heartbeat] = {}

    async def start(self, node: str, actor_class: type, *args: object) -> None:
        """Start the node's actor and wait until it is ready; it takes no CPU from the plan."""
        options = {
            "name": self._name(node),
            "num_cpus": 0,
            "max_concurrency": 4,  # small requests are answered during a large copy
            "concurrency_groups": {"ping": 1},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        actor: ActorHandle = ray.remote(**options)(actor_class).remote(*args)  # type: ignore[call-overload]
        ready: RayReply[bool] = RayReply(actor.ready.remote(), describe(node), max(self.spec.timeout_s, START_S))
        await ready
        self._started[node] = self._found[node] = actor

    def __contains__(self, node: str) -> bool:
        return node in self._started

    def nodes(self) -> list[str]:
        """The nodes whose actors were started here."""
        return list(self._started)

    def get(self, node: str) -> ActorHandle:
        if node not in self._found:
            try:
                self._found[node] = ray.get_actor(self._name(node))
            except ValueError as error:
                raise DataLost(f"{describe(node)} is gone") from error
        return self._found[node]

    def ask(
        self, node: str, method: Callable[Concatenate[A, P], T], /, *args: P.args, **named: P.kwargs
    ) -> RayReply[T]:
        """Call a method of the node's actor: `ask(node, FileServer.read, …)`. A dead or unresponsive actor is an error
        within seconds; a slow one is waited for."""
        return RayReply(
            call(self.get(node), method, *args, **named), describe(node), self.spec.timeout_s, [self.heartbeat(node)]
        )

    def tell(self, node: str, method: Callable[Concatenate[A, P], object], /, *args: P.args, **named: P.kwargs) -> None:
        """Call a method of the node's actor without waiting for it."""
        call(self.get(node), method, *args, **named)

    def heartbeat(self, node: str) -> Heartbeat:
        if node not in self._heartbeats:
            self._heartbeats[node] = Heartbeat(lambda: self.get(node).ping.remote())
        return self._heartbeats[node]

    async def close(self) -> None:
        """End the actors that were started here, whether or not they answer."""
        for node, actor in self._started.items():
            with contextlib.suppress(DataLost, NoAnswer):
                closed: RayReply[None] = RayReply(actor.close.remote(), describe(node), GRACE_S)
                await closed
            ray.kill(actor)
        self._started = {}

    def _name(self, node: str) -> str:
        return f"tqppo-{self.spec.run}-storage-{node[:16]}"


def describe(node: str) -> str:
    """A node's storage, in messages."""
    return f"the storage of node {node}"
