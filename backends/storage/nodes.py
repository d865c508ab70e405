"""One Ray actor per node, found by name: started from the index's process, which outlives every producer."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tqppo.errors import DataLost
from tqppo.protocols import StorageSpec
from tqppo.queue.link.calls import GRACE_S, START_S, Pulse, Remote, Silence


class NodeActor:
    """What every such actor answers."""

    def ready(self) -> bool:
        return True

    @ray.method(concurrency_group="pulse")  # a thread of its own: answered whatever else is under way
    def ping(self) -> None:
        return None


class NodeActors:
    """The storage actors of a run, by node. Who did not start them looks them up."""

    def __init__(self, spec: StorageSpec) -> None:
        self.spec = spec
        self._started: dict[str, Any] = {}
        self._found: dict[str, Any] = {}
        self._pulses: dict[str, Pulse] = {}

    async def start(self, node: str, actor_class: type, *args: Any) -> None:
        """Start the node's actor and wait until it is ready; it takes no CPU from the plan."""
        options = {
            "name": self._name(node),
            "num_cpus": 0,
            "max_concurrency": 4,  # a large copy does not hold up small requests
            "concurrency_groups": {"pulse": 1},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        make: Any = ray.remote
        actor = make(**options)(actor_class).remote(*args)
        await Remote(actor.ready.remote(), who(node), max(self.spec.timeout_s, START_S))
        self._started[node] = self._found[node] = actor

    def __contains__(self, node: str) -> bool:
        return node in self._started

    def nodes(self) -> list[str]:
        """Where actors were started from here."""
        return list(self._started)

    def of(self, node: str) -> Any:
        if node not in self._found:
            try:
                self._found[node] = ray.get_actor(self._name(node))
            except ValueError as error:
                raise DataLost(f"{who(node)} is gone") from error
        return self._found[node]

    def ask(self, node: str, method: str, *args: Any) -> Remote:
        """Call the node's actor; that it is dead or silent shows within seconds, however long the answer may take."""
        reply = getattr(self.of(node), method).remote(*args)
        return Remote(reply, who(node), self.spec.timeout_s, [self.pulse(node)])

    def pulse(self, node: str) -> Pulse:
        if node not in self._pulses:
            self._pulses[node] = Pulse(lambda: self.of(node).ping.remote())
        return self._pulses[node]

    async def close(self) -> None:
        """End the actors that were started here; one that is dead or silent has nothing to say about it."""
        for node, actor in self._started.items():
            with contextlib.suppress(DataLost, Silence):
                await Remote(actor.close.remote(), who(node), GRACE_S)
            ray.kill(actor)
        self._started = {}

    def _name(self, node: str) -> str:
        return f"tqppo-{self.spec.run}-storage-{node[:16]}"


def who(node: str) -> str:
    return f"the storage of node {node}"


def this_node() -> str:
    return ray.get_runtime_context().get_node_id()
