"""Looks at the processes of actors while the driver waits for them: which of them stand still, on any node.

A process on the driver's node is looked at directly, others by a small process on their node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import ray
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tqppo.processes.ray_calls import call, this_node
from tqppo.processes.stillness import Activity, Stillness, activity


class ProcessPlace(NamedTuple):
    node: str  # Ray's id
    pid: int


def _place(actor: object) -> ProcessPlace:
    return ProcessPlace(this_node(), os.getpid())


class NodeLook:
    """Looks at processes of its own node. A Ray actor."""

    def activities(self, pids: Sequence[int]) -> dict[int, Activity | None]:
        return {pid: activity(pid) for pid in pids}


class _Elsewhere:
    """The processes of another node, seen through an actor there. An answer is used when it comes."""

    def __init__(self, node: str) -> None:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        self._looker = ray.remote(NodeLook).options(num_cpus=0, scheduling_strategy=strategy).remote()
        self._asked: ray.ObjectRef[dict[int, Activity | None]] | None = None

    def activities(self, pids: Sequence[int]) -> dict[int, Activity | None]:
        found: dict[int, Activity | None] = {}
        if self._asked is not None:
            if not ray.wait([self._asked], timeout=0)[0]:
                return {}
            try:
                found = ray.get(self._asked)
            except RayError:  # the node is lost, which the calls to its processes report
                return {}
        self._asked = call(self._looker, NodeLook.activities, list(pids))
        return found


class ActorWatch:
    """Which of some actors stand still, by their names."""

    def __init__(self, actors: Mapping[str, ActorProxy[Any]]) -> None:
        handles = {name: cast(ActorHandle[Any], actor) for name, actor in actors.items()}
        self._asked: dict[str, ray.ObjectRef[ProcessPlace]] = {
            name: handle.__ray_call__.remote(_place) for name, handle in handles.items()
        }
        self._places: dict[str, ProcessPlace] = {}
        self._stillness = {name: Stillness() for name in actors}
        self._nodes: dict[str, NodeLook | _Elsewhere] = {}

    def still(self) -> Sequence[str]:
        self._find()
        found = []
        for node in {place.node for place in self._places.values()}:
            here = {name: place.pid for name, place in self._places.items() if place.node == node}
            seen = self._look_at(node).activities(list(here.values()))
            for name, pid in here.items():
                if pid in seen and (why := self._stillness[name].look(seen[pid])):
                    found.append(f"{name} stands still: {why}; it is process {pid} on node {node}")
        return found

    def _find(self) -> None:
        """Take in where the processes are, once they have started."""
        for name, asked in list(self._asked.items()):
            if ray.wait([asked], timeout=0)[0]:
                del self._asked[name]
                try:
                    self._places[name] = ray.get(asked)
                except RayError:  # it died; the calls to it report that
                    continue

    def _look_at(self, node: str) -> NodeLook | _Elsewhere:
        if node not in self._nodes:
            self._nodes[node] = NodeLook() if node == this_node() else _Elsewhere(node)
        return self._nodes[node]
