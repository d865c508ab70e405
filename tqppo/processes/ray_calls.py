"""Objects in Ray actors, and typed calls to Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Concatenate, ParamSpec, TypeVar, cast, overload

import ray
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import OutOfMemoryError, RayActorError

from tqppo.processes import ray_health

ACTOR_GONE = (RayActorError, OutOfMemoryError)  # of calls whose actor died; the second if Ray's own killer ended it

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


@overload
def call(
    actor: ActorProxy[A],
    method: Callable[Concatenate[A, P], Coroutine[object, object, T]],
    /,
    *args: P.args,
    **named: P.kwargs,
) -> ray.ObjectRef[T]: ...


@overload
def call(
    actor: ActorProxy[A], method: Callable[Concatenate[A, P], T], /, *args: P.args, **named: P.kwargs
) -> ray.ObjectRef[T]: ...


def call(
    actor: ActorProxy[A], method: Callable[Concatenate[A, P], object], /, *args: P.args, **named: P.kwargs
) -> object:
    """Start `method`, a function of the actor's class, on the actor: `call(worker, RolloutWorker.close)`.

    A type checker sees the method, its arguments and its result, which `actor.close.remote()` hides.
    """
    return getattr(actor, method.__name__).remote(*args, **named)


def kill(actor: ActorProxy[A]) -> None:
    """End the actor's process at once. Does nothing if it has ended, or Ray with it."""
    if ray_health.lost():
        return
    ray.kill(cast(ActorHandle[A], actor))


def this_node() -> str:
    """Ray's id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def num_nodes() -> int:
    """Live nodes of the cluster."""
    nodes: Callable[[], list[dict[str, bool]]] = ray.nodes
    return sum(node["Alive"] for node in nodes())


def own_address() -> str:
    """The address of this node for others of the cluster."""
    address: Callable[[], str] = ray.util.get_node_ip_address
    return address()
