"""The node that this process runs on, as Ray names it. A process that has no Ray is on the only node there is."""

from __future__ import annotations

import sys


def is_on_ray() -> bool:
    """Whether this process is connected to Ray. Does not import Ray, which takes half a second."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def this_node() -> str:
    """Ray's id of the node that this process runs on; empty without Ray."""
    if not is_on_ray():
        return ""
    from tqppo.processes import ray_calls

    return ray_calls.this_node()


def num_nodes() -> int:
    """Live nodes of the cluster; 1 without Ray."""
    if not is_on_ray():
        return 1
    from tqppo.processes import ray_calls

    return ray_calls.num_nodes()


def own_address() -> str:
    """The address of this node for others of the cluster; loopback if there are none."""
    if num_nodes() == 1:
        return "127.0.0.1"
    from tqppo.processes import ray_calls

    return ray_calls.own_address()
