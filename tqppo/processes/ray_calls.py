"""Typed calls to Ray actors, and waiting for them with a deadline. Worker groups, engine pools and `run` use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

import ray
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayActorError, RayError, RayTaskError

from tqppo.errors import DeadlineExceeded, TqppoError, WorkerError
from tqppo.processes import ray_health
from tqppo.processes.host_memory import out_of_memory
from tqppo.processes.stillness import LOOK_S

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


def close_all(
    actors: Sequence[ActorProxy[A]], close: Callable[[A], object], timeout_s: float, *, watch: Watch | None = None
) -> None:
    """Call `close` on every actor and wait until all have closed; after `timeout_s`, end those that have not.

    If one of them stands still, none is waited for any longer.
    """
    if ray_health.lost():
        return
    settle([call(actor, close) for actor in actors], timeout_s, grace_s=timeout_s, watch=watch)
    for actor in actors:
        kill(actor)


def this_node() -> str:
    """Ray's id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def num_nodes() -> int:
    """Live nodes of the cluster."""
    nodes: Callable[[], list[dict[str, bool]]] = ray.nodes
    return sum(node["Alive"] for node in nodes())


@dataclass(frozen=True, slots=True)
class Settled:
    """How a set of calls stands after a wait: positions of those that failed, and of those without a result.

    `still` says of processes that stand still what they do instead.
    """

    failures: dict[int, RayError] = field(default_factory=dict)
    pending: tuple[int, ...] = ()
    still: Sequence[str] = ()


class Watch(Protocol):
    """Looks at the processes of some calls; see `actor_watch`."""

    def still(self) -> Sequence[str]:
        """Each process that stands still: its name, and what it does instead of running."""


def settle(
    calls: Sequence[ray.ObjectRef[T]],
    timeout_s: float,
    *,
    grace_s: float = 0.0,
    watch: Watch | None = None,
    until_first: bool = False,
) -> Settled:
    """Wait until every call has a result, one has failed, `timeout_s` has passed, or a process stands still.

    With `until_first`, the first result is enough.
    After a failure the other calls get `grace_s` to fail too, so that the report can name every failed process.
    Raises ClusterLost if Ray itself is gone.
    """
    places = {call: place for place, call in enumerate(calls)}
    pending, deadline = list(places), time.monotonic() + timeout_s
    failures: dict[int, RayError] = {}
    still: Sequence[str] = ()
    while pending and not failures and not still:
        ray_health.check()
        left = deadline - time.monotonic()
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, min(left, LOOK_S)))
        if not done and left <= LOOK_S:
            break
        failures = _failures(done, places)
        if done and until_first:
            break
        still = watch.still() if watch is not None and not done else ()
    if failures:
        ray_health.check(now=True)  # then it is why they failed
    if failures and pending:
        late, pending = ray.wait(pending, num_returns=len(pending), timeout=grace_s)
        failures |= _failures(late, places)
    return Settled(failures, tuple(sorted(places[call] for call in pending)), still)


def results(
    calls: Sequence[ray.ObjectRef[T]],
    timeout_s: float,
    what: str,
    *,
    missing: Callable[[], str] = str,
    died: type[TqppoError] = WorkerError,
    watch: Watch | None = None,
) -> list[T]:
    """Return the results in the order of `calls`, or raise the first failure as soon as it happens.

    Raises `DeadlineExceeded` after `timeout_s`, with `missing()` in its message; a call's own `TqppoError` as it was
    raised; and `died` if the process of a call is gone or stands still. `what` names the calls in these messages.
    """
    settled = settle(calls, timeout_s, watch=watch)
    for error in settled.failures.values():
        raise cause_of(error, what, died) from None
    if settled.still:
        raise died(f"{what}: {'; '.join(settled.still)}")
    if settled.pending:
        raise DeadlineExceeded(f"{what} did not finish within {timeout_s:g} s. {missing()}".rstrip())
    return ray.get(list(calls))


def cause_of(error: RayError, what: str, died: type[TqppoError] = WorkerError) -> Exception:
    """Return the error to raise for a failed call: the `TqppoError` inside it, or `died` if its process is gone."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, TqppoError):
        return error.cause
    if (full := out_of_memory(error, what)) is not None:
        return full
    if isinstance(error, RayActorError):
        return died(f"{what}: the process died. {error}")
    return error


def _failures(done: Sequence[ray.ObjectRef[T]], places: dict[ray.ObjectRef[T], int]) -> dict[int, RayError]:
    failures: dict[int, RayError] = {}
    for call in done:
        try:
            ray.get(call)
        except RayError as error:
            failures[places[call]] = error
    return failures
