"""Places every process of a run on the GPUs that the config describes. Imports no torch and asks no Ray.

Rank i of every role sits on device i, so that roles which take turns share their devices one to one. The GPUs of one
engine are neighbours on one node. Without `cluster.colocate` each role has devices of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from tqppo.config import facts
from tqppo.config.sections import Config
from tqppo.devices.placement import TEACHER, Device, Placement, Seats


class FreeDevices:
    """The devices of some nodes that are not taken yet."""

    def __init__(self, nodes: range, gpus_per_node: int) -> None:
        self._nodes = [[Device(node, index) for index in range(gpus_per_node)] for node in nodes]

    def take(self, count: int) -> tuple[Device, ...]:
        """The first `count` devices that are free on one node; nothing if no node has as many."""
        for place, free in enumerate(self._nodes):
            if len(free) >= count:
                taken = tuple(free[:count])
                del free[:count]
                if not free:
                    del self._nodes[place]
                return taken
        return ()

    def take_across(self, count: int) -> tuple[Device, ...]:
        """The next `count` free devices, which may span nodes."""
        return tuple(device for _ in range(count) for device in self.take(1))


def placement_of(config: Config) -> Placement:
    cluster, pool = config.cluster, config.distillation
    has_pool = facts.has_teachers(config) and bool(pool.gpus_per_node)
    gpus = [cluster.gpus_per_node] * cluster.nodes + [pool.gpus_per_node] * (pool.nodes if has_pool else 0)
    roles: dict[str, Seats] = dict(_trainer_roles(config)) | dict(_teacher_roles(config))
    unplaced = _unplaced(config, roles)
    return Placement(tuple(gpus), roles, unplaced)


def ranks_per_copy(config: Config, role: str) -> int:
    """Ranks that share one copy of a role's state: all, or with `cluster.shard_within_nodes` those of each node.

    0 if the nodes have different numbers of the role's ranks.
    """
    if not config.cluster.shard_within_nodes:
        return facts.section_of(config, role).ranks
    seats = placement_of(config).roles[role]
    if not config.cluster.gpus_per_node:  # nodes without GPUs get equal shares
        return 0 if len(seats) % config.cluster.nodes else len(seats) // config.cluster.nodes
    on_nodes = {len(list(ranks)) for _, ranks in groupby(seats, key=lambda seat: seat[0].node if seat else -1)}
    return on_nodes.pop() if len(on_nodes) == 1 else 0


def runs_at_once(config: Config) -> bool:
    """Whether roles compute at the same time: each has processes of its own, no two of them share a GPU, and they have
    a core for each of their threads or one thread each."""
    roles, placement = facts.worker_roles(config), placement_of(config)
    threads = facts.worker_threads(config)
    has_room = threads <= 1 or threads * sum(roles.values()) <= config.run.cores
    shares_gpus = any(placement.neighbours(role) & roles.keys() for role in roles)
    return not config.cluster.in_process and not shares_gpus and has_room


def _trainer_roles(config: Config) -> Iterator[tuple[str, Seats]]:
    cluster, rollout = config.cluster, config.rollout
    if not cluster.gpus_per_node:
        yield from ((role, ((),) * count) for role, count in facts.roles(config).items())
        return
    nodes, engine_size = range(cluster.nodes), 0 if rollout.endpoints else rollout.tensor_parallel
    separate = FreeDevices(nodes, cluster.gpus_per_node)
    found: dict[str, Seats] = {}
    # Engines first: they need neighbours, and ranks fill whatever gaps are left.
    for role, count in sorted(facts.roles(config).items(), key=lambda item: item[0] != "rollout"):
        free = FreeDevices(nodes, cluster.gpus_per_node) if cluster.colocate else separate
        size = engine_size if role == "rollout" else 1
        found[role] = tuple(free.take(size) if size else () for _ in range(count))
    yield from ((role, found[role]) for role in facts.roles(config))


def _teacher_roles(config: Config) -> Iterator[tuple[str, Seats]]:
    """Replicas get the pool's devices in the order of the config."""
    pool, first = config.distillation, config.cluster.nodes
    free = FreeDevices(range(first, first + pool.nodes), pool.gpus_per_node)
    for name, teacher in config.teachers.items() if facts.has_teachers(config) else ():
        count = len(teacher.endpoints) or teacher.replicas
        size = 0 if teacher.endpoints else teacher.tensor_parallel
        yield f"{TEACHER}{name}", tuple(free.take_across(size) for _ in range(count))


def _unplaced(config: Config, roles: dict[str, Seats]) -> dict[str, int]:
    """Processes that need a device and have none, by role."""
    needs = dict(facts.worker_roles(config)) if config.cluster.gpus_per_node else {}
    if config.cluster.gpus_per_node and not config.rollout.endpoints:
        needs["rollout"] = config.rollout.replicas
    missing = {role: sum(not seat for seat in roles[role]) for role in needs}
    return {role: count for role, count in missing.items() if count}


def placement_text(placement: Placement) -> Iterator[str]:
    """One line per role: the devices of each process, a bar between processes that have several."""
    if not placement.devices:
        return
    shape = " + ".join(f"{len(list(same))} × {count}" for count, same in groupby(placement.gpus))
    yield f"GPUs: nodes × GPUs = {shape}"
    width = max(len(role) for role in [*placement.roles, "idle"])
    for role, seats in placement.roles.items():
        yield f"  {role:<{width}}  {_seats_text(seats)}"
    yield f"  {'idle':<{width}}  {_devices_text(placement.idle) or 'none'}"


def _seats_text(seats: Seats) -> str:
    if not any(seats):
        return "no GPU"
    if all(len(seat) == 1 for seat in seats):
        return _devices_text([device for seat in seats for device in seat])
    return " | ".join(_devices_text(list(seat)) for seat in seats)


def _devices_text(devices: list[Device]) -> str:
    """`node 0: 0-3, 5; node 1: 0`."""
    parts = []
    for node, found in groupby(sorted(devices), key=lambda device: device.node):
        runs: list[list[int]] = []
        for device in found:
            if runs and runs[-1][-1] == device.index - 1:
                runs[-1].append(device.index)
            else:
                runs.append([device.index])
        spans = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        parts.append(f"node {node}: {', '.join(spans)}")
    return "; ".join(parts)
